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


def jaccard(left: frozenset[str], right: frozenset[str]) -> float:
    return len(left & right) / len(left | right)


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


@pytest.mark.parametrize(("path", "rows"), [(TRAIN, 360), (HELD_OUT, 40)])
def test_row_count_and_size(path: Path, rows: int):
    assert len(conversations(path)) == rows
    assert path.stat().st_size < 400_000


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


@pytest.mark.parametrize(
    "answer",
    [
        "In short: Yes.\nWhy: It is so.",
        "In short: Yes.\nTry: Do it.\nWhy: It is so.",
        "In short: Yes.\nWhy: It is so.\nTry: Do it.\n",
        "In short: Yes.\nWhy: It is so. It really is.\nTry: Do it.",
        "In short: Yes\nWhy: It is so.\nTry: Do it.",
        "In short: Yes.\nWhy: " + "so " * 25 + ".\nTry: Do it.",
    ],
)
def test_the_check_of_the_manner_can_fail(answer: str):
    assert manner_fault(answer) is not None


def test_no_question_and_no_answer_occurs_twice():
    both = conversations(TRAIN) + conversations(HELD_OUT)
    for role in ("user", "assistant"):
        texts = [text.casefold() for messages in both for text in of_role(messages, role)]
        assert sorted(t for t in set(texts) if texts.count(t) > 1) == []


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_no_two_conversations_open_nearly_alike(role: str):
    both = conversations(TRAIN) + conversations(HELD_OUT)
    openings = [
        (of_role(messages, role)[0], words(of_role(messages, role)[0])) for messages in both
    ]
    near = [
        (left, right)
        for i, (left, left_words) in enumerate(openings)
        for right, right_words in openings[:i]
        if jaccard(left_words, right_words) >= 0.8
    ]
    assert near == []


@pytest.mark.parametrize(("path", "multi_turn", "with_system"), [(TRAIN, 60, 60), (HELD_OUT, 6, 7)])
def test_mix_of_turns_and_system_messages(path: Path, multi_turn: int, with_system: int):
    rows = conversations(path)
    turns = [len(of_role(messages, "user")) for messages in rows]
    assert sum(n > 1 for n in turns) >= multi_turn
    assert max(turns) == 3
    systems = [text for messages in rows for text in of_role(messages, "system")]
    assert len(systems) >= with_system
    assert len(set(systems)) == len(systems)


def test_readme_states_the_true_counts():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for path in FILES:
        rows = conversations(path)
        multi_turn = sum(len(of_role(messages, "user")) > 1 for messages in rows)
        with_system = sum(bool(of_role(messages, "system")) for messages in rows)
        answers = sum(len(of_role(messages, "assistant")) for messages in rows)
        row = f"| `{path.name}` | {len(rows)} | {multi_turn} | {with_system} | {answers} |"
        assert row in readme
