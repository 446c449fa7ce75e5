"""Environments of the counting task: episodes of many turns and long contexts."""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import chz

from tinker_cookbook import model_info
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.rl_numerics_check.task import (
    DEFAULT_WORDS,
    EXTRA_TURNS,
    GENERATED,
    MAX_CORPUS_CHARS,
    CountingProblem,
    CountingTaskConfig,
    NumPagesHint,
    WordHint,
    build_prompt,
    clean_wikitext_line,
    closeness_reward,
    count_word,
    load_corpus,
    load_wikitext_corpus,
    parse_answer,
    sample_problem,
    split_pages,
)
from tinker_cookbook.renderers import Message, Renderer, ToolCall, get_renderer, get_text_content
from tinker_cookbook.rl.envs.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Logs,
    Metrics,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import (
    AgentToolMessageEnv,
    ToolResult,
    error_tool_result,
    simple_tool_result,
    tool,
)

__all__ = [
    "DEFAULT_MAX_TRAJECTORY_TOKENS",
    "DEFAULT_WORDS",
    "EXTRA_TURNS",
    "MAX_CORPUS_CHARS",
    "CountingDataset",
    "CountingDatasetBuilder",
    "CountingEnvGroupBuilder",
    "CountingProblem",
    "CountingReward",
    "CountingTaskConfig",
    "EpisodeState",
    "ExtensionCheckedEnv",
    "NumPagesHint",
    "OneToolCallPerTurnEnv",
    "PageReader",
    "PagesInTurnEnv",
    "WordHint",
    "build_env",
    "build_prompt",
    "clean_wikitext_line",
    "closeness_reward",
    "count_word",
    "load_wikitext_corpus",
    "parse_answer",
    "sample_problem",
    "split_pages",
]

logger = logging.getLogger(__name__)

SYSTEM_PROMPT = "You are a careful assistant who reads documents with the read_page tool."
DEFAULT_MAX_TRAJECTORY_TOKENS = 128 * 1024
FAILED_PARSE_REWARD = -0.1
CONTEXT_OVERFLOW_REWARD = -0.1
_REJECTED = "One call of read_page in each reply: this call was not executed."
_TURNS_TO_JUDGE = 5  # a few turns that do not extend the previous one do not justify a warning


@dataclass
class EpisodeState:
    """What the tool and the reward of an episode share."""

    pages_read: set[int] = field(default_factory=set)
    invalid_page_requests: int = 0


class PageReader:
    """The tool of an episode."""

    def __init__(self, pages: Sequence[str], state: EpisodeState) -> None:
        self._pages, self._state = pages, state

    @tool
    async def read_page(
        self, page: Annotated[int, "Number of the page to read, from 1"]
    ) -> ToolResult:
        """Read one page of the document. Call this once in a reply."""
        if not 1 <= page <= len(self._pages):
            self._state.invalid_page_requests += 1
            return error_tool_result(f"There is no page {page}.", name="read_page")
        self._state.pages_read.add(page)
        return simple_tool_result(f"[Page {page}]\n{self._pages[page - 1]}", name="read_page")


@dataclass
class OneToolCallPerTurnEnv(AgentToolMessageEnv):
    """Runs the first call of each answer and rejects the others, so that pages cost turns."""

    async def _run(self, calls: Sequence[ToolCall], logs: Logs) -> list[ToolResult]:
        self._first_of_turn = self._num_calls
        return await super()._run(calls, logs)

    async def _run_one(self, index: int, call: ToolCall) -> ToolResult:
        if index == self._first_of_turn:
            return await super()._run_one(index, call)
        name = call.function.name
        return error_tool_result(_REJECTED, call_id=call.id or "", name=name, error_type="rejected")


@dataclass
class CountingReward:
    """The reward of a whole episode, and its metrics."""

    problem: CountingProblem
    state: EpisodeState
    tolerance: float

    async def __call__(self, history: list[Message]) -> tuple[float, dict[str, float]]:
        """Grades the last answer."""
        answers = [m for m in history if m["role"] == "assistant"]
        predicted = parse_answer(get_text_content(answers[-1])) if answers else None
        n, read = self.problem.num_pages, self.state.pages_read
        true_count = self.problem.true_count
        results = [get_text_content(m) for m in history if m["role"] == "tool"]
        metrics = {
            "answer_parsed": float(predicted is not None),
            "exact_match": float(predicted == true_count),
            "true_count": float(true_count),
            "num_pages": float(n),
            "pages_read": float(len(read)),
            "read_all_pages": float(read.issuperset(range(1, n + 1))),
            "read_past_end": float(any(page > n for page in read)),
            "rejected_tool_calls": float(sum(_REJECTED in text for text in results)),
            "invalid_page_requests": float(self.state.invalid_page_requests),
        }
        if predicted is None:
            return 0.0, metrics
        metrics["abs_error"] = float(abs(predicted - true_count))
        return closeness_reward(predicted, true_count, self.tolerance), metrics


class PagesInTurnEnv(MessageEnv):
    """Each answer is followed by the next page, whatever its text; the last one is graded.

    For models that cannot call tools: the numerics of long episodes do not depend on their skill.
    """

    def __init__(self, problem: CountingProblem, reward: CountingReward) -> None:
        self.problem, self.reward = problem, reward
        self.history: list[Message] = []

    async def initial_observation(self) -> list[Message]:
        """Returns the question and the first page."""
        self.history = [Message(role="user", content=f"{self.problem.prompt}\n\n{self._page(1)}")]
        return self.history

    async def step(self, message: Message) -> MessageStepResult:
        """Shows the next page, or grades."""
        read = self.reward.state.pages_read
        self.history = [*self.history, message]
        if len(read) == self.problem.num_pages:
            reward, metrics = await self.reward(self.history)
            return MessageStepResult(reward, True, self.history, dict(metrics))
        page = Message(role="user", content=self._page(len(read) + 1))
        self.history = [*self.history, page]
        return MessageStepResult(0.0, False, self.history)

    async def observe_truncated_response(self, message: Message) -> MessageStepResult:
        """Goes on: an answer that is cut off is as good for the numerics as another."""
        return await self.step(message)

    def _page(self, number: int) -> str:
        self.reward.state.pages_read.add(number)
        return f"[Page {number}]\n{self.problem.pages[number - 1]}"


@functools.cache
def _warn_turns_not_extending() -> None:
    logger.warning(
        "Most prompts of an episode do not begin with the prompt and answer of the turn before, so "
        "each turn is trained as a sequence with the whole context. The chat format rewrites "
        "earlier turns, as formats do that leave out earlier thinking; another renderer_name, such "
        "as qwen3_5_disable_thinking, may keep them"
    )


class ExtensionCheckedEnv(EnvFromMessageEnv):
    """Reports ``extension_rate``: how often a prompt begins with the turn before.

    Turns for which this holds are trained as one sequence.
    """

    _expected: list[int]
    _checked: int
    _extended: int

    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """Returns the first prompt."""
        self._checked = self._extended = 0
        result = await super().initial_observation()
        if not isinstance(result, InitialObservationOverflow):
            self._expected = result[0].to_ints()
        return result

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Compares the next prompt with what the model has seen and written."""
        result = await super().step(action, extra=extra)
        if not result.episode_done:
            prompt = result.next_observation.to_ints()
            self._expected = [*self._expected, *action]
            self._checked += 1
            self._extended += prompt[: len(self._expected)] == self._expected
            self._expected = prompt
        elif self._checked:
            rate = self._extended / self._checked
            metrics: Metrics = {**result.metrics, "extension_rate": rate}
            result = dataclasses.replace(result, metrics=metrics)
            if rate < 0.5 and self._checked >= _TURNS_TO_JUDGE:
                _warn_turns_not_extending()
        return result


def build_env(
    problem: CountingProblem,
    renderer: Renderer,
    task: CountingTaskConfig,
    max_trajectory_tokens: int | None,
    max_generation_tokens: int | None,
) -> EnvFromMessageEnv:
    """Returns the environment of one episode."""
    state = EpisodeState()
    reward = CountingReward(problem, state, task.reward_tolerance)
    message_env: MessageEnv
    if task.require_tool_calls:
        reader = PageReader(problem.pages, state)
        declared = renderer.create_conversation_prefix_with_tools(
            tools=[reader.read_page.to_spec()], system_prompt=SYSTEM_PROMPT
        )
        message_env = OneToolCallPerTurnEnv(
            tools=[reader.read_page],
            initial_messages=[*declared, Message(role="user", content=problem.prompt)],
            max_turns=task.max_turns,
            reward_fn=reward,
        )
    else:
        message_env = PagesInTurnEnv(problem, reward)
    return ExtensionCheckedEnv(
        renderer=renderer,
        message_env=message_env,
        failed_parse_reward=FAILED_PARSE_REWARD,
        terminate_on_length=task.require_tool_calls,
        max_trajectory_tokens=max_trajectory_tokens,
        max_generation_tokens=max_generation_tokens,
        context_overflow_reward=CONTEXT_OVERFLOW_REWARD,
    )


@dataclass(frozen=True)
class CountingEnvGroupBuilder(EnvGroupBuilder):
    """Episodes of the same problem."""

    problem: CountingProblem
    task: CountingTaskConfig
    model_name_for_tokenizer: str
    renderer_name: str
    group_size: int
    max_trajectory_tokens: int | None
    max_generation_tokens: int | None

    async def make_envs(self) -> Sequence[Env]:
        """Makes ``group_size`` equal environments."""
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))
        limits = self.max_trajectory_tokens, self.max_generation_tokens
        return [
            build_env(self.problem, renderer, self.task, *limits) for _ in range(self.group_size)
        ]

    def logging_tags(self) -> list[str]:
        """Returns the kind of task."""
        return ["rl_numerics_check"]


class CountingDataset(RLDataset):
    """Problems on random parts of a text; a batch depends on the seed and its index only."""

    def __init__(
        self,
        corpus: str,
        task: CountingTaskConfig,
        batch_size: int,
        n_batches: int,
        seed: int,
        make_group_builder: functools.partial[CountingEnvGroupBuilder],
    ) -> None:
        self.corpus, self.task, self.seed = corpus, task, seed
        self.batch_size, self.n_batches = batch_size, n_batches
        self.make_group_builder = make_group_builder

    def data_sources(self) -> dict[str, Any]:
        """Returns the text."""
        return {"": [self.corpus]}

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns the groups of batch ``index``."""
        rng = random.Random(f"{self.seed}-{index}")
        return [
            self.make_group_builder(problem=sample_problem(rng, self.corpus, self.task))
            for _ in range(self.batch_size)
        ]

    def __len__(self) -> int:
        return self.n_batches


@chz.chz
class CountingDatasetBuilder(RLDatasetBuilder):
    """The counting task on a generated text, WikiText-103, or a file."""

    batch_size: int = chz.field(doc="Problems per step")
    group_size: int = chz.field(doc="Episodes per problem")
    model_name_for_tokenizer: str = chz.field(doc="Model that has the tokenizer")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    task: CountingTaskConfig = chz.field(default_factory=CountingTaskConfig, doc="The task")
    n_batches: int = chz.field(default=1000, doc="Steps per epoch")
    seed: int = chz.field(default=0, doc="Seed of the problems")
    max_trajectory_tokens: int | None = chz.field(
        default=DEFAULT_MAX_TRAJECTORY_TOKENS, doc="Maximum tokens of an episode; None: no limit"
    )
    max_generation_tokens: int | None = chz.field(default=None, doc="Tokens kept for an answer")
    corpus: str = chz.field(
        default=GENERATED, doc="generated, wikitext (WikiText-103 of the Hub), or a text file"
    )

    def check(self) -> None:
        """Raises ``ConfigurationError`` for a number out of range."""
        for name in ("batch_size", "group_size", "n_batches"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}: got {getattr(self, name)}, expected at least 1")

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Loads the text."""
        name = self.renderer_name or model_info.get_recommended_renderer_name(
            self.model_name_for_tokenizer
        )
        make_group_builder = functools.partial(
            CountingEnvGroupBuilder,
            task=self.task,
            model_name_for_tokenizer=self.model_name_for_tokenizer,
            renderer_name=name,
            group_size=self.group_size,
            max_trajectory_tokens=self.max_trajectory_tokens,
            max_generation_tokens=self.max_generation_tokens,
        )
        corpus = load_corpus(self.corpus)
        return CountingDataset(
            corpus, self.task, self.batch_size, self.n_batches, self.seed, make_group_builder
        ), None
