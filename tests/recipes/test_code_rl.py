"""Programming tasks of known formats, their grading, and the recipe.

About 6 s; the slow test another 20 s.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import RecipeRuns

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.recipes.code_rl import code_grading
from tinker_cookbook.recipes.code_rl.code_env import DeepcoderDatasetBuilder
from tinker_cookbook.recipes.code_rl.code_grading import (
    extract_code_from_model,
    postprocess_lcb_sample,
    sandbox_check_correctness,
    taco_to_lcb_format,
)
from tinker_cookbook.recipes.code_rl.deepcoder_tool import (
    DeepcoderReward,
    DeepcoderTask,
    DeepcoderTool,
)
from tinker_cookbook.recipes.code_rl.tasks import load_tasks, one_line_tasks, task_of
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.sandbox import (
    SandboxBackend,
    SandboxInfrastructureError,
    SandboxUnavailableError,
    available_tier,
)
from tinker_cookbook.tool_use import ToolInput


@pytest.fixture(autouse=True, scope="module")
def _sandbox():
    try:
        available_tier()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


ADD = {"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}
SUM = {"input": "1 2\n", "output": "3\n", "testtype": "stdin_stdout", "metadata": {}}


def check(tests, code, backend=None):
    return asyncio.run(sandbox_check_correctness(tests, code, 6, backend))


def answer(text: str) -> list[Message]:
    return [{"role": "user", "content": "…"}, {"role": "assistant", "content": text}]


def test_gold_programs_of_mbpp_pass_and_those_of_others_do_not(shared_dir):
    mbpp = shared_dir / "data" / "mbpp" / "mbpp.jsonl"
    tasks = load_tasks("mbpp", "train", str(mbpp))[:20]
    programs = [json.loads(line)["code"] for line in mbpp.read_text().splitlines()[:20]]

    async def rewards(order):
        graded = (
            DeepcoderReward(task)(answer(f"```python\n{programs[i]}\n```"))
            for task, i in zip(tasks, order, strict=True)
        )
        return [reward for reward, _ in await asyncio.gather(*graded)]

    own = list(range(20))
    assert asyncio.run(rewards(own)) == [1.0] * 20
    assert asyncio.run(rewards(own[1:] + own[:1])) == [0.0] * 20


@pytest.mark.parametrize(("code", "correct"), [("def sum(a, b): return a + b", 1.0), ("pass", 0.0)])
def test_names_in_tests_are_the_program_s(code, correct):
    """``sum`` is the program's, not the built-in function."""
    row = {"text": "Add.", "code": "def sum(a, b): return b + a", "test_list": ["assert sum(1, 2)"]}
    reward, _ = asyncio.run(DeepcoderReward(task_of(row, ""))(answer(f"```python\n{code}\n```")))
    assert reward == correct


@pytest.mark.parametrize(
    ("tests", "right", "wrong"),
    [
        ([ADD], "def add(a, b): return a + b", "def add(a, b): return a - b"),
        (
            [ADD],
            "class Solution:\n    def add(self, a, b): return a + b",
            "class Solution:\n    def add(self, a, b): return '3'",
        ),
        ([SUM], "print(sum(map(int, input().split())))", "print(input())"),
    ],
    ids=["function", "method", "program"],
)
def test_a_right_program_passes_and_a_wrong_one_does_not(tests, right, wrong):
    assert check(tests, right, SandboxBackend.LOCAL)[0]
    passed, details = check(tests, wrong)
    assert not passed
    assert details["num_passed"] == 0
    assert check(tests, "import os; os._exit(0)")[0] is False


def test_a_wrong_program_learns_no_expected_output():
    test = {**ADD, "output": "987654"}
    _, details = check([test], "def add(a, b): return a + b")
    assert "987654" not in json.dumps(details)


class FusionServer:
    """Runs the program that is sent to SandboxFusion, as its server does, in a bare process."""

    def __init__(self, down: bool = False) -> None:
        self.down = down

    async def run(self, code, files, timeout, language="python"):
        if self.down:
            return False, {"error": "HTTP 502"}
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                Path(folder, name).write_text(text)
            assert '"output"' not in files["job.json"]
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-c", code],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        return True, {"run_result": {"stdout": done.stdout}}


def test_a_remote_sandbox_gives_the_same_verdicts(monkeypatch):
    server = FusionServer()
    monkeypatch.setattr(code_grading, "_sandbox_fusion", lambda: server)
    fusion = SandboxBackend.SANDBOXFUSION
    assert check([ADD, SUM], "def add(a, b): return a + b\nprint(3)", fusion)[0]
    passed, details = check([ADD, SUM], "def add(a, b): return a + b\nprint(4)", fusion)
    assert not passed
    assert details["num_passed"] == 1
    assert not check([ADD], "import os; os._exit(0)", fusion)[0]
    with pytest.raises(ConfigurationError, match="sandbox_backend=sandboxfusion"):
        check([{"input": "assert True", "output": "", "testtype": "code"}], "", fusion)
    numbers = "\n".join(map(str, range(60_000)))  # 350 kB
    long = [{**SUM, "output": numbers}, SUM]
    passed, details = check(long, "print(*range(60_000), sep='\\n')", fusion)
    assert details["failures"] == [{"test": 1, "message": "wrong output"}]
    _, details = check([SUM], "import sys; sys.stdout.buffer.write(b'\\xff' * 300_000)", fusion)
    assert details["failures"][0]["message"] == "it printed too much"
    # A server that is down says nothing about the program, so there is no reward.
    server.down = True
    task = DeepcoderTask("…", [ADD])
    with pytest.raises(SandboxInfrastructureError, match="HTTP 502"):
        asyncio.run(DeepcoderReward(task, fusion)(answer("```\nx = 1\n```")))


def test_the_reward_follows_the_formula():
    task = DeepcoderTask("…", [ADD, {**ADD, "input": "2\n2", "output": "4"}])
    half = "```python\ndef add(a, b): return 3\n```"

    def reward(text, **settings):
        return asyncio.run(DeepcoderReward(task, **settings)(answer(text)))

    assert reward("I do not know.") == (
        -0.1,
        {"format": 0.0, "correct": 0.0, "tests_passed": 0.0},
    )
    assert reward(half) == (0.0, {"format": 1.0, "correct": 0.0, "tests_passed": 0.5})
    assert reward(half, partial_credit=True)[0] == 0.5
    assert reward("def add(a, b): return a + b", code_block=False)[0] == 1.0


def test_the_tool_runs_public_tests_only():
    hidden = {**ADD, "input": "2\n2", "output": "5"}  # no sum passes it
    task = DeepcoderTask("Add. Example: 1\n2 gives 3", [ADD, hidden])
    assert task.visible_tests() == [ADD]
    tool = DeepcoderTool(task).check_solution
    call = ToolInput(arguments={"code": "def add(a, b): return a + b"}, call_id="1")
    result = asyncio.run(tool.run(call))
    seen = json.loads(get_text_content(result.messages[0]))
    assert seen == {
        "passed": True,
        "details": {"num_tests": 1, "num_passed": 1, "program_error": "", "failures": []},
    }
    assert DeepcoderTask("Add.", [ADD]).visible_tests() == []
    # The wait for a free worker of the grader does not count.
    assert tool.settings.timeout_seconds is None


def test_rows_of_deepcoder_are_read():
    lcb = {"question": "Add.", "tests": json.dumps([ADD]), "starter_code": "def add(a, b):"}
    task = task_of(lcb, "row 0")
    assert task.tests == [ADD]
    assert "def add(a, b):" in task.problem
    taco = {
        "problem": "Add.",
        "ground_truth": {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"},
    }
    assert task_of(taco, "row 0").tests == [{**ADD, "input": [1, 2], "output": 3}]
    assert check(task_of(taco, "row 0").tests, "def add(a, b): return a + b")[0]
    named = {
        "question": "Add.",
        "tests": [{"input": "1\n2", "output": "3", "testtype": "functional"}],
    }
    named["metadata"] = {"func_name": "add"}
    assert task_of(named, "row 0").tests == [ADD]
    assert taco_to_lcb_format({"inputs": ["1 2\n"], "outputs": ["3\n"]}) == [SUM]
    assert json.loads(postprocess_lcb_sample([ADD])["input_output"]) == {
        "inputs": ["1\n2"],
        "outputs": ["3"],
        "fn_name": "add",
    }


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "Add."}, "no tests"),
        ({"question": "Add.", "tests": "[{"}, "Expecting"),
        ({"tests": [ADD]}, "no text of a problem"),
        ({"text": "Add.", "test_list": []}, "index"),
        ([1], "got list"),
    ],
)
def test_a_bad_row_is_named(row, reason):
    with pytest.raises(DataFormatError, match=rf"file.jsonl:3: .*{reason}"):
        task_of(row, "file.jsonl:3")


PROGRAM = "def f():\n    return 1\n"
FENCES = [
    f"```python\n{PROGRAM}```",
    f"Sure!\n\n```Python\n{PROGRAM}```\nDone.",
    f"```\n{PROGRAM}```",
    f"```solution.py\n{PROGRAM}```",
    f'```python title="a.py"\n{PROGRAM}```',
    f"```{{python}}\n{PROGRAM}```",
    f"~~~python\n{PROGRAM}~~~",
    f"~~~python\n{PROGRAM}# ```\n~~~",
    f"````python\n{PROGRAM}````",
    f"```python\n{PROGRAM}```".replace("\n", "\r\n"),
    f"```python\n{PROGRAM}",
    f"```python\n{PROGRAM.rstrip()}```",
    f"The code: ```python\n{PROGRAM}```",
    f"Call ```f```.\n```python\n{PROGRAM}```",
    "1. Code:\n\n   ```python\n   def f():\n       return 1\n   ```\n",
    "\t```python\n\tdef f():\n\t    return 1\n\t```",
    "```python\n    def f():\n        return 1\n```",
    f"```python\n{PROGRAM}```\nOutput:\n```\n6\n```",
    f"```\n3\n1 2 3\n```\n```python\n{PROGRAM}```",
    f"```python\nx = 1\n```\nBetter:\n```\n{PROGRAM}```",
    f"```python\n{PROGRAM}```\nOr:\n```python\ndef f(",
    f"```python\n{PROGRAM}```\n```python\n```",
    f"```cpp\nint f();\n```\n```python\n{PROGRAM}```",
    '```python\ndef f():\n    """As:\n\n    ```py\n    f()\n    ```\n    """\n    return 1\n```',
    "```python\ndef f():\n    return len('```') - 2\n```",
]


@pytest.mark.parametrize("text", FENCES)
def test_a_program_is_found_in_every_fence(text):
    names: dict[str, Any] = {}
    exec(extract_code_from_model(text) or "", names)
    assert names["f"]() == 1


def test_which_block_is_the_program():
    text = "```python\nx = 1\n```\nBetter:\n```\nx = 2\n```"
    assert extract_code_from_model(text) == "x = 2"
    assert extract_code_from_model("no code") is None
    used = f"```python\n{PROGRAM}```\nUse it:\n```python\nprint(f())\n```"
    assert extract_code_from_model(used, ["f"]) == PROGRAM.strip()
    assert extract_code_from_model(used) == "print(f())"


STARTER = [
    "return Counter(s).most_common(1)[0][0]",
    "return max(defaultdict(int, {c: s.count(c) for c in s}).items(), key=lambda p: p[1])[0]",
    "heap: List[Tuple[int, str]] = []\n        for c in s: heappush(heap, (-s.count(c), c))\n"
    "        return heappop(heap)[1]",
    "return sorted(s)[bisect_left(sorted(s), 'b')] if math.sqrt(4) == sqrt(4) else inf",
    "best: Optional[str] = reduce(lambda a, b: a if s.count(a) >= s.count(b) else b, s)\n"
    "        return best",
    "@cache\n        def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\n"
    "        return 'b' if depth(5000) == 5000 else ''",
    "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\n"
    "        return 'b' if depth(50_000) == 50_000 else ''",
    "return 'b' if pow(3, -1, 7) == 5 and sum([1]) == abs(-1) else ''",
    "import numpy as np\n        return str(np.array(list(s))[2])",
]


def test_solutions_may_use_what_starter_code_presupposes():
    """LiveCodeBench runs them behind imports, with a high limit of recursion."""
    row = {
        "question": "The most frequent letter.",
        "starter_code": "class Solution:\n    def f(self, s: str) -> str:\n",
        "tests": [{"input": '"abbc"', "output": '"b"', "testtype": "functional"}],
        "metadata": {"func_name": "f"},
    }
    task = task_of(row, "row 0")

    async def rewards(bodies):
        head = "class Solution:\n    def f(self, s: str) -> Optional[str]:\n        "
        graded = (DeepcoderReward(task)(answer(f"```python\n{head}{body}\n```")) for body in bodies)
        return [reward for reward, _ in await asyncio.gather(*graded)]

    assert asyncio.run(rewards(STARTER)) == [1.0] * len(STARTER)
    assert asyncio.run(rewards(["return Counter(s).most_common(1)", "return gcd"])) == [0.0, 0.0]
    # A method has the name of an imported function.
    for name in ("merge", "search", "shuffle", "add"):
        named = {**row["tests"][0], "input": '"b"', "metadata": {"func_name": name}}
        program = f"class Solution:\n    def {name}(self, s): return s"
        assert check([named], program)[0]
        assert not check([named], program + "[1:]")[0]
    program = f"class Solution:\n    def f(self, s: str) -> Optional[str]:\n        {STARTER[0]}"
    assert check(task.tests, program)[0]
    # A function that the program does not define is none of its own, though it is imported.
    named = {"input": "4\n6", "output": "2", "testtype": "functional",
             "metadata": {"func_name": "gcd"}}  # fmt: skip
    for program in ("x = 1", "class Solution: pass", "print(gcd(4, 6))"):
        passed, details = check([named], program)
        assert (passed, details["program_error"]) == (False, "the program does not define gcd")
    for program in (
        "def gcd(a, b): return math.gcd(a, b)",
        "from math import gcd",
        "gcd = gcd",
        "class Solution:\n    def gcd(self, a, b): return gcd(a, b)",
        "class Solution: pass\nsetattr(Solution, 'gcd', lambda self, a, b: 2)",
    ):
        assert check([named], program)[0], program
    own = {"problem": "gcd", "tests": [{"input": "assert gcd(4, 6) == 2", "testtype": "code"}]}
    right = "import math\ngcd = math.gcd"
    for code, reward in (("def gcd(a, b): return 0", 0.0), (right, 1.0), ("x = 1", 0.0)):
        text = answer(f"```python\n{code}\n```")
        assert asyncio.run(DeepcoderReward(task_of(own, "row 0"))(text))[0] == reward
    stdio = task_of({"question": "Sum.", "tests": [SUM]}, "row 1")
    text = answer("```python\nprint(sum(map(int, stdin.readline().split())))\n```")
    assert asyncio.run(DeepcoderReward(stdio)(text))[0] == 1.0


def test_one_line_functions_can_be_solved():
    tasks = one_line_tasks()
    assert len({task.problem for task in tasks}) == len(tasks) == 108
    solutions = {
        "adds 3 to x": "x + 3",
        "subtracts x from 3": "3 - x",
        "adds 3 to the square of x": "x ** 2 + 3",
    }
    for text, code in solutions.items():
        (task,) = (t for t in tasks if re.search(rf"that {text}\.", t.problem))
        assert check(task.tests, f"def f(x):\n    return {code}")[0]
        assert not check(task.tests, "def f(x):\n    return x")[0]


def test_an_unknown_dataset_is_refused():
    settings = {"model_name_for_tokenizer": "m", "batch_size": 1, "group_size": 2}
    with pytest.raises(ConfigurationError, match="did you mean 'deepcoder'"):
        DeepcoderDatasetBuilder(**settings, dataset="deepcoders").check()


@pytest.mark.slow
def test_the_recipe_trains(tmp_path, stories_model):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"question": "Add.", "tests": [ADD]}) + "\n")
    options = f"dataset_path={tasks} group_size=2 groups_per_batch=1 max_steps=1"
    runs = RecipeRuns(tmp_path, stories_model, "recipes.code_rl.train", options)
    done = runs.run("run")
    assert done.returncode == 0, done.stderr[-2000:]
    assert [row["step"] for row in runs.rows("run")] == [1]
    # A chat format without tools is refused before anything is sampled.
    refused = runs.run("tools", "raise", "max_turns=2")
    assert refused.returncode == 1
    assert "role_colon: this chat format declares no tools" in refused.stderr
