"""What goes wrong in an RL run: it is named, counted, and costs no more than it must."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from typing import Any

import animal_stories
import pytest
import tinker
from animal_stories import StoryDataset, StoryEnv, StoryGroupBuilder, story_config
from rollout_samples import Group, Steps, hang
from train_runs import adapter, run

from tinker_cookbook.exceptions import (
    AllTrajectoriesFailedError,
    BackendError,
    ConfigurationError,
    TinkerCookbookError,
)
from tinker_cookbook.rl.loop.async_source import AsyncSource
from tinker_cookbook.rl.loop.sources import (
    BatchSource,
    PolicySnapshot,
    RolloutWorker,
    problem_batches,
)
from tinker_cookbook.rl.rollouts.async_utils import run_in_daemon_thread
from tinker_cookbook.rl.rollouts.limits import RolloutConfig, RolloutLimits
from tinker_cookbook.rl.rollouts.strategy import MinViableGroup, RetryOnFailure
from tinker_cookbook.rl.test_evaluator import RLTestSetEvaluator
from tinker_cookbook.rl.train import AsyncConfig
from tinker_cookbook.rl.types import RLDataset, StepResult
from tinker_cookbook.utils.user_classes import accepts

BEFORE_THE_FIRST_TURN = r"test set, group \d: .* before its first"


def broken(*_, **__):
    return json.loads("x")


async def broken_async(*_, **__):
    await asyncio.sleep(0)
    return json.loads("x")


@pytest.mark.parametrize(
    ("owner", "method", "fault", "named"),
    [
        (StoryEnv, "initial_observation", broken_async, BEFORE_THE_FIRST_TURN),
        (StoryEnv, "step", broken_async, r"test set, group \d: StoryEnv, member \d, turn 0: JSON"),
        (StoryGroupBuilder, "make_envs", broken_async, r"batch 0, group \d: make_envs of StoryG"),
        (StoryGroupBuilder, "reward", broken, r"batch 0, group \d: StoryEnv, member \d, turn 0"),
        (StoryGroupBuilder, "logging_tags", broken, "Expecting value"),
        (StoryDataset, "get_batch", broken, "Expecting value"),
        (RLTestSetEvaluator, "observe", broken, "Expecting value"),
    ],
)
def test_error_names_the_users_line_and_log_has_the_traceback(
    stories_model, tmp_path, monkeypatch, capsys, owner, method, fault, named
):
    # Errors during the evaluation before training are named as those of training are.
    tests = {"test_groups": 1} if owner in (StoryEnv, RLTestSetEvaluator) else {}
    config = story_config(stories_model, tmp_path, {"num_batches": 2, **tests})
    accepts.cache_clear()
    original = getattr(owner, method)

    def later(self, index):  # the first batch is built before the run begins
        return original(self, index) if index == 0 else fault()

    monkeypatch.setattr(owner, method, later if method == "get_batch" else fault)
    with pytest.raises((TinkerCookbookError, json.JSONDecodeError), match=named) as raised:
        run(config)
    place = "test_train_failures.py"
    if isinstance(raised.value, TinkerCookbookError):
        assert f"{place}:" in str(raised.value)
        assert "rollout_error_tolerance=true" in str(raised.value)
    log = (tmp_path / "logs.log").read_text()
    assert log.count("Traceback (most recent call last)") >= 1
    assert f'{place}", line' in log
    assert f"traceback: {tmp_path}/logs.log" in capsys.readouterr().out


def test_prompts_that_fill_the_context_end_their_episodes(stories_model, tmp_path, monkeypatch):
    long = "once upon a time " * 200  # the context has 512 tokens
    monkeypatch.setattr(animal_stories, "OPENINGS", (long, *animal_stories.OPENINGS[1:]))
    (row,) = run(story_config(stories_model, tmp_path / "one", {"num_batches": 1}))
    assert (row["stop/context_overflow"], row["env/all/turns_per_episode"]) == (0.25, 0.75)


def test_groups_that_cannot_be_played_are_left_out_and_counted(
    stories_model, tmp_path, monkeypatch
):
    original = StoryGroupBuilder.make_envs

    async def make_envs(self):
        if self.tag == "opening_1":
            raise OSError("no room")
        return await original(self)

    monkeypatch.setattr(StoryGroupBuilder, "make_envs", make_envs)
    config = story_config(
        stories_model,
        tmp_path,
        {"num_batches": 2, "reward_for": "length"},
        rollout_error_tolerance=MinViableGroup(max_retries=0),
        num_substeps=2,
    )
    found = run(config)
    assert [row["rollout_errors/groups_skipped"] for row in found] == [1, 1]
    assert [row["env/all/total_episodes"] for row in found] == [12, 12]
    assert [row["optim/num_steps"] for row in found] == [2, 2]


@pytest.mark.parametrize("how", ["the request is refused", "the request is dropped"])
def test_a_sampling_client_whose_model_was_unloaded(stories_model, tmp_path, monkeypatch, how):
    from tinker_cookbook.backends.local_sampling import LocalSamplingClient

    original = LocalSamplingClient.sample

    def sample(self, *args, **kwargs):
        if how == "the request is refused":
            raise LookupError("404: no such model")
        answer = original(self, *args, **kwargs)
        self._engine.close(wait=False)
        return answer

    monkeypatch.setattr(LocalSamplingClient, "sample", sample)
    with pytest.raises(BackendError) as error:
        run(story_config(stories_model, tmp_path))
    assert "weights after 0 updates" in str(error.value)
    assert "unloaded" in str(error.value)


def test_finished_groups_are_logged_before_an_error(stories_model, tmp_path, monkeypatch):
    original, others = StoryGroupBuilder.compute_group_rewards, []

    async def compute_group_rewards(self, trajectories, envs):
        if self.tag == "opening_3":
            while len(others) < 3:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            raise OSError("the judge is away")
        others.append(self)
        return await original(self, trajectories, envs)

    monkeypatch.setattr(StoryGroupBuilder, "compute_group_rewards", compute_group_rewards)
    with pytest.raises(TinkerCookbookError, match="the judge is away"):
        run(story_config(stories_model, tmp_path))
    text = (tmp_path / "iteration_000000" / "train_rollout_summaries.jsonl").read_text()
    groups = {tuple(json.loads(line)["tags"]) for line in text.splitlines()}
    assert groups == {("opening_0",), ("opening_1",), ("opening_2",)}


def test_equal_rewards_train_nothing_and_warn(stories_model, tmp_path, caplog):
    config = story_config(
        stories_model, tmp_path, {"num_batches": 3, "reward_for": "constant"}, save_every=1
    )
    with caplog.at_level(logging.WARNING):
        found = run(config)
    assert [row["step"] for row in found] == [1, 2, 3]
    for row in found:
        assert row["optim/num_steps"] == 0
        assert row["tokens/trained"] == 0
        assert row["env/all/by_group/frac_all_bad"] == 1.0
        assert row["optim/entropy"] > 0
        assert "optim/kl_sample_train_v1" not in row
    assert any("step 3: cut_off (steps 1 to 3)" in record.message for record in caplog.records)
    # B of a fresh LoRA adapter is zero, and stays so.
    assert all(not t.any() for name, t in adapter(tmp_path).items() if "lora_B" in name)


# --- every kind of failure, in every place and mode -------------------------------------------


class Stop(BaseException):
    """A library's own error that is no Exception."""


def raising(error: BaseException):
    async def fault():
        raise error

    return fault


async def leaked_cancellation():
    inner = asyncio.ensure_future(asyncio.sleep(10))
    inner.cancel()
    await inner


async def cancelled_rollout():
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(10)


def in_some_thread(error: BaseException, call=run_in_daemon_thread):
    def work():
        raise error

    async def fault():
        await call(work)

    return fault


async def nested_exit():
    raise BaseExceptionGroup("tasks", [asyncio.CancelledError(), ValueError("no")])


def result(value: Any):
    async def fault():
        return value

    return fault


def reward(value: Any):
    return result(StepResult(value, True, tinker.ModelInput.from_ints([1]), [0]))


FAILURES = {
    # name: (what happens in ``step``, the counted class)
    "sys.exit(0)": (raising(SystemExit(0)), "SystemExit"),
    "sys.exit(1) in a thread": (in_some_thread(SystemExit(1)), "SystemExit"),
    "Ctrl-C of a program": (in_some_thread(KeyboardInterrupt()), "KeyboardInterrupt"),
    "StopIteration in a thread": (in_some_thread(StopIteration()), "StopIteration"),
    "a leaked cancellation": (leaked_cancellation, "CancelledError"),
    "a cancelled rollout": (cancelled_rollout, "CancelledError"),
    "a group with a cancellation": (nested_exit, "BaseExceptionGroup"),
    "an own BaseException": (raising(Stop("over")), "Stop"),
    "RuntimeError": (raising(RuntimeError("bug")), "RuntimeError"),
    "a setting": (raising(ConfigurationError("no key")), "ConfigurationError"),
    "nan": (reward(float("nan")), "DataValidationError"),
}


class Dead:
    """Client of a backend that does not answer any more."""

    async def sample(self, prompt, num_samples, sampling_params):
        raise ConnectionError("refused")


class Client:
    async def sample(self, prompt, num_samples, sampling_params):
        sequence = tinker.SampledSequence(
            stop_reason="stop", sequence_id="s", _tokens_list=[5], _logprobs_list=[-1.0]
        )
        return tinker.SampleResponse(sequences=[sequence] * num_samples)


class Groups(RLDataset):
    """One batch: ``bad`` groups of two, whose second member fails, and two good ones."""

    def __init__(self, make, good=2):
        self.make, self.good = make, good

    def __len__(self):
        return 1

    def get_batch(self, index):
        return [self.make(), *(Group(Steps, lambda: Steps(reward=0.0)) for _ in range(self.good))]


def failing(fault, turn=0):
    return lambda: Group(Steps, lambda: Steps(faults={turn: fault}))


def collect(tmp_path, mode, tolerance, make, *, client: Any = None, good=2, stop: Any = None):
    """Runs one batch; returns what the source passes to training."""
    asynchronous = AsyncConfig(max_steps_off_policy=0, groups_per_batch=max(good, 1))
    config = story_config(
        "no-such-model",
        tmp_path,
        rollout_error_tolerance=tolerance,
        # With timeouts an episode and each step are tasks of their own.
        rollout_config=RolloutConfig(
            limits=RolloutLimits(rollout_timeout_seconds=600 if tolerance else None)
        ),
        async_config=asynchronous if mode == "async" else None,
    )
    dataset, worker = Groups(make, good), RolloutWorker(config)

    async def go():
        if mode == "async":
            source: Any = AsyncSource(dataset, worker, config, 1, tmp_path)
        else:
            source = BatchSource(problem_batches(dataset, 0, 0, 1), worker)

        async def consume(groups):
            pass

        async with source:
            return await source.collect(0, PolicySnapshot(client or Client(), 0), consume)

    async def until_stopped():
        task = asyncio.ensure_future(go())
        if stop is not None:
            await stop()
            task.cancel()
        return await task

    return asyncio.run(until_stopped())


RETRY = RetryOnFailure(max_retries=1, per_rollout_timeout=600)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_rollout_is_named_or_its_group_is_skipped_and_counted(tmp_path, mode, name):
    fault, kind = FAILURES[name]
    # Without tolerance the run ends with an error that names class, member and turn.
    with pytest.raises(TinkerCookbookError) as error:
        collect(tmp_path, mode, False, failing(fault))
    assert "Steps, member 1, turn 0" in str(error.value)
    # With tolerance the others are trained.
    made: list[Group] = []

    def make():
        made.append(failing(fault)())
        return made[-1]

    found = collect(tmp_path, mode, RETRY, make)
    assert len(found.groups) == 2
    assert found.errors[0].error_type == kind
    # What would come again is not repeated.
    once = kind in ("DataValidationError", "ConfigurationError")
    # An asynchronous source prepares groups that it does not start.
    made = [group for group in made if group.made]
    assert all((group.cleaned, len(group.remade)) == (1, not once) for group in made)
    # A run in which everything fails says so and ends.
    with pytest.raises(AllTrajectoriesFailedError, match=f"groups failed .*{kind}"):
        collect(tmp_path, mode, RETRY, failing(fault), good=0)


class Elsewhere(Group):
    """Group that exits outside of ``step``."""

    def __init__(self, place):
        super().__init__(Steps, Steps)
        self.place = place

    def _exit(self, place):
        if place == self.place:
            sys.exit(0)

    async def make_envs(self):
        self._exit("make_envs")
        envs = await super().make_envs()
        envs[1].rollout_ended = lambda failed: self._exit("rollout_ended")
        return envs

    async def compute_group_rewards(self, trajectory_group, env_group):
        self._exit("compute_group_rewards")
        return await super().compute_group_rewards(trajectory_group, env_group)

    async def cleanup(self):
        self._exit("cleanup")


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    "place", ["initial_observation", "make_envs", "rollout_ended", "compute_group_rewards"]
)
def test_exits_in_other_places_are_named(tmp_path, mode, place):
    def make():
        first = failing(raising(SystemExit(0)), -1)()
        return first if place == "initial_observation" else Elsewhere(place)

    where = "before its first turn" if place == "initial_observation" else place
    with pytest.raises(TinkerCookbookError, match=rf"{where}.*SystemExit: it called sys.exit\(0\)"):
        collect(tmp_path, mode, False, make)
    found = collect(tmp_path, mode, RETRY, make)
    # An asynchronous source makes up for the group that was skipped.
    errors = [e for one in found.groups for e in one.group.rollout_errors] + found.errors
    assert {error.error_type for error in errors} == {"SystemExit"}
    assert len(collect(tmp_path, mode, False, lambda: Elsewhere("cleanup")).groups) >= 2


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("strategy", [False, RETRY, MinViableGroup(1, max_retries=0)])
def test_a_dead_backend_ends_the_run_with_any_tolerance(tmp_path, mode, strategy):
    with pytest.raises(BackendError, match=r"weights after 0 updates failed .*refused"):
        collect(tmp_path, mode, strategy, failing(hang), client=Dead())


async def hides_its_cancellation():
    try:
        await hang()
    except asyncio.CancelledError:
        raise RuntimeError("the connection was closed") from None


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("fault", [hang, hides_its_cancellation])
def test_a_real_cancellation_stops_the_run_at_once(tmp_path, mode, fault):
    made: list[Group] = []
    begun = threading.Event()

    async def stuck():
        begun.set()
        await fault()

    async def stop():
        while not begun.is_set():
            await asyncio.sleep(0.01)

    def make():
        made.append(failing(stuck)())
        return made[-1]

    with pytest.raises(asyncio.CancelledError):
        collect(tmp_path, mode, RETRY, make, stop=stop)
    assert [(g.remade, g.cleaned) for g in made if g.made] == [([], 1)]


def test_ctrl_c_is_passed_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        collect(tmp_path, "sync", RETRY, failing(raising(KeyboardInterrupt())))
