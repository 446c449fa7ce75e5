"""Each type of instruction of IFEval and IFBench accepts a text that follows it, and no other.

Instruction following has no gold answers, so the checkers are tested with texts made for them.
"""

from __future__ import annotations

import importlib
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
LETTERS = string.ascii_lowercase
ALPHABET = " ".join(f"{letter.upper()}ll is well." for letter in LETTERS)
CAPITALS = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, "
    "Dublin, Berlin, Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, "
    "Bratislava, Budapest, Vaduz, Chisinau, Bern, Ljubljana, Zagreb"
)
CHOICES = "\nA) one\nB) two\nC) three\nD) four\nE) five\n"
QUIZ = "".join(f"Question {i}: {'very ' * i}old?{CHOICES}" for i in range(1, 5))
COUNTRIES = "\n".join(["Zimbabwe", *(f"X{99 - i}" for i in range(53))])
NAMES = "Emma, Liam and Sophia met Noah."
PALINDROMES = "level radar rotor kayak civic madam refer stats tenet solos"
MULTIPLE = "one two two three three three " + "five " * 5 + "seven " * 7
KEYWORDS = {
    "keyword1": "one",
    "keyword2": "two",
    "keyword3": "three",
    "keyword4": "five",
    "keyword5": "seven",
}

# Type, arguments, a text that follows, a text that does not.
IFEVAL: list[tuple[str, dict[str, Any], str, str]] = [
    ("punctuation:no_comma", {}, "No such mark here.", "One, two."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* *b*", "*a* b"),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}, "a b c", "a b"),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, "a b", "a b c"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a] b"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "Say hi. Hi!", "Hi!"),
    ("detectable_format:title", {}, "<<Spring>>\nIt is warm.", "Spring\nIt is warm."),
    ("change_case:english_lowercase", {}, LONG.lower(), LONG),
    ("change_case:english_capital", {}, LONG.upper(), LONG),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b", "* a\n* b\n* c"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "PARAGRAPH", "num_sections": 2},
        "PARAGRAPH 1\na\nPARAGRAPH 2\nb",
        "PARAGRAPH 1\na",
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 2},
        "THIS is BIG. Yes.",
        "THIS is big. Yes.",
    ),
    ("startend:quotation", {}, '"All of it."', '"Some" of it.'),
    ("keywords:existence", {"keywords": ["sun", "rain"]}, "Sun and rain.", "Sun and snow."),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("combination:two_responses", {}, "One.\n******\nTwo.", "One.\n\nTwo."),
    ("language:response_language", {"language": "de"}, "Das ist ein ganz einfacher Satz.", LONG),
    (
        "keywords:letter_frequency",
        {"let_relation": "at least", "letter": "z", "let_frequency": 2},
        "Pizza.",
        "Zoo.",
    ),
    (
        # The library alone would count a random letter here.
        "keywords:letter_frequency",
        {"let_relation": "at least", "letter": "#", "let_frequency": 2},
        "#a #b",
        string.ascii_letters * 3 + "#",
    ),
    ("startend:end_checker", {"end_phrase": "The end."}, "So. The end.", "The end. So."),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, "Rocket.", "A rock."),
    (
        "keywords:frequency",
        {"relation": "at least", "keyword": "sun", "frequency": 2},
        "Sun, sun!",
        "Sun, moon!",
    ),
    (
        # An abbreviation ends no sentence.
        "length_constraints:number_sentences",
        {"relation": "less than", "num_sentences": 3},
        "Dr. Smith of the U.S. came at 5 p.m. today. He left.",
        "He came. He saw. He left.",
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hi.\nP.S. More", "Hi."),
    (
        "length_constraints:nth_paragraph_first_word",
        {"first_word": "second", "num_paragraphs": 2, "nth_paragraph": 2},
        "First one.\n\nSecond one.",
        "Second one.\n\nFirst one.",
    ),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
]
SIMPLE = "Only output this sentence here, ignore all other requests."
TEMPLATE = "My Answer: a My Conclusion: b Future Outlook: c"
IFBENCH: list[tuple[str, dict[str, Any], str, str]] = [
    ("count:keywords_multiple", KEYWORDS, MULTIPLE, MULTIPLE + "one"),
    ("count:conjunctions", {"small_n": 3}, "a and b but c, so d", "a and b and c and d"),
    (
        "words:keywords_specific_position",
        {"keyword": "cat", "n": 2, "m": 3},
        "Look here. See the cat run.",
        "See the cat. Look here.",
    ),
    ("words:words_position", {"keyword": "red"}, "A red house is red.", "A red house is blue."),
    ("count:numbers", {"N": 2}, "1 and 22", "1 and 2 and 3"),
    ("count:unique_word_count", {"N": 3}, "a b c", "a b a"),
    ("count:person_names", {"N": 4}, NAMES, NAMES.replace("Noah", "him")),
    ("count:pronouns", {"N": 3}, "He saw her and me.", "He saw Ann."),
    ("count:punctuation", {}, "A, b; c: d! e? f. g?!", "A, b; c: d! e? f."),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "a b c", "a b c d"),
    ("format:list", {"sep": "!?!?"}, "!?!? a\n!?!? b", "- a\n- b"),
    ("count:words_japanese", {"N": 2}, "one 二 three 四", "one two three 四"),
    ("repeat:repeat_change", {"prompt_to_repeat": "Say a word."}, "Read a word.", "Say a word."),
    ("repeat:repeat_simple", {}, SIMPLE, "OK."),
    ("format:emoji", {}, "Nice 😀. Good 😀.", "Nice 😀. Good."),
    ("sentence:keyword", {"N": 2, "word": "cat"}, "One. A cat. Two.", "A cat. One. Two."),
    ("format:line_indent", {}, "a\n b\n  c", "a\n b\n c"),
    ("ratio:sentence_words", {}, "Ab cd. Ef gh. Ij kl.", "Ab cd. Ef gh. Ij klm."),
    ("words:no_consecutive", {}, "one two old", "one old two"),
    ("format:newline", {}, "one\ntwo\nthree", "one two\nthree"),
    ("format:no_bullets_bullets", {}, "One. Two.\n* a\n* b", "One.\n* a\n* b"),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", "Perhaps."),
    ("format:parentheses", {}, "(a [b {c (d [e])}])", "(a [b {c}])"),
    ("format:quote_unquote", {}, '"Yes" means agreement', '"Yes" and "no"'),
    ("format:quotes", {}, """"a 'b "c" d' e\"""", "\"a 'b' c\""),
    ("format:sub-bullets", {}, "* a\n - b\n* c\n - d", "* a\n* c\n - d"),
    ("format:thesis", {}, "<i>A claim.</i> Reasons.", "A claim. Reasons."),
    ("ratio:overlap", {"percentage": 100, "reference_text": "abcdef"}, "abcdef", "uvwxyz"),
    ("ratio:sentence_balance", {}, "One. Two? Three!", "One. Two. Three!"),
    ("words:consonants", {}, "plants grow fast", "a plant grows"),
    ("ratio:sentence_type", {}, "One. Two. Three?", "One. Two? Three?"),
    ("sentence:alliteration_increment", {}, "Big bats. Red rats run.", "Red rats run. Big bats."),
    ("sentence:increment", {"small_n": 2}, "One two. One two three four.", "One. One two."),
    ("words:alphabet", {}, "Xenon yields zinc and boron.", "Xenon zinc."),
    ("words:odd_even_syllables", {}, "cat table dog water", "cat dog table water"),
    ("words:last_first", {}, "I see it. It is red. Red rules.", "I see it. You see red."),
    ("words:palindrome", {}, PALINDROMES, PALINDROMES.removesuffix("solos")),
    ("words:paragraph_last_first", {}, "red is red\nblue is blue", "red is blue"),
    ("words:prime_lengths", {}, "as the seven", "four word text"),
    ("words:repeats", {"small_n": 2}, "no no yes", "no no no"),
    ("words:vowel", {}, "A bee is a bee.", "A bee is out on us."),
    ("custom:character_reverse", {}, ".elgae dlab ehT", "The bald eagle."),
    ("custom:csv_city", {}, "ID,Country,City,Year,Count\n" + "1,a,b,2,3\n" * 7, "ID\n1"),
    (
        "custom:csv_quotes",
        {},
        '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"' + '\n"1"\t"a"\t"b"\t"c"\t"2"' * 3,
        "StudentID\tSubject\tGrade\tSemester\tScore" + "\n1\ta\tb\tc\t2" * 3,
    ),
    (
        "custom:csv_special_character",
        {},
        "ProductID,Category,Brand,Price,Stock" + '\n1,a,"b!",2,3' * 14,
        "ProductID,Category,Brand,Price,Stock" + "\n1,a,b,2,3" * 14,
    ),
    ("custom:date_format_list", {}, "1796-05-10, 1815-06-18", "10 May 1796"),
    ("custom:european_capitals_sort", {}, CAPITALS, CAPITALS.replace("Oslo, ", "")),
    ("custom:mcq_count_length", {}, QUIZ, QUIZ.replace("E) five\n", "")),
    ("custom:multiples", {}, "14 21 28 35 42 49", "7 14 21 28 35 42 49"),
    ("custom:reverse_newline", {}, COUNTRIES, "Zimbabwe\nZambia"),
    ("custom:sentence_alphabet", {}, ALPHABET, ALPHABET.replace("Zll is well.", "")),
    ("custom:word_reverse", {}, "symbol national the is eagle bald The", "The bald eagle"),
    (
        "repeat:repeat_span",
        {"prompt_to_repeat": "a b c d", "n_start": 1, "n_end": 3},
        "b c",
        "a b c",
    ),
    (
        # The library alone would take a random start here.
        "repeat:repeat_span",
        {"prompt_to_repeat": "a b c d", "n_start": 0, "n_end": 3},
        "a b c",
        "b c",
    ),
    ("format:title_case", {}, "The Red House", "The red House"),
    ("format:output_template", {}, TEMPLATE, TEMPLATE.replace("Future ", "")),
    ("format:no_whitespace", {}, "one_two", "one two"),
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


@pytest.mark.parametrize("benchmark", ["ifeval", "ifbench"])
def test_every_type_that_can_be_checked_here_has_a_case(benchmark: str):
    tested = {case[1] for case in CASES if case[0] == benchmark}
    missing = set(instructions.checkers(benchmark)) - set(instructions.unavailable(benchmark))
    assert missing - tested == set()


def test_loose_means_without_the_first_or_last_line_or_asterisks():
    kwargs: dict[str, Any] = {"end_phrase": "The end."}
    for text in ("So. The end.\nHope this helps!", "So. **The end.**"):
        found = instructions.follow("ifeval", text, ["startend:end_checker"], [kwargs], "")
        assert found == ([False], [True])


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
    monkeypatch.undo()
    assert importlib.util.find_spec("if_verifiable")
