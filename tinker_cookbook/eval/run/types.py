"""Settings, results and stored answers of benchmarks, and the interface of a benchmark.

Names and fields follow the official package. Additions: ``top_p`` and the fields after it in
``BenchmarkConfig``, ``sample`` and the fields after it in ``StoredTrajectory``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeAlias

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.record.schema import RecordLevel
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import Env

Metrics: TypeAlias = dict[str, float | int]
"""Numbers about one answer, or about all answers of a benchmark."""

Logs: TypeAlias = dict[str, Any]
"""Information to show with an answer, as JSON values."""

METRIC_MAX_TOKENS_REACHED = "max_tokens_reached"
"""Metric of an answer: 1 if it was truncated at ``max_tokens``."""

METRIC_CONTEXT_OVERFLOW = "context_overflow"
"""Metric of an answer: 1 if the conversation exceeded the context window."""

PassAtKScores: TypeAlias = dict[int, float]
"""k -> probability that at least one of k answers to a problem is right."""

TurnRole: TypeAlias = Literal["user", "assistant", "environment", "grader"]
Scoring: TypeAlias = Literal["generation", "logprob"]


StoredTurnDict: TypeAlias = dict[str, Any]
"""A ``StoredTurn`` as JSON."""

StoredTrajectoryDict: TypeAlias = dict[str, Any]
"""A ``StoredTrajectory`` as JSON: a line of ``trajectories.jsonl``."""

BenchmarkResultDict: TypeAlias = dict[str, Any]
"""A ``BenchmarkResult`` as JSON: ``result.json``; the keys of ``pass_at_k`` are text."""


@dataclass
class BenchmarkConfig:
    """Settings of a benchmark run."""

    max_examples: int | None = None
    """Number of examples, from the first; default: all."""
    concurrency: int = 64
    """Maximum concurrent requests."""
    agent_concurrency: int = 8
    """Like ``concurrency``, for benchmarks with several turns."""
    timeout_seconds: float = 300
    """Time limit of one example; exceeding it counts as an error."""
    max_trajectory_tokens: int | None = None
    """Maximum tokens of a whole conversation, for benchmarks with several turns."""
    max_generation_tokens: int | None = None
    """Maximum sampled tokens of a whole conversation, for benchmarks with several turns."""
    max_tokens: int = 32768
    """Maximum tokens of one answer, capped by the context left after the prompt."""
    temperature: float = 0.6
    """0 is greedy."""
    context_window: int | None = None
    """Maximum tokens of prompt and answer together; default: the model's context, if known."""
    save_dir: str | None = None
    """Output folder. Default: none, so that the run cannot be resumed."""
    num_samples: int = 1
    """Answers per problem, sampled in one request."""
    judge_sampling_client: SamplingClient | None = None
    """Client of the judge model, for benchmarks with ``requires_judge``."""
    judge_renderer: Renderer | None = None
    sandbox_factory: Callable[[], Any] | None = None
    """Creates sandboxes, for benchmarks with ``requires_sandbox``."""
    system_prompt: str | None = None
    """System prompt; default: the benchmark's recommended one, if any; ``""`` for none."""
    grade_fn: Callable[[str, Logs], float] | None = None
    """Replaces the grader: ``grade_fn(response, logs)``, response without thinking -> reward."""

    top_p: float = 1.0
    top_k: int = -1
    """Number of candidate tokens; -1: all."""
    seed: int | None = None
    """Makes sampling repeatable; each problem gets a seed derived from it."""
    data_path: str | None = None
    """Local folder or file with the data; default: the Hub."""
    scoring: Scoring = "generation"
    """``logprob`` compares log-probabilities of the choices instead of sampling an answer."""
    model_id: str | None = None
    """Identifier of the weights in the key of stored answers; default: read from the client."""
    judge_id: str | None = None
    """Like ``model_id``, for the judge model."""
    record: RecordLevel = "full"
    """What is recorded of the sampled tokens in ``save_dir`` (docs/record.md); ``summary`` leaves
    out the tokens, ``off`` records nothing."""

    def __post_init__(self) -> None:
        counts = "concurrency agent_concurrency num_samples max_tokens max_examples context_window"
        for name, least in (*((name, 1) for name in counts.split()), ("temperature", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigurationError(f"{name}: got {value}, expected at least {least}")
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p: got {self.top_p}, expected above 0, at most 1")
        if self.timeout_seconds <= 0:
            raise ConfigurationError(f"timeout_seconds: got {self.timeout_seconds}, expected > 0")
        if self.scoring not in ("generation", "logprob"):
            raise ConfigurationError(
                f"scoring: got {self.scoring!r}, expected 'generation' or 'logprob'"
            )

    @classmethod
    def for_model(cls, model_name: str, **kwargs: Any) -> BenchmarkConfig:
        """Returns a config with the ``context_window`` of a model; ``kwargs`` are fields.

        The default ``max_tokens`` is reduced to the context window.
        """
        from tinker_cookbook.model_info import resolve_max_length

        context = kwargs.pop("context_window", None) or resolve_max_length(model_name, None)
        if context is not None:
            kwargs.setdefault("max_tokens", min(cls.max_tokens, context))
        return cls(context_window=context, **kwargs)


@dataclass
class StoredTurn:
    """One message of a stored conversation."""

    role: TurnRole
    content: str
    token_count: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class StoredTrajectory:
    """One answer, or one conversation in a benchmark with several turns."""

    idx: int
    """Position of the problem in the benchmark."""
    benchmark: str
    example_id: str = ""
    turns: list[StoredTurn] = field(default_factory=list)
    reward: float = 0.0
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    error: str | None = None
    """Why there is no reward: sampling or grading failed. The next run retries."""
    time_seconds: float = 0.0
    sample: int = 0
    """Index of this answer among the ``num_samples`` answers to the problem."""
    key: str = ""
    """Hash of the model and the sampling settings; only answers with the same key are
    comparable."""
    prompt_key: str = ""
    """Hash of the rendered prompt."""
    grader: str = ""
    """Version of the grader; an answer of another version is graded again."""

    def to_dict(self) -> StoredTrajectoryDict:
        """Returns the JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> StoredTrajectory:
        """Returns the trajectory of a JSON object; unknown fields are ignored."""
        known = {item.name for item in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in d.items() if name in known}
        values["turns"] = [StoredTurn(**turn) for turn in values.get("turns", ())]
        return cls(**values)

    @property
    def correct(self) -> bool:
        """Whether the answer got the full reward."""
        return self.error is None and self.reward >= 1

    @property
    def truncated(self) -> bool:
        """Whether the answer was truncated at ``max_tokens`` or at the context window."""
        marks = (METRIC_MAX_TOKENS_REACHED, METRIC_CONTEXT_OVERFLOW)
        return any(self.metrics.get(mark, 0) for mark in marks)


@dataclass
class BenchmarkResult:
    """Result of one benchmark. All counts are numbers of answers, ``num_samples`` per problem."""

    name: str
    score: float
    """Mean reward over the answers that were graded: errors do not count, truncated answers do."""
    num_examples: int
    num_correct: int
    """Answers with the full reward, 1."""
    num_errors: int = 0
    num_truncated: int = 0
    metrics: Metrics = field(default_factory=dict)
    """``ci_low`` and ``ci_high`` of the score, and further metrics of the benchmark."""
    time_seconds: float = 0.0
    pass_at_k: PassAtKScores = field(default_factory=dict)

    @property
    def num_completed(self) -> int:
        """Answers that were graded and not truncated."""
        return max(0, self.num_examples - self.num_errors - self.num_truncated)

    @property
    def score_completed(self) -> float:
        """Mean reward over the answers that were graded and not truncated; 0 if there are none."""
        exact = self.metrics.get("score_completed")
        if exact is not None:
            return float(exact)
        # Without the runner's value: the share of right answers, if no truncated answer is right.
        return min(1.0, self.num_correct / self.num_completed) if self.num_completed else 0.0

    def to_dict(self) -> BenchmarkResultDict:
        """Returns the JSON object."""
        return asdict(self) | {"pass_at_k": {str(k): p for k, p in self.pass_at_k.items()}}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> BenchmarkResult:
        """Returns the result of a JSON object; unknown fields are ignored."""
        known = {item.name for item in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in d.items() if name in known}
        values["pass_at_k"] = {int(k): float(p) for k, p in values.get("pass_at_k", {}).items()}
        return cls(**values)


class BenchmarkBuilder(ABC):
    """A benchmark: creates one environment per example.

    Most benchmarks are single questions with a grader: subclass ``ExampleBenchmark`` for them.
    """

    name: str
    multi_turn: bool = False
    """Whether ``agent_concurrency`` applies."""
    recommended_timeout: float = 300
    recommended_system_prompt: str | None = None
    experimental: bool = False
    requires_sandbox: bool = False
    requires_judge: bool = False
    grader_version: str = "1"
    """Version of the grader, and of environments: change them together. Stored answers to single
    questions are then graded again; episodes of environments are run again."""
    part_of: str | None = None
    """Name of the benchmark that this one is a subject or task of."""

    @abstractmethod
    def make_envs(self, renderer: Renderer, config: BenchmarkConfig) -> Sequence[Env]:
        """Returns one environment for each example, in the order of the examples.

        An environment may have ``example_id``; default: its position.
        """

    def aggregate(self, rewards: list[float], metrics_list: list[Metrics]) -> BenchmarkResult:
        """Returns the result of the answers that were graded.

        Override it to add metrics, such as a score for each subject.
        """
        return BenchmarkResult(
            name=self.name,
            score=sum(rewards) / len(rewards) if rewards else 0.0,
            num_examples=len(rewards),
            num_correct=sum(reward >= 1 for reward in rewards),
        )
