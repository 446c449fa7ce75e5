"""The report on training data, against counts by hand and planted faults."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tinker_cookbook.exceptions import DataError
from tinker_cookbook.supervised.data_report import make_report
from tinker_cookbook.supervised.hf_datasets import ChatDataBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig


def dialogue(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def builder(tokenizer_folder, path, max_length=None):
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=tokenizer_folder("smollm2"),
        renderer_name="chatml",
        max_length=max_length,
        batch_size=1,
    )
    return ChatDataBuilder(common_config=common, file_path=str(path))


def write(folder, train, test=()):
    for name, rows in (("train", train), ("test", test)):
        if rows:
            lines = [json.dumps({"messages": row}) for row in rows]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def test_figures_against_a_count_by_hand(tmp_path, tokenizer_folder):
    question = "How many legs does a spider have, and why do people often get it wrong?"
    train = [dialogue(f"Question {i}: what is {i} times {i}?", f"It is {i * i}.") for i in range(9)]
    train += [
        train[3],  # the same row again
        dialogue("Say nothing.", ""),
        dialogue(question, "Eight."),
        dialogue("Name the largest planet.", "Jupiter."),
        dialogue("A long one. " * 40, "Cut off."),
    ]
    # With a system message of their own: the format adds one to conversations without.
    train = [[{"role": "system", "content": "Be brief."}, *row] for row in train]
    test = [dialogue("Something else entirely.", "x"), dialogue(question.upper(), "x")]
    made = builder(tokenizer_folder, write(tmp_path, train, test), max_length=100)
    report = make_report(*made())
    assert report is not None
    # By hand: the text of the format, and the tokens of each answer.
    lengths, trained = [], 0
    encode = lambda text: made.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    for row in train:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row)[:-1]
        lengths.append(len(encode(text)))
        # The answer and the stop token, unless they are cut off.
        trained += (len(encode(row[-1]["content"])) + 1) * (lengths[-1] <= 100)
    part = report.train
    assert (part.length_min, part.length_max) == (min(lengths), max(lengths))
    assert part.length_median == np.median(lengths)
    assert part.length_p95 == pytest.approx(np.quantile(lengths, 0.95))
    assert sum(part.histogram) == part.rows == part.rows_read == part.rows_rendered == 14
    assert part.tokens == sum(min(length, 100) for length in lengths)
    assert part.loss_tokens == trained
    assert (part.truncated, part.dropped) == (1, 1)
    # Places as in error messages: the line of the file, from 1.
    line = f"{tmp_path / 'train.jsonl'}:%d"
    assert (part.duplicates, part.duplicate_example) == (1, f"{line % 10} = {line % 4}")
    assert (part.empty_answers, part.empty_example) == (1, line % 11)
    same = f"{tmp_path / 'test.jsonl'}:2 = {line % 12}"
    assert (report.test_same, report.test_example) == (1, same)
    text = "\n".join(report.lines())
    assert len(report.lines()) <= 15
    for word in ("14 training rows, 2 test rows", "1 row (7.1%) longer than max_length=100"):
        assert word in text
    assert "truncated before the answer" in text
    report.write(tmp_path)
    assert json.loads((tmp_path / "data_report.json").read_text())["train"]["truncated"] == 1
    assert (tmp_path / "data_report.txt").read_text().startswith("data report: 14 training rows")


def test_rows_without_a_question_are_counted(tmp_path, tokenizer_folder):
    rows = [dialogue("a", "b"), [{"role": "system", "content": "s"}, dialogue("a", "b")[1]]]
    report = make_report(builder(tokenizer_folder, write(tmp_path, rows))()[0], None)
    assert report is not None
    line = (
        f"1 row (50.0%) without a question before the first answer ({tmp_path / 'train.jsonl'}:2)"
    )
    assert any(line in text for text in report.lines())


def test_a_row_that_cannot_be_rendered_is_named_before_training(tmp_path, tokenizer_folder):
    call = [{"function": {"name": "f", "arguments": "{}"}}]
    rows = [dialogue("a", "b")] * 2
    rows += [[rows[0][0], {"role": "assistant", "content": "", "tool_calls": call}]]
    made = builder(tokenizer_folder, write(tmp_path, rows))
    with pytest.raises(DataError, match=r"train\.jsonl:3 of the training data: .*tool"):
        make_report(made()[0], None)
