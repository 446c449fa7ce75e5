"""Problems with answers: from the Hub by the name of the environment, or from local files.

A row is an object with the problem (``question`` or ``problem``) and its answer: ``answer`` or
``final_answer``, or ``solution`` whose last ``\\boxed{}`` is the answer. Of an ``answer`` that ends
in ``#### NUMBER`` (GSM8K's own format) the number counts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import DataError, DataFormatError, DataValidationError
from tinker_cookbook.rl.envs.grading import extract_boxed
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset
from tinker_cookbook.supervised.json_files import json_lines, load_local_rows

logger = logging.getLogger(__name__)

_MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
_EXPECTED = "an object with question (or problem) and answer (or final_answer, or solution)"


@dataclass(frozen=True)
class Problem:
    """A problem and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class _Split:
    """A split of a Hub dataset; ``names`` are its configurations, all of which are read."""

    path: str
    split: str
    names: tuple[str | None, ...] = (None,)


_MATH_500 = (_Split("HuggingFaceH4/MATH-500", "test"),)
# MATH-500 is a part of MATH's test split; the other 4,500 problems of that are trained on, as the
# field does.
_MATH = "EleutherAI/hendrycks_math"
_SOURCES: Mapping[str, tuple[tuple[_Split, ...], tuple[_Split, ...]]] = {
    "gsm8k": (
        (_Split("openai/gsm8k", "train", ("main",)),),
        (_Split("openai/gsm8k", "test", ("main",)),),
    ),
    "math": (
        (_Split(_MATH, "train", _MATH_SUBJECTS), _Split(_MATH, "test", _MATH_SUBJECTS)),
        _MATH_500,
    ),
    "polaris": ((_Split("POLARIS-Project/Polaris-Dataset-53K", "train"),), _MATH_500),
    "deepmath": ((_Split("zwhe99/DeepMath-103K", "train"),), _MATH_500),
}

HUB_NAMES = tuple(_SOURCES)


def problem_of(row: Any, where: str) -> Problem:
    """Reads a row; ``where`` names it in errors.

    Raises:
        DataFormatError: A field is missing or no text.
    """
    if not isinstance(row, Mapping):
        raise DataFormatError(f"{where}: got {type(row).__name__}, expected {_EXPECTED}")
    question = row.get("question", row.get("problem"))
    answer = row.get("answer", row.get("final_answer"))
    if answer is None and isinstance(row.get("solution"), str):
        answer = extract_boxed(row["solution"])
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    for name, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise DataFormatError(
                f"{where}: {name}: got {value!r}; expected text; a row is {_EXPECTED}, got the "
                f"fields {', '.join(map(str, row))}"
            )
    assert isinstance(question, str)
    assert isinstance(answer, str)
    answer = answer.rpartition("####")[2].strip()
    return Problem(question.strip(), answer)


def read_problems(path: str, split: str = "train") -> list[Problem]:
    """The problems of a local file, or of a split of a local folder.

    Raises:
        DataError: There is no such file, or it holds something else; names the line.
    """
    local = Path(path).expanduser()
    if not local.exists():
        raise DataValidationError(
            f"dataset: there is no file or folder {local} (searched from {Path.cwd()}); expected "
            f"JSON lines, each {_EXPECTED}"
        )
    rows: Iterable[tuple[str, Any]]
    if local.is_file() and local.name.endswith((".jsonl", ".jsonl.gz")):
        rows = json_lines(local, _EXPECTED)
    else:
        found = load_local_rows(local, split)
        rows = ((f"{local} ({split}), row {i}", found[i]) for i in range(len(found)))
    problems = [problem_of(row, where) for where, row in rows]
    if not problems:
        raise DataValidationError(f"{local}: got no problem, expected one at least")
    return problems


def problems_from_hub(env: str, *, test: bool) -> list[Problem]:
    """The problems to train on, or to evaluate on, of one of ``HUB_NAMES``.

    Raises:
        DataError: The Hub cannot be reached and holds no copy here; says what helps.
    """
    problems: list[Problem] = []
    for source in _SOURCES[env][int(test)]:
        for name in source.names:
            try:
                rows = load_hf_dataset(source.path, source.split, name)
            except DataError as error:
                raise DataError(_offline_advice(env, source, str(error))) from error
            problems += _rows_of(rows, source.path)
    return problems


def _rows_of(rows: Any, path: str) -> Iterator[Problem]:
    skipped = 0
    for i in range(len(rows)):
        try:
            yield problem_of(rows[i], f"{path}, row {i}")
        except DataFormatError:
            # A few rows of MATH have a solution without a box; a whole dataset without is an error.
            skipped += 1
            if skipped * 10 > len(rows):
                raise
    if skipped:
        logger.warning("%s: %d of %d rows have no answer; left out", path, skipped, len(rows))


def _offline_advice(env: str, source: _Split, why: str) -> str:
    # What the loader says after its reason is about conversations.
    reason = why.partition(". Give conversations")[0]
    return (
        f"env={env} needs {source.path} (split {source.split}): {reason}. Either be online once, "
        f"or give a local copy: dataset_path=FILE.jsonl (and test_path=FILE.jsonl), each line "
        f"{_EXPECTED}; or a folder with train.jsonl and test.jsonl. env=arithmetic and "
        "env=reasoning_gym:chain_sum need no data"
    )
