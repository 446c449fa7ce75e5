"""The example texts in thirteen kinds of language: format, labels, counts, variety."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from recipes.prompt_distillation.tasks import LANGUAGE_NAMES, TASKS, read_queries

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "example_data"
FILE = FOLDER / "languages.jsonl"
SCRIPTS = {"el": "GREEK", "ru": "CYRILLIC", "ar": "ARABIC", "ur": "ARABIC", "hi": "DEVANAGARI"}
SCRIPTS |= {"zh": "CJK"}
# Letters that Urdu has and Arabic has not; a sentence of ours has one of them at least.
URDU = set("ٹڈڑںےہپچگکی")


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


@pytest.mark.parametrize("folder", ["example_data", "tinker_cookbook/example_data"])
def test_multilingual_txt_has_the_queries_of_one_line(folder):
    text = (FOLDER.parents[1] / folder / "multilingual.txt").read_text(encoding="utf-8")
    assert text.splitlines() == [q for row in rows() if "\n" not in (q := row["query"])]


def test_every_sentence_is_there_in_twelve_languages():
    groups = defaultdict(list)
    for row in rows():
        if row["kind"] == "sentence":
            groups[row["group"]].append(row["label"])
    assert len(groups) == 40
    assert all(sorted([*labels, "ot"]) == sorted(LANGUAGE_NAMES) for labels in groups.values())


@pytest.mark.parametrize("label", sorted(LANGUAGE_NAMES.keys() - {"ot"}))
def test_sentences_are_in_the_script_of_their_language(label):
    for row in rows():
        if row["kind"] == "sentence" and row["label"] == label:
            assert script(row["query"]) == {SCRIPTS.get(label, "LATIN")}, row["query"]
            if label == "ur":
                assert URDU & set(row["query"])
            if label == "ar":
                assert not set("ٹڈڑںےہپچگ") & set(row["query"])


def test_no_text_of_a_prompt_is_a_query():
    queries = {row["query"] for row in rows()}
    shown = [m["content"] for task in TASKS.values() for m in task.messages]
    assert not queries & set(shown)


def test_readme_states_the_true_counts():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    kinds = Counter(row["kind"] for row in rows())
    for kind, count in kinds.items():
        assert re.search(rf"^\| {re.escape(kind)} \| {count} \|", readme, re.MULTILINE), kind
