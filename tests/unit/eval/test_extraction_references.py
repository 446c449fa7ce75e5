"""Extraction and grading compared with the filters of lm-evaluation-harness and with math_verify.

The letters and numbers of lm-evaluation-harness were read from its version 0.4.13: the filter
``custom-extract`` of mmlu_pro, ``strict-match`` and ``flexible-extract`` of gsm8k.
"""

from __future__ import annotations

import logging

import pytest

from tinker_cookbook.eval.benchmarks import REGISTRY, BenchmarkConfig, ExampleBenchmark
from tinker_cookbook.official.benchmark_common import extract_gsm8k_answer, extract_mcq_answer

# Where the filter of mmlu_pro finds a letter, by text.
MMLU_PRO = {
    "The answer is (B).": "B",
    "answer is B": "B",
    "The answer is A": "A",
    "The answer is A because it fits": "A",
    "(A) is wrong, (B) is wrong, so the answer is (C).": "C",
    "The answer is B. A is wrong.": "B",
    "The correct answer is (A) the heart (B) the liver": "A",
    # From here on ours differs.
    "The answer is B? No, wait: the answer is D.": "B",
    "The answer is A good idea": "A",
    "The answer is I don't know": "I",
    "The answer is C++.": "C",
}
DIFFERENT_LETTERS = {
    "The answer is B? No, wait: the answer is D.": "D",
    "The answer is A good idea": "",
    "The answer is I don't know": "",
    "The answer is C++.": "",
}
STRICT = {"#### 18": "18", "#### -5": "-5", "#### 18\nExtra 3": "18"}
FLEXIBLE = {
    "#### 18": "18",
    "#### -5": "-5",
    "5-3 is 2 so 2": "2",
    "1/2 of 10": "10",
    r"\boxed{18}": "18",
    r"\boxed{18\text{ dollars}}": "18",
    r"\boxed{x = 5}": "5",
    r"first \boxed{3} then \boxed{4}": "4",
    r"\boxed{\text{none}} so 7": "7",
    r"The answer is \(12\).": "12",
    "The answer is 5 + 3 = 8": "8",
    "Answer: **18**": "18",
    "no number": "",
}
# The last number is not always the answer: text, what flexible-extract takes, what is right.
WRONG_LAST_NUMBER = [
    ("#### 18\nExtra 3", "3", "18"),
    (r"\boxed{\$1{,}000}", "000", "1000"),
    (r"\boxed{\frac{36}{2}}", "2", "18"),
    ("The answer is $1,234.50 per 7 days.", "7", "1234.50"),
    ("The final answer is: 42 apples, not 43", "43", "42"),
    ("**1. Compute** 3*4\n**2. Add**\nShe pays **$12** for 7 days", "7", "12"),
]


def test_letters_are_those_of_lm_eval_where_it_finds_the_right_one():
    found = {text: extract_mcq_answer(text, "ABCDEFGHIJ") for text in MMLU_PRO}
    assert found == MMLU_PRO | DIFFERENT_LETTERS


def test_numbers_are_those_of_lm_eval_where_it_finds_the_right_one():
    for reference in (STRICT, FLEXIBLE):
        assert {text: extract_gsm8k_answer(text) for text in reference} == reference
    for text, last, right in WRONG_LAST_NUMBER:
        assert extract_gsm8k_answer(text) == right != last


@pytest.mark.shared
@pytest.mark.slow
def test_math_verify_alone_gives_the_same_grades(shared_dir):
    """10 s: 100 of the solutions, as many of other problems, and answers without a box."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    benchmark = REGISTRY["math500"]
    assert isinstance(benchmark, ExampleBenchmark)
    examples = benchmark.examples(BenchmarkConfig(data_path=str(shared_dir / "data")))
    for example in examples[::5]:
        truth = parse(f"\\boxed{{{example.expected}}}")
        plain = f"Therefore the answer is ${example.expected}$."
        for response in (example.gold, benchmark.foreign_answer(example, examples), plain):
            assert response is not None
            expected = verify(truth, parse(response))
            assert benchmark.grade(response, example).reward == expected, example.example_id
        assert benchmark.grade(plain, example).reward == 1
