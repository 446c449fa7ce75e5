"""The example comparisons: their format, and that neither length nor a phrase gives them away."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "example_data"
TRAIN, HELD_OUT = FOLDER / "comparisons.jsonl", FOLDER / "comparisons_test.jsonl"
FILES = [(TRAIN, 320), (HELD_OUT, 80)]
IDS = [path.stem for path, _ in FILES]


def rows_of(path):
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def question(row):
    prompt = row["prompt"]
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def sentences(text):
    return set(re.split(r"(?<=[.!?]) ", text))


@pytest.mark.parametrize(("path", "count"), FILES, ids=IDS)
def test_each_line_is_one_pair_and_nothing_else(path, count):
    text = path.read_bytes().decode("utf-8")
    assert text.endswith("\n")
    assert "\r" not in text
    rows = rows_of(path)
    assert len(rows) == count
    for row in rows:
        assert list(row) == ["prompt", "chosen", "rejected"]
        for answer in (row["chosen"], row["rejected"]):
            assert answer == answer.strip() != ""
            assert answer[-1] in ".!?"
        if not isinstance(row["prompt"], str):
            roles = "".join(message["role"][0] for message in row["prompt"])
            assert re.fullmatch(r"s?(ua)*u", roles)


def test_no_question_occurs_twice():
    questions = [question(row) for path, _ in FILES for row in rows_of(path)]
    assert len(set(questions)) == len(questions)


def test_no_sentence_of_the_held_out_rambling_is_in_the_training_part():
    """What is learned has to be the manner, not its phrases."""
    known = {s for row in rows_of(TRAIN) for s in sentences(row["rejected"])}
    for row in rows_of(HELD_OUT):
        filler = sentences(row["rejected"]) - sentences(row["chosen"])
        assert filler
        assert not filler & known


@pytest.mark.parametrize(("path", "count"), FILES, ids=IDS)
def test_the_better_answer_is_not_always_the_shorter_one(path, count):
    longer = sum(len(row["chosen"]) > len(row["rejected"]) for row in rows_of(path))
    assert 0.05 * count < longer < 0.5 * count


def test_readme_states_the_true_counts():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for path, _ in FILES:
        rows = rows_of(path)
        several = sum(
            not isinstance(row["prompt"], str)
            and sum(message["role"] == "user" for message in row["prompt"]) > 1
            for row in rows
        )
        longer = sum(len(row["chosen"]) > len(row["rejected"]) for row in rows)
        assert f"| `{path.name}` | {len(rows)} | {several} | {longer} |" in readme
