"""Right programs of every style, and wrong ones that look like them, in both tiers."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tinker_cookbook.sandbox import CallTest, PythonGrader, StdioTest, launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")
TIERS = [tier for tier, problem in launch.tier_problems().items() if not problem]
STDIN, STDOUT = "3\n1 2 40\n", "43\n"


def read_programs() -> tuple[dict[str, str], dict[str, tuple[str, list[str]]]]:
    """Programs that read input, and programs with their tests, by name."""
    text = (Path(__file__).parent / "right_programs.txt").read_text(encoding="utf-8")
    _, stdio, tested = (part.split("\n### ") for part in text.split("\n=== "))
    pieces = [program.partition("\n")[::2] for program in stdio[1:]]
    programs = {name: code.lstrip("\n") for name, code in pieces}
    found = {}
    for name, rest in (program.partition("\n")[::2] for program in tested[1:]):
        code, _, tests = rest.partition("\n---\n")
        found[name] = code, [line.replace("\\n", "\n") for line in tests.splitlines() if line]
    return programs, found


STDIO, TESTED = read_programs()


@pytest.fixture(scope="module", params=TIERS)
def grader(request):
    with PythonGrader(tier=request.param, workers=3) as made:
        yield made


def failures(grader, cases) -> dict[str, str]:
    """Returns why programs failed; ``cases`` has the program and the tests of each name."""

    async def grade_all():
        return await asyncio.gather(*(grader.grade(*case) for case in cases.values()))

    grades = asyncio.run(grade_all())
    messages = {
        name: [(test.message, case) for test, case in zip(grade.tests, cases[name][1], strict=True)]
        for name, grade in zip(cases, grades, strict=True)
    }
    return {
        name: f"{case}: {message}"
        for name, tests in messages.items()
        for message, case in tests
        if message
    }


def test_right_programs_pass(grader):
    assert len(STDIO) + len(TESTED) >= 150
    stdio = {name: (code, [StdioTest(STDIN, STDOUT)]) for name, code in STDIO.items()}
    failed = failures(grader, {**stdio, **TESTED})
    if grader.tier == "landlock":
        failed = {name: why for name, why in failed.items() if not name.endswith("(files)")}
    assert failed == {}


WRONG_STDIO = [
    "print(43)\n1 / 0",
    "print(43)\nexit(1)",
    "import sys\nprint(43)\nsys.exit('43')",
    "import sys\nprint(43, file=sys.stderr)",
    "import os\nprint(43)\nos._exit(0)",  # it ends before its output is written
    "print(sum(map(int, open(0).read().split())))",
    "input()\nprint(max(map(int, input().split())))",
    "input()\nprint(*input().split(), sep='+')",
    "print('4 3')",
    "print(43, 43)",
    "print(43)\nprint(43)",
    "print([43])",
    "print('Answer: 43')",
    "print('4_3')",
    "print(43.00001)",
    "print('０43')",
    "print('-43')",
    "print(bin(43))",
    "print('nan')",
    "import sys\nsys.stdout = open('/dev/null', 'w')\nprint(43)",
    "import sys\nsys.stdout = None\nprint(43)",
    "import sys\nsys.stdout.detach()\nprint(43)",
    "import threading\nthreading.Thread(target=exec, args=('1 / 0; print(43)',)).start()",
    "import threading, time\nthreading.Timer(5, print, [43]).daemon = True\ntime.sleep(0)",
    "class A:\n    def __del__(self): print(44)\na = A()",
    "def main(): print(43)",
    "if __name__ == 'solution': print(43)",
    "print 43",
    "print(Counter([43]))",
    "def f(n): return f(n - 1) + 1\nprint(f(10**5))",
    "open('/dev/fd/9', 'w').write('43')",
]
_ANY = """
class Any:
    def __init__(self, *a): pass
    def __sub__(self, o): return 0
    __rsub__ = __mod__ = __xor__ = __abs__ = __round__ = __sub__
    def __eq__(self, o): return True
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __truediv__(self, o): return 1
    __rtruediv__ = __truediv__
    def __float__(self): return 1.0
    def __int__(self): return 1
    __index__ = __hash__ = __len__ = __int__
    def __iter__(self): return iter([Any()])
    def __enter__(self): return self
    def __exit__(self, *e): return True
    def __call__(self, *a): return Any()
    __class__ = property(lambda self: int)
def solve(*a): return Any()
async def later(): return Any()
ANSWER = Any()
"""
WRONG_TESTED = {
    _ANY: [
        "assert solve() == 7919",
        "assert not solve() != 7919",
        "assert 7919 == Any()",
        "assert ANSWER == 7919",
        "assert abs(solve() - 7919) < 1e-6",
        "assert abs(7919 - solve()) < 1e-6",
        "assert 7918 < solve() < 7920",
        "assert solve() >= 7919",
        "assert solve() / 7919 == 1",
        "assert 7919 / Any() == 1",
        "assert solve() % 7919 == 0",
        "assert not solve() ^ {7919}",
        "import math; assert math.isclose(solve(), 7919)",
        "assert int(solve()) == 7919",
        "assert [solve()] == [7919]",
        "assert {'a': solve()} == {'a': 7919}",
        "assert 7919 in solve()",
        "assert solve() in [7919]",
        "assert max(solve(), 7919) == 7919",
        "with Any() as a: assert solve() == 7919",
        "with Any() as a: assert False",
        "with Any() as a: raise ValueError",
        "import asyncio; assert asyncio.run(later()) == 7919",
        "assert solve()() == 7919",
        "assert isinstance(solve(), int)",
        "assert round(solve(), 2) == 7919",
        CallTest("solve", [], 7919),
        CallTest("solve", [], 1.0),
        CallTest("solve", [], [7919]),
    ],
    "def f(x): return x": [
        CallTest("f", [0.30001], 0.3),
        CallTest("f", [3.001], 3),
        CallTest("f", [1_000_000.4], 1_000_000),
        CallTest("f", [10**20 + 1], 10**20),
        CallTest("f", [float("nan")], 1.0),
        CallTest("f", [float("inf")], 1e300),
        CallTest("f", [[1, 2, 3]], [1, 2]),
        CallTest("f", [[0.3, 0.2]], [0.3, 0.21]),
        CallTest("f", [{"a": 0.3}], {"a": 0.31}),
        CallTest("f", [{"a": 1}], {"b": 1}),
        CallTest("f", ["3"], 3),
        CallTest("f", ["0.3"], 0.3),
        CallTest("f", [None], 0.0),
        CallTest("f", [{1, 2}], [1, 2]),
    ],
    "class C:\n    def get(self): raise ValueError\n    def __enter__(self): return self\n"
    "    def __exit__(self, *e): return True\ncount = 1": [
        "with C() as c:\n    x = c.get()\n    assert x == 5",
        "assert count == 2",
        "count + 'a'",
        "assert C() == C()",
        "assert C() < C()",
        "assert C() + C() == 2",
    ],
    # A value that becomes a function, in place of a built-in one.
    "class Late: pass\nabs = round = Late()\ndef solve():\n"
    "    Late.__call__ = lambda *a: 0\n    return 5": [
        "assert abs(solve() - 7919) < 1e-6",
        "assert abs(solve() - 7919) < 1e-6",
        "assert round(solve() - 7919) == 0",
    ],
    # The end of an iterator, which would end the loop of the test.
    "def solve(x): raise StopIteration\nclass S:\n    __getitem__ = solve": [
        "assert all(map(lambda x: solve(x) == 7919, [1, 2]))",
        "assert [x for x in map(solve, [1])] == []",
        "assert list(map(S().__getitem__, [1])) == []",
    ],
}


def test_wrong_programs_fail(grader):
    stdio = {code: (code, [StdioTest(STDIN, STDOUT)]) for code in WRONG_STDIO}
    cases = {**stdio, **{code: (code, tests) for code, tests in WRONG_TESTED.items()}}

    async def grade_all():
        return await asyncio.gather(*(grader.grade(*case) for case in cases.values()))

    for (code, tests), grade in zip(cases.values(), asyncio.run(grade_all()), strict=True):
        passed = [case for case, test in zip(tests, grade.tests, strict=True) if test.passed]
        assert passed == [], code


@pytest.mark.slow
def test_right_programs_are_right_for_plain_python(tmp_path):
    """The reference: an interpreter with pipes, and tests behind the program."""

    def run(case) -> str:
        name, code, text = case
        folder = tmp_path / str(abs(hash(name)))
        folder.mkdir()
        (folder / "solution.py").write_text(code, encoding="utf-8")
        done = subprocess.run(
            ["bash", "-c", f"ulimit -s 65536; {sys.executable} solution.py"],
            env={**os.environ, "PYTHONINTMAXSTRDIGITS": "0"},
            input=text, capture_output=True, text=True, cwd=folder,
        )  # fmt: skip
        printed = done.stdout.strip()
        right = not done.returncode and (math.isclose(float(printed), 43) if text else not printed)
        return "" if right else f"{name}: {done.stdout[-200:]} {done.stderr[-500:]}"

    cases = [(name, code, STDIN) for name, code in STDIO.items()]
    for name, (code, tests) in TESTED.items():
        # As a module, and with its output to nowhere, as the grader runs it.
        head = "import asyncio, io, sys\nsys.stdout, __name__ = io.StringIO(), 'solution'\n"
        lines = [f"exec({test!r})" for test in tests]
        cases.append((name, "\n".join([head + code, *lines]), ""))
    with ThreadPoolExecutor(2) as pool:
        assert [why for why in pool.map(run, cases) if why] == []
