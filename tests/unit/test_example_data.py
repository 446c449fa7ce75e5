"""The example conversations: their format, their manner of answering, their variety."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "example_data"
TRAIN, HELD_OUT = FOLDER / "conversations.jsonl", FOLDER / "conversations_test.jsonl"
FILES = [TRAIN, HELD_OUT]

# Three labelled lines, each a single sentence that ends in a full stop.
MANNER = re.compile(r"In short: (?P<short>.+)\nWhy: (?P<why>.+)\nTry: (?P<step>.+)")
LONGEST_LINE_IN_WORDS = 21

Message = dict[str, str]


def conversations(path: Path) -> list[list[Message]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in lines]


def of_role(messages: list[Message], role: str) -> list[str]:
    return [m["content"] for m in messages if m["role"] == role]


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.casefold()))


def manner_fault(answer: str) -> str | None:
    """What keeps an answer from being in the manner, or None."""
    lines = MANNER.fullmatch(answer)
    if lines is None:
        return "not exactly the three labelled lines"
    for label, line in lines.groupdict().items():
        if not line.endswith(".") or re.search(r"[.!?;]\s+[A-Z]", line):
            return f"{label} is not one sentence"
        if line != line.strip() or "  " in line:
            return f"{label} has stray spaces"
        if len(line.split()) > LONGEST_LINE_IN_WORDS:
            return f"{label} is too long"
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_line_is_one_conversation_and_nothing_else(path: Path):
    text = path.read_bytes().decode("utf-8")
    assert text.endswith("\n")
    assert "\r" not in text
    for line in text.splitlines():
        row = json.loads(line)
        assert list(row) == ["messages"]
        for message in row["messages"]:
            assert list(message) == ["role", "content"]
            assert message["content"] == message["content"].strip() != ""
        roles = "".join(message["role"][0] for message in row["messages"])
        assert re.fullmatch(r"s?(ua)+", roles), line


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_answer_is_in_the_manner(path: Path):
    answers = [a for messages in conversations(path) for a in of_role(messages, "assistant")]
    assert {a: fault for a in answers if (fault := manner_fault(a))} == {}
