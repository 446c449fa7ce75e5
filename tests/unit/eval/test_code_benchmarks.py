"""MBPP and HumanEval in the local sandbox."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tinker_cookbook.eval.benchmarks import REGISTRY, BenchmarkConfig, Grade
from tinker_cookbook.eval.benchmarks.programs import ProgramTests, program_of

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux"),
]
COUNTS = {"mbpp": 500, "humaneval": 164}


def load(name, shared_dir):
    benchmark = REGISTRY[name]
    return benchmark, benchmark.load_examples(BenchmarkConfig(data_path=str(shared_dir / "data")))


def grade(benchmark, response, example) -> Grade:
    return asyncio.run(benchmark.grade_async(response, example, BenchmarkConfig()))


@pytest.mark.parametrize("every", [20, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COUNTS)
def test_gold_answers_and_those_of_other_problems(shared_dir, name, every):
    """Each twentieth problem; the slow test takes 8 s of processor time for each fourth."""
    benchmark, examples = load(name, shared_dir)
    assert len(examples) == COUNTS[name]
    for example in examples[::every]:
        right = grade(benchmark, f"Here it is:\n{example.gold}\nIt works.", example)
        assert (right.reward, right.metrics["tests_passed"], right.logs) == (1.0, 1.0, {})
        wrong = grade(benchmark, benchmark.foreign_answer(example, examples), example)
        assert wrong.reward == 0.0
        assert wrong.logs["program_error"]


@pytest.mark.parametrize("name", COUNTS)
def test_programs_that_end_early_get_0(shared_dir, name):
    """``tests/unit/sandbox/test_attacks.py`` has all attacks."""
    benchmark, examples = load(name, shared_dir)
    for program in ("import os\nos._exit(0)", ""):
        assert grade(benchmark, f"```python\n{program}\n```", examples[0]).reward == 0.0


def test_the_helpers_in_a_prompt_of_humaneval_belong_to_the_tests(shared_dir):
    benchmark, examples = load("humaneval", shared_dir)
    # The tests of find_zero evaluate the polynomial with a function that is in the prompt.
    (example,) = [e for e in examples if e.expected["entry_point"] == "find_zero"]
    cheat = "def poly(xs, x): return 0\ndef find_zero(xs): return 0.5"
    assert grade(benchmark, f"```python\n{cheat}\n```", example).reward == 0.0
    assert grade(benchmark, str(example.gold), example).reward == 1.0


def test_the_setup_of_tests_may_use_a_class_of_the_program(shared_dir):
    benchmark, examples = load("mbpp", shared_dir)
    # Its tests begin with trees of the program's class Node.
    (example,) = [e for e in examples if e.example_id == "mbpp_367"]
    assert benchmark.program_tests(example).entry_points == ("Node", "is_tree_balanced")
    assert grade(benchmark, str(example.gold), example).reward == 1.0


def test_an_answer_may_be_code_only():
    program = "def area(r): return 1"
    assert program_of(program, ProgramTests((), ("area",))) == program
    tests = ProgramTests((), ("area",), preamble="import math")
    block = "```py\ndef area(r): ...\n```\n```\nprint(area(2))\n```"
    assert program_of(block, tests).endswith("import math\ndef area(r): ...\n")


def test_a_future_import_of_the_answer_stays_before_the_preamble():
    tests = ProgramTests((), ("f",), preamble="import math")
    program = program_of('"""A text."""\nfrom __future__ import annotations\ndef f(): ...\n', tests)
    names: dict[str, object] = {}
    exec(program, names)
    assert {"math", "f", "annotations"} <= names.keys()
