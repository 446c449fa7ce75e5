"""Report on training data: lengths, truncation, trained tokens, duplicates, overlap with the test.

    python -m tinker_cookbook.supervised.data_report dataset=my.jsonl model_name=MODEL
    python -m tinker_cookbook.supervised.data_report dataset=OWNER/NAME streaming=true max_rows=5000
    python -m tinker_cookbook.supervised.data_report dataset=FOLDER test_path=test.csv out=report

Supervised runs print the report before training and save it in their folder. Texts of up to 50,000
rows are compared; lengths and tokens come from up to ``max_rows`` rows, evenly spaced, since
rendering takes about a millisecond per row. The report states if it is based on a sample.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import chz
import numpy as np
import numpy.typing as npt

from tinker_cookbook import model_info
from tinker_cookbook.exceptions import ConfigurationError, DataError, TinkerCookbookError
from tinker_cookbook.renderers import Message, TrainOnWhat, get_text_content, select_trained
from tinker_cookbook.renderers.core.messages import has_thinking, message_to_jsonable
from tinker_cookbook.run.digests import value_digest
from tinker_cookbook.run.paths import ensure_writable_dir, write_atomically
from tinker_cookbook.supervised.arrow_rows import without_arrow_nulls
from tinker_cookbook.supervised.conversation_file import ChatDataset, ConversationRows, chat_dataset
from tinker_cookbook.supervised.hf_datasets import ChatDataBuilder, stream_hf_dataset
from tinker_cookbook.supervised.near_duplicates import similar_texts
from tinker_cookbook.supervised.row_datasets import place_of
from tinker_cookbook.supervised.row_images import has_images
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig, SupervisedDataset
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line

JSON_FILE, TEXT_FILE = "data_report.json", "data_report.txt"
MAX_TEXTS = 50_000
_EXAMPLES = 5
_BARS = " ▁▂▃▄▅▆▇█"
_BINS = 16


@dataclass
class PartReport:
    """Statistics of the training set or the test set.

    Tokens, lengths and derived values are computed from ``rows_rendered`` rows, duplicates and
    empty answers from ``rows_read`` rows. The length of a conversation that is split into several
    examples is the length of the longest one.
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
    loss_tokens: dict[str, int] = field(default_factory=dict)
    """Trained tokens by the role of their message."""
    truncated: int = 0
    """Rows with an example longer than ``max_length``."""
    dropped: int = 0
    """Rows with an example without a trained token after truncation."""
    duplicates: int = 0
    """Rows with the same messages as an earlier row."""
    duplicate_examples: list[tuple[str, str]] = field(default_factory=list)
    """Places (``FILE:LINE``, or ``NAME[N]`` with N from 0) of some of these rows, each with the
    earlier row."""
    empty_answers: int = 0
    """Rows with a trained assistant message without text, thinking or tool call."""
    empty_examples: list[str] = field(default_factory=list)
    """Places of some of these rows."""

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
    test_similar: int = 0
    """Number of test rows with most word 3-grams of the prompt in common with a training prompt."""
    test_examples: list[tuple[str, str, float]] = field(default_factory=list)
    """Places of some of these pairs (test row, training row), the most similar first, with the
    Jaccard index of their word 3-grams."""
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """Returns the report as text."""
        train, test = self.train, self.test
        rows = f"{train.rows:,} training rows"
        rows += f", {test.rows:,} test rows" if test is not None else ", no test data"
        lines = [f"data report: {rows}"]
        if train.rows_read < train.rows:
            lines.append(
                f"  sample       texts of {train.rows_read:,} training rows, tokens of "
                f"{train.rows_rendered:,}"
            )
        elif train.rows_rendered < train.rows:
            lines.append(f"  sample       all texts, tokens of {train.rows_rendered:,} rows")
        bars = "".join(_BARS[_height(n, max(train.histogram))] for n in train.histogram)
        lines += [
            f"  lengths      min {train.length_min}, median {train.length_median:.0f}, p95 "
            f"{train.length_p95:.0f}, max {train.length_max} tokens  |{bars}|",
            f"  truncated    {_share(train.truncated, train.rows_rendered)} longer than "
            f"max_length={self.max_length}"
            if self.max_length is not None
            else "  truncated    none (no max_length)",
        ]
        trained = sum(train.loss_tokens.values())
        roles = ", ".join(f"{role} {count:,}" for role, count in train.loss_tokens.items())
        lines.append(
            f"  trained on   {trained:,} of {train.tokens:,} tokens "
            f"({trained / max(train.tokens, 1):.0%}): {roles or 'none'}"
        )
        if train.images:
            share = train.image_tokens / max(train.tokens, 1)
            lines.append(
                f"  images       {train.images:,} with {train.image_tokens:,} tokens ({share:.0%})"
            )
        if train.dropped:
            lines.append(
                f"  dropped      {_share(train.dropped, train.rows_rendered)} without a token to "
                f"train on ({self._why_dropped()})"
            )
        duplicates = (
            f"  duplicates   {_share(train.duplicates, train.rows_read)} equal to an earlier one"
        )
        if train.duplicate_examples:
            row, earlier = train.duplicate_examples[0]
            duplicates += f" ({row} = {earlier})"
        lines.append(duplicates)
        empty = (
            f"  empty        {_share(train.empty_answers, train.rows_read)} with an empty answer"
        )
        if train.empty_examples:
            empty += f" ({train.empty_examples[0]})"
        lines.append(empty)
        if test is not None:
            lines.append(self._test_line(test))
        return lines

    def _why_dropped(self) -> str:
        cut = self.max_length is not None and self.train.truncated
        return "truncated before the answer" if cut else f"train_on_what={self.train_on_what}"

    def _test_line(self, test: PartReport) -> str:
        line = f"  test set     {self.test_same} of {test.rows_read:,} test prompts are in the "
        line += f"training data, {self.test_similar} more similar"
        if self.test_examples:
            row, training_row, _ = self.test_examples[0]
            line += f" ({row} ~ {training_row})"
        return line

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
        found = similar_texts(list(test_prompts.values()), list(prompts.values()))
        rows, test_rows = list(prompts), list(test_prompts)
        pairs = sorted(found, key=lambda pair: -pair.similarity)
        report.test_same = sum(pair.similarity == 1.0 for pair in pairs)
        report.test_similar = len(pairs) - report.test_same
        place, test_place = (partial(place_of, d.hf_dataset) for d in (train_set, test_set))
        report.test_examples = [
            (test_place(test_rows[pair.query]), place(rows[pair.index]), pair.similarity)
            for pair in pairs[:_EXAMPLES]
        ]
    report.seconds = time.monotonic() - begun
    return report


def _part(data: ChatDataset, max_rows: int, noun: str) -> tuple[PartReport, dict[int, str]]:
    """Returns the statistics of a dataset, and the prompts of the rows read, by row."""
    rows, num_rows = without_arrow_nulls(data.hf_dataset), len(data.hf_dataset)
    place = partial(place_of, rows)
    read, rendered = _spaced(num_rows, MAX_TEXTS), set(_spaced(num_rows, max_rows).tolist())
    part = PartReport(num_rows, len(read), 0)
    lengths, prompts = list[int](), dict[int, str]()
    loss_tokens: Counter[str] = Counter()
    seen: dict[Any, int] = {}
    for row in np.union1d(read, np.array(sorted(rendered), dtype=np.int64)).tolist():
        try:
            messages = data.messages(rows[row])
            if row in rendered:
                lengths.append(_render(data, messages, part, loss_tokens))
        except TinkerCookbookError as error:
            raise DataError(f"{place(row)} of the {noun} data: {error}") from error
        prompts[row] = _prompt(messages)
        earlier = seen.setdefault(_identity(messages), row)
        if earlier != row:
            part.duplicates += 1
            if len(part.duplicate_examples) < _EXAMPLES:
                part.duplicate_examples.append((place(row), place(earlier)))
        if _has_empty_answer(messages, data.builder.train_on_what):
            part.empty_answers += 1
            if len(part.empty_examples) < _EXAMPLES:
                part.empty_examples.append(place(row))
    part.rows_read, part.rows_rendered = len(prompts), len(lengths)
    part.loss_tokens = dict(loss_tokens.most_common())
    _describe_lengths(part, np.array(lengths))
    return part, prompts


def _spaced(num_rows: int, most: int) -> npt.NDArray[np.int64]:
    """Returns up to ``most`` row numbers, evenly spaced, the same in every run."""
    return np.unique(np.linspace(0, num_rows - 1, min(num_rows, most)).astype(np.int64))


def _render(
    data: ChatDataset, messages: list[Message], part: PartReport, loss_tokens: Counter[str]
) -> int:
    """Adds the tokens of a conversation to ``part``; returns the length of its longest example."""
    what, longest = data.builder.train_on_what, data.builder.common_config.max_length
    renderer = data.builder.renderer
    made = renderer.build_merged_examples(messages, what)
    examples = [(one.length, np.asarray(weights)[:longest]) for one, weights in made]
    images = [chunk for one, _ in made for chunk in one.chunks if chunk.type == "image"]
    part.images += len(images)
    part.image_tokens += sum(chunk.length for chunk in images)
    # No position predicts the first token, so its weight has no effect.
    counts = [int(np.count_nonzero(weights[1:])) for _, weights in examples]
    part.num_examples += len(examples)
    part.tokens += sum(len(weights) for _, weights in examples)
    part.truncated += longest is not None and any(length > longest for length, _ in examples)
    part.dropped += 0 in counts
    roles = {
        message["role"]
        for message, trained in zip(messages, select_trained(messages, what), strict=True)
        if trained
    }
    if len(roles) == 1 and what is not TrainOnWhat.ALL_TOKENS:
        loss_tokens[roles.pop()] += sum(counts)
    else:
        _count_by_role(data, messages, roles, sum(counts), loss_tokens)
    return max(length for length, _ in examples)


def _count_by_role(
    data: ChatDataset, messages: list[Message], roles: set[str], total: int, found: Counter[str]
) -> None:
    """Counts the trained tokens of each role, by rendering with only that role trained."""
    chosen = select_trained(messages, data.builder.train_on_what)
    longest, left = data.builder.common_config.max_length, total
    for role in sorted(roles):
        marked: list[Any] = [
            {**message, "trainable": trained and message["role"] == role}
            for message, trained in zip(messages, chosen, strict=True)
        ]
        examples = data.builder.renderer.build_merged_examples(marked, TrainOnWhat.CUSTOMIZED)
        count = sum(int(np.count_nonzero(np.asarray(w)[1:longest])) for _, w in examples)
        found[role] += count
        left -= count
    # Headers and separators are trained only with all_tokens.
    if left > 0:
        found["chat format"] += left


def _describe_lengths(part: PartReport, lengths: npt.NDArray[np.int64]) -> None:
    part.length_min, part.length_max = int(lengths.min()), int(lengths.max())
    part.length_median, part.length_p95 = (float(np.quantile(lengths, q)) for q in (0.5, 0.95))
    part.histogram = np.histogram(lengths, bins=_BINS)[0].tolist()


def _prompt(messages: Sequence[Message]) -> str:
    """Returns the text of the user messages, or of all messages if there are none.

    With images, each word has their digest, so that texts about other images are not similar.
    """
    asked = [m for m in messages if m["role"] == "user"] or messages
    text = "\n".join(get_text_content(message) for message in asked)
    if not has_images(asked):
        return text
    mark = value_digest([_images(message) for message in asked]) or ""
    return " ".join(f"{word}{mark[:12]}" for word in text.split()) or mark


def _images(message: Message) -> Any:
    """Returns the parts of a message that are images."""
    content = message["content"]
    if isinstance(content, str):
        return []
    return [part for part in content if part["type"] == "image"]


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
    streaming: bool = chz.field(
        default=False, doc="Read only the first max_rows rows, from the Hub without a download"
    )
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
    if config.streaming:
        for key in ("test_path", "test_size"):
            if getattr(config, key):
                raise ConfigurationError(
                    f"{key}: got {getattr(config, key)} with streaming=true, which reads the first "
                    f"rows of the training data only; leave {key} out"
                )
        name, _, configuration = config.dataset.partition(":")
        stream = stream_hf_dataset(name, "train", configuration or None)
        rows = list(islice(stream, config.max_rows))
        table = ConversationRows(rows, config.dataset, lambda: builder.renderer)
        print_line(f"dataset: the first {table.columns.line(config.dataset)}")
        data: tuple[Any, Any] = (chat_dataset(builder, table, 1), None)
    else:
        data = builder()
    report = make_report(*data, config.max_rows)
    assert report is not None
    for line in report.lines():
        print_line(line)
    if config.out is not None:
        report.write(ensure_writable_dir(config.out, "out"))
        print_line(f"written to {Path(config.out) / JSON_FILE} and {TEXT_FILE}")


if __name__ == "__main__":
    run_entrypoint(main)
