"""Groups: shared requests, random numbers, cancelling and cleaning up."""

from __future__ import annotations

import asyncio

import pytest
from rollout_samples import Group, Policy, Steps, fail, hang

from tinker_cookbook.backends import connect
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.rollouts.errors import RolloutFailedError
from tinker_cookbook.rl.rollouts.group import do_group_rollout
from tinker_cookbook.rl.rollouts.strategy import MinViableGroup, RetryOnFailure


def group_rollout(builder, policy=None, **options):
    return asyncio.run(do_group_rollout(builder, policy or Policy(), **options))


def test_members_that_begin_alike_share_one_request():
    policy = Policy()
    other = [lambda: Steps(start=(7,), turns=2), Steps, lambda: Steps(start=(7,)), Steps]
    group = group_rollout(Group(*other), policy)
    assert sorted(policy.asked) == [
        ((0, 0), [7], 2),
        ((0, 1), [7, 0, 0, 0], 1),
        ((1, 0), [1, 2], 2),
    ]
    # Tokens are (first member of those alike, turn): every member has its own sample.
    assert [t.transitions[0].ob.to_ints() for t in group.trajectories_G] == [[7], [1, 2]] * 2
    assert group.final_rewards_G == [0.5] * 4


def test_each_member_gets_its_own_sample_of_the_shared_request():
    group = group_rollout(Group(Steps, Steps, Steps), Policy(length=3))
    assert [t.transitions[0].ac.tokens for t in group.trajectories_G] == [
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
    ]


def test_a_real_group_is_one_request_and_repeats_with_its_seed(stories_model):
    service = connect("local", device="cpu", dtype="float32").service
    client = service.create_sampling_client(base_model=stories_model).result()
    requests = []

    class Counted:
        def sample(self, prompt, num_samples, sampling_params):
            requests.append(num_samples)
            return client.sample(prompt, num_samples, sampling_params)

    policy = TinkerTokenCompleter(Counted(), max_tokens=4, seed=11)

    def sampled(delays):
        def env(i):
            async def wait():
                await asyncio.sleep(delays[i])

            return lambda: Steps(start=(1, 300, 301), turns=2, faults={0: wait})

        group = group_rollout(Group(*map(env, range(4))), policy)
        return [[t.ac.tokens for t in tr.transitions] for tr in group.trajectories_G]

    first = sampled([0, 0.1, 0, 0.05])
    assert requests == [4, 1, 1, 1, 1]
    assert first == sampled([0.1, 0, 0.05, 0])
    assert len({tuple(turns[0]) for turns in first}) > 1
    assert len({tuple(turns[1]) for turns in first}) > 1


# --- cancelling and cleaning up ---------------------------------------------------------------


def cancelled_after(seconds, group, work):
    async def run():
        task = asyncio.ensure_future(work)
        await asyncio.sleep(seconds)
        while not group.made:
            await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())


@pytest.mark.parametrize(
    "strategy", [None, RetryOnFailure(), MinViableGroup(per_rollout_timeout=60)]
)
@pytest.mark.parametrize("faults", [{}, {-1: hang}, {0: hang}])
def test_an_interruption_is_no_rollout_error_and_cleans_up(strategy, faults):
    group = Group(lambda: Steps(faults=faults), lambda: Steps(faults=faults))
    policy = Policy(delay=0 if faults else 3600)
    cancelled_after(0.1, group, do_group_rollout(group, policy, strategy=strategy))
    assert (group.cleaned, group.remade) == (1, [])


def test_cleanup_runs_once_whatever_happens():
    for group, error in (
        (Group(Steps), None),
        (Group(lambda: Steps(faults={0: fail(KeyError())})), RolloutFailedError),
        (Group(), DataValidationError),
    ):
        if error is None:
            group_rollout(group)
        else:
            with pytest.raises(error):
                group_rollout(group)
        assert group.cleaned == 1


def test_an_error_in_cleanup_is_recorded_and_fails_nothing():
    class Leaky(Group):
        async def cleanup(self):
            raise OSError("socket")

    group = group_rollout(Leaky(Steps))
    (error,) = group.rollout_errors
    assert error.error_type == "OSError"
    assert error.error_message == "cleanup of Leaky: OSError: socket" + _where(group)
    with pytest.raises(RolloutFailedError, match="KeyError"):  # not hidden by that of cleanup
        group_rollout(Leaky(lambda: Steps(faults={0: fail(KeyError())})))


def _where(group):
    line = str(group.rollout_errors[0])
    return line[line.index(" (raised at") :]
