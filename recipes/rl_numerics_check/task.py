"""The task: a document is read page by page, and the occurrences of a word are counted."""

from __future__ import annotations

import functools
import logging
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import chz

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError, DataValidationError

logger = logging.getLogger(__name__)

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
WIKITEXT = "wikitext"

_WORD = re.compile(r"[a-z]+")
_ANSWER = re.compile(r"answer\s*:\s*\**\s*(-?\d[\d,]*)", re.IGNORECASE)
_EXAMPLE = "light"  # explains whole words in the prompt, so it cannot be counted
_HIDDEN_SEED = 0
_SLACK = 1.1  # a page ends at the end of a word, so it may be a little longer than page_chars
# WikiText writes punctuation inside of words as separate tokens.
_WIKITEXT_MARKS = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."))
_NOUNS = (
    "river", "city", "king", "train", "school", "island", "bridge", "ship", "painter", "army",
    "garden", "song",
)  # fmt: skip
_VERBS = (
    "reached", "crossed", "left", "built", "followed", "changed", "kept", "found", "opened",
    "sold",
)  # fmt: skip
_PLACES = (
    "north", "south", "valley", "coast", "market", "tower", "library", "station", "castle",
    "field",
)  # fmt: skip


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
    page_chars: int = chz.field(default=10_000, doc="Characters of a page")
    words: tuple[str, ...] = chz.field(default=DEFAULT_WORDS, doc="Words to count")
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
        low, high, words = self.num_pages_min, self.num_pages_max, self.words
        if not 1 <= low <= high:
            raise ConfigurationError(
                f"num_pages_min, num_pages_max: got {low} and {high}, expected 1 <= min <= max"
            )
        if self.page_chars < 1 or self.reward_tolerance <= 0:
            raise ConfigurationError(
                f"page_chars, reward_tolerance: got {self.page_chars} and {self.reward_tolerance}, "
                "expected more than 0"
            )
        wrong = [word for word in words if not _WORD.fullmatch(word) or word == _EXAMPLE]
        if not words or wrong or len(set(words)) < len(words):
            raise ConfigurationError(
                f"words: got {words}, expected different words of lower-case letters, and not "
                f"{_EXAMPLE!r}, the matching example of the prompt"
            )
        ends = {(word[0], word[-1]) for word in words}
        if self.word_hint == "first_last" and len(ends) < len(words):
            raise ConfigurationError(
                "words: two of them share first and last letters, expected that "
                "word_hint=first_last tells them apart"
            )
        if self.word_hint == "hidden" and len(words) > 1:
            raise ConfigurationError(
                f"words: got {len(words)} with word_hint=hidden, expected a single word, as "
                "nothing in the prompt tells which is meant"
            )
        secret = self.secret_num_pages
        if secret is not None and not low <= secret <= high:
            raise ConfigurationError(
                f"secret_num_pages: got {secret}, expected a number from {low} to {high}"
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
        return random.Random(_HIDDEN_SEED).randint(self.num_pages_min, self.num_pages_max)


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
    for mark, plain in _WIKITEXT_MARKS:
        line = line.replace(mark, plain)
    return line.strip()


@functools.cache
def load_wikitext_corpus(max_chars: int = MAX_CORPUS_CHARS) -> str:
    """Returns the beginning of WikiText-103 (Merity et al. 2016), from the Hub."""
    from datasets import load_dataset

    rows: Any = load_dataset("Salesforce/wikitext", "wikitext-103-raw-v1", split="train")
    return _joined((clean_wikitext_line(row["text"]) for row in rows), max_chars)


@functools.cache
def generate_corpus(max_chars: int = 2_000_000, seed: int = 0) -> str:
    """Returns sentences from a small grammar with all of ``DEFAULT_WORDS``; needs no download."""
    rng = random.Random(seed)

    def sentence() -> str:
        first, second = rng.sample(DEFAULT_WORDS, 2)
        noun, other = rng.sample(_NOUNS, 2)
        verb, place = rng.choice(_VERBS), rng.choice(_PLACES)
        return f"The {noun} {verb} the {place} {first} the {other} was {second} in the {place}."

    return _joined(iter(sentence, None), max_chars)


def load_corpus(source: str) -> str:
    """Returns the text that ``source`` names: ``generated``, ``wikitext``, or a text file."""
    if source == GENERATED:
        return generate_corpus()
    if source == WIKITEXT:
        return load_wikitext_corpus()
    path = Path(source).expanduser()
    if not path.is_file():
        raise DataFormatError(
            f"corpus: got {source!r}, expected {GENERATED}, {WIKITEXT} or the path of a text file"
        )
    return path.read_text(encoding="utf-8", errors="replace")


def _joined(lines: Iterable[str], max_chars: int) -> str:
    parts: list[str] = []
    total = 0
    for line in lines:
        if not line:
            continue
        parts.append(line)
        total += len(line) + 1
        if total >= max_chars:
            break
    return "\n".join(parts)[:max_chars]


def split_pages(corpus: str, start: int, num_pages: int, page_chars: int) -> list[str]:
    """Returns consecutive pages of about ``page_chars`` characters; no word is divided."""
    pages: list[str] = []
    at = start
    for _ in range(num_pages):
        end = min(at + page_chars, len(corpus))
        while end < len(corpus) and not corpus[end].isspace():
            end += 1
        pages.append(corpus[at:end].strip())
        at = end
    return pages


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
        f'word "{_EXAMPLE}", "Light" and "light-based" count, "lights" does not.'
    )


def sample_problem(rng: random.Random, corpus: str, config: CountingTaskConfig) -> CountingProblem:
    """Returns a problem on a part of the corpus; raises if the corpus is too short."""
    word = rng.choice(config.words)
    exact = config.num_pages_hint == "exact"
    drawn = rng.randint(config.num_pages_min, config.num_pages_max) if exact else None
    num_pages = config.hidden_num_pages if drawn is None else drawn
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
