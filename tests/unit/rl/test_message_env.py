"""Environments of messages, played with tokens: malformed answers, limits, what the grader sees."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import (
    ToolCall,
    UnparsedToolCall,
    get_renderer,
    get_text_content,
)
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.envs.message_env import (
    EnvFromMessageEnv,
    MessageEnv,
    MessageStepResult,
)
from tinker_cookbook.rl.rollouts.episode import run_rollout
from tinker_cookbook.rl.rollouts.errors import RolloutFailedError
from tinker_cookbook.rl.rollouts.hooks import RolloutHooks
from tinker_cookbook.rl.rollouts.limits import (
    ParseErrorPolicy,
    RolloutConfig,
    RolloutLimits,
    TerminationRewardPolicy,
)
from tinker_cookbook.rl.types import StopReason
from tinker_cookbook.tokenizer_utils import get_tokenizer


def user(text):
    return {"role": "user", "content": text}


class Echo(MessageEnv):
    """Says back what was said, ``turns`` times; pays 1 a turn."""

    def __init__(self, turns=2):
        self.turns, self.messages, self.told, self.graded = turns, [user("go")], [], None

    def begin_rollout(self, config):
        self.config = config

    async def initial_observation(self):
        return self.messages

    async def step(self, message):
        self.turns -= 1
        self.told.append(get_text_content(message))
        self.messages = [*self.messages, message, user(f"you said {self.told[-1]}")]
        return MessageStepResult(
            1.0, self.turns == 0, self.messages, {"m": 1}, {"said": self.told[-1]}
        )

    async def grade(self, messages, stop_reason):
        self.graded = ([get_text_content(m) for m in messages], stop_reason)
        return 10.0, {"judged": 1.0}


class Says(TokenCompleter):
    """Answers with these texts in turn; one that ends with … was cut off, with ! it has no end."""

    def __init__(self, renderer, *texts):
        self.codec, self.texts, self.prompts = renderer.codec, list(texts), []

    async def __call__(self, model_input, stop):
        self.prompts.append(self.codec.decode(model_input.to_ints()))
        text = self.texts.pop(0)
        cut, endless = text.endswith("…"), text.endswith("!")
        tokens = self.codec.encode(f" {text}" if cut or endless else f" {text}\n\nUser:")
        return TokensWithLogprobs(tokens, [0.0] * len(tokens), "length" if cut else "stop")


def play(env, policy, **options):
    return asyncio.run(run_rollout(policy, env, **options))


def test_messages_become_tokens_and_back(renderer):
    env, policy = Echo(), Says(renderer, "a", "b")
    trajectory = play(EnvFromMessageEnv(renderer, env), policy)
    assert env.told == ["a", "b"]
    assert policy.prompts == [
        "User: go\n\nAssistant:",
        "User: go\n\nAssistant: a\n\nUser: you said a\n\nAssistant:",
    ]
    assert [t.reward for t in trajectory.transitions] == [1.0, 11.0]
    assert trajectory.transitions[0].metrics == {"m": 1}
    assert trajectory.transitions[1].logs == {"said": "b"}
    assert trajectory.metrics == {"judged": 1.0}
    assert env.graded == (["go", "a", "you said a", "b", "you said b"], StopReason.COMPLETED)
    assert isinstance(env.config, RolloutConfig)


def test_a_step_that_returns_something_else_is_named(renderer):
    class Forgets(Echo):
        async def step(self, message):
            return None

    said = r"turn 0: TypeError: Forgets\.step returned None, expected a MessageStepResult\(reward="
    with pytest.raises(RolloutFailedError, match=said):
        play(EnvFromMessageEnv(renderer, Forgets()), Says(renderer, "a"))


def test_an_environment_compacts_thinking_as_the_renderer_does(renderer, tokenizer_folder):
    class Compacts(Echo):
        compact_thinking_every = 2

    class Thinks(TokenCompleter):
        async def __call__(self, model_input, stop):
            tokens = plain.codec.encode("<think>\nhm\n</think>\n\nyes<|im_end|>")
            return TokensWithLogprobs(tokens, [0.0] * len(tokens))

    tokenizer = get_tokenizer(tokenizer_folder("qwen3"))
    plain = get_renderer("qwen3", tokenizer)
    of_renderer = get_renderer("qwen3?compact_thinking_every=2", tokenizer)
    # The last: others with the same renderer are as before.
    envs = [(of_renderer, Echo(5)), (plain, Compacts(5)), (plain, Echo(5))]
    by_renderer, by_env, other = (play(EnvFromMessageEnv(r, env), Thinks()) for r, env in envs)
    assert [t.ob for t in by_env.transitions] == [t.ob for t in by_renderer.transitions]
    spec = EnvFromMessageEnv(plain, Compacts()).renderer.spec
    assert (plain.spec, spec) == ("qwen3", of_renderer.spec)
    assert [len(trajectory_to_data(t, 1.0)) for t in (by_renderer, by_env, other)] == [3, 3, 5]
    with pytest.raises(ConfigurationError, match=r"compact_thinking_every: .* has no thinking"):
        EnvFromMessageEnv(renderer, Compacts())
    Compacts.compact_thinking_every = 0
    with pytest.raises(ConfigurationError, match="compact_thinking_every: got 0, expected"):
        EnvFromMessageEnv(plain, Compacts())


# --- malformed answers ------------------------------------------------------------------------


def test_a_malformed_answer_ends_the_episode_by_default(renderer):
    env = Echo()
    trajectory = play(EnvFromMessageEnv(renderer, env), Says(renderer, "oops!"))
    assert trajectory.transitions[0].reward == -1.0 + 10.0  # 10 is the grade of the whole
    assert trajectory.stop_reason is StopReason.PARSE_ERROR
    assert env.told == []
    assert trajectory.transitions[0].metrics == {"parse_error": 1.0, "stop/parse_error": 1.0}


def test_an_answer_that_was_cut_off_ends_the_episode_by_default(renderer):
    env = Echo()
    trajectory = play(EnvFromMessageEnv(renderer, env), Says(renderer, "oops…"))
    assert trajectory.transitions[0].reward == -0.1 + 10.0
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert env.told == []
    expected = {"max_tokens_reached": 1.0, "stop/max_tokens": 1.0}
    assert trajectory.transitions[0].metrics == expected


def test_without_that_the_model_is_asked_again_and_sees_what_it_said(renderer):
    env = Echo()
    wrapped = EnvFromMessageEnv(renderer, env, -0.5, terminate_on_parse_error=False)
    policy = Says(renderer, "oops!", "a", "b")
    trajectory = play(wrapped, policy)
    assert [t.reward for t in trajectory.transitions] == [-0.5, 1.0, 11.0]
    assert env.told == ["a", "b"]
    # Each prompt begins with all that was said before: the turns train as one sequence.
    for shorter, longer in zip(policy.prompts, policy.prompts[1:], strict=False):
        assert longer.startswith(shorter)
    assert "oops!" in policy.prompts[2]
    assert env.graded[0] == ["go", "a", "you said a", "b", "you said b"]


def test_the_policy_of_the_rollout_goes_before_the_environments_rules(renderer):
    policy = ParseErrorPolicy(
        max_consecutive=1,
        retry_message_template="again: {details}",
        penalty_per_error=0.25,
        terminal_reward=-2.0,
        mask_error_turns=True,
    )
    says = Says(renderer, "x!", "a", "y…", "z!")
    wrapped = EnvFromMessageEnv(renderer, Echo(5), terminate_on_length=False)
    trajectory = play(wrapped, says, parse_errors=policy)
    assert [t.reward for t in trajectory.transitions] == [-0.25, 1.0, -0.25, -2.0 + 10.0]
    assert [t.masked for t in trajectory.transitions] == [True, False, True, True]
    assert trajectory.stop_reason is StopReason.PARSE_ERROR
    assert "User: again: the message did not end properly" in says.prompts[1]
    assert "User: again: the message is too long and was truncated" in says.prompts[3]


def test_an_answer_cut_off_that_no_one_takes_ends_the_episode(renderer, caplog):
    class Ignores(Echo):
        pass

    wrapped = EnvFromMessageEnv(renderer, Ignores(), terminate_on_length=False)
    trajectory = play(wrapped, Says(renderer, "y…"))
    assert "max_tokens, and Ignores does not handle it" in caplog.text
    assert trajectory.transitions[0].reward == -0.1 + 10
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    # Where malformed answers do not end the episode, this one does not either.
    says = Says(renderer, "y…", "a")
    flags = {"terminate_on_length": False, "terminate_on_parse_error": False}
    trajectory = play(EnvFromMessageEnv(renderer, Echo(1), **flags), says)
    assert "too long and was truncated" in says.prompts[1]
    assert [t.reward for t in trajectory.transitions] == [-1.0, 11.0]


def test_a_conversation_with_a_cut_off_answer_may_go_on(renderer):
    class Keeps(Echo):
        async def observe_truncated_response(self, message):
            self.messages = [*self.messages, message]
            return self.messages

    says = Says(renderer, "so far…", "a")
    trajectory = play(EnvFromMessageEnv(renderer, Keeps(1), terminate_on_length=False), says)
    assert "so far…" in says.prompts[1]
    assert [t.reward for t in trajectory.transitions] == [0.0, 11.0]


def test_the_grader_sees_all_where_so_wished(renderer):
    env = Echo(1)
    config = RolloutConfig(
        parse_errors=ParseErrorPolicy(max_consecutive=1, retry_message_template="again: {details}"),
        termination=TerminationRewardPolicy(pass_all_messages_to_grader=True),
    )
    play(EnvFromMessageEnv(renderer, env), Says(renderer, "x!", "a"), config=config)
    assert env.graded[0] == [
        "go",
        "x!",
        "again: the message did not end properly",
        "a",
        "you said a",
    ]


class Tools(Echo):
    """Forgets the calls, which role_colon cannot write."""

    async def step(self, message):
        return await super().step({"role": "assistant", "content": message["content"]})


def parse_as(renderer, monkeypatch, **extra):
    parse = renderer.parse_response

    def parsed(tokens):
        message, ending = parse(tokens)
        return {**message, **extra}, ending

    monkeypatch.setattr(renderer, "parse_response", parsed)


def test_a_tool_call_that_cannot_be_read_is_malformed(renderer, monkeypatch):
    broken = UnparsedToolCall(raw_text="<", error="no JSON")
    parse_as(renderer, monkeypatch, unparsed_tool_calls=[broken])
    trajectory = play(EnvFromMessageEnv(renderer, Echo()), Says(renderer, "a"))
    assert trajectory.stop_reason is StopReason.PARSE_ERROR
    assert trajectory.transitions[0].logs["parse_error"] == "no JSON"


def test_tool_calls_are_counted_and_those_beyond_the_limit_not_made(renderer, monkeypatch):
    call = ToolCall(function=ToolCall.FunctionBody(name="f", arguments="{}"))
    parse_as(renderer, monkeypatch, tool_calls=[call, call])
    env = Tools(9)
    trajectory = play(
        EnvFromMessageEnv(renderer, env),
        Says(renderer, *"abcd"),
        limits=RolloutLimits(max_tool_calls=5),
    )
    assert env.told == ["a", "b"]
    assert trajectory.stop_reason is StopReason.MAX_TOOL_CALLS
    assert len(trajectory.transitions) == 3
    assert trajectory.transitions[0].metrics["tool_calls"] == 2


# --- length -----------------------------------------------------------------------------------


def test_a_conversation_that_grows_too_long_ends_with_a_penalty(renderer):
    first = len("User: go\n\nAssistant:")
    wrapped = EnvFromMessageEnv(renderer, Echo(9), max_trajectory_tokens=first + 10)
    trajectory = play(wrapped, Says(renderer, "a"))
    assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert trajectory.transitions[0].reward == -0.1 + 10.0  # in place of the step's 1
    assert trajectory.transitions[0].metrics["context_overflow"] == 1.0


@pytest.mark.parametrize(("room", "plays"), [(10, True), (11, False)])
def test_a_first_prompt_must_leave_room_for_an_answer(renderer, room, plays):
    first = len("User: go\n\nAssistant:")
    wrapped = EnvFromMessageEnv(
        renderer,
        Echo(1),
        max_trajectory_tokens=first + 10,
        max_generation_tokens=room,
        context_overflow_reward=-0.5,
    )
    trajectory = play(wrapped, Says(renderer, "a"))
    if plays:
        assert trajectory.stop_reason is StopReason.COMPLETED
    else:
        assert (trajectory.reward, trajectory.transitions) == (-0.5, [])
        assert trajectory.metrics == {"max_tokens_reached": 1.0}
        assert "too long" in trajectory.logs["initial_observation_overflow"]


# --- messages from outside; threads -----------------------------------------------------------


class Hurry(RolloutHooks):
    async def on_turn_begin(self, state):
        return [user(f"hurry {state.turn_index}")]


def test_hooks_put_messages_into_the_conversation(renderer):
    env, policy = Echo(), Says(renderer, "a", "b")
    play(EnvFromMessageEnv(renderer, env), policy, hooks=Hurry())
    assert policy.prompts[0] == "User: go\n\nUser: hurry 0\n\nAssistant:"
    assert policy.prompts[1].startswith(policy.prompts[0] + " a")
    assert policy.prompts[1].endswith("User: you said a\n\nUser: hurry 1\n\nAssistant:")


def test_rendering_does_not_block_the_event_loop(renderer, monkeypatch):
    threads = []

    def watch(name):
        work = getattr(renderer, name)

        def watched(*args):
            threads.append(threading.current_thread())
            return work(*args)

        monkeypatch.setattr(renderer, name, watched)

    watch("build_generation_prompt")
    watch("parse_response")
    play(EnvFromMessageEnv(renderer, Echo()), Says(renderer, "a", "b"))
    assert len(threads) == 4
    assert threading.main_thread() not in threads
