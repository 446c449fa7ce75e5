"""A policy that records its requests, and an environment with scripted steps."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import tinker

from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, StepResult


def prompt(*tokens: int) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(tokens))


@dataclass
class Policy(TokenCompleter):
    """Returns its path as tokens, so that a sample shows its random numbers."""

    length: int = 2
    delay: float = 0.0
    path: tuple[int, ...] = ()
    asked: list[tuple[tuple[int, ...], list[int], int]] = field(default_factory=list)
    """(path, prompt, number of samples) of each request."""

    async def __call__(self, model_input, stop):
        return (await self.sample_many(model_input, stop, 1))[0]

    async def sample_many(self, model_input, stop, num_samples):
        self.asked.append((self.path, model_input.to_ints(), num_samples))
        await asyncio.sleep(self.delay)
        tokens = [[*self.path, i, *[9] * self.length][: self.length] for i in range(num_samples)]
        return [TokensWithLogprobs(t, [-0.5] * len(t)) for t in tokens]

    def derived(self, *path):
        return replace(self, path=(*self.path, *path))


class Steps(Env):
    """``turns`` turns; each prompt is the one before with the answer and the turn's number.

    ``faults[turn]`` is called in that turn, -1 for the first observation, and what it returns, if
    anything, takes the place of the result.
    """

    def __init__(self, start=(1, 2), turns=1, reward=1.0, faults=None, metrics=None):
        self.tokens, self.turns, self.reward = list(start), turns, reward
        self.faults, self.metrics = faults or {}, metrics or {}
        self.taken, self.extras = 0, []

    async def _fault(self, turn):
        if turn not in self.faults:
            return None
        result = self.faults[turn]()
        return await result if asyncio.iscoroutine(result) else result

    async def initial_observation(self):
        return (await self._fault(-1)) or (prompt(*self.tokens), [0])

    async def step(self, action, *, extra=None):
        turn = self.taken
        self.taken += 1
        self.extras.append(extra)
        self.tokens += [*action, turn]
        instead = await self._fault(turn)
        if instead is not None:
            return instead
        done = self.taken >= self.turns
        return StepResult(self.reward, done, prompt(*self.tokens), [0], dict(self.metrics))


class Group(EnvGroupBuilder):
    """Builder of given environments; a retry gets one of ``spares`` (member: factory)."""

    def __init__(self, *factories, spares=None):
        self.factories, self.spares = factories, spares or {}
        self.made, self.remade, self.cleaned = 0, [], 0
        self.graded = None

    async def make_envs(self):
        self.made += 1
        return [factory() for factory in self.factories]

    async def make_env(self, index):
        self.remade.append(index)
        return self.spares.get(index, self.factories[index])()

    async def compute_group_rewards(self, trajectory_group, env_group):
        self.graded = (trajectory_group, list(env_group))
        return [(0.5, {"place": i}) for i in range(len(trajectory_group))]

    async def cleanup(self):
        self.cleaned += 1


def fail(error: Exception):
    def fault():
        raise error

    return fault


async def hang():
    await asyncio.sleep(3600)


async def hang_for_hours():
    """Moves the clock of the event loop, so that a test of a timeout waits for nothing, and a
    timeout of an hour ends nothing else."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + 2 * 3600
    await asyncio.sleep(24 * 3600)
