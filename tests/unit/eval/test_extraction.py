"""Answers are found in responses, and not found where there is none."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinker_cookbook.eval.benchmarks._common import (
    check_gsm8k,
    extract_command,
    extract_final_answer,
    extract_gsm8k_answer,
    extract_mcq_answer,
    extract_python_code,
    is_task_complete,
    parse_kwargs,
)
from tinker_cookbook.exceptions import DataFormatError

WAYS = ["({})", "{}", "The answer is {}.", "Answer: ({})", r"\boxed{{{}}}", "So **{}** is right."]


@given(letter=st.sampled_from("ABCD"), way=st.sampled_from(WAYS), words=st.text("xyz ,\n"))
@settings(max_examples=200, deadline=None)
def test_a_choice_is_found_after_any_reasoning(letter: str, way: str, words: str):
    assert extract_mcq_answer(f"{words}\n{way.format(letter)}") == letter


@given(st.text(string.ascii_lowercase.replace("w", "") + " .,\n"))
@settings(max_examples=200, deadline=None)
def test_lower_case_text_without_the_word_answer_is_no_choice(text: str):
    kept = [line for line in text.split("\n") if not any(w in line for w in ("be", "so", "hen"))]
    # A single letter is an answer in lower case, too.
    kept = [line for line in kept if sum(map(str.isalpha, line)) > 1]
    assert extract_mcq_answer("\n".join(kept)) == ""


# A number, and texts that state it; ``|`` separates them.
NUMBERS = r"""
18: #### 18 | #### 18\nExtra 3 | She makes $18. | \boxed{18} | \boxed{18\text{ dollars}}
18: \boxed{\frac{36}{2}} | Answer: **18**
-18: \boxed{-\$18}
0.5: \boxed{\frac{1}{2}}
7: \boxed{\text{none}} so 7 | The answer is 2 * 3 + 1 = 6 + 1 = 7
12: The answer is \(12\). | **1. Compute** 3*4\n**2. Add**\nShe pays **$12** for 7 days
8: The answer is 5 + 3 = 8 | The answer is 8, since 5 + 4 = 9 | The answer is 8 because 4 * 2 = 9
8: The answer is 8 (n = 2)
60: The answer is $5 × 12 = $60. | The answer is $5 \times 12 = 60$. | The answer is 50% of 120 = 60
25: The answer is 20 apples + 5 apples = 25 apples, not 20
35: The answer is 5 x (3 + 4) = 35 of 40
"""


def test_the_final_number_is_found():
    for line in NUMBERS.strip().split("\n"):
        number, _, texts = line.partition(": ")
        for text in texts.split(" | "):
            assert extract_gsm8k_answer(text.replace("\\n", "\n")) == number, text


@given(st.integers(-(10**9), 10**9), st.sampled_from(["#### {}", r"\boxed{{{}}}", "It is {}."]))
@settings(max_examples=200, deadline=None)
def test_every_integer_is_found_with_and_without_commas(number: int, way: str):
    for text in (str(number), f"{number:,}"):
        assert check_gsm8k("Step 1 of 2 takes 3 hours.\n" + way.format(text), str(number))
        assert not check_gsm8k(way.format(text), str(number + 1))


FINAL = {
    "So the answer is (B).": "(B)",
    "So the answer is a b c.": "a b c",
    "the answer is: ] } >.": "] } >",
    "The answer is .5": ".5",
    r"\boxed{\text{No}}": "No",
    "Reasons.\n\nYes.": "Yes",
    'The answer is "True".': "True",
    "**Answer:** valid": "valid",
    "The answer is 3.\nMore text": "3",
}


def test_the_final_answer_is_the_rest_of_the_line():
    assert {text: extract_final_answer(text) for text in FINAL} == FINAL


CODE = [
    ("```python\ndef f():\n    return 1\n```", "def f():\n    return 1"),
    ("Here:\n```\nx=1\n```\n```py\ndef g(): pass\n```", "def g(): pass"),
    # A call of the function in a block before its definition.
    ("```python\nprint(f())\n```\n```python\ndef f():\n  return 1", "def f():\n  return 1"),
    ("1. x\n   ```python\n   def f():\n       return '```'\n   ```", "def f():\n    return '```'"),
    ("~~~python\nx = 1\n~~~", "x = 1"),
    ("def f(): pass", "def f(): pass"),
]


@pytest.mark.parametrize(("text", "code"), CODE)
def test_code_is_found(text: str, code: str):
    assert extract_python_code(text) == code


def test_commands_and_the_end_of_a_task_are_found():
    assert extract_command("```python\nx\n```\n```bash\nls -l\n```") == "ls -l"
    assert extract_command("```\nls\n```") == "ls"
    assert extract_command("```\nimport os\n```") is None
    assert extract_command("ls") is None
    assert is_task_complete("Task complete.")
    assert not is_task_complete("the task is complete")


def test_arguments_of_instructions_are_read_from_each_form():
    assert parse_kwargs([None, '{"a": 1}', {"b": 2, "c": None}]) == [{}, {"a": 1}, {"b": 2}]
    assert parse_kwargs([], ["x", "y"]) == [{}, {}]
    with pytest.raises(DataFormatError, match="expected JSON"):
        parse_kwargs(["{"])
