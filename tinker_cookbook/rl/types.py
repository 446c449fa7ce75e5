"""What reinforcement learning here is made of: environments, and what comes of playing them.

An ``RLDataset`` gives batches of ``EnvGroupBuilder``s. Each builds a group of ``Env``s, which
mostly are copies of one problem; advantages are centred within the group. An ``Env`` is one
episode: it is played once, and it speaks tokens, because training needs the very tokens that were
sampled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import chz
from typing_extensions import TypedDict

from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.utils.imports import lazy_module

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.renderers import Message
else:
    tinker = lazy_module("tinker")

__all__ = [
    "Action",
    "ActionExtra",
    "Env",
    "EnvGroupBuilder",
    "InitialObservationOverflow",
    "Logprobs",
    "Logs",
    "Metrics",
    "Observation",
    "PARSE_ERROR_MASKED_METRIC_KEY",
    "RLDataset",
    "RLDatasetBuilder",
    "RolloutError",
    "STOP_METRIC_PREFIX",
    "StepResult",
    "StopCondition",
    "StopReason",
    "TokensWithLogprobs",
    "Trajectory",
    "TrajectoryGroup",
    "Transition",
]

Action: TypeAlias = list[int]
"""Token ids that the policy sampled, the stop token included."""

Observation: TypeAlias = "tinker.ModelInput"
"""All that the policy sees when it acts: the whole prompt, not what is new in it."""

Logprobs: TypeAlias = list[float]
Metrics: TypeAlias = dict[str, float | int]
"""Numbers of a step or an episode; averaged over a batch and logged as ``env/all/NAME``."""

Logs: TypeAlias = dict[str, str | int | float]
"""What the transcript of a step shows beside the text."""


class StopReason(StrEnum):
    """Why an episode ended. Counted as ``stop/REASON``."""

    COMPLETED = "completed"
    TOOL_STOPPED = "tool_stopped"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_SAMPLED_TOKENS = "max_sampled_tokens"
    MAX_TOOL_CALLS = "max_tool_calls"
    CONTEXT_OVERFLOW = "context_overflow"
    PARSE_ERROR = "parse_error"
    ROLLOUT_TIMEOUT = "rollout_timeout"


STOP_METRIC_PREFIX = "stop/"
"""A metric ``stop/REASON`` of an episode's last step says why it ended."""


def stop_reason_from_metrics(metrics: Metrics) -> StopReason | str | None:
    """Returns the reason that an environment reported as a metric ``stop/REASON``, if it did."""
    for name, value in metrics.items():
        if name.startswith(STOP_METRIC_PREFIX) and value:
            return as_stop_reason(name.removeprefix(STOP_METRIC_PREFIX))
    return None


def as_stop_reason(text: str) -> StopReason | str:
    """Returns the ``StopReason`` of this name, or the text itself, which may be of user code."""
    return StopReason(text) if text in set(StopReason) else text


PARSE_ERROR_MASKED_METRIC_KEY = "parse_error_masked"
"""A step with this metric is not trained on (``ParseErrorPolicy.mask_error_turns``)."""


@dataclass(frozen=True)
class InitialObservationOverflow:
    """Returned by ``initial_observation`` if the first prompt leaves no room to answer.

    The episode ends at once, without a transition, with ``reward``.
    """

    reward: float = 0.0
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)


class ActionExtra(TypedDict, total=False):
    """What is known of an action besides its tokens; keys may be absent."""

    stop_reason: str
    """``"stop"``: a stop condition ended it; ``"length"``: it was cut off."""


@dataclass
class StepResult:
    """What an environment answers to an action."""

    reward: float
    """For this step alone; an episode's reward is the sum over its steps."""
    episode_done: bool
    next_observation: Observation
    next_stop_condition: StopCondition
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    stop_reason: StopReason | str | None = None
    """Why the episode ended, where the environment knows better than "completed"."""

    @classmethod
    def final(cls, reward: float, stop_condition: StopCondition, **others: Any) -> StepResult:
        """The answer to an action that ends the episode; ``others`` are further fields."""
        return cls(reward, True, tinker.ModelInput.empty(), stop_condition, **others)


class Env(ABC):
    """One episode. Make a new one for the next: there is no reset."""

    teacher_prompt: Callable[[Sequence[Message]], Observation] | None = None
    """Renders ``messages`` for a teacher that sees another prompt than the policy; runs in a
    thread. Who sets it needs an environment with ``messages`` (``rollout_hooks.HasMessages``)."""

    @abstractmethod
    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """The first prompt, and what ends the answer to it."""

    @abstractmethod
    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Takes the policy's answer, the stop token included.

        An environment that does not care how the answer ended may leave ``extra`` out of its
        signature: ``async def step(self, action)``.
        """


@dataclass
class Transition:
    """One turn: what the policy saw, what it did, what that earned."""

    ob: Observation
    ac: TokensWithLogprobs
    reward: float
    episode_done: bool
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    masked: bool = False
    """Not trained on (a malformed turn under ``ParseErrorPolicy.mask_error_turns``)."""
    teacher_ob: Observation | None = None
    """What a teacher that scores the action sees, where that is not ``ob``."""


@dataclass(frozen=True)
class Trajectory:
    """One episode. ``final_ob`` is what the policy would have seen next."""

    transitions: list[Transition]
    final_ob: Observation
    stop_reason: StopReason | str | None = None
    """Why it ended; a rollout sets it. ``RolloutHooks.on_stop_reason`` may give any text."""
    reward_without_turn: float = 0.0
    """Earned though no turn was played: that of an ``InitialObservationOverflow``."""
    metrics: Metrics = field(default_factory=dict)
    """Of the episode rather than of a turn; a group's rollout adds them to ``metrics_G``."""
    logs: Logs = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """Time waited for ``sampling`` and for the environment's ``env`` and ``grading``."""

    @property
    def reward(self) -> float:
        """Sum of the steps' rewards; rewards of the group come on top."""
        return self.reward_without_turn + sum(turn.reward for turn in self.transitions)


@dataclass(frozen=True)
class RolloutError:
    """A failure of a rollout, kept with its group: the exception's class name and its message."""

    error_type: str
    error_message: str

    def __str__(self) -> str:
        return f"{self.error_type}: {self.error_message}"

    @classmethod
    def parse(cls, line: str) -> RolloutError:
        """Reads what ``str`` gives."""
        error_type, _, message = line.partition(": ")
        return cls(error_type, message)


@dataclass
class TrajectoryGroup:
    """The episodes of one group, in the order of its environments.

    ``final_rewards_G`` and ``metrics_G`` are those of ``compute_group_rewards``;
    ``rollout_errors`` names what went wrong on the way, also where a retry mended it;
    ``sampling_client_step`` is the number of updates in the weights that sampled the group.
    """

    trajectories_G: list[Trajectory]
    final_rewards_G: list[float]
    metrics_G: list[Metrics]
    rollout_errors: list[RolloutError] = field(default_factory=list)
    sampling_client_step: int = 0

    def __post_init__(self) -> None:
        lengths = {
            "trajectories_G": len(self.trajectories_G),
            "final_rewards_G": len(self.final_rewards_G),
            "metrics_G": len(self.metrics_G),
        }
        if len(set(lengths.values())) > 1:
            raise DataValidationError(
                f"TrajectoryGroup: got {lengths}, expected one entry for each member of the group"
            )

    def get_total_rewards(self) -> list[float]:
        """Each member's reward: that of its steps plus that of the group."""
        return [
            trajectory.reward + final
            for trajectory, final in zip(self.trajectories_G, self.final_rewards_G, strict=True)
        ]


class EnvGroupBuilder(ABC):
    """Builds the environments of one group. Must pickle, as a group may be played elsewhere."""

    @abstractmethod
    async def make_envs(self) -> Sequence[Env]:
        """New environments, one for each member of the group."""

    async def make_env(self, index: int) -> Env:
        """Member ``index`` alone, for a retry. Override where making all of them costs much."""
        envs = await self.make_envs()
        # A builder may make fewer when it is asked again; members are alike then.
        return envs[min(index, len(envs) - 1)]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """A reward for each member that depends on all of them; by default nothing."""
        return [(0.0, {}) for _ in trajectory_group]

    async def cleanup(self) -> None:
        """Gives back what the group held (a sandbox, a connection); called once, always."""

    def logging_tags(self) -> list[str]:
        """Names under which the group's metrics are logged too, as ``env/TAG/…``."""
        return []


class RLDataset(ABC):
    """Batches of problems, by index."""

    @abstractmethod
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Batch ``index``; the same one each time. Called in a thread of its own."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches."""

    def set_epoch(self, seed: int) -> None:
        """Reorders the problems for an epoch, if the dataset shuffles; by default nothing."""


@chz.chz
class RLDatasetBuilder:
    """Settings from which a dataset is made: training data and, if there are any, test data."""

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Builds both."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for settings that cannot work, before anything loads."""
