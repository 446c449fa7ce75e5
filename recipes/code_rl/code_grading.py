"""Grades programs with tests, on this machine, on a SandboxFusion server or on Modal.

A test is a dict ``{"input", "output", "testtype", "metadata"}``, as in LiveCodeBench and DeepCoder:

- ``stdin_stdout``: the program reads ``input`` and must print ``output``;
- ``functional``: ``metadata["func_name"]``, also a method of a class ``Solution``, is called with
  the arguments in ``input`` (JSON, one on a line) and must return ``output`` (JSON);
- ``code``: ``input`` is Python code, such as ``assert add(1, 2) == 3`` (on this machine only).

Expected outputs stay in this process on every backend: a program gets only the inputs, and its
outputs are compared here.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.grading.texts import split_thinking
from tinker_cookbook.recipes.code_rl.lcb_utils import LCB_PREAMBLE
from tinker_cookbook.sandbox import (
    ModalSandboxPool,
    SandboxBackend,
    SandboxFusionClient,
    SandboxInfrastructureError,
)
from tinker_cookbook.sandbox.grading import (
    CallTest,
    Grade,
    GradedTest,
    PythonGrader,
    StdioTest,
    Test,
    same_output,
)
from tinker_cookbook.sandbox.inside.values import same_value
from tinker_cookbook.sandbox.program_text import binds, extract_program, with_preamble

TEST_TYPES = ("stdin_stdout", "functional", "code")

_MAX_MESSAGE = 300
_OUTPUT_CHARACTERS = 200_000
_ANSWER_BYTES = 64 << 20


def extract_code_from_model(model_response: str, names: Sequence[str] = ()) -> str | None:
    """Returns the program in an answer, or ``None`` if it has no fenced code block.

    It is the last block of Python, which defines one of ``names`` if any does: see
    ``tinker_cookbook.sandbox.program_text.extract_program``.
    """
    code = extract_program(split_thinking(model_response)[0], names)
    return None if code is None else code.strip()


def postprocess_lcb_sample(sample: list[dict[str, Any]]) -> dict[str, str]:
    """Returns tests in the one-object form of LiveCodeBench's test runner.

    Args:
        sample: Tests of one type.

    Returns:
        ``{"input_output": TEXT}``, where the text is JSON with ``inputs``, ``outputs`` and, for
        ``functional`` tests, ``fn_name``.
    """
    merged: dict[str, Any] = {
        "inputs": [test["input"] for test in sample],
        "outputs": [test["output"] for test in sample],
    }
    if sample[0].get("testtype") == "functional":
        merged["fn_name"] = _function_name(sample[0])
    return {"input_output": json.dumps(merged)}


def taco_to_lcb_format(tests: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the tests of ``{"inputs": […], "outputs": […], "fn_name"?}`` (TACO, APPS)."""
    inputs, outputs = tests.get("inputs", []), tests.get("outputs", [])
    converted: list[dict[str, Any]] = []
    for i in range(max(len(inputs), len(outputs))):
        # A list that is too short belongs to all tests, as in the data set.
        given = inputs[i] if i < len(inputs) else next(iter(inputs), "")
        expected = outputs[i] if i < len(outputs) else next(iter(outputs), "")
        # The data set wraps results in a list.
        if isinstance(expected, list):
            expected = expected[0] if expected else ""
        test = {"input": given, "output": expected, "testtype": "stdin_stdout", "metadata": {}}
        if "fn_name" in tests:
            test |= {"testtype": "functional", "metadata": {"func_name": tests["fn_name"]}}
        converted.append(test)
    return converted


def as_grader_test(test: dict[str, Any]) -> Test:
    """Returns a test in the form of ``tinker_cookbook.sandbox.PythonGrader``.

    Raises:
        DataValidationError: Its type is unknown, or its arguments are no JSON.
    """
    kind = test.get("testtype") or "stdin_stdout"
    if kind == "code":
        return str(test["input"])
    if kind == "stdin_stdout":
        return StdioTest(_text(test["input"]), _text(test["output"]))
    if kind != "functional":
        raise DataValidationError(
            f"testtype: got {kind!r}, expected one of {', '.join(TEST_TYPES)}"
        )
    given, expected = test["input"], test["output"]
    try:
        # LiveCodeBench writes one JSON value on a line; TACO has the values themselves.
        if isinstance(given, str):
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
        if isinstance(expected, str) and isinstance(test["input"], str):
            expected = json.loads(expected)
    except ValueError as error:
        raise DataValidationError(
            f"input and output of a functional test: got {test['input']!r} and "
            f"{test['output']!r}, expected JSON values ({error})"
        ) from None
    return CallTest(_function_name(test), given, expected)


async def grade_solution(
    sample: Sequence[dict[str, Any]],
    generation: str,
    timeout: float = 6,
    backend: SandboxBackend | None = None,
    *,
    preamble: str = "",
    entry_points: Sequence[str] | None = None,
) -> Grade:
    """Runs tests against a program.

    Args:
        sample: Tests, see the module.
        generation: The program.
        timeout: Seconds of a test.
        backend: Where the program runs; default: this machine.
        preamble: Code that runs before the program only, unless a test has the type ``code``. A
            functional test of a name that it imports fails unless the program defines the name.
        entry_points: Names in tests of the type ``code`` that refer to the program; see
            ``tinker_cookbook.sandbox.PythonGrader.grade``.

    Returns:
        The result of each test, and the share of tests that passed.

    Raises:
        SandboxInfrastructureError: Grading failed for a reason outside the program.
    """
    if not sample:
        raise DataValidationError("tests: got none, expected at least one")
    tests = [as_grader_test(test) for test in sample]
    backend = SandboxBackend(backend or SandboxBackend.LOCAL)
    if any(isinstance(test, str) for test in tests):
        preamble = ""  # a test could call an imported function that the program does not define
    called = {test.function for test in tests if isinstance(test, CallTest)}
    if missing := sorted(name for name in called if preamble and not binds(generation, name)):
        message = f"the program does not define {', '.join(missing)}"
        return Grade(tuple(GradedTest(False, message, 0.0) for _ in tests), message)
    program = with_preamble(preamble, generation)
    # Each test may use its whole time, and the sandbox needs some to start.
    total = (timeout + 1) * len(tests) + 5
    if backend == SandboxBackend.LOCAL:
        return await _local_grader(float(timeout)).grade(
            program, tests, entry_points=entry_points, total_seconds=total
        )
    return await _grade_remotely(tests, program, timeout, total, backend)


async def sandbox_check_correctness(
    sample: list[dict[str, Any]],
    generation: str,
    timeout: int = 6,
    backend: SandboxBackend | None = None,
) -> tuple[bool, dict[str, Any]]:
    """Returns whether a program passes all tests, and details; arguments as ``grade_solution``.

    The program runs behind the imports of LiveCodeBench, which starter code presupposes.
    The details are ``num_tests``, ``num_passed``, ``program_error`` and the ``failures`` with the
    index and the message of each; they contain no expected output.
    """
    grade = await grade_solution(sample, generation, timeout, backend, preamble=LCB_PREAMBLE)
    return grade.passed, describe(grade)


def describe(grade: Grade, max_failures: int = 3) -> dict[str, Any]:
    """Returns what a model or a person may read about a grade: no expected output is in it."""
    failures = [
        {"test": i, "message": test.message[:_MAX_MESSAGE]}
        for i, test in enumerate(grade.tests)
        if not test.passed
    ]
    return {
        "num_tests": len(grade.tests),
        "num_passed": len(grade.tests) - len(failures),
        "program_error": grade.program_error[:_MAX_MESSAGE],
        "failures": failures[:max_failures],
    }


@cache
def _local_grader(timeout: float) -> PythonGrader:
    # One pool for all environments: its sandboxes are warm. It ends with the program. NumPy can be
    # imported, as where LiveCodeBench runs programs.
    found = importlib.util.find_spec("numpy")
    folders = [] if found is None or found.origin is None else [Path(found.origin).parents[1]]
    return PythonGrader(test_seconds=timeout, python_path=tuple(map(str, folders)))


def _function_name(test: dict[str, Any]) -> str:
    name = (test.get("metadata") or {}).get("func_name")
    if not name:
        raise DataValidationError(
            "metadata.func_name: got none, expected the name of the function that a functional "
            "test calls"
        )
    return str(name)


def _text(value: Any) -> str:
    """Standard input or output; TACO has lists of lines."""
    return value if isinstance(value, str) else "\n".join(map(str, value))


# Runs in the sandbox. It knows inputs only, so that a program that takes it over learns nothing:
# a result counts if it equals the expected one, which stays outside.
_DRIVER = """
import json, subprocess, sys
job = json.load(open("job.json"))
results = []
for item in job["items"]:
    try:
        done = subprocess.run([sys.executable, item["program"]], input=item["stdin"], text=True,
                              encoding="utf-8", errors="replace", capture_output=True,
                              timeout=job["timeout"])
        results.append([done.returncode, done.stdout[-job["most"]:], done.stderr[-300:],
                        len(done.stdout) > job["most"]])
    except subprocess.TimeoutExpired:
        results.append([None, "", "it took longer than %s s" % job["timeout"], False])
    except Exception as error:
        results.append([None, "", "%s: %s" % (type(error).__name__, error), False])
print()
print(json.dumps(results))
"""
_CALL = """
import json, sys
sys.path.insert(0, ".")
job = json.load(sys.stdin)
import code_to_grade as program
solution, name = getattr(program, "Solution", None), job["function"]
target = getattr(solution() if hasattr(solution, name) else program, name)
result = target(*job["arguments"])
print()
print(json.dumps(result))
"""


async def _grade_remotely(
    tests: Sequence[Test], program: str, timeout: float, total: float, backend: SandboxBackend
) -> Grade:
    items = []
    # One limit for all outputs, so that a program cannot infer the length of an expected one.
    most = _OUTPUT_CHARACTERS
    for test in tests:
        if isinstance(test, str):
            raise ConfigurationError(
                f"sandbox_backend={backend}: got a test that is Python code, expected "
                "stdin_stdout or functional tests; sandbox_backend=local runs all three"
            )
        if isinstance(test, StdioTest):
            items.append({"program": "code_to_grade.py", "stdin": test.stdin})
            most = max(most, 2 * len(test.stdout))
        else:
            call = {"function": test.function, "arguments": list(test.arguments)}
            items.append({"program": "call.py", "stdin": json.dumps(call)})
            most = max(most, 2 * len(json.dumps(test.expected)))
    files = {
        "code_to_grade.py": program,
        "call.py": _CALL,
        "job.json": json.dumps({"items": items, "timeout": timeout, "most": most}),
    }
    printed = await _run_remotely(files, int(total), backend)
    try:
        results = json.loads(printed.rstrip().rpartition("\n")[2])
        outcomes = [_compare(test, *result) for test, result in zip(tests, results, strict=True)]
    except (ValueError, TypeError) as error:
        raise SandboxInfrastructureError(
            f"sandbox_backend={backend}: its answer cannot be read ({error}): {printed[-300:]!r}"
        ) from error
    return Grade(tuple(outcomes))


async def _run_remotely(files: dict[str, str], seconds: int, backend: SandboxBackend) -> str:
    """Runs the driver; returns what it printed."""
    if backend == SandboxBackend.SANDBOXFUSION:
        ok, answer = await _sandbox_fusion().run(code=_DRIVER, files=files, timeout=seconds)
        if not ok:
            raise SandboxInfrastructureError(f"SandboxFusion: {answer.get('error', answer)}")
        return str((answer.get("run_result") or {}).get("stdout", ""))
    pool = _modal_pool()
    done = await pool.run_in_workdir(
        {**files, "driver.py": _DRIVER},
        ["python", "driver.py"],
        timeout=seconds,
        max_output_bytes=_ANSWER_BYTES,
    )
    if done.exit_code != 0:
        raise SandboxInfrastructureError(f"Modal: exit code {done.exit_code}: {done.stderr[-300:]}")
    return done.stdout


@cache
def _sandbox_fusion() -> SandboxFusionClient:
    return SandboxFusionClient()


@cache
def _modal_pool() -> Any:
    modal = importlib.import_module("modal")  # an extra
    return ModalSandboxPool(image=modal.Image.debian_slim().pip_install("numpy"))


def _compare(
    test: Test, status: int | None, stdout: str, stderr: str, truncated: bool
) -> GradedTest:
    if status != 0:
        return GradedTest(False, stderr.strip() or f"exit status {status}")
    if isinstance(test, StdioTest):
        if truncated:
            return GradedTest(False, "it printed too much")
        passed = same_output(stdout, test.stdout)
        return GradedTest(passed, "" if passed else "wrong output")
    assert isinstance(test, CallTest)
    try:
        result = json.loads(stdout.rstrip().rpartition("\n")[2])
    except ValueError:
        return GradedTest(False, "its result is no JSON value")
    # Through JSON, where tuples and lists are the same.
    passed = same_value(result, json.loads(json.dumps(test.expected)))
    return GradedTest(passed, "" if passed else "wrong result")
