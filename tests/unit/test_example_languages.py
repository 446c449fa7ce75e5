"""The example texts in thirteen kinds of language: format, labels, counts, variety."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

from recipes.prompt_distillation.tasks import LANGUAGE_NAMES, read_queries

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "example_data"
FILE = FOLDER / "languages.jsonl"
SCRIPTS = {"el": "GREEK", "ru": "CYRILLIC", "ar": "ARABIC", "ur": "ARABIC", "hi": "DEVANAGARI"}
SCRIPTS |= {"zh": "CJK"}


def rows() -> list[dict[str, str]]:
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def script(text: str) -> set[str]:
    return {unicodedata.name(c).split()[0] for c in text if c.isalpha()}


def test_each_line_is_a_query_with_label_group_and_kind():
    text = FILE.read_bytes().decode("utf-8")
    assert text.endswith("\n")
    assert "\r" not in text
    for row in rows():
        assert list(row) == ["query", "label", "group", "kind"]
        assert row["query"] == row["query"].strip() != ""
        assert row["label"] in LANGUAGE_NAMES
    assert len(read_queries(str(FILE), LANGUAGE_NAMES)) == len(rows())  # none stands there twice
