"""Episodes with tools: ends, rewards, malformed calls, metrics (under 4 s)."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from PIL import Image

from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, SandboxError
from tinker_cookbook.record.episodes import RecordedGroup, turn_table
from tinker_cookbook.renderers import ToolCall, UnparsedToolCall, get_renderer
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts.episode import run_rollout
from tinker_cookbook.rl.rollouts.errors import GraderTimeoutError
from tinker_cookbook.rl.rollouts.limits import (
    ParseErrorPolicy,
    RolloutConfig,
    RolloutLimits,
    TerminationRewardPolicy,
)
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import (
    AgentToolMessageEnv,
    ToolInput,
    ToolResult,
    build_agent_tool_env,
    simple_tool_result,
    tool,
)

USER = {"role": "user", "content": "go"}


class Counter:
    """Tools with state."""

    def __init__(self):
        self.value, self.order = 0, []

    @tool
    async def add(self, n: int) -> str:
        """Adds to the counter."""
        await asyncio.sleep(0.01 / n)
        self.value += n
        self.order.append(n)
        return simple_tool_result(str(self.value), metrics={"n": n})

    @tool
    def finish(self) -> str:
        """Ends the episode."""
        return simple_tool_result("bye", should_stop=True)

    @tool
    def down(self) -> str:
        """Cannot be reached."""
        raise SandboxError("the sandbox is gone")


def called(*calls, text="", malformed=()):
    """An answer with these calls: (name, arguments)."""
    message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            ToolCall(
                function=ToolCall.FunctionBody(name=name, arguments=json.dumps(arguments)),
                id=f"id{i}",
            )
            for i, (name, arguments) in enumerate(calls)
        ]
    if malformed:
        message["unparsed_tool_calls"] = [
            UnparsedToolCall(raw_text="<tool_call>", error=error) for error in malformed
        ]
    return message


async def counts(history, episode):
    """Reward that reads the state of the tools."""
    (owner,) = {one._instance for one in episode.tools}
    return float(owner.value), {"calls_seen": len(episode.calls)}


def make(max_turns=5, reward_fn=counts, **options):
    counter = Counter()
    tools = [counter.add, counter.finish, counter.down]
    return AgentToolMessageEnv(tools, [USER], max_turns, reward_fn, **options), counter


def play(env, *answers):
    async def run():
        await env.initial_observation()
        return [await env.step(answer) for answer in answers]

    return asyncio.run(run())


def test_calls_run_and_an_answer_without_one_ends_the_episode():
    env, _ = make()
    first, last = play(env, called(("add", {"n": 2}), text="thinking"), called(text="it is 2"))
    assert (first.reward, first.episode_done, first.stop_reason) == (0.0, False, None)
    assert first.logs == {
        "assistant_content": "thinking",
        "tool_call_0": 'add({"n": 2})',
        "tool_result_0": "2",
    }
    assert [m["role"] for m in last.next_messages] == ["user", "assistant", "tool", "assistant"]
    assert last.next_messages[2] == {
        "role": "tool",
        "content": "2",
        "tool_call_id": "id0",
        "name": "add",
    }
    assert (last.reward, last.episode_done) == (2.0, True)
    assert last.metrics == {"calls_seen": 1, "stop/completed": 1.0}
    assert last.stop_reason == "completed"


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
def test_results_are_in_the_order_of_the_calls(execution):
    env, counter = make(tool_execution=execution)
    play(env, called(("add", {"n": 1}), ("add", {"n": 5})))
    assert counter.order == ([5, 1] if execution == "parallel" else [1, 5])
    results = ["6", "5"] if execution == "parallel" else ["1", "6"]
    assert [m["content"] for m in env.history[2:]] == results


def test_the_ends_of_an_episode_and_their_metrics():
    env, _ = make(max_turns=1)
    (step,) = play(env, called(("add", {"n": 2})))
    assert (step.episode_done, step.stop_reason, step.reward) == (True, "max_turns", 2.0)
    assert step.metrics["max_turns"] == 1.0

    env, _ = make()
    (step,) = play(env, called(("finish", {})))
    assert (step.stop_reason, step.metrics["tool_stopped"]) == ("tool_stopped", 1.0)

    env, counter = make(max_tool_calls=3)
    _, step = play(
        env, called(("add", {"n": 1}), ("add", {"n": 2})), called(*[("add", {"n": 4})] * 3)
    )
    assert counter.value == 7  # the calls up to the limit ran
    assert (step.stop_reason, step.reward) == ("max_tool_calls", 7.0)
    assert step.metrics["max_tool_calls"] == 1.0
    assert step.logs["tool_calls_dropped"].startswith("2 of 3 calls were not run")


def test_malformed_calls():
    bad = called(malformed=["Invalid JSON"])
    env, _ = make()
    (step,) = play(env, bad)
    assert (step.reward, step.episode_done, step.stop_reason) == (-0.1, True, "parse_error")
    assert step.metrics == {"parse_error": 1.0, "stop/parse_error": 1.0}
    assert step.logs["parse_errors"] == "Invalid JSON"

    # The model may try again, and its error is before it.
    env, _ = make(terminate_on_parse_error=False)
    first, second = play(env, bad, called(("add", {"n": 3})))
    assert (first.reward, first.episode_done) == (-0.1, False)
    assert "Invalid JSON" in env.history[2]["content"]
    assert second.logs["tool_result_0"] == "3"

    # Next to a valid call, which runs.
    env, counter = make()
    (step,) = play(env, called(("add", {"n": 3}), malformed=["Invalid JSON"]))
    assert (counter.value, step.reward, step.episode_done) == (3, 0.0, False)
    assert step.metrics == {"parse_error": 1.0}

    policy = ParseErrorPolicy(
        max_consecutive=1, penalty_per_error=0.25, terminal_reward=-2, mask_error_turns=True
    )
    env, _ = make(parse_error_policy=policy)
    first, second, third, last = play(env, bad, called(("add", {"n": 3})), bad, bad)
    assert [step.reward for step in (first, second, third, last)] == [-0.25, 0.0, -0.25, -2.0]
    assert [step.episode_done for step in (first, third, last)] == [False, False, True]
    assert first.metrics["parse_error_masked"] == 1.0


def test_metrics_of_the_episode():
    env, _ = make(on_unavailable="report")
    play(
        env,
        called(("add", {"n": 1}), ("add", {"n": 3}), ("ad", {}), ("add", {"n": "x"})),
        called(("down", {})),
    )
    reward, metrics = asyncio.run(env.grade([], "completed"))
    assert reward == 0.0
    assert metrics.pop("calls_seen") == 5, "reward_fn, which no step has called"
    assert {name: value for name, value in metrics.items() if value} == {
        "tool/calls": 5,
        "tool/calls/add": 3,
        "tool/calls/down": 1,
        "tool/errors": 3,
        "tool/errors/tool_not_found": 1,
        "tool/errors/validation_failed": 1,
        "tool/errors/unavailable": 1,
        "tool/add/n": 2.0,
    }
    assert metrics["tool/errors/timed_out"] == 0


def test_rewards_of_several_forms_and_what_they_see():
    env, _ = make(reward_fn=lambda history: (len(history), {}))
    assert play(env, called(text="x"))[0].reward == 2
    policy = TerminationRewardPolicy()
    env, _ = make(reward_fn=lambda history: (len(history), {}), termination_policy=policy)
    assert play(env, called(text="x"))[0].reward == 1  # without the initial messages
    with pytest.raises(DataValidationError, match="reward_fn returned 3, expected"):
        play(make(reward_fn=lambda history: 3)[0], called(text="x"))

    async def slow(history):
        await asyncio.sleep(3600)

    policy = TerminationRewardPolicy(grader_timeout_seconds=0.05)
    with pytest.raises(GraderTimeoutError, match="grader_timeout_seconds"):
        play(make(reward_fn=slow, termination_policy=policy)[0], called(text="x"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_turns": 0}, "max_turns: got 0"),
        ({"tool_execution": "both"}, "tool_execution: got 'both'"),
        ({"on_unavailable": "skip"}, "on_unavailable: got 'skip'"),
    ],
)
def test_invalid_settings_are_refused(options, said):
    with pytest.raises(ConfigurationError, match=said):
        make(**options)
    with pytest.raises(NotImplementedError, match="concurrent_safe"):
        make(tool_execution="concurrent_safe")
    counter = Counter()
    with pytest.raises(ConfigurationError, match="distinct names"):
        AgentToolMessageEnv([counter.add, counter.add], [USER], 5, counts)


# --- with tokens ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def renderer(tokenizer_folder):
    return get_renderer("qwen3_instruct", get_tokenizer(tokenizer_folder("qwen3")))


class Says(TokenCompleter):
    """Answers with these texts, each ended properly."""

    def __init__(self, renderer, *texts, by_letter=False):
        self.renderer, self.texts, self.by_letter = renderer, list(texts), by_letter

    async def __call__(self, model_input, stop):
        text = self.texts.pop(0)
        parts = list(text) if self.by_letter else [text]
        tokens = [*(t for part in parts for t in self.renderer.codec.encode(part)), *stop]
        return TokensWithLogprobs(tokens, [-0.5] * len(tokens), "stop")


ADD = '<tool_call>\n{"name": "add", "arguments": {"n": 2}}\n</tool_call>'
BAD = '<tool_call>\n{"name": "add", "arguments": {"n": }}\n</tool_call>'


def rollout(renderer, *texts, config=None, by_letter=False, **options):
    counter = Counter()
    tools = [counter.add, counter.finish, counter.down]
    prefix = renderer.create_conversation_prefix_with_tools([one.to_spec() for one in tools])
    env = build_agent_tool_env(renderer, tools, [*prefix, USER], counts, **options)
    return asyncio.run(run_rollout(Says(renderer, *texts, by_letter=by_letter), env, config=config))


@pytest.mark.parametrize("by_letter", [False, True], ids=["", "other tokens than the tokenizer's"])
def test_an_episode_is_one_datum_and_has_the_metrics_of_its_tools(renderer, by_letter):
    trajectory = rollout(renderer, ADD, f"again\n{ADD}", "4", by_letter=by_letter)
    assert [t.reward for t in trajectory.transitions] == [0.0, 0.0, 4.0]
    assert trajectory.stop_reason == "completed"
    assert trajectory.metrics["tool/calls/add"] == 2
    assert [t.metrics.get("tool_calls") for t in trajectory.transitions] == [1, 1, None]
    (datum,) = trajectory_to_data(trajectory, 1.0)
    trained = sum(len(t.ac.tokens) for t in trajectory.transitions)
    assert float(datum.loss_fn_inputs["mask"].to_numpy().sum()) == trained


def test_the_record_has_the_messages_and_the_tool_calls(renderer):
    trajectory = rollout(renderer, ADD, ADD.replace("add", "down"), "4", on_unavailable="report")
    group = RecordedGroup(0, TrajectoryGroup([trajectory], [0.0], [{}]))
    rows = turn_table([group]).to_pylist()
    assert len({row["episode_messages"] for row in rows}) == 1
    messages = json.loads(rows[0]["episode_messages"])
    roles = ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in messages] == roles
    assert messages[2]["tool_calls"][0]["function"]["name"] == "add"
    calls = json.loads(rows[0]["episode_tool_calls"])
    assert [(call["name"], json.loads(call["arguments"]), call["error"]) for call in calls] == [
        ("add", {"n": 2}, None),
        ("down", {"n": 2}, "validation_failed"),
    ]
    assert (calls[0]["messages"][0]["content"], calls[0]["metrics"]) == ("2", {"n": 2})


@tool
def look(n: int) -> ToolResult:
    """Shows a picture."""
    image = Image.new("RGB", (64, 48), (n, 0, 0))
    return simple_tool_result([{"type": "image", "image": image}, {"type": "text", "text": "seen"}])


@pytest.mark.parametrize("by_letter", [False, True], ids=["", "other tokens than the tokenizer's"])
def test_images_of_questions_and_tools_are_in_the_one_datum(vision_tokenizer, by_letter):
    renderer = get_renderer("qwen3_vl_instruct", get_tokenizer(vision_tokenizer))
    question = {"role": "user", "content": asyncio.run(run_tool(look, 9))}
    env = build_agent_tool_env(renderer, [look], [question], nothing)
    answers = [ADD.replace("add", "look").replace("2", str(n)) for n in (1, 2)]
    policy = Says(renderer, *answers, "2", by_letter=by_letter)
    trajectory = asyncio.run(run_rollout(policy, env))
    (datum,) = trajectory_to_data(trajectory, 1.0)
    shown = [chunk for chunk in datum.model_input.chunks if chunk.type == "image"]
    colours = [Image.open(io.BytesIO(chunk.data)).getpixel((0, 0))[0] for chunk in shown]
    assert colours == [9, 1, 2]
    mask, targets = (datum.loss_fn_inputs[k].to_numpy() for k in ("mask", "target_tokens"))
    assert mask.sum() == sum(len(t.ac.tokens) for t in trajectory.transitions)
    assert [len(targets), len(mask)] == [datum.model_input.length] * 2
    assert (mask[targets == 0] == 0).all()
    assert sum(targets == 0) == sum(chunk.length for chunk in shown)


async def nothing(history):
    return 0.0, {}


async def run_tool(chosen, n):
    result = await chosen.run(ToolInput(arguments={"n": n}))
    return result.messages[0]["content"]


def test_the_settings_of_a_rollout_configure_the_environment(renderer):
    config = RolloutConfig(
        limits=RolloutLimits(max_turns=2, max_tool_calls=7, max_trajectory_tokens=1000),
        parse_errors=ParseErrorPolicy(max_consecutive=1),
        tool_execution="sequential",
    )
    env = build_agent_tool_env(
        renderer, [], [USER], counts, rollout_config=config, max_tool_calls=3
    )
    inner = env.message_env
    assert (inner.max_turns, inner.max_tool_calls, inner.tool_execution) == (2, 3, "sequential")
    assert env.rollout_limits == config.limits
    assert not env.terminate_on_length
    env = build_agent_tool_env(renderer, [], [USER], counts)
    assert (env.message_env.max_turns, env.terminate_on_length) == (5, True)
    env = build_agent_tool_env(renderer, [], [USER], counts, model_name="thinkingmachines/Inkling")
    assert (env.message_env.max_turns, env.message_env.max_tool_calls) == (10, 30)
