"""Tasks in Harbor's folder format as environments: a terminal in a sandbox, then tests."""

from __future__ import annotations

import asyncio
import logging
import shlex
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import chz

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.recipes.harbor_rl.dockerfile import Dockerfile, read_dockerfile, read_workdir
from tinker_cookbook.recipes.harbor_rl.harbor_tools import HarborBashTool, HarborReward
from tinker_cookbook.recipes.start import example_data, renderer_of
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.rollouts.async_utils import gather_or_cancel
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.sandbox import SandboxInfrastructureError, SandboxInterface, SandboxResult
from tinker_cookbook.tool_use import build_agent_tool_env
from tinker_cookbook.tool_use.agent_tool_message_env import RewardFn

logger = logging.getLogger(__name__)

HARBOR_CACHE_DIR = Path.home() / ".cache" / "harbor" / "tasks"
EXAMPLES = "example_data"
"""Name for which ``load_harbor_tasks`` returns the project's own ten tasks."""

HARBOR_SYSTEM_PROMPT = (
    "You work in a terminal. Use the tool bash to look at files, run programs and change files "
    "until the task of the user is done. Then answer without a tool call."
)

SandboxFactory: TypeAlias = Callable[[Path, int], Awaitable[SandboxInterface]]
"""Makes a sandbox of a task's ``environment`` folder with a lifetime in seconds."""


@dataclass(frozen=True)
class HarborTask:
    """A task: ``environment/Dockerfile``, ``tests/test.sh`` and maybe ``solution/solve.sh``."""

    task_name: str
    instruction: str
    task_dir: Path
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def environment_dir(self) -> Path:
        """Folder of the Dockerfile and of the files that it copies."""
        return self.task_dir / "environment"

    @property
    def tests_dir(self) -> Path:
        """Folder of ``test.sh``; the model never sees it."""
        return self.task_dir / "tests"

    def seconds(self, section: str, default: int) -> int:
        """Returns ``timeout_sec`` of a section of ``task.toml``, at most ``default``."""
        given = self.config.get(section, {}).get("timeout_sec")
        return default if given is None else min(default, int(given))


def load_harbor_tasks(dataset: str) -> list[HarborTask]:
    """Returns the tasks of a folder, of a dataset in Harbor's cache, or of ``example_data``.

    Folders of tasks may be one level deeper, as ``harbor datasets download`` writes them.

    Raises:
        ConfigurationError: There is no such folder.
        DataValidationError: It has no tasks, or a task lacks a file.
    """
    folder = example_data("harbor") if dataset == EXAMPLES else Path(dataset).expanduser()
    if not folder.is_dir():
        folder = HARBOR_CACHE_DIR / dataset
    if not folder.is_dir():
        raise ConfigurationError(
            f"dataset: got {dataset!r}, expected a folder of tasks, the name of one in "
            f"{HARBOR_CACHE_DIR}, or {EXAMPLES!r}"
        )
    found = {path.parent for path in (*folder.glob("*/task.toml"), *folder.glob("*/*/task.toml"))}
    if not found:
        raise DataValidationError(f"{folder}: no folder in it has a task.toml")
    return sorted(map(_read_task, found), key=lambda task: task.task_name)


def _read_task(folder: Path) -> HarborTask:
    for name in ("instruction.md", "environment/Dockerfile", "tests/test.sh"):
        if not (folder / name).is_file():
            raise DataValidationError(f"{folder}: the task has no {name}")
    config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    text = (folder / "instruction.md").read_text(encoding="utf-8")
    return HarborTask(folder.name, text.strip(), folder, config)


async def default_sandbox_factory(env_dir: Path, timeout: int) -> SandboxInterface:
    """Makes a local sandbox, and follows the Dockerfile of ``env_dir`` in it.

    Raises:
        ConfigurationError: The Dockerfile has what the local sandbox cannot do.
        SandboxInfrastructureError: A command of it fails.
    """
    from tinker_cookbook.sandbox import LocalSandbox

    plan = await asyncio.to_thread(read_dockerfile, env_dir / "Dockerfile")
    sandbox = await LocalSandbox.create(timeout, environment=plan.environment)
    try:
        await _follow(sandbox, plan)
    except BaseException:
        await sandbox.cleanup()
        raise
    return sandbox


async def _follow(sandbox: SandboxInterface, plan: Dockerfile) -> None:
    for folder in plan.folders:
        _check(await sandbox.run_command(f"mkdir -p {shlex.quote(folder)}", "/"), "WORKDIR")
    for step in plan.steps:
        for source, target in step.copies:
            executable = bool(source.stat().st_mode & 0o100)
            content = await asyncio.to_thread(source.read_bytes)
            done = await sandbox.write_file(target, content, executable=executable)
            _check(done, step.instruction)
        if step.command is not None:
            exports = "".join(f"export {k}={shlex.quote(v)}; " for k, v in step.environment)
            done = await sandbox.run_command(exports + step.command, step.workdir, timeout=120)
            _check(done, step.instruction)


def _check(result: SandboxResult, what: str) -> None:
    if result.exit_code:
        said = (result.stderr or result.stdout).strip()[-300:]
        raise SandboxInfrastructureError(f"{what}: failed: {said}")


def workdir_of(task: HarborTask) -> str:
    """Returns the folder that WORKDIR names in the task's Dockerfile, or ``/``."""
    return read_workdir(task.environment_dir / "Dockerfile")


def initial_messages(task: HarborTask, renderer: Renderer, bash: HarborBashTool) -> list[Message]:
    """Returns the declaration of the tool and the task."""
    prefix = renderer.create_conversation_prefix_with_tools(
        [bash.bash.to_spec()], HARBOR_SYSTEM_PROMPT
    )
    return [*prefix, {"role": "user", "content": task.instruction}]


@dataclass
class HarborEnvGroupBuilder(EnvGroupBuilder):
    """Episodes of one task, each in its own sandbox.

    With the local sandbox the tests run in a second one, which receives only the work folder.
    Another ``sandbox_factory`` grades in the model's sandbox, unless its sandboxes pass folders on.
    """

    task: HarborTask
    model_name: str
    renderer_name: str | None
    max_turns: int
    group_size: int
    sandbox_timeout: int = 600
    command_timeout: int = 120
    grader_timeout: int = 60
    max_trajectory_tokens: int | None = 32 * 1024
    max_generation_tokens: int | None = None
    context_overflow_reward: float = -0.1
    sandbox_factory: SandboxFactory | None = None
    reward_fn: RewardFn | None = None
    _sandboxes: list[SandboxInterface] = field(default_factory=list, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sandboxes": []}

    async def make_envs(self) -> Sequence[Env]:
        """Returns one environment for each member; their sandboxes start together."""
        return await gather_or_cancel(self.make_env(i) for i in range(self.group_size))

    async def make_env(self, index: int, renderer: Renderer | None = None) -> Env:
        """Returns an environment in a new sandbox; ``renderer`` replaces the named one."""
        task = self.task
        renderer = renderer or renderer_of(self.model_name, self.renderer_name)
        sandbox = await self.new_sandbox()
        self._sandboxes.append(sandbox)
        workdir = workdir_of(task)
        bash = HarborBashTool(sandbox, self.command_timeout, workdir)
        return build_agent_tool_env(
            renderer,
            [bash.bash],
            initial_messages(task, renderer, bash),
            self.reward_fn or self.reward_of(sandbox, workdir),
            model_name=self.model_name,
            max_turns=self.max_turns,
            max_trajectory_tokens=self.max_trajectory_tokens,
            max_generation_tokens=self.max_generation_tokens,
            context_overflow_reward=self.context_overflow_reward,
        )

    async def new_sandbox(self) -> SandboxInterface:
        """Returns a sandbox with the environment of the task; the caller releases it."""
        make = self.sandbox_factory or default_sandbox_factory
        return await make(self.task.environment_dir, self.sandbox_timeout)

    def reward_of(self, sandbox: SandboxInterface, workdir: str) -> HarborReward:
        """Returns the reward of the work in ``sandbox``."""
        task = self.task
        # Without a work folder the whole sandbox is the work, which cannot be passed on.
        separate = hasattr(sandbox, "export_folder") and workdir != "/"
        return HarborReward(
            task.tests_dir,
            sandbox,
            task.seconds("verifier", self.grader_timeout),
            self.new_sandbox if separate else None,
            workdir,
            task.config.get("artifacts", ()),
        )

    async def cleanup(self) -> None:
        """Releases the sandboxes."""
        results = await asyncio.gather(
            *(sandbox.cleanup() for sandbox in self._sandboxes), return_exceptions=True
        )
        self._sandboxes.clear()
        for error in results:
            if isinstance(error, BaseException):
                logger.warning("a sandbox could not be released: %s", error)

    def logging_tags(self) -> list[str]:
        """Metrics are also logged as ``harbor`` and under the name of the task."""
        return ["harbor", self.task.task_name]


class HarborDataset(ProblemDataset[HarborEnvGroupBuilder]):
    """Batches of groups."""

    def __init__(
        self,
        env_group_builders: list[HarborEnvGroupBuilder],
        batch_size: int,
        shuffle: bool = False,
    ) -> None:
        super().__init__(env_group_builders, lambda builder: builder, batch_size, shuffle)

    def data_sources(self) -> dict[str, Any]:
        """Returns the tasks, without their folders, which may be moved."""
        tasks = [builder.task for builder in self._problems]
        return {"": [(task.task_name, task.instruction, task.config) for task in tasks]}


@chz.chz
class HarborSettings:
    """How the episodes of terminal tasks go; of the dataset and of the programs."""

    max_turns: int = chz.field(default=10, doc="Maximum answers of the model")
    sandbox_timeout: int = chz.field(default=600, doc="Lifetime of a sandbox in seconds")
    command_timeout: int = chz.field(default=120, doc="Seconds for a command of the model")
    grader_timeout: int = chz.field(default=60, doc="Seconds for the tests")
    max_trajectory_tokens: int = chz.field(default=32 * 1024, doc="Maximum tokens of an episode")
    max_generation_tokens: int | None = chz.field(
        default=None, doc="Tokens reserved for an answer; default: max_tokens"
    )
    context_overflow_reward: float = chz.field(
        default=-0.1, doc="Reward of an answer that was cut off"
    )
    num_test: int | None = chz.field(
        default=None, doc="Tasks held out for evaluation; default: evaluate on all"
    )


@chz.chz
class HarborDatasetBuilder(HarborSettings, RLDatasetBuilder):
    """Tasks for training, and the same with one episode each for evaluation.

    ``num_test`` tasks, the last ones, are held out instead, if it is given.
    """

    tasks: list[HarborTask]
    batch_size: int
    group_size: int
    model_name: str
    renderer_name: str | None = None
    sandbox_factory: SandboxFactory | None = None
    reward_fn: RewardFn | None = None

    def check(self) -> None:
        """Raises ``ConfigurationError`` for a task that cannot run; nothing is started."""
        if self.num_test is not None and not 0 <= self.num_test < len(self.tasks):
            raise ConfigurationError(
                f"num_test: got {self.num_test}, expected less than the {len(self.tasks)} tasks"
            )
        if self.sandbox_factory is None:
            for task in self.tasks:
                read_dockerfile(task.environment_dir / "Dockerfile")

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Builds both datasets."""
        self.check()
        held_out = self.num_test or 0
        tasks = self.tasks[: len(self.tasks) - held_out]
        tested = self.tasks[len(tasks) :] if self.num_test is not None else self.tasks
        train_set = HarborDataset(self._groups(tasks, self.group_size), self.batch_size, True)
        if not tested:
            return train_set, None
        return train_set, HarborDataset(self._groups(tested, 1), len(tested))

    def _groups(self, tasks: Sequence[HarborTask], size: int) -> list[HarborEnvGroupBuilder]:
        same = {f.name for f in fields(HarborEnvGroupBuilder)} & chz.chz_fields(self).keys()
        settings = {name: getattr(self, name) for name in same - {"group_size"}}
        return [HarborEnvGroupBuilder(task=task, group_size=size, **settings) for task in tasks]
