"""Environments, trajectories and datasets of reinforcement learning.

An ``RLDataset`` returns batches of ``EnvGroupBuilder``s. Each builds a group of ``Env``s, usually
copies of one problem. An ``Env`` is used for one episode; its observations and actions are tokens,
because training needs exactly the sampled tokens.
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
from tinker_cookbook.utils.imports import tinker

if TYPE_CHECKING:
    from tinker_cookbook.renderers import Message

Action: TypeAlias = list[int]
"""Token ids that the policy sampled, the stop token included."""

Observation: TypeAlias = "tinker.ModelInput"
"""Whole prompt of a turn, not only its new part."""

Logprobs: TypeAlias = list[float]
Metrics: TypeAlias = dict[str, float | int]
"""Metrics of a step or an episode; averaged over a batch and logged as ``env/all/NAME``."""

Logs: TypeAlias = dict[str, str | int | float]
"""Values that the transcript of a step shows in addition to the text."""


class StopReason(StrEnum):
    """Reason why an episode ended, counted as ``stop/REASON``."""

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
"""Prefix of the metric ``stop/REASON`` of an episode's last step."""


def stop_reason_from_metrics(metrics: Metrics) -> StopReason | str | None:
    """Returns the stop reason that an environment reported as a metric, or ``None``."""
    for name, value in metrics.items():
        # A value of 0 means that the episode did not end for this reason.
        if name.startswith(STOP_METRIC_PREFIX) and value:
            return as_stop_reason(name.removeprefix(STOP_METRIC_PREFIX))
    return None


def as_stop_reason(text: str) -> StopReason | str:
    """Returns the ``StopReason`` of this name, or the text itself if user code defined it."""
    return StopReason(text) if text in set(StopReason) else text


PARSE_ERROR_MASKED_METRIC_KEY = "parse_error_masked"
"""A step with this metric is not trained on (``ParseErrorPolicy.mask_error_turns``)."""


@dataclass(frozen=True)
class InitialObservationOverflow:
    """Returned by ``initial_observation`` if the first prompt leaves no room for a response.

    The episode ends at once, without a transition, with ``reward``.
    """

    reward: float = 0.0
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)


class ActionExtra(TypedDict, total=False):
    """Optional information about an action."""

    stop_reason: str
    """``"stop"``: a stop condition ended it; ``"length"``: it was truncated."""
    logprobs: list[float]
    """Log-probability of each token, if the policy has them."""


@dataclass
class StepResult:
    """Result of one step of an environment."""

    reward: float
    """Reward of this step; the reward of an episode is the sum over its steps."""
    episode_done: bool
    next_observation: Observation
    next_stop_condition: StopCondition
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    stop_reason: StopReason | str | None = None
    """Why the episode ended; ``None`` means "completed"."""

    @classmethod
    def final(cls, reward: float, stop_condition: StopCondition, **others: Any) -> StepResult:
        """Returns the result of the last step; ``others`` are additional fields."""
        return cls(reward, True, tinker.ModelInput.empty(), stop_condition, **others)


class Env(ABC):
    """Environment of one episode; it has no reset."""

    teacher_prompt: Callable[[Sequence[Message]], Observation] | None = None
    """Renders ``messages`` for a teacher with another prompt than the policy; runs in a thread.
    Requires an environment with a property ``messages``: the conversation so far."""

    waits_for_members: bool = False
    """Whether ``initial_observation`` or ``step`` may wait for another member of the group, as in a
    game between them. Other members begin without waiting for its first observation."""

    def rollout_ended(self, failed: bool) -> None:
        """Called once when the rollout is over, for whatever reason; by default does nothing.

        An environment that others wait for overrides it. ``failed``: by an error or a cancellation.
        """

    @abstractmethod
    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """Returns the first prompt and the stop condition of its response."""

    @abstractmethod
    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Processes the policy's response, including the stop token.

        An environment that does not need ``extra`` may omit it from its signature.
        """


@dataclass
class Transition:
    """One turn: observation, action and reward."""

    ob: Observation
    ac: TokensWithLogprobs
    reward: float
    episode_done: bool
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    masked: bool = False
    """Whether training skips the turn (``ParseErrorPolicy.mask_error_turns``)."""
    teacher_ob: Observation | None = None
    """Observation of a teacher that scores the action, if it differs from ``ob``."""

    @property
    def is_masked(self) -> bool:
        """Whether training skips the turn, by ``masked`` or by a metric of the environment."""
        return self.masked or bool(self.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY))


@dataclass(frozen=True)
class Trajectory:
    """Finished episode; ``final_ob`` is the observation after the last turn."""

    transitions: list[Transition]
    final_ob: Observation
    stop_reason: StopReason | str | None = None
    """Why the episode ended; ``RolloutHooks.on_stop_reason`` may return any text."""
    reward_without_turn: float = 0.0
    """Reward of an episode without turns (``InitialObservationOverflow``)."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the whole episode; ``do_group_rollout`` adds them to ``metrics_G``."""
    logs: Logs = field(default_factory=dict)
    messages: str = field(default="", compare=False, repr=False)
    """JSON list of the messages, if the environment has them (``Env.messages``)."""
    tool_calls: str = field(default="", compare=False, repr=False)
    """JSON list of the tool calls with their results; see ``ToolEpisode.rows``."""
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """Time spent on ``sampling``, in the environment (``env``) and on ``grading``."""

    @property
    def reward(self) -> float:
        """Sum of the steps' rewards, without the reward of the group."""
        return self.reward_without_turn + sum(turn.reward for turn in self.transitions)


@dataclass(frozen=True)
class RolloutError:
    """Error of a rollout: class name and message of the exception."""

    error_type: str
    error_message: str

    def __str__(self) -> str:
        return f"{self.error_type}: {self.error_message}"

    @classmethod
    def parse(cls, line: str) -> RolloutError:
        """Parses the result of ``str``."""
        error_type, _, message = line.partition(": ")
        return cls(error_type, message)


@dataclass
class TrajectoryGroup:
    """Finished episodes of one group, in the order of its environments.

    ``final_rewards_G`` and ``metrics_G`` come from ``compute_group_rewards``. ``rollout_errors``
    includes errors of attempts that were retried. ``sampling_client_step`` is the number of updates
    in the weights that sampled the group.
    """

    trajectories_G: list[Trajectory]
    final_rewards_G: list[float]
    metrics_G: list[Metrics]
    rollout_errors: list[RolloutError] = field(default_factory=list)
    sampling_client_step: int = 0

    def get_total_rewards(self) -> list[float]:
        """Returns each member's reward: the sum of its steps' rewards plus its group reward."""
        return [
            # Advantages and the drop of constant groups use this total, not one of its parts.
            trajectory.reward + final
            for trajectory, final in zip(self.trajectories_G, self.final_rewards_G, strict=True)
        ]


class EnvGroupBuilder(ABC):
    """Builder of the environments of one group; picklable for process pools."""

    @abstractmethod
    async def make_envs(self) -> Sequence[Env]:
        """Returns new environments, one for each member of the group."""

    async def make_env(self, index: int) -> Env:
        """Returns a new environment of member ``index``, for a retry; override expensive groups."""
        envs = await self.make_envs()
        # A builder may return fewer environments the second time; its members are alike then.
        return envs[min(index, len(envs) - 1)]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Returns a reward for each member that depends on the whole group; by default 0."""
        return [(0.0, {}) for _ in trajectory_group]

    async def cleanup(self) -> None:
        """Releases resources such as a sandbox or a connection; always called once."""

    def logging_tags(self) -> list[str]:
        """Returns tags under which the group's metrics are also logged, as ``env/TAG/…``."""
        return []


class RLDataset(ABC):
    """Dataset of batches of problems."""

    @abstractmethod
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns batch ``index``, the same each time. Called in a separate thread."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of batches."""

    def data_sources(self) -> dict[str, Any]:
        """Returns the rows, or the datasets, that the batches are made of, by name.

        A run records their number and a digest, and a resumed run refuses others. A single part
        has the name "". Empty (the default): only the number of batches is compared.
        """
        return {}

    def set_epoch(self, seed: int) -> None:
        """Shuffles the problems for an epoch; by default does nothing."""


@chz.chz
class RLDatasetBuilder:
    """Settings of a dataset with training data and optional test data."""

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Builds the training set and the test set, if any."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for invalid settings, before anything is loaded."""
