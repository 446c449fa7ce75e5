"""Episodes with many turns: a document is read page by page, and a word is counted."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import chz

from tinker_cookbook import model_info
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
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
from tinker_cookbook.training.config import at_least, number

SYSTEM_PROMPT = "You are a careful assistant who reads documents with the read_page tool."
DEFAULT_MAX_TRAJECTORY_TOKENS = 128 * 1024
FAILED_PARSE_REWARD = -0.1
CONTEXT_OVERFLOW_REWARD = -0.1
_REJECTED = "One call of read_page in each reply: this call was not executed."
NumPagesHint = Literal["exact", "range"]
WordHint = Literal["exact", "first_last", "hidden"]

# Common words; no two have the same first and last letters, which "first_last" shows.
DEFAULT_WORDS: tuple[str, ...] = (
    "after", "against", "although", "before", "being", "between", "both", "could", "during",
    "however", "including", "into", "known", "later", "many", "most", "only", "over", "several",
    "such", "their", "then", "through", "time", "under", "until", "when", "while",
)  # fmt: skip
EXTRA_TURNS = 4
"""Turns beyond the longest document, for the answer and for mistakes."""
MAX_CORPUS_CHARS = 100_000_000
GENERATED = "generated"

_WORD = re.compile(r"[a-z]+")
_ANSWER = re.compile(r"answer\s*:\s*\**\s*(-?\d[\d,]*)", re.IGNORECASE)
_SLACK = 1.1  # a page ends at the end of a word, so it may be a little longer than page_chars


@chz.chz
class CountingTaskConfig:
    """Length of the task, and content of its prompt."""

    num_pages_hint: NumPagesHint = chz.field(
        default="exact", doc="exact: the prompt has the number of pages; range: only its range"
    )
    word_hint: WordHint = chz.field(
        default="exact", doc="exact: the prompt has the word; first_last: two letters; hidden"
    )
    num_pages_min: int = chz.field(default=28, doc="Minimum pages of a document")
    num_pages_max: int = chz.field(default=36, doc="Maximum pages of a document")
    page_chars: int = number(10_000, "Characters of a page", low=1)
    words: tuple[str, ...] = chz.field(default=DEFAULT_WORDS, doc="Words to count, in lower case")
    secret_num_pages: int | None = chz.field(
        default=None,
        doc="num_pages_hint=range: pages of every document; default: a fixed random number",
    )
    reward_tolerance: float = chz.field(
        default=0.2, doc="Relative error of the count at which the reward becomes 0"
    )
    require_tool_calls: bool = chz.field(
        default=True,
        doc="false: the next page follows every answer. This is for models that cannot call "
        "tools; their episodes have the same length",
    )

    @chz.validate
    def _check(self) -> None:
        if not 1 <= self.num_pages_min <= self.num_pages_max:
            raise ConfigurationError(
                f"num_pages_min, num_pages_max: got {self.num_pages_min} and "
                f"{self.num_pages_max}, expected 1 <= min <= max"
            )
        if self.word_hint == "hidden" and len(self.words) > 1:
            raise ConfigurationError(
                f"words: got {len(self.words)} with word_hint=hidden, expected a single word, as "
                "nothing in the prompt tells which is meant"
            )

    @property
    def max_turns(self) -> int:
        """Most turns of an episode; pages exist up to this number."""
        return self.num_pages_max + EXTRA_TURNS

    @property
    def hidden_num_pages(self) -> int:
        """Pages of every document with ``num_pages_hint="range"``."""
        if self.secret_num_pages is not None:
            return self.secret_num_pages
        return random.Random(0).randint(self.num_pages_min, self.num_pages_max)


@dataclass(frozen=True)
class CountingProblem:
    """A document and the word to count; ``pages`` has also those behind its end."""

    word: str
    num_pages: int
    pages: tuple[str, ...]
    prompt: str
    true_count: int


def count_word(text: str, word: str) -> int:
    """Returns how often ``word`` occurs; words are runs of letters in either case."""
    return sum(found == word for found in _WORD.findall(text.lower()))


def parse_answer(text: str) -> int | None:
    """Returns the number behind the last ``Answer:``, or ``None``."""
    found = _ANSWER.findall(text)
    return int(found[-1].replace(",", "")) if found else None


def closeness_reward(predicted: int, true_count: int, tolerance: float) -> float:
    """Returns 1 for the exact count, falling to 0 at a relative error of ``tolerance``."""
    return max(0.0, 1.0 - abs(predicted - true_count) / max(true_count, 1) / tolerance)


def clean_wikitext_line(line: str) -> str:
    """Returns a line of WikiText as it would be printed."""
    # WikiText writes punctuation inside of words as separate tokens.
    return re.sub(r" @([-,.])@ ", r"\1", line).strip()


@functools.cache
def load_wikitext_corpus(max_chars: int = MAX_CORPUS_CHARS) -> str:
    """Returns the beginning of WikiText-103 (Merity et al. 2016), from the Hub."""
    from datasets import load_dataset

    rows: Any = load_dataset("Salesforce/wikitext", "wikitext-103-raw-v1", split="train")
    lines = filter(None, (clean_wikitext_line(row["text"]) for row in rows))
    return "\n".join(lines)[:max_chars]


@functools.cache
def generate_corpus(num_sentences: int = 40_000) -> str:
    """Returns random sentences with all of ``DEFAULT_WORDS``; needs no download."""
    rng = random.Random(0)
    lines = (" ".join(rng.choices(DEFAULT_WORDS, k=10)) for _ in range(num_sentences))
    return ".\n".join(lines)


def load_corpus(source: str) -> str:
    """Returns the text that ``source`` names: ``generated``, ``wikitext``, or a text file."""
    if source == GENERATED:
        return generate_corpus()
    if source == "wikitext":
        return load_wikitext_corpus()
    return Path(source).expanduser().read_text(encoding="utf-8", errors="replace")


def split_pages(corpus: str, start: int, num_pages: int, page_chars: int) -> list[str]:
    """Returns consecutive pages of about ``page_chars`` characters; no word is divided."""
    pages = re.compile(rf".{{1,{page_chars}}}\S*", re.DOTALL).finditer(corpus, start)
    return [page.group().strip() for page in itertools.islice(pages, num_pages)]


def build_prompt(config: CountingTaskConfig, word: str, num_pages: int) -> str:
    """Returns the question."""
    words = {
        "exact": f'the word "{word}"',
        "first_last": f'a secret word that starts with "{word[0]}" and ends with "{word[-1]}"',
        "hidden": "a secret word",
    }
    pages = f"The document has {num_pages} pages, with numbers from 1."
    if config.num_pages_hint == "range":
        pages = (
            f"The document has between {config.num_pages_min} and {config.num_pages_max} pages, "
            "with numbers from 1. Pages behind its end can be read too, but do not count."
        )
    how = (
        "Read with the tool read_page, exactly once per response; more calls are rejected. When "
        "you have read the document, reply without a call"
        if config.require_tool_calls
        else "You are shown one page after the other. After each page reply with what you found"
    )
    return (
        f"How often does {words[config.word_hint]} occur in a document?\n{pages}\n{how}, and end "
        'with "Answer: <count>". Upper and lower case count alike, and only whole words: for the '
        'word "light", "Light" and "light-based" count, "lights" does not.'
    )


def sample_problem(rng: random.Random, corpus: str, config: CountingTaskConfig) -> CountingProblem:
    """Returns a problem on a part of the corpus; raises if the corpus is too short."""
    word = rng.choice(config.words)
    num_pages = config.hidden_num_pages
    if config.num_pages_hint == "exact":
        num_pages = rng.randint(config.num_pages_min, config.num_pages_max)
    needed = int(config.max_turns * config.page_chars * _SLACK)
    if len(corpus) <= needed:
        raise DataValidationError(
            f"corpus: has {len(corpus):,} characters, expected more than {needed:,} for documents "
            f"of {config.max_turns} pages; take fewer or shorter pages, or a longer text"
        )
    start = rng.randrange(len(corpus) - needed)
    # From the beginning of a line, if one is near.
    line = corpus.find("\n", start)
    start = line + 1 if 0 <= line < start + config.page_chars else start
    pages = split_pages(corpus, start, config.max_turns, config.page_chars)
    count = sum(count_word(page, word) for page in pages[:num_pages])
    return CountingProblem(
        word, num_pages, tuple(pages), build_prompt(config, word, num_pages), count
    )


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
    """The reward of an episode, and its metrics."""

    problem: CountingProblem
    state: EpisodeState
    tolerance: float

    async def __call__(self, history: list[Message]) -> tuple[float, dict[str, float]]:
        """Grades the last answer."""
        answers = [get_text_content(m) for m in history if m["role"] == "assistant"]
        results = [get_text_content(m) for m in history if m["role"] == "tool"]
        predicted = parse_answer(answers[-1]) if answers else None
        true_count, n = self.problem.true_count, self.problem.num_pages
        read = self.state.pages_read
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
    """Each answer is followed by the next page, whatever its text; for models that cannot call
    tools."""

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


class ExtensionCheckedEnv(EnvFromMessageEnv):
    """Reports ``extension_rate``, the share of prompts that begin with the turn before.

    Such turns are trained as one sequence. Formats that leave out earlier thinking
    rewrite earlier turns; another renderer_name, such as qwen3_5_disable_thinking, may keep them.
    """

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
    message_env: MessageEnv = PagesInTurnEnv(problem, reward)
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
        make = functools.partial(build_env, self.problem, renderer, self.task, *limits)
        return [make() for _ in range(self.group_size)]

    def logging_tags(self) -> list[str]:
        """Returns the kind of task."""
        return ["rl_numerics_check"]


@dataclass
class CountingDataset(RLDataset):
    """Problems on random parts of a text; a batch depends on the seed and its index only."""

    corpus: str
    task: CountingTaskConfig
    batch_size: int
    n_batches: int
    seed: int
    make_group_builder: functools.partial[CountingEnvGroupBuilder]

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

    batch_size: int = chz.field(validator=at_least(1), doc="Problems per step")
    group_size: int = chz.field(validator=at_least(1), doc="Episodes per problem")
    model_name_for_tokenizer: str = chz.field(doc="Model that has the tokenizer")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    task: CountingTaskConfig = chz.field(default_factory=CountingTaskConfig, doc="The task")
    n_batches: int = number(1000, "Steps per epoch", low=1)
    seed: int = chz.field(default=0, doc="Seed of the problems")
    max_trajectory_tokens: int | None = chz.field(
        default=DEFAULT_MAX_TRAJECTORY_TOKENS, doc="Maximum tokens of an episode; None: no limit"
    )
    max_generation_tokens: int | None = chz.field(default=None, doc="Tokens kept for an answer")
    corpus: str = chz.field(
        default=GENERATED, doc="generated, wikitext (WikiText-103 of the Hub), or a text file"
    )

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
        return CountingDataset(
            load_corpus(self.corpus),
            self.task,
            self.batch_size,
            self.n_batches,
            self.seed,
            make_group_builder,
        ), None
