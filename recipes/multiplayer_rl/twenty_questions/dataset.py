"""The words to guess, and the model that answers questions about them."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path

import chz

from tinker_cookbook import model_info
from tinker_cookbook.backends import ServiceClient
from tinker_cookbook.backends.shared import make_once
from tinker_cookbook.completers import MessageCompleter, TinkerMessageCompleter
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError, DataValidationError
from tinker_cookbook.recipes.multiplayer_rl.twenty_questions.env import (
    Rules,
    TwentyQuestionsGroupBuilder,
    plain,
)
from tinker_cookbook.recipes.start import example_data
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

WORDS = example_data("twenty_questions_words.txt")


@chz.chz
class AnswererConfig:
    """A model that answers, greedily; calling it gives the completer, one a process."""

    model_name: str = chz.field(doc="Hub name or local folder of the model")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    model_path: str | None = chz.field(
        default=None, doc="tinker:// path of its adapter, where it has one"
    )
    max_tokens: int = chz.field(default=5, doc="Most tokens of an answer; yes and no are short")
    backend: str = chz.field(default="auto", doc="auto, local, tinker, or the URL of a server")
    base_url: str | None = chz.field(default=None, doc="URL of a Tinker server")
    device: str = chz.field(default="auto", doc="auto, cuda, mps or cpu (local engine)")
    dtype: str = chz.field(default="auto", doc="auto, float32 or bfloat16 (local engine)")

    def __call__(self) -> MessageCompleter:
        """The completer; made at the first call, which loads the model."""
        return make_once(self, self._make)

    def _make(self, service: ServiceClient) -> MessageCompleter:
        if self.model_path is not None:
            opened = service.create_sampling_client(model_path=self.model_path)
        else:
            opened = service.create_sampling_client(base_model=self.model_name)
        name, _ = model_info.resolve_renderer_name(self.model_name, self.renderer_name)
        renderer = get_renderer(name, get_tokenizer(self.model_name))
        return TinkerMessageCompleter(opened.result(), renderer, self.max_tokens, temperature=0.0)


def read_words(path: str | Path) -> list[str]:
    """The words of a file, one a line; lines that begin with ``#`` are comments.

    Raises:
        DataValidationError: There is no such file, or no word in it.
        DataFormatError: A line is no word, or there twice; names it.
    """
    file = Path(path).expanduser()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataValidationError(
            f"words_path: {file} cannot be read ({error}); expected a text file with one word a "
            "line"
        ) from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        word = line.strip()
        if not word or word.startswith("#"):
            continue
        key = plain(word)
        if not key:
            raise DataFormatError(f"{file}:{number}: got {word!r}, expected a word")
        if key in found:
            raise DataFormatError(
                f"{file}:{number}: got {word!r}, which counts as the same as {found[key]!r} above"
            )
        found[key] = word
    if not found:
        raise DataValidationError(f"words_path: {file} has no word; expected one a line")
    return list(found.values())


@chz.chz
class TwentyQuestionsDatasetBuilder(RLDatasetBuilder):
    """Games about the words of a file, some of which are held out for evaluation."""

    answerer: AnswererConfig = chz.field(doc="Model that answers the questions")
    rules: Rules = chz.field(doc="The rules")
    model_name_for_tokenizer: str = chz.field(doc="Whose tokenizer turns text into tokens")
    renderer_name: str = chz.field(doc="Chat format")
    groups_per_batch: int = chz.field(doc="Words a step")
    group_size: int = chz.field(doc="Games about a word")
    words_path: str = chz.field(default=str(WORDS), doc="The words, one a line")
    num_test: int = chz.field(default=16, doc="Words held out for evaluation; 0: no evaluation")
    seed: int = chz.field(default=0, doc="Seed of which are held out")

    def check(self) -> None:
        """Raises for a file that cannot be read and for a number out of range."""
        words = read_words(self.words_path)
        if not 0 <= self.num_test < len(words):
            raise ConfigurationError(
                f"num_test: got {self.num_test}, expected at least 0 and less than the "
                f"{len(words)} words of {self.words_path}"
            )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Games to train on and to evaluate on."""
        return await asyncio.to_thread(self._build)

    def _build(self) -> tuple[RLDataset, RLDataset | None]:
        self.check()
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))
        words = read_words(self.words_path)
        random.Random(self.seed).shuffle(words)
        test, training = words[: self.num_test], words[self.num_test :]
        return (
            ProblemDataset(
                training, partial(self._group, renderer, self.group_size), self.groups_per_batch
            ),
            ProblemDataset(test, partial(self._group, renderer, 1), self.groups_per_batch)
            if test
            else None,
        )

    def _group(self, renderer: Renderer, size: int, word: str) -> EnvGroupBuilder:
        return TwentyQuestionsGroupBuilder(word, self.answerer, self.rules, renderer, size)
