"""One question, one answer: what it earns, and where grading runs."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.envs.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.rollouts.episode import run_rollout
from tinker_cookbook.rl.rollouts.group import do_group_rollout
from tinker_cookbook.rl.rollouts.limits import RolloutConfig, TerminationRewardPolicy
from tinker_cookbook.rl.rollouts.strategy import RetryOnFailure
from tinker_cookbook.rl.types import StopReason


class Sum(ProblemEnv):
    def get_question(self):
        return "2+3?"

    def check_answer(self, sample_str):
        return sample_str.strip() == "5"

    def check_format(self, sample_str):
        return sample_str.strip().isdigit()

    def get_reference_answer(self):
        return "5"


class Says(TokenCompleter):
    """Answers with a text, ended properly or not."""

    def __init__(self, renderer, text, ended=True):
        self.codec, self.ended = renderer.codec, ended
        self.text = f" {text}\n\nUser:" if ended else f" {text}"
        self.prompts = []

    async def __call__(self, model_input, stop):
        self.prompts.append(self.codec.decode(model_input.to_ints()))
        assert stop == ["\n\nUser:"]
        tokens = self.codec.encode(self.text)
        return TokensWithLogprobs(tokens, [0.0] * len(tokens), "stop" if self.ended else "length")


def play(env, policy, **options):
    return asyncio.run(run_rollout(policy, env, **options))


@pytest.mark.parametrize(
    ("text", "ended", "strict", "expected"),
    [
        ("5", True, True, (1, 1, 1.0)),
        ("6", True, True, (1, 0, 0.0)),
        ("five", True, True, (0, 0, -0.25)),
        ("5", False, True, (0, 1, 0.75)),
        ("5", False, False, (0, 1, 0.75)),  # cut off: bad form in either mode
    ],
)
def test_the_reward_is_what_the_formula_says(renderer, text, ended, strict, expected):
    env = Sum(renderer, format_coef=0.25, require_stop_sequence_for_format=strict)
    trajectory = play(env, Says(renderer, text, ended))
    (turn,) = trajectory.transitions
    assert (turn.metrics["format"], turn.metrics["correct"], turn.reward) == expected
    assert turn.logs == {"question": "2+3?", "answer": text, "reference": "5"}
    ends = StopReason.COMPLETED if ended else StopReason.MAX_TOKENS
    assert trajectory.stop_reason is ends


class Unformatted(ProblemEnv):
    """A task with the two required methods alone."""

    def get_question(self):
        return "2+3?"

    def check_answer(self, sample_str):
        return sample_str.strip() == "5"


@pytest.mark.parametrize(
    ("text", "ended", "reward"), [("5", True, 1), ("5", False, 1), ("6", True, 0), ("", True, 0)]
)
def test_without_check_format_the_reward_has_no_format_term(renderer, text, ended, reward):
    trajectory = play(Unformatted(renderer), Says(renderer, text, ended))
    (turn,) = trajectory.transitions
    assert turn.reward == reward
    stopped = {} if ended else {"stop/max_tokens": 1.0}
    empty = {} if text else {"empty_answer": 1.0}
    assert turn.metrics == {"correct": reward, **stopped, **empty}
    assert turn.logs == {"question": "2+3?", "answer": text}


def test_an_async_grader_runs_on_the_loop_and_a_plain_one_elsewhere(renderer):
    where = []

    class Plain(Sum):
        def check_answer(self, sample_str):
            where.append(threading.current_thread())
            return True

    class Async(Sum):
        async def check_answer(self, sample_str):
            await asyncio.sleep(0)
            where.append(threading.current_thread())
            return True

    class Deferred(Sum):
        def check_answer(self, sample_str):
            return Async.check_answer(self, sample_str)

    for kind in (Plain, Async, Deferred):
        assert play(kind(renderer), Says(renderer, "5")).reward == 1
    main = threading.main_thread()
    assert [thread is main for thread in where] == [False, True, True]


def test_grading_does_not_block_the_event_loop(renderer, monkeypatch):
    threads = {}

    def watched(name, work):
        def wrapper(*args):
            threads.setdefault(name, set()).add(threading.current_thread())
            return work(*args)

        return wrapper

    class Watched(Sum):
        pass

    # Rendering asks for the question.
    for name in ("get_question", "check_format", "check_answer"):
        monkeypatch.setattr(Watched, name, watched(name, getattr(Sum, name)))
    for name in ("build_generation_prompt", "parse_response"):
        monkeypatch.setattr(renderer, name, watched(name, getattr(renderer, name)))
    assert play(Watched(renderer), Says(renderer, "5")).reward == 1
    assert len(threads) == 5
    assert threading.main_thread() not in set.union(*threads.values())


def test_hanging_grader_times_out(renderer):
    release = threading.Event()

    class Stuck(Sum):
        def check_answer(self, sample_str):
            release.wait(3600)
            return True

    config = RolloutConfig(termination=TerminationRewardPolicy(grader_timeout_seconds=0.2))
    trajectory = play(Stuck(renderer), Says(renderer, "5"), config=config)
    assert trajectory.reward == 0
    assert trajectory.transitions[0].metrics["grader_timeout"] == 1
    builder = ProblemGroupBuilder(partial(Stuck, renderer), 2)
    strategy = RetryOnFailure(max_retries=0, per_rollout_timeout=0.2)
    with pytest.raises(TimeoutError):
        asyncio.run(do_group_rollout(builder, Says(renderer, "5"), strategy=strategy))
    release.set()  # until here asyncio.run would wait for a thread of its own pool
