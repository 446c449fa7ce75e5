"""Environments of verifiers 0.4 in our loop: tasks as groups, rollouts as episodes.

The library's own code runs the environment, with tools, users, several agents. Its model calls go
to an endpoint in this process, which turns them into observations of a ``DrivenEnv``.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import chz
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    load_environment,
    resolve_env_config,
)

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.start import renderer_of
from tinker_cookbook.recipes.verifiers_rl.driven_env import DrivenEnv, ModelCall, ProgramResult
from tinker_cookbook.recipes.verifiers_rl.v1.endpoint import MODEL, Session, TokenEndpoint
from tinker_cookbook.recipes.verifiers_rl.v1.harness import HARNESS_ID
from tinker_cookbook.recipes.verifiers_rl.v1.renderer import (
    custom_renderer,
    tokenizer_folder,
)
from tinker_cookbook.recipes.verifiers_rl.v1.traces import result_of_episode
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder


@chz.chz
class VerifiersSpec:
    """Environment and chat format, as values that can be sent to another process."""

    taskset_id: str = chz.field(doc="Package of the taskset")
    settings: str = chz.field(default="{}", doc="Settings of the environment, as JSON")
    model_name: str = chz.field(doc="Model whose tokenizer and chat format are used")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    num_tasks: int = chz.field(default=-1, doc="Number of tasks; the first ones are used; -1: all")


def env_config(taskset_id: str, settings: dict[str, Any]) -> Any:
    """Returns the library's config of an environment.

    ``settings`` are the settings of its ``[env]`` block (``taskset``, ``agent``, ``timeout`` …). A
    role without a runtime gets the local one. Without a harness it gets the taskset's, or our chat
    loop.
    """
    settings = json.loads(json.dumps(settings))
    taskset = {**settings.pop("taskset", {}), "id": taskset_id}
    kind = env_config_type(taskset_id, settings.get("id") or "")
    bundled = default_harness_id(taskset_id)
    roles = [name for name, info in kind.model_fields.items()
             if isinstance(info.default, AgentConfig)]  # fmt: skip
    for name in roles:
        role = settings.setdefault(name, {})
        role.setdefault("runtime", {"type": "subprocess"})
        # The library's default runs shell commands of the model on this machine: never unasked.
        if bundled == "bash" and kind.model_fields[name].default.harness is None:
            role.setdefault("harness", {"id": HARNESS_ID})
    try:
        return resolve_env_config({**settings, "taskset": taskset})
    except ValueError as error:
        raise ConfigurationError(
            f"vf_env_args: {taskset_id} does not accept these settings: {error}"
        ) from error


@lru_cache(maxsize=8)
def environment(spec: VerifiersSpec) -> Any:
    """Returns the library's environment of a spec; one for each process."""
    try:
        return load_environment(env_config(spec.taskset_id, json.loads(spec.settings)))
    except (ModuleNotFoundError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"vf_env_id: got {spec.taskset_id!r}, expected an installed package that exports a "
            f"Taskset of verifiers 0.4 in __all__: {error}"
        ) from error


@lru_cache(maxsize=8)
def tasks_of(spec: VerifiersSpec) -> Sequence[Any]:
    """Returns the tasks of a spec in the taskset's order."""
    taskset = environment(spec).taskset
    if spec.num_tasks > 0:
        taskset = taskset.take(spec.num_tasks)
    if not taskset.bounded:
        raise ConfigurationError(
            f"dataset_n: got {spec.num_tasks}, expected the number of tasks to use, since "
            f"{type(taskset).__name__} generates them endlessly"
        )
    return list(taskset)


@dataclass
class LiveEnvironment:
    """A served environment and its token endpoint, on one event loop."""

    spec: VerifiersSpec
    endpoint: TokenEndpoint = field(default_factory=TokenEndpoint)
    _serving: asyncio.Task[None] | None = None
    _ready: asyncio.Future[None] | None = None

    async def started(self) -> LiveEnvironment:
        """Starts both once, and waits for them. They end with the event loop."""
        if self._serving is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._ready))
        assert self._ready is not None
        await asyncio.shield(self._ready)
        return self

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        async with AsyncExitStack() as stack:
            try:
                await self.endpoint.start()
                stack.push_async_callback(self.endpoint.stop)
                await stack.enter_async_context(environment(self.spec).serving())
            except Exception as error:
                self._serving = None
                ready.set_exception(error)
                return
            ready.set_result(None)
            # The event loop cancels this task at its end, which closes both.
            await asyncio.Event().wait()

    async def episode(self, task: Any, call: ModelCall) -> tuple[ProgramResult, Any]:
        """Runs one episode with ``call`` as its model; returns its result and record."""
        spec, sessions = self.spec, []
        stop = renderer_of(spec.model_name, spec.renderer_name).get_stop_sequences()

        def on_trace(trace: Any) -> None:
            sessions.append(trace.id)
            self.endpoint.sessions[trace.id] = Session(call, stop, trace.agent)

        client = TrainClientConfig(
            base_url=self.endpoint.url,
            api_key_var="TINKER_COOKBOOK_NO_KEY",
            renderer=custom_renderer(spec.model_name, spec.renderer_name),
            renderer_model_name=await asyncio.to_thread(tokenizer_folder, spec.model_name),
        )
        context = ModelContext(model=MODEL, client=client, sampling=vf.Sampling())
        try:
            episode = await environment(spec).run_episode(task, context, on_trace=on_trace)
        finally:
            for session in sessions:
                self.endpoint.sessions.pop(session, None)
        where = f"{spec.taskset_id}, task {task.data.idx}"
        return result_of_episode(episode, where), episode


_live: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[VerifiersSpec, LiveEnvironment]]
_live = weakref.WeakKeyDictionary()


async def live_environment(spec: VerifiersSpec) -> LiveEnvironment:
    """Returns the environment that is served on this event loop."""
    served = _live.setdefault(asyncio.get_running_loop(), {})
    return await served.setdefault(spec, LiveEnvironment(spec)).started()


class VerifiersEnv(DrivenEnv):
    """Rollout by the library's own code. ``episode`` is its record at the end, with the traces."""

    def __init__(self, spec: VerifiersSpec, task: Any) -> None:
        self.episode: Any = None

        async def program(call: ModelCall) -> ProgramResult:
            live = await live_environment(spec)
            result, self.episode = await live.episode(task, call)
            return result

        super().__init__(program)


@dataclass
class VerifiersTaskGroupBuilder(EnvGroupBuilder):
    """Rollouts of one task."""

    spec: VerifiersSpec
    index: int
    num_envs: int
    _driven: list[DrivenEnv] = field(default_factory=list, repr=False)

    async def make_envs(self) -> Sequence[Env]:
        """Returns one environment for each member."""
        return [await self.make_env(i) for i in range(self.num_envs)]

    async def make_env(self, index: int) -> Env:
        """Returns one environment; all of the group are alike."""
        self._driven.append(VerifiersEnv(self.spec, tasks_of(self.spec)[self.index]))
        return self._driven[-1]

    async def cleanup(self) -> None:
        """Cancels rollouts that the loop has ended before their program."""
        await asyncio.gather(*(env.close() for env in self._driven))
        self._driven.clear()

    def logging_tags(self) -> list[str]:
        """Metrics are also logged under the taskset's name."""
        return [self.spec.taskset_id.rpartition("/")[2]]


@chz.chz
class VerifiersTaskDatasetBuilder(RLDatasetBuilder):
    """Tasks of a taskset of verifiers 0.4.

    ``num_test`` tasks, the last ones, are held out and evaluated. The others are shuffled at each
    epoch by the run's seed.
    """

    spec: VerifiersSpec
    group_size: int = chz.field(default=8, doc="Rollouts of a task")
    groups_per_batch: int = chz.field(default=8, doc="Tasks per step")
    num_test: int = chz.field(default=0, doc="Tasks held out for evaluation; 0: none")

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Loads the taskset, which may take a while, in a thread."""
        tasks = await asyncio.to_thread(tasks_of, self.spec)
        if not 0 <= self.num_test < len(tasks):
            raise ConfigurationError(
                f"num_test: got {self.num_test}, expected less than the {len(tasks)} tasks of "
                f"{self.spec.taskset_id}"
            )
        # With the tasks, so that a resumed run notices others.
        numbered = list(enumerate(tasks))
        split = len(tasks) - self.num_test

        def group(size: int) -> Any:
            return lambda task: VerifiersTaskGroupBuilder(self.spec, task[0], size)

        train_set = ProblemDataset(numbered[:split], group(self.group_size), self.groups_per_batch)
        if not self.num_test:
            return train_set, None
        test_set = ProblemDataset(numbered[split:], group(1), self.num_test, shuffle=False)
        return train_set, test_set
