"""Members of a group that wait for each other, as in a game: none of them hangs."""

from __future__ import annotations

import asyncio

import pytest
import tinker

from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollouts.limits import RolloutConfig, RolloutLimits
from tinker_cookbook.rl.rollouts.strategy import FailFast, RetryOnFailure
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, StepResult


class Policy(TokenCompleter):
    async def __call__(self, model_input, stop, *, max_tokens=None):
        return TokensWithLogprobs([7], [0.0])

    async def sample_many(self, model_input, stop, num_samples, *, max_tokens=None):
        return [await self(model_input, stop) for _ in range(num_samples)]


class Turns(Env):
    """Two members move by turns, three times each; member 1 sees the first move of member 0."""

    def __init__(self, shared, member, declared, fails=()):
        self.shared, self.member, self.fails = shared, member, list(fails)
        self.waits_for_members = declared and member > 0
        self.ended = []

    async def turn(self):
        while self.shared["moves"] % 2 != self.member and "left" not in self.shared:
            await asyncio.sleep(0)

    async def initial_observation(self):
        await self.turn()
        return tinker.ModelInput.from_ints([1]), []

    async def step(self, action):  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.fails:
            raise ValueError(self.fails.pop())
        self.shared["moves"] += 1
        await self.turn()
        done = self.shared["moves"] >= 5 or "left" in self.shared
        return StepResult(1.0, done, tinker.ModelInput.from_ints([1, 2]), [])

    def rollout_ended(self, failed):
        self.ended.append(failed)
        self.shared["left"] = failed


class Pair(EnvGroupBuilder):
    def __init__(self, declared, fails=()):
        self.declared, self.fails, self.envs = declared, fails, []

    async def make_envs(self):
        shared = {"moves": 0}
        self.envs += [Turns(shared, 0, self.declared, self.fails), Turns(shared, 1, self.declared)]
        return self.envs[-2:]


def run(builder, how=None, config=None):
    work = (how or FailFast()).execute(builder, Policy(), config)
    return asyncio.run(asyncio.wait_for(work, 300))


def test_a_member_that_waits_does_not_hold_up_the_others():
    pair = Pair(declared=True)
    result = run(pair)
    assert [len(t.transitions) for t in result.trajectories] == [3, 2]
    assert [env.ended for env in pair.envs] == [[False], [False]]


@pytest.mark.parametrize("limit", [1, 2])
def test_an_environment_learns_that_its_rollout_reached_a_limit(limit):
    """Without that, the other member would wait forever."""
    pair = Pair(declared=True)
    run(pair, config=RolloutConfig(limits=RolloutLimits(max_turns=limit)))
    assert [env.ended for env in pair.envs] == [[False], [False]]


def test_an_environment_learns_that_its_rollout_failed():
    pair = Pair(declared=True, fails=["broken"])
    with pytest.raises(Exception, match="broken"):
        run(pair, RetryOnFailure(max_retries=0))
    assert pair.envs[0].ended == [True]
