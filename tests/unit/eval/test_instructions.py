"""Instructions of IFEval and IFBench: checks without downloads and chance, skipped prompts."""

from __future__ import annotations

import json
import logging
import random
import string
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tinker_cookbook.eval.benchmarks import (
    REGISTRY,
    BenchmarkConfig,
    ExampleBenchmark,
    instructions,
)
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError

pytest.importorskip("if_verifiable", reason="pip install -e '.[eval]'")
pytest.importorskip("punkt", reason="pip install -e '.[eval]'")

LONG = "This is a plain English sentence about the weather in spring."
NAMES = "Emma, Liam and Sophia met Noah."

# The checks that our code changes, or for which it replaces NLTK's data; the others are the
# library's own. Type, arguments, a text that follows, a text that does not.
IFEVAL: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 2},
        "THIS is BIG. Yes.",
        "THIS is big. Yes.",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("language:response_language", {"language": "de"}, "Das ist ein ganz einfacher Satz.", LONG),
    (
        # The library alone would count a random letter here.
        "keywords:letter_frequency",
        {"let_relation": "at least", "letter": "#", "let_frequency": 2},
        "#a #b",
        string.ascii_letters * 3 + "#",
    ),
    (
        # An abbreviation ends no sentence.
        "length_constraints:number_sentences",
        {"relation": "less than", "num_sentences": 3},
        "Dr. Smith of the U.S. came at 5 p.m. today. He left.",
        "He came. He saw. He left.",
    ),
]
IFBENCH: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "words:keywords_specific_position",
        {"keyword": "cat", "n": 2, "m": 3},
        "Look here. See the cat run.",
        "See the cat. Look here.",
    ),
    ("count:person_names", {"N": 4}, NAMES, NAMES.replace("Noah", "him")),
    ("count:pronouns", {"N": 3}, "He saw her and me.", "He saw Ann."),
    ("sentence:keyword", {"N": 2, "word": "cat"}, "One. A cat. Two.", "A cat. One. Two."),
    ("ratio:sentence_words", {}, "Ab cd. Ef gh. Ij kl.", "Ab cd. Ef gh. Ij klm."),
    ("ratio:sentence_balance", {}, "One. Two? Three!", "One. Two. Three!"),
    ("words:odd_even_syllables", {}, "cat table dog water", "cat dog table water"),
    (
        # The library alone would take a random start here.
        "repeat:repeat_span",
        {"prompt_to_repeat": "a b c d", "n_start": 0, "n_end": 3},
        "a b c",
        "b c",
    ),
]
CASES = [("ifeval", *case) for case in IFEVAL] + [("ifbench", *case) for case in IFBENCH]


@pytest.fixture(autouse=True)
def _no_download(monkeypatch):
    import nltk

    def refuse(*args, **options):
        raise AssertionError("nothing may be downloaded")

    # Checked after the first import, which itself replaces the function for a moment.
    instructions.checkers("ifbench")
    monkeypatch.setattr(nltk, "download", refuse)


def _strictly(benchmark: str, name: str, kwargs: dict[str, Any], text: str) -> bool:
    strict, loose = instructions.follow(benchmark, text, [name], [kwargs], "Prompt.")
    assert strict[0] <= loose[0]
    return strict[0]


@pytest.mark.parametrize(("benchmark", "name", "kwargs", "follows", "violates"), CASES)
def test_a_type_of_instruction(benchmark, name, kwargs, follows, violates):
    assert _strictly(benchmark, name, kwargs, follows)
    assert not _strictly(benchmark, name, kwargs, violates)
    assert not _strictly(benchmark, name, kwargs, "")


def _rows(shared: Path, name: str) -> Iterator[dict[str, Any]]:
    file = {"ifeval": "input_data.jsonl", "ifbench": "IFBench_test.jsonl"}[name]
    with open(shared / "data" / name / file, encoding="utf-8") as lines:
        yield from map(json.loads, lines)


@pytest.mark.shared
@pytest.mark.parametrize(("name", "total"), [("ifeval", 541), ("ifbench", 300)])
def test_prompts_that_need_data_of_the_network_are_counted_not_graded(
    shared_dir, caplog, name: str, total: int
):
    benchmark = REGISTRY[name]
    assert isinstance(benchmark, instructions.InstructionBenchmark)
    missing = instructions.unavailable(name)
    with caplog.at_level(logging.WARNING):
        examples = benchmark.examples(BenchmarkConfig(data_path=str(shared_dir / "data")))
    left_out = [
        row for row in _rows(shared_dir, name) if set(row["instruction_id_list"]) & set(missing)
    ]
    assert len(examples) == total - len(left_out)
    assert benchmark.num_excluded == len(left_out)
    # IFEval needs nothing but the sentence model.
    assert (len(left_out) > 0) == ("nltk.downloader" in caplog.text) == (name in caplog.text)
    if name == "ifeval":
        assert missing == {}
    elif len(missing) == 2:
        assert len(left_out) == 18
    metrics = [benchmark.grade("Nice.", example).metrics for example in examples[:20]]
    result = benchmark.aggregate([m["strict"] for m in metrics], metrics)
    assert result.metrics["num_excluded"] == len(left_out)
    assert result.metrics["prompt_level_strict_acc"] == result.score
    assert result.metrics["inst_level_strict_acc"] <= result.metrics["inst_level_loose_acc"]


@pytest.mark.shared
@pytest.mark.parametrize("name", ["ifeval", "ifbench"])
def test_a_grade_does_not_depend_on_chance(shared_dir, name: str):
    benchmark = REGISTRY[name]
    assert isinstance(benchmark, ExampleBenchmark)
    examples = benchmark.examples(BenchmarkConfig(data_path=str(shared_dir / "data")))
    text = f"{LONG}\n\n* One, TWO.\n* Three? [four] {string.ascii_letters} #!"
    grades = []
    for seed in range(2):
        random.seed(seed)
        # Several threads: the first use of the language detection must be complete.
        with ThreadPoolExecutor(4) as pool:
            grades.append(list(pool.map(lambda e: benchmark.grade(text, e).metrics, examples)))
    assert grades[0] == grades[1]


@pytest.mark.shared
def test_the_sentence_model_gives_the_words_of_nltk(shared_dir):
    """Independent reference: the splitter of the package that has the same model."""
    import nltk
    import punkt

    model = instructions._NltkWithModel(nltk)
    texts = [row["prompt"] for row in _rows(shared_dir, "ifeval")]
    different = sum(model.sentences.tokenize(t) != punkt.sent_tokenize(t) for t in texts)
    assert different <= len(texts) // 20
    tokens = model.word_tokenize("Mr. Lee isn't here. He left!")
    assert tokens == ["Mr.", "Lee", "is", "n't", "here", ".", "He", "left", "!"]


def test_integers_that_columns_made_floats_are_integers_again(tmp_path):
    row = {
        "key": "1",
        "prompt": "Say cat.",
        "instruction_id_list": ["sentence:keyword"],
        "kwargs": [{"N": 2.0, "word": "cat", "sep": None}],
    }
    (tmp_path / "IFBench_test.jsonl").write_text(json.dumps(row), "utf-8")
    benchmark = REGISTRY["ifbench"]
    assert isinstance(benchmark, ExampleBenchmark)
    config = BenchmarkConfig(data_path=str(tmp_path))
    (example,) = benchmark.load_examples(config)
    assert example.expected["kwargs"] == [{"N": 2, "word": "cat"}]
    assert benchmark.grade("One. A cat.", example).reward == 1
    row["instruction_id_list"] = ["sentence:unknown"]
    (tmp_path / "IFBench_test.jsonl").write_text(json.dumps(row), "utf-8")
    with pytest.raises(DataFormatError, match="sentence:unknown"):
        benchmark.load_examples(config)


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    instructions._checkers.cache_clear()
    monkeypatch.setattr(instructions, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install -e '.*\[eval\]'"):
        instructions.checkers("ifeval")
