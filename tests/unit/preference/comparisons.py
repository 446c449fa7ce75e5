"""Small comparisons, and files of them."""

from __future__ import annotations

import json

from tinker_cookbook.preference.types import Comparison, LabeledComparison

FOOD = "What is your favourite food?"


def said(role, content):
    """A message."""
    return {"role": role, "content": content}


def comparison(a="Pizza, always.", b="Hard to say.", prompt=FOOD):
    """Two answers to one question."""
    return Comparison([said("user", prompt)], [said("assistant", a)], [said("assistant", b)])


def labeled(label="A", a="Pizza, always.", b="Hard to say.", prompt=FOOD):
    """The same, judged."""
    return LabeledComparison(comparison(a, b, prompt), label)


def write_rows(path, *rows):
    """Writes rows, or lines as they are, to a file and returns its path."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def pair_row(i=0, **changes):
    """A row of the plain format; the answers differ."""
    return {"prompt": f"Question {i}?", "chosen": f"Yes, {i}.", "rejected": f"No, {i}."} | changes
