"""Programming tasks: DeepCoder, MBPP, files of a user, generated one-line functions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from tinker_cookbook.exceptions import DataError, DataFormatError, DataValidationError
from tinker_cookbook.recipes.code_rl.code_grading import taco_to_lcb_format
from tinker_cookbook.recipes.code_rl.deepcoder_tool import DeepcoderTask
from tinker_cookbook.recipes.code_rl.lcb_utils import (
    LCB_PREAMBLE,
    fetch_live_code_bench_system_prompt,
)
from tinker_cookbook.recipes.start import local_rows
from tinker_cookbook.sandbox.program_text import names_in_tests
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset

Split = Literal["train", "test"]

HUB_DATASETS: Mapping[str, tuple[str, Mapping[Split, tuple[tuple[str, str], ...]]]] = {
    # Name -> Hub dataset, and for each split its configurations with their splits.
    "deepcoder": (
        "agentica-org/DeepCoder-Preview-Dataset",
        {
            "train": (("primeintellect", "train"), ("taco", "train"), ("lcbv5", "train")),
            "test": (("codeforces", "test"), ("lcbv5", "test")),
        },
    ),
    "mbpp": (
        "google-research-datasets/mbpp",
        {"train": (("full", "train"),), "test": (("full", "test"),)},
    ),
}
ONE_LINE = "one_line"

_EXPECTED = (
    "an object with a problem (question, prompt or problem) and tests (or ground_truth), or a row "
    "of MBPP (text, test_list)"
)


def load_tasks(dataset: str, split: Split, path: str | None = None) -> list[DeepcoderTask]:
    """Returns the tasks of a split, in the order of the data.

    Args:
        dataset: A name in ``HUB_DATASETS``; it is not used with ``path``.
        split: ``train`` or ``test``.
        path: A JSONL, JSON or parquet file, or a folder with files of each split, instead.

    Raises:
        DataError: The Hub cannot be reached; the message says how to give local files.
        DataFormatError: A row has no problem, or no test that can be read.
    """
    rows = _hub_rows(dataset, split) if path is None else local_rows(path, split, _EXPECTED)
    tasks = [task_of(row, where) for where, row in rows]
    if not tasks:
        raise DataValidationError(
            f"dataset={dataset}: got no task of the split {split}, expected one at least"
        )
    return tasks


def _hub_rows(dataset: str, split: Split) -> Iterable[tuple[str, Any]]:
    hub_name, splits = HUB_DATASETS[dataset]
    for name, hub_split in splits[split]:
        try:
            rows = load_hf_dataset(hub_name, hub_split, name, instead="")
        except DataError as error:
            raise DataError(
                f"dataset={dataset} needs {hub_name} ({name}, {hub_split}): {error}. "
                "Either be online once, or give local files: dataset_path=FILE.jsonl (and "
                f"test_path=FILE.jsonl), each line {_EXPECTED}. dataset={ONE_LINE} needs no data"
            ) from error
        for i in range(len(rows)):
            yield f"{hub_name} ({name}, {hub_split}), row {i}", rows[i]


def task_of(row: Any, where: str) -> DeepcoderTask:
    """Parses a row of any of the formats; raises ``DataFormatError`` prefixed with ``where``."""
    if not isinstance(row, Mapping):
        raise DataFormatError(f"{where}: got {type(row).__name__}, expected {_EXPECTED}")
    try:
        return _mbpp_task(row) if "test_list" in row else _deepcoder_task(row)
    except (SyntaxError, ValueError, LookupError, TypeError, AttributeError, DataError) as error:
        raise DataFormatError(
            f"{where}: got the fields {', '.join(map(str, row))} ({error}), expected {_EXPECTED}"
        ) from error


def _code_tests(texts: Iterable[str]) -> list[dict[str, Any]]:
    return [{"input": text, "output": "", "testtype": "code", "metadata": {}} for text in texts]


def _mbpp_task(row: Mapping[str, Any]) -> DeepcoderTask:
    question = row.get("text") or row["prompt"]
    tests = list(row["test_list"])
    # The first test names the function; the others stay hidden.
    problem = (
        f"{question}\nYour code must pass tests such as this one:\n{tests[0]}\n"
        "Put the whole program into one fenced code block."
    )
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    hidden = tests + list(row.get("challenge_test_list") or ())
    codes = [f"{setup}\n{test}" if setup else test for test in hidden]
    # The reference solution tells which names are the program's, such as a function ``sum``.
    names = names_in_tests(str(row.get("code") or ""), codes)
    return DeepcoderTask(
        problem,
        _code_tests(codes),
        public_tests=tuple(_code_tests(codes[:1])),
        entry_points=tuple(names) or None,
    )


def _deepcoder_task(row: Mapping[str, Any]) -> DeepcoderTask:
    question = row.get("question") or row.get("prompt") or row.get("problem")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("no text of a problem")
    starter = row.get("starter_code")
    if not isinstance(starter, str) or not starter.strip():
        starter = None
    metadata = _object(row.get("metadata"))
    tests = normalized_tests(row.get("tests") or row.get("ground_truth"), metadata)
    public = row.get("public_tests")
    return DeepcoderTask(
        fetch_live_code_bench_system_prompt(question, starter),
        tests,
        starter,
        public_tests=None if public is None else tuple(normalized_tests(public, metadata)),
        preamble=LCB_PREAMBLE,
    )


def _object(value: Any) -> dict[str, Any]:
    """An object that may be written as JSON text."""
    if isinstance(value, str) and value.strip():
        value = json.loads(value)
    return dict(value) if isinstance(value, Mapping) else {}


def normalized_tests(tests: Any, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns tests of the known formats, which may be JSON text, in one form.

    Raises:
        ValueError: There is none, or one is not an object.
    """
    if isinstance(tests, str):
        tests = json.loads(tests)
    if isinstance(tests, Mapping):
        tests = taco_to_lcb_format(dict(tests)) if "inputs" in tests else [tests]
    normalized: list[dict[str, Any]] = []
    for test in tests or ():
        if not isinstance(test, Mapping):
            raise ValueError(f"a test is {type(test).__name__}, expected an object")
        own = _object(test.get("metadata"))
        if "func_name" not in own and metadata.get("func_name"):
            own["func_name"] = metadata["func_name"]
        normalized.append(
            {
                "input": test.get("input", ""),
                "output": test.get("output", ""),
                "testtype": test.get("testtype") or test.get("type") or "stdin_stdout",
                "metadata": own,
            }
        )
    if not normalized:
        raise ValueError("no tests")
    return normalized


_TEMPLATES = (
    ("adds {n} to x", lambda x, n: x + n),
    ("subtracts {n} from x", lambda x, n: x - n),
    ("multiplies x by {n}", lambda x, n: x * n),
    ("subtracts x from {n}", lambda x, n: n - x),
    ("multiplies x by {n} and adds 1", lambda x, n: x * n + 1),
    ("adds {n} to the square of x", lambda x, n: x * x + n),
)


def one_line_tasks() -> list[DeepcoderTask]:
    """Returns tasks about functions of one line, such as "adds 3 to x": 6 kinds, 18 numbers."""
    tasks = []
    for text, function in _TEMPLATES:
        for n in range(2, 20):
            problem = (
                f"Write a Python function f(x) that {text.format(n=n)}. "
                "Answer with the code only, in two lines:\ndef f(x):\n    return ..."
            )
            tests = [
                {
                    "input": json.dumps(x),
                    "output": json.dumps(function(x, n)),
                    "testtype": "functional",
                    "metadata": {"func_name": "f"},
                }
                for x in (0, 1, 5, -3, 12)
            ]
            tasks.append(DeepcoderTask(problem, tests, public_tests=tuple(tests[:1])))
    # A fixed order, so that training and test tasks of all seeds are the same.
    random.Random(0).shuffle(tasks)
    return tasks
