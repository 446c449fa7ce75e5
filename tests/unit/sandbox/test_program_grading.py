"""Programs graded in real sandboxes (about 3 s; as much again with the slow tests)."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.sandbox import (
    CallTest,
    PythonGrader,
    SandboxInfrastructureError,
    StdioTest,
    grading_worker,
    launch,
    names_in_tests,
    same_output,
    split_check,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")
TIERS = [tier for tier, problem in launch.tier_problems().items() if not problem]


# The weaker tier has its turn with the slow tests.
STRONGEST_FIRST = [*TIERS[:1], *(pytest.param(t, marks=pytest.mark.slow) for t in TIERS[1:])]


@pytest.fixture(scope="module", params=STRONGEST_FIRST)
def grader(request):
    with PythonGrader(tier=request.param, workers=1, memory_mb=256) as made:
        yield made


@pytest.fixture(scope="module")
def hurried(grader):
    """For programs that reach the limit of a call."""
    with PythonGrader(tier=grader.tier, workers=1, test_seconds=0.3, memory_mb=256) as made:
        yield made


def outcomes(grade) -> list[bool]:
    return [test.passed for test in grade.tests]


def test_each_test_counts(grader):
    program = "def add(a, b):\n    return a + b"
    tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", CallTest("add", (1, 2), 3)]
    grade = grader.grade_sync(program, tests)
    assert outcomes(grade) == [True, False, True]
    assert grade.score == pytest.approx(2 / 3)
    assert not grade.passed
    assert grade.tests[1].message == "AssertionError"
    assert grade.metrics["seconds"] > 0


def test_values_keep_their_types(grader):
    # The expected values are written into the test; the program's own are compared inside it too.
    echo = "import collections, enum\ndef f(x): return x\ndef g(x): return collections.Counter(x)"
    cases = [
        "None", "True", "1", "-(2**80)", "0.1", "float('inf')", "'\\ud800 ü'", "b'\\x00'",
        "(1, [2, (3,)], {4: {5}})", "frozenset({(1, 2)})", "1 + 2j", "range(0, 9, 2)", "int",
        "__import__('decimal').Decimal('1.10')", "__import__('fractions').Fraction(1, 3)",
        "__import__('datetime').date(2020, 1, 2)", "bytearray(b'x')",
        "__import__('datetime').time(1, 2)", "{1: 2}.keys()", "{1: 2}.items()",
    ]  # fmt: skip
    tests = [f"r = f({case}); assert r == {case} and type(r) is type({case})" for case in cases]
    tests += ["assert g('aab') == {'a': 2, 'b': 1}", "x = f(float('nan')); assert x != x"]
    grade = grader.grade_sync(echo, tests)
    assert [t.message for t in grade.tests] == [""] * len(tests)


def test_objects_and_callbacks_stay_in_their_process(grader):
    program = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __eq__(self, other): return True
    def __contains__(self, item): return True
def apply(function, value): return function(value)
def double(x): return 2 * x
def total(numbers): return sum(numbers)
def first(numbers): return next(numbers)
def select(items): return items[0]
def peek(function): return function.__globals__
"""
    tests = [
        "s = Stack(); s.push(3); s.push((4,)); assert len(s) == 2 and list(s) == [3, (4,)]",
        "assert s[1] == (4,) and s.items == [3, (4,)]",
        "assert Stack() != 5",
        "assert apply(lambda x: x * 2, 4) == 8",
        "peek(lambda x: x)",
        "try:\n    s[9]\nexcept IndexError:\n    pass\nelse:\n    assert False",
        # The program does not learn the item, so it cannot agree.
        "assert 3 in s and 5 not in s",
        "assert isinstance(s, Stack) and not isinstance(5, Stack)",
        "assert apply(double, 3) == 6",
        "assert total(x for x in [1, 2]) == 3 and first(iter([4])) == 4",
        "assert total({1: 2, 3: 4}.values()) == 6",
        # A module of this name exists, but a module cannot be called.
        "assert select([1, 2]) == 1",
    ]
    grade = grader.grade_sync(program, tests)
    assert [test.message for i, test in enumerate(grade.tests) if i != 4] == [""] * 11
    assert not grade.tests[4].passed


def test_programs_with_input_and_output(grader):
    program = "import sys\nprint(sum(map(int, sys.stdin.read().split())))"
    tests = [StdioTest("1 2\n3", "6"), StdioTest("1", "2"), StdioTest("x", "0")]
    grade = grader.grade_sync(program, tests)
    assert outcomes(grade) == [True, False, False]
    assert grade.tests[1].message == "wrong output"
    assert "ValueError" in grade.tests[2].message
    run = asyncio.run(grader.run("import sys; print(input()); sys.exit(3)", "hello\n"))
    assert (run.stdout, run.exit_code) == ("hello\n", 3)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "ended while it was loaded"),
        ("import os\ndef f(): os._exit(0)", "the program ended"),
        ("def f():\n    while True: pass", "did not return in time"),
        ("def f():\n    return [0] * 10**9", "MemoryError"),
        ("def f(): return f()", "RecursionError"),
        ("x = 1", "NameError"),
    ],
)
def test_program_errors_fail_the_program(hurried, program, reason):
    grade = hurried.grade_sync(program, ["assert f() == 1"])
    assert grade.score == 0
    assert reason in grade.tests[0].message


def test_a_call_that_hangs_fails_one_test(hurried):
    program = "def f(x):\n    while x: pass\n    return x"
    tests = ["assert f(0) == 0", "assert f(1) == 1", "assert f(0) == 0"]
    assert outcomes(hurried.grade_sync(program, tests)) == [True, False, True]


def test_helpers_of_the_tests_cannot_be_replaced(grader):
    helper = "def close(a, b): return abs(a - b) < 1e-6"
    program = "def close(a, b): return True\nclass math:\n    isclose = close\ndef f(): return 7"
    tests = ["assert close(f(), 8)", "assert math.isclose(f(), 8)", "assert close(f(), 7)"]
    assert outcomes(grader.grade_sync(program, tests, setup=helper)) == [False, False, True]
    # By their names, entry points are the program's, also if setup or Python define them.
    own = grader.grade_sync(
        "def sum(a, b): return a + b", ["assert sum(1, 2) == 3"], entry_points=["sum"]
    )
    assert own.passed
    failing = grader.grade_sync("x = 1", ["assert f(n)"], setup="n = Node()")
    assert "Node" in failing.tests[0].message


def test_a_humaneval_check_becomes_one_test_per_assertion(grader):
    check = """
METADATA = {}
def check(candidate):
    n = 3
    assert candidate(n) == 6
    for i in range(2):
        assert candidate(i) == 2 * i
    assert candidate(5) == 11, "a message"
"""
    tests = split_check(check, "double")
    assert len(tests) == 3
    stub = "def double(x):\n    pass"
    program = "def double(x): return 2 * x"
    grade = grader.grade_sync(program, tests, setup=stub, entry_points=["double"])
    assert outcomes(grade) == [True, True, False]
    solution = "import math\ndef double(x): return helper(x)\ndef helper(x): return 2 * x"
    assert names_in_tests(solution, [*tests[:1], "double(helper(1))"]) == ["double", "helper"]
    with pytest.raises(DataValidationError, match="asserts nothing"):
        split_check("def check(candidate): pass", "f")


def test_tests_that_cannot_be_used_are_errors(grader):
    with pytest.raises(DataValidationError, match="none given"):
        grader.grade_sync("", [])
    with pytest.raises(DataValidationError, match=r"tests\[1\]: does not compile"):
        grader.grade_sync("", ["assert 1", "assert ("])
    with pytest.raises(DataValidationError, match="setup: it fails: ZeroDivisionError"):
        grader.grade_sync("", ["assert 1"], setup="1 / 0")
    with pytest.raises(DataValidationError, match="not a plain value"):
        grader.grade_sync("", [CallTest("f", [object()], 1)])
    node = ["class Node: pass\nf(Node())"]
    with pytest.raises(DataValidationError, match="type Node to the program"):
        grader.grade_sync("def f(x): return x", node)
    # Once the program has answered, the value may depend on it.
    later = grader.grade_sync("def f(x): return x", ["f(1)", *node])
    assert "type Node to the program" in later.tests[1].message
    with pytest.raises(ConfigurationError, match="memory"):
        PythonGrader(memory=3)
    with pytest.raises(ConfigurationError, match="did you mean 'landlock'"):
        PythonGrader(tier="landlok")
    assert pickle.loads(pickle.dumps(grader)).settings == grader.settings
    with pytest.raises(ConfigurationError, match="test_seconds"):
        PythonGrader(test_seconds=0)


def test_a_sandbox_that_dies_is_replaced_and_then_an_error(monkeypatch):
    with PythonGrader(workers=1, attempts=2) as grader:
        good = ("def f(): return 1", ["assert f() == 1"])
        assert grader.grade_sync(*good).passed
        worker = grader._pool._workers[0]
        # The sandbox dies while the program runs, and then before the next one.
        with ThreadPoolExecutor() as threads:
            slow = "import time\ndef f():\n    time.sleep(0.5)\n    return 1"
            future = threads.submit(grader.grade_sync, slow, good[1])
            while worker._inside is None:
                pass
            os.kill(worker._inside.process.pid, 9)
            assert future.result().passed
        worker._inside.process.kill()
        assert grader.grade_sync(*good).passed
        # It cannot be made at all: an error of its own kind, not a score.
        worker._inside.stop()

        def fail(*args, **kwargs):
            raise grading_worker.SandboxError("no memory for a sandbox")

        monkeypatch.setattr(grading_worker.launch, "start", fail)
        with pytest.raises(SandboxInfrastructureError, match="2 attempts: no memory"):
            grader.grade_sync(*good)
    with pytest.raises(SandboxInfrastructureError, match="closed"):
        grader.grade_sync(*good)


def test_many_programs_from_many_event_loops(grader):
    async def main(offset):
        tests = [
            grader.grade(f"def f(): return {i}", [f"assert f() == {offset}"]) for i in range(4)
        ]
        return [grade.passed for grade in await asyncio.gather(*tests)]

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda i: asyncio.run(main(i)), range(3)))
    assert results == [[i == j for j in range(4)] for i in range(3)]


def test_a_program_leaves_nothing_for_the_next(grader):
    folders = "['/tmp', '/dev/shm', '/dev', '/var/tmp', '/', '.', '/home/sandbox', '/workspace']"
    write = f"""
def f():
    for folder in {folders}:
        try: open(folder + '/left', 'w').write('x')
        except OSError: pass
    return 1
"""
    read = f"import os\ndef f(): return [d for d in {folders} if os.path.exists(d + '/left')]"
    assert grader.grade_sync(write, ["assert f() == 1"]).passed
    assert grader.grade_sync(read, ["assert f() == []"]).passed


_PARENT = """
import sys
from tinker_cookbook.sandbox import PythonGrader
grader = PythonGrader(tier=sys.argv[1], workers=1)
grader.grade_sync("x = 1", ["assert True"])
print(flush=True)
grader.grade_sync("import time\\ndef f(): time.sleep(50)", ["assert f()"])
"""


def _descendants(pid: int) -> set[int]:
    """Processes below one, of which the kernel lists the children."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | _descendants(child)
    return found


def test_kill_9_of_the_program_ends_what_it_grades(grader):
    program = subprocess.Popen(
        [sys.executable, "-c", _PARENT, grader.tier], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    program.stdout.readline()
    deadline = time.monotonic() + 60
    while len(running := _descendants(program.pid)) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(running) >= 5  # the zygote, and for the program and its tests two each
    program.kill()
    program.wait()
    while any(map(_is_alive, running)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in running if _is_alive(pid)] == []


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1.50", "1.5", True),
        ("0.1000000000001", "0.1", True),
        ("0.11", "0.1", False),
        ("0.333333 1e-7", "0.333333333333 0.0", True),
        ("1.99999999 2", "2 2.0", True),
        ("123456789.1 ", "123456789.0", True),
        ("1000000.4", "1000000", False),
        ("1e1", "10", True),
        ("12345678901234567891", "1.2345678901234567e19", True),
        ("9007199254740993", "9007199254740992", False),
        ("nan", "1", False),
        ("nan", "nan", True),
        ("inf", "5", False),
        ("1\n2", "1 2", False),
        ("", "1", False),
        ("1_0", "10", False),
        ("5", "inf", False),
        ("+007 -0", "7 0", True),
        ("-7", "7", False),
        ("1" * 5000, "3", False),
        ("0" + "1" * 5000, "1" * 5000, True),
    ],
)
def test_outputs_are_compared_by_words_and_numbers(printed, expected, same):
    assert same_output(printed, expected) is same
