"""Report on training data: lengths, truncation, trained tokens, duplicates, overlap with the test.

    python -m tinker_cookbook.supervised.data_report dataset=my.jsonl model_name=MODEL
    python -m tinker_cookbook.supervised.data_report dataset=FOLDER test_path=test.csv out=report

Supervised runs print the report before training and save it in their folder. Texts of up to 50,000
rows are compared; lengths and tokens come from up to ``max_rows`` rows, evenly spaced, since
rendering takes about a millisecond per row. The report states if it is based on a sample.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import chz
import numpy as np
import numpy.typing as npt

from tinker_cookbook import model_info
from tinker_cookbook.exceptions import DataError, TinkerCookbookError
from tinker_cookbook.renderers import Message, TrainOnWhat, get_text_content, select_trained
from tinker_cookbook.renderers.core.messages import (
    ensure_list,
    has_thinking,
    message_to_jsonable,
)
from tinker_cookbook.run.digests import value_digest
from tinker_cookbook.run.paths import ensure_writable_dir, write_atomically
from tinker_cookbook.supervised.arrow_rows import without_arrow_nulls
from tinker_cookbook.supervised.conversation_file import ChatDataset
from tinker_cookbook.supervised.hf_datasets import ChatDataBuilder
from tinker_cookbook.supervised.row_datasets import place_of
from tinker_cookbook.supervised.row_images import has_images
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig, SupervisedDataset
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line

JSON_FILE, TEXT_FILE = "data_report.json", "data_report.txt"
MAX_TEXTS = 50_000
_BARS = " ▁▂▃▄▅▆▇█"
_BINS = 16
_WORD = re.compile(r"[^\W_]+")


@dataclass
class PartReport:
    """Statistics of the training set or the test set.

    Tokens, lengths and derived values are computed from ``rows_rendered`` rows, duplicates and
    empty answers from ``rows_read`` rows. The length of a conversation that is split into several
    examples is the length of the longest one. Places are ``FILE:LINE``, or ``NAME[N]`` from 0.
    """

    rows: int
    rows_read: int = 0
    rows_rendered: int = 0
    length_min: int = 0
    length_median: float = 0
    length_p95: float = 0
    length_max: int = 0
    histogram: list[int] = field(default_factory=list)
    """Histogram of lengths, with equal bins from the shortest to the longest."""
    num_examples: int = 0
    tokens: int = 0
    """Tokens of all examples, truncated to ``max_length``."""
    images: int = 0
    image_tokens: int = 0
    """Tokens of the images in all examples; they are not trained."""
    loss_tokens: int = 0
    """Trained tokens."""
    truncated: int = 0
    """Rows with an example longer than ``max_length``."""
    dropped: int = 0
    """Rows with an example without a trained token after truncation."""
    duplicates: int = 0
    """Rows with the same messages as an earlier row."""
    duplicate_example: str = ""
    """Places of the first of these rows and of the earlier row."""
    empty_answers: int = 0
    """Rows with a trained assistant message without text, thinking or tool call."""
    empty_example: str = ""
    """Place of the first of these rows."""
    without_question: int = 0
    """Rows that begin with an answer, after system messages."""
    without_question_example: str = ""
    """Place of the first of these rows."""

    @property
    def input_tokens(self) -> float:
        """Input tokens of an epoch, estimated from the rendered rows; the last token of each
        example is only a target."""
        return (self.tokens - self.num_examples) * self.rows / max(self.rows_rendered, 1)


@dataclass
class DataReport:
    """Report on a training set and its test set."""

    train: PartReport
    test: PartReport | None
    max_length: int | None
    train_on_what: str
    test_same: int = 0
    """Number of test rows with the same words in the prompt (all user messages) as a training
    row."""
    test_example: str = ""
    """Places of the first of these rows and of the training row."""
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """Returns the report as text."""
        train, test, made = self.train, self.test, self.train.rows_rendered
        rows = f", {test.rows:,} test rows" if test is not None else ", no test data"
        lines = [f"data report: {train.rows:,} training rows{rows}"]

        def add(label: str, text: str, example: str = "") -> None:
            lines.append(f"  {label:<12} {text}{f' ({example})' if example else ''}")

        if made < train.rows:
            add("sample", f"texts of {train.rows_read:,} training rows, tokens of {made:,}")
        bars = "".join(_BARS[_height(n, max(train.histogram))] for n in train.histogram)
        add(
            "lengths",
            f"min {train.length_min}, median {train.length_median:.0f}, p95 "
            f"{train.length_p95:.0f}, max {train.length_max} tokens  |{bars}|",
        )
        limit = f"{_share(train.truncated, made)} longer than max_length={self.max_length}"
        add("truncated", "none (no max_length)" if self.max_length is None else limit)
        share = train.loss_tokens / max(train.tokens, 1)
        add("trained on", f"{train.loss_tokens:,} of {train.tokens:,} tokens ({share:.0%})")
        if train.images:
            share = train.image_tokens / max(train.tokens, 1)
            add("images", f"{train.images:,} with {train.image_tokens:,} tokens ({share:.0%})")
        if train.dropped:
            cut = self.max_length is not None and train.truncated
            why = "truncated before the answer" if cut else f"train_on_what={self.train_on_what}"
            add("dropped", f"{_share(train.dropped, made)} without a token to train on", why)
        same = _share(train.duplicates, train.rows_read)
        add("duplicates", f"{same} equal to an earlier one", train.duplicate_example)
        empty = _share(train.empty_answers, train.rows_read)
        add("empty", f"{empty} with an empty answer", train.empty_example)
        if train.without_question:
            share = _share(train.without_question, train.rows_read)
            text = f"{share} without a question before the first answer"
            add("no question", text, train.without_question_example)
        if test is not None:
            same = f"{self.test_same} of {test.rows_read:,} test prompts are in the training data"
            add("test set", same, self.test_example)
        return lines

    def write(self, folder: Path) -> None:
        """Writes ``data_report.json`` and ``data_report.txt``."""
        text = json.dumps(asdict(self), indent=1)
        write_atomically(folder / JSON_FILE, text.encode())
        write_atomically(folder / TEXT_FILE, ("\n".join(self.lines()) + "\n").encode())


def make_report(
    train_set: SupervisedDataset, test_set: SupervisedDataset | None, max_rows: int = 1000
) -> DataReport | None:
    """Returns the report on chat data; None for other datasets.

    Raises DataError for the first row that cannot be rendered.
    """
    if not isinstance(train_set, ChatDataset):
        return None
    begun = time.monotonic()
    builder = train_set.builder
    train, prompts = _part(train_set, max_rows, "training")
    report = DataReport(train, None, builder.common_config.max_length, builder.train_on_what.value)
    if isinstance(test_set, ChatDataset):
        report.test, test_prompts = _part(test_set, max_rows, "test")
        places = {prompt: place for place, prompt in reversed(prompts.items()) if prompt}
        same = [place for place, prompt in test_prompts.items() if prompt in places]
        report.test_same = len(same)
        if same:
            report.test_example = f"{same[0]} = {places[test_prompts[same[0]]]}"
    report.seconds = time.monotonic() - begun
    return report


def _part(data: ChatDataset, max_rows: int, noun: str) -> tuple[PartReport, dict[str, str]]:
    """Returns the statistics of a dataset, and the prompts of the rows read, by their place."""
    rows, num_rows = without_arrow_nulls(data.hf_dataset), len(data.hf_dataset)
    place = partial(place_of, rows)
    rendered = set(_spaced(num_rows, max_rows))
    part = PartReport(num_rows)
    lengths, prompts = list[int](), dict[str, str]()
    seen: dict[Any, int] = {}
    for row in sorted(rendered.union(_spaced(num_rows, MAX_TEXTS))):
        try:
            messages = data.messages(rows[row])
            if row in rendered:
                lengths.append(_render(data, messages, part))
        except TinkerCookbookError as error:
            raise DataError(f"{place(row)} of the {noun} data: {error}") from error
        prompts[place(row)] = _prompt(messages)
        earlier = seen.setdefault(_identity(messages), row)
        if earlier != row:
            part.duplicates += 1
            part.duplicate_example = part.duplicate_example or f"{place(row)} = {place(earlier)}"
        if _has_empty_answer(messages, data.builder.train_on_what):
            part.empty_answers += 1
            part.empty_example = part.empty_example or place(row)
        if next((m["role"] for m in messages if m["role"] != "system"), "") == "assistant":
            part.without_question += 1
            part.without_question_example = part.without_question_example or place(row)
    part.rows_read, part.rows_rendered = len(prompts), len(lengths)
    part.length_min, part.length_max = min(lengths), max(lengths)
    part.length_median, part.length_p95 = (float(np.quantile(lengths, q)) for q in (0.5, 0.95))
    part.histogram = np.histogram(lengths, bins=_BINS)[0].tolist()
    return part, prompts


def _spaced(num_rows: int, most: int) -> list[int]:
    """Returns up to ``most`` row numbers, evenly spaced, the same in every run."""
    return np.linspace(0, num_rows - 1, min(num_rows, most)).astype(np.int64).tolist()


def _render(data: ChatDataset, messages: list[Message], part: PartReport) -> int:
    """Adds the tokens of a conversation to ``part``; returns the length of its longest example."""
    longest = data.builder.common_config.max_length
    made = data.builder.renderer.build_merged_examples(messages, data.builder.train_on_what)
    kept: list[npt.NDArray[Any]] = [np.asarray(weights)[:longest] for _, weights in made]
    images = [chunk for one, _ in made for chunk in one.chunks if chunk.type == "image"]
    part.images += len(images)
    part.image_tokens += sum(chunk.length for chunk in images)
    # No position predicts the first token, so its weight has no effect.
    counts = [int(np.count_nonzero(weights[1:])) for weights in kept]
    length = max(one.length for one, _ in made)
    part.num_examples += len(made)
    part.tokens += sum(map(len, kept))
    part.loss_tokens += sum(counts)
    part.truncated += longest is not None and length > longest
    part.dropped += 0 in counts
    return length


def _prompt(messages: Sequence[Message]) -> str:
    """Returns the words of the user messages, or of all messages if there are none, and a digest of
    their images."""
    asked = [m for m in messages if m["role"] == "user"] or messages
    words = _WORD.findall("\n".join(map(get_text_content, asked)).lower())
    images = value_digest([_images(m) for m in asked]) if has_images(asked) else None
    return " ".join([*words, images] if images else words)


def _images(message: Message) -> list[Any]:
    return [part for part in ensure_list(message["content"]) if part["type"] == "image"]


def _identity(messages: Sequence[Message]) -> Any:
    """Returns a key that is equal for equal conversations."""
    if all(isinstance(m["content"], str) and len(m) == 2 for m in messages):
        return tuple((m["role"], m["content"]) for m in messages)
    images = value_digest([_images(m) for m in messages]) if has_images(messages) else None
    plain = [message_to_jsonable(m) for m in messages]
    return json.dumps([images, *plain], sort_keys=True, default=str)


def _has_empty_answer(messages: Sequence[Message], what: TrainOnWhat) -> bool:
    return any(
        trained
        and message["role"] == "assistant"
        and not get_text_content(message).strip()
        and not message.get("tool_calls")
        and not has_thinking(message["content"])
        for message, trained in zip(messages, select_trained(messages, what), strict=True)
    )


def _share(count: int, total: int) -> str:
    if not count:
        return "0 rows"
    share = f"{count / total:.1%}" if count >= 0.001 * total else "<0.1%"
    return f"{count:,} row{'s' if count > 1 else ''} ({share})"


def _height(count: int, most: int) -> int:
    """Returns the height of a bar; non-empty bins are always visible."""
    return 0 if not count else max(1, round(count / most * (len(_BARS) - 1)))


@chz.chz
class Config:
    """Dataset and model of a report."""

    dataset: str = chz.field(doc="Hub name, folder, or file (jsonl, json, csv, parquet)")
    model_name: str = chz.field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct", doc="Model that has the tokenizer"
    )
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    test_path: str | None = chz.field(
        default=None,
        doc="Held-out data, same formats as dataset; default: the split test of dataset",
    )
    test_size: int = number(0, "Held-out size of dataset (if no test_path)")
    seed: int = chz.field(default=0, doc="Seed of the split by test_size")
    max_length: int | None = chz.field(
        default=None, doc="Maximum tokens of an example; default: the model's context"
    )
    train_on_what: TrainOnWhat = chz.field(
        default=TrainOnWhat.ALL_ASSISTANT_MESSAGES, doc="Messages to train on"
    )
    max_rows: int = number(10_000, "Number of rows for the token counts", low=1)
    out: str | None = chz.field(
        default=None, doc="Folder for data_report.json and data_report.txt; default: none"
    )


def main(config: Config) -> None:
    """Prints the report on a dataset."""
    renderer_name, _ = model_info.resolve_renderer_name(config.model_name, config.renderer_name)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=config.model_name,
        renderer_name=renderer_name,
        max_length=model_info.resolve_max_length(config.model_name, config.max_length),
        batch_size=1,
        train_on_what=config.train_on_what,
    )
    builder = ChatDataBuilder(
        common_config=common,
        file_path=config.dataset,
        test_file_path=config.test_path,
        test_size=config.test_size,
        shuffle_seed=config.seed,
    )
    report = make_report(*builder(), config.max_rows)
    assert report is not None
    for line in report.lines():
        print_line(line)
    if config.out is not None:
        report.write(ensure_writable_dir(config.out, "out"))
        print_line(f"written to {Path(config.out) / JSON_FILE} and {TEXT_FILE}")


if __name__ == "__main__":
    run_entrypoint(main)
