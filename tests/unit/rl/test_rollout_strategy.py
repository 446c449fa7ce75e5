"""What a group does about rollouts that fail."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import suppress
from dataclasses import dataclass

import pytest
import tinker
from rollout_samples import Group, Policy, Steps, fail, hang, hang_for_hours

from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import (
    AllTrajectoriesFailedError,
    ConfigurationError,
    TrainingError,
)
from tinker_cookbook.rl.rollouts import (
    RolloutErrorCounter,
    do_group_rollout_and_filter_constant_reward,
)
from tinker_cookbook.rl.rollouts.episode import do_single_rollout
from tinker_cookbook.rl.rollouts.errors import RolloutFailedError, RolloutTimeoutError
from tinker_cookbook.rl.rollouts.group import do_group_rollout
from tinker_cookbook.rl.rollouts.strategy import (
    FailFast,
    MinViableGroup,
    RetryOnFailure,
    RolloutResult,
    RolloutStrategy,
    rollout_strategy_from_config,
    skips_group,
)
from tinker_cookbook.rl.types import RolloutError


def group_rollout(group, strategy, policy=None):
    return asyncio.run(do_group_rollout(group, policy or Policy(), strategy=strategy))


def broken():
    return Steps(faults={0: fail(OSError("down"))})


def numbered(i, **options):
    """Returns a factory of an environment whose prompt names the member."""
    return lambda: Steps(start=(100 + i,), **options)


def slow(i):
    async def wait():
        await asyncio.sleep(0.05 * (3 - i))

    return numbered(i, faults={0: wait})


def whose(group):
    return [t.transitions[0].ob.to_ints()[0] - 100 for t in group.trajectories_G]


def test_a_retried_member_keeps_its_place_and_gets_its_own_environment():
    # Members differ and are done in the reverse of their order; 1 and 2 fail at first.
    group = Group(
        slow(0),
        numbered(1, faults={0: fail(OSError("down"))}),
        numbered(2, faults={-1: fail(OSError("down"))}),
        slow(3),
        spares={1: numbered(1), 2: numbered(2)},
    )
    policy = Policy()
    result = group_rollout(group, RetryOnFailure(), policy)
    assert whose(result) == [0, 1, 2, 3]
    assert (group.made, sorted(group.remade)) == (1, [1, 2])  # no full group for a retry
    trajectories, envs = group.graded
    assert trajectories == result.trajectories_G
    assert [env.tokens[0] - 100 for env in envs] == [0, 1, 2, 3]
    assert all(env.taken for env in envs)  # the environment that was run, not the failed one
    assert [error.error_type for error in result.rollout_errors] == ["OSError"] * 2
    assert "Steps, member 1, turn 0: OSError: down" in result.rollout_errors[0].error_message
    paths = {path for path, _, _ in policy.asked}
    assert paths == {(0, 0), (1, 0), (3, 0), (1, 0, 1), (2, 0, 1)}


def test_fail_fast_cancels_the_others():
    group = Group(lambda: Steps(faults={0: hang}), broken)
    with pytest.raises(RolloutFailedError, match=r"Steps, member 1, turn 0: OSError: down"):
        group_rollout(group, FailFast())
    assert (group.cleaned, group.remade) == (1, [])
    with pytest.raises(RolloutFailedError, match="before its first turn"):
        group_rollout(
            Group(lambda: Steps(faults={-1: hang}), lambda: Steps(faults={-1: fail(OSError())})),
            None,
        )


def test_a_make_env_that_fails_is_an_attempt_that_failed():
    calls = []

    def flaky():
        calls.append(1)
        if len(calls) < 2:
            raise OSError("no sandbox")
        return Steps()

    result = group_rollout(Group(broken, spares={0: flaky}), RetryOnFailure())
    assert "make_env of Group, member 0: OSError: no sandbox" in str(result.rollout_errors[1])


@pytest.mark.parametrize("fault", [0, -1])
@pytest.mark.parametrize("stubborn", [False, True])
def test_an_environment_that_hangs_is_given_up(fault, stubborn):
    async def ignore():
        with suppress(asyncio.CancelledError):
            await hang_for_hours()
        await hang()

    stuck = ignore if stubborn else hang_for_hours
    group = Group(Steps, lambda: Steps(faults={fault: stuck}), spares={1: Steps})
    result = group_rollout(group, RetryOnFailure(per_rollout_timeout=3600))
    assert len(result.trajectories_G) == 2
    assert result.rollout_errors[0].error_type == "TimeoutError"
    if not stubborn:
        group = Group(lambda: Steps(faults={fault: hang_for_hours}))
        with pytest.raises(RolloutTimeoutError, match="3600 s"):
            group_rollout(group, RetryOnFailure(max_retries=0, per_rollout_timeout=3600))


def test_a_viable_group_goes_on_without_those_that_failed():
    group = Group(numbered(0), broken, numbered(2), numbered(3))
    result = group_rollout(group, MinViableGroup(max_retries=1))
    assert whose(result) == [0, 2, 3]
    assert [env.tokens[0] - 100 for env in group.graded[1]] == [0, 2, 3]
    assert len(result.final_rewards_G) == len(result.metrics_G) == 3
    assert len(result.rollout_errors) == 2
    assert group.remade == [1]


@pytest.mark.parametrize(
    ("needed", "good", "viable"),
    [(None, 2, False), (None, 3, True), (2, 2, True), (9, 4, True), (9, 3, False)],
)
def test_how_many_must_succeed(needed, good, viable):
    group = Group(*[Steps] * good, *[broken] * (4 - good))
    strategy = MinViableGroup(needed, max_retries=0)
    if viable:
        assert len(group_rollout(group, strategy).trajectories_G) == good
    else:
        with pytest.raises(AllTrajectoriesFailedError, match=f"{good}/4 rollouts.*OSError: "):
            group_rollout(group, strategy)
    assert group.cleaned == 1


def test_nothing_that_fails_in_a_tolerant_group_ends_the_run():
    class NoEnvs(Group):
        async def make_envs(self):
            raise OSError("no sandbox")

    class Unjudged(Group):
        async def compute_group_rewards(self, trajectory_group, env_group):
            raise OSError("judge is out")

    for group, what in (
        (Group(broken, broken), "0/2 rollouts"),
        (NoEnvs(), "make_envs of NoEnvs"),
        (Unjudged(Steps), "compute_group_rewards of Unjudged: OSError: judge is out"),
    ):
        with pytest.raises(TrainingError, match=what) as error:
            group_rollout(group, MinViableGroup(max_retries=0))
        assert skips_group(MinViableGroup(), error.value)
        assert skips_group(FailFast(), error.value) == (what == "0/2 rollouts")
        assert group.cleaned == 1


def test_strategies_from_a_config():
    assert rollout_strategy_from_config(None) == rollout_strategy_from_config(False) == FailFast()
    assert rollout_strategy_from_config(True) == RetryOnFailure(max_retries=3)
    mine = MinViableGroup(2, per_rollout_timeout=5)
    assert rollout_strategy_from_config(mine) is mine
    assert pickle.loads(pickle.dumps(mine)) == mine
    with pytest.raises(ConfigurationError, match="rollout_error_tolerance: got 'yes'"):
        rollout_strategy_from_config("yes")  # type: ignore[arg-type]
    for make, field in (
        (lambda: RetryOnFailure(max_retries=-1), "max_retries"),
        (lambda: RetryOnFailure(per_rollout_timeout=float("nan")), "per_rollout_timeout"),
        (lambda: MinViableGroup(min_successful=0), "min_successful"),
    ):
        with pytest.raises(ConfigurationError, match=field):
            make()


# --- strategies and loops of user code --------------------------------------------------------


class Chosen(RolloutStrategy):
    """Strategy with its own ``execute`` that keeps one rollout."""

    async def execute(self, env_group_builder, policy):
        (env, *_) = await env_group_builder.make_envs()
        failed = [RolloutError("OSError", "gone")]
        return RolloutResult([await do_single_rollout(policy, env)], [env], failed)


def test_a_strategy_may_define_execute():
    group = asyncio.run(do_group_rollout(Group(Steps, Steps), Policy(), Chosen()))
    assert len(group.trajectories_G) == len(group.final_rewards_G) == 1
    assert group.rollout_errors == [RolloutError("OSError", "gone")]
    with pytest.raises(NotImplementedError, match="must define execute"):
        asyncio.run(do_group_rollout(Group(Steps), Policy(), RolloutStrategy()))


@dataclass
class Client:
    tokens: list[int]

    async def sample(self, prompt, num_samples, sampling_params):
        sequence = tinker.SampledSequence(
            stop_reason="stop",
            sequence_id="s",
            _tokens_list=self.tokens,
            _logprobs_list=[-1.0] * len(self.tokens),
        )
        return tinker.SampleResponse(sequences=[sequence] * num_samples)


@pytest.mark.parametrize(
    ("group", "strategy", "removes", "kept"),
    [
        (Group(Steps, Steps), None, False, True),
        (Group(Steps, Steps), None, True, False),  # equal rewards
        (Group(Steps, lambda: Steps(reward=2.0)), None, True, True),
        (
            Group(lambda: Steps(faults={0: fail(OSError())})),
            RetryOnFailure(max_retries=0),
            False,
            False,
        ),
    ],
)
def test_a_group_for_a_loop_of_user_code(group, strategy, removes, kept):
    counter = RolloutErrorCounter()
    result = asyncio.run(
        do_group_rollout_and_filter_constant_reward(
            Client([5]), group, 4, 1.0, removes, strategy=strategy
        )
    )
    assert (result is not None) is kept
    counter.ingest(result)
    assert counter.get_metrics().get("rollout_errors/groups_skipped", 0) == (not kept)


# --- cancellation -------------------------------------------------------------------------------


def test_a_cancelled_group_still_cleans_up_to_the_end():
    class Slow(Group):
        def __init__(self):
            super().__init__(Steps)
            self.begun = asyncio.Event()

        async def cleanup(self):
            self.begun.set()
            await asyncio.sleep(0.05)
            self.cleaned += 1

    async def run():
        group = Slow()
        task = asyncio.create_task(do_group_rollout(group, Policy()))
        await group.begun.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task
        return group.cleaned

    assert asyncio.run(run()) == 1


def test_one_failed_request_of_a_policy_without_sample_many_fails_one_member():
    class Flaky(TokenCompleter):
        calls = 0

        async def __call__(self, model_input, stop):
            self.calls += 1
            if self.calls == 2:
                raise OSError("down")
            return TokensWithLogprobs([1], [-0.5])

    result = group_rollout(Group(Steps, Steps), RetryOnFailure(), Flaky())
    assert (len(result.trajectories_G), len(result.rollout_errors)) == (2, 1)
