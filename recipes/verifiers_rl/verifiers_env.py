"""Environments of verifiers 0.1.9 (``load_environment``) in our loop.

Each member of a group is a rollout of the library's own code. Its model calls go to a client that
converts them to observations of a ``DrivenEnv``; then the environment's rubric scores the group.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import chz
import tinker

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.exceptions import BackendError, ConfigurationError, DataValidationError
from tinker_cookbook.recipes.start import renderer_of
from tinker_cookbook.recipes.verifiers_rl.driven_env import (
    WITHOUT_REWARD,
    DrivenEnv,
    ModelCall,
    ProgramResult,
)
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    Metrics,
    RLDataset,
    RLDatasetBuilder,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from tinker_cookbook.utils.imports import lazy_module

if TYPE_CHECKING:
    import verifiers as vf
else:
    # Only the library needs a separate environment; names of this module do not.
    vf = lazy_module("verifiers")

_vf_env: ContextVar[Any] = ContextVar("vf_env", default=None)

_STOP_REASONS = {
    "max_turns_reached": StopReason.MAX_TURNS,
    "prompt_too_long": StopReason.CONTEXT_OVERFLOW,
}


def set_vf_env(env: vf.Environment) -> None:
    """Sets the environment of this context, which builders take that another process sent."""
    _vf_env.set(env)


def get_vf_env() -> vf.Environment | None:
    """Returns the environment of this context."""
    return _vf_env.get()


def convert_states_to_trajectory_group(states: list[vf.State]) -> TrajectoryGroup:
    """Returns the finished rollouts of a group as trajectories, with their final rewards.

    Raises:
        DataValidationError: A step has no tokens. They come with responses of a client that
            returns token ids, such as ``TinkerAsyncOpenAIClient``.
    """
    trajectories: list[Trajectory] = []
    for state in states:
        steps = state.get("trajectory") or []
        turns = []
        for j, step in enumerate(steps):
            if (tokens := step.get("tokens")) is None:
                raise DataValidationError(
                    f"step {j}: got no tokens; use a client that returns token ids"
                )
            action = TokensWithLogprobs(
                list(tokens["completion_ids"]),
                list(tokens["completion_logprobs"]),
                "length" if step.get("is_truncated") else "stop",
            )
            ob = tinker.ModelInput.from_ints(list(tokens["prompt_ids"]))
            turns.append(Transition(ob, action, 0.0, j == len(steps) - 1))
        reason = stop_reason_of(state)
        trajectories.append(Trajectory(turns, tinker.ModelInput.empty(), reason))
    return TrajectoryGroup(
        trajectories,
        [float(state.get("reward") or 0.0) for state in states],
        [dict(state.get("metrics") or {}) for state in states],
    )


def stop_reason_of(state: vf.State) -> StopReason | str:
    """Returns why a rollout ended, as our loop counts it."""
    condition = state.get("stop_condition")
    return _STOP_REASONS.get(str(condition), StopReason.COMPLETED)


class LegacyVerifiersEnv(DrivenEnv):
    """One rollout. ``state`` is the library's record of it at the end."""

    def __init__(self, builder: VerifiersEnvGroupBuilder) -> None:
        self.state: Any = None
        renderer = builder.renderer
        assert renderer is not None, "renderer: got None, expected the one of the model"

        async def program(call: ModelCall) -> ProgramResult:
            from tinker_cookbook.recipes.verifiers_rl.tinker_openai import DrivenOpenAIClient

            (given,) = builder.get_rollout_inputs(1)
            client = DrivenOpenAIClient(call, renderer, renderer.tokenizer)
            # Temperature and maximum tokens come from the policy, which samples.
            state = await builder.vf_env.run_rollout(given, client, "tinker", {}, nullcontext())
            if state.get("error") is not None:
                error = state["error"]
                raise BackendError(
                    f"{builder.task}, example {builder.example_id} failed: "
                    f"{type(error).__name__}: {error.__cause__ or error}. {WITHOUT_REWARD}"
                ) from error
            self.state = state
            return ProgramResult(0.0, stop_reason=stop_reason_of(state))

        super().__init__(program)


class VerifiersEnvGroupBuilder(EnvGroupBuilder):
    """Rollouts of one example.

    An environment of the library cannot be pickled. A builder that was sent to another process
    takes the one of ``set_vf_env`` there.
    """

    def __init__(
        self,
        vf_env: vf.Environment,
        prompt: vf.Messages,
        example_id: int,
        task: str,
        answer: str = "",
        info: dict | None = None,
        renderer: Renderer | None = None,
        group_size: int = 8,
    ) -> None:
        self.vf_env, self.renderer, self.group_size = vf_env, renderer, group_size
        self.prompt, self.example_id, self.task = prompt, example_id, task
        self.answer, self.info = answer, info or {}
        self._envs: list[LegacyVerifiersEnv] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "vf_env": None, "_envs": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        env = get_vf_env()
        if env is None:
            raise RuntimeError(
                "VerifiersEnvGroupBuilder was unpickled without an environment; call "
                "set_vf_env(vf.load_environment(...)) in this process first"
            )
        for name, value in {**state, "vf_env": env}.items():
            setattr(self, name, value)

    def get_rollout_inputs(self, group_size: int) -> list[vf.RolloutInput]:
        """Returns the library's input of a rollout, ``group_size`` times."""
        names = ("prompt", "answer", "task", "info", "example_id")
        fields = {name: getattr(self, name) for name in names}
        return [vf.RolloutInput(**fields) for _ in range(group_size)]

    async def make_envs(self) -> Sequence[Env]:
        """Returns one environment for each member."""
        return [await self.make_env(i) for i in range(self.group_size)]

    async def make_env(self, index: int) -> Env:
        """Returns a new environment; all of the group are alike."""
        self._envs.append(LegacyVerifiersEnv(self))
        return self._envs[-1]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Scores the group by the environment's rubric, which may compare its members.

        A rollout that a limit of the loop ended has no state: its reward is 0.
        """
        states = [env.state for env in env_group if isinstance(env, LegacyVerifiersEnv)]
        finished = [state for state in states if state is not None]
        if finished and self.vf_env.score_rollouts:
            await self.vf_env.rubric.score_group(finished, score_sem=nullcontext())
        return [
            (0.0, {})
            if state is None
            else (float(state.get("reward") or 0.0), dict(state.get("metrics") or {}))
            for state in states
        ]

    async def cleanup(self) -> None:
        """Cancels rollouts that the loop has ended before their program."""
        await asyncio.gather(*(env.close() for env in self._envs))
        self._envs.clear()

    def logging_tags(self) -> list[str]:
        """Metrics are also logged under the task's name."""
        return [self.task] if self.task else []


class VerifiersRLDataset(ProblemDataset[dict]):
    """Examples of an environment, in the order of its dataset."""

    def __init__(
        self,
        rows: list[dict],
        vf_env: vf.Environment,
        groups_per_batch: int,
        renderer: Renderer | None = None,
        group_size: int = 8,
    ) -> None:
        more: dict[str, Any] = {"renderer": renderer, "group_size": group_size}
        super().__init__(
            rows,
            lambda row: VerifiersEnvGroupBuilder(vf_env, **row, **more),
            groups_per_batch,
            shuffle=False,
        )


@chz.chz
class VerifiersRLDatasetBuilder(RLDatasetBuilder):
    """Examples of an environment of verifiers 0.1.9.

    Uses the environment of ``set_vf_env``, or loads the one with this name and these arguments.
    """

    vf_env_id: str = chz.field(doc="Name of an installed environment")
    vf_env_args: dict = chz.field(default_factory=dict, doc="Arguments of its load_environment")
    groups_per_batch: int = chz.field(default=32, doc="Examples per step")
    dataset_n: int = chz.field(
        default=-1, doc="Number of examples; the first ones are used; -1: all"
    )
    dataset_seed: int | None = chz.field(
        default=None, doc="Seed to shuffle the examples before they are chosen"
    )
    model_name: str = chz.field(default="", doc="Model whose tokenizer is used")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    group_size: int = chz.field(default=8, doc="Rollouts of an example")
    num_test: int = chz.field(default=0, doc="Examples of the eval dataset to evaluate on")

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Loads the environment, in this thread: the library sets handlers of signals."""
        env = get_vf_env()
        if env is None:
            env = self._load()
            set_vf_env(env)
        renderer = renderer_of(self.model_name, self.renderer_name)
        rows = _rows(env.get_dataset(n=self.dataset_n, seed=self.dataset_seed))
        size = self.group_size
        train_set = VerifiersRLDataset(rows, env, self.groups_per_batch, renderer, size)
        if not self.num_test:
            return train_set, None
        rows = _rows(env.get_eval_dataset(n=self.num_test))
        return train_set, VerifiersRLDataset(rows, env, len(rows), renderer, 1)

    def _load(self) -> vf.Environment:
        # Its handlers would end the run without the loop's own end; it also registers with atexit.
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return vf.load_environment(self.vf_env_id, **self.vf_env_args)
        except (ImportError, ValueError, AttributeError, TypeError, RuntimeError) as error:
            raise ConfigurationError(
                f"vf_env_id: got {self.vf_env_id!r}, expected an installed environment that "
                f"accepts vf_env_args={self.vf_env_args}: {error}"
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():
                    signal.signal(number, handler)


def _rows(dataset: Any) -> list[dict[str, Any]]:
    names = ("prompt", "example_id", "task", "answer", "info")
    present = [name for name in names if name in dataset.column_names]
    return [{name: row[name] for name in present if row[name] is not None} for row in dataset]
