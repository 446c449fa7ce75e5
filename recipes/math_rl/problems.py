"""Problems of GSM8K, MATH, Polaris and DeepMath on the Hub, or of user files."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tinker_cookbook.exceptions import DataError, DataFormatError, DataValidationError
from tinker_cookbook.grading.texts import extract_boxed
from tinker_cookbook.recipes.start import local_rows
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset

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


# Hub dataset, split, and the configurations to read (None: the default one).
_Split: TypeAlias = tuple[str, str, tuple[str | None, ...]]

_MATH_500: tuple[_Split, ...] = (("HuggingFaceH4/MATH-500", "test", (None,)),)
_SOURCES: Mapping[str, tuple[tuple[_Split, ...], tuple[_Split, ...]]] = {
    "gsm8k": (
        (("openai/gsm8k", "train", ("main",)),),
        (("openai/gsm8k", "test", ("main",)),),
    ),
    # MATH-500 is a part of MATH's test split; its other 4,500 problems are trained on, as usual.
    "math": (
        (
            ("EleutherAI/hendrycks_math", "train", _MATH_SUBJECTS),
            ("EleutherAI/hendrycks_math", "test", _MATH_SUBJECTS),
        ),
        _MATH_500,
    ),
    "polaris": ((("POLARIS-Project/Polaris-Dataset-53K", "train", (None,)),), _MATH_500),
    "deepmath": ((("zwhe99/DeepMath-103K", "train", (None,)),), _MATH_500),
}
"""Training and test splits of each dataset."""

HUB_NAMES = tuple(_SOURCES)


def problem_of(row: Any, where: str) -> Problem:
    """Parses a row; raises ``DataFormatError``, prefixed with ``where``, for a missing field."""
    fields: Mapping[str, Any] = row if isinstance(row, Mapping) else {}
    question = fields.get("question", fields.get("problem"))
    answer = fields.get("answer", fields.get("final_answer"))
    # MATH has a worked solution only; the boxed expression is its answer.
    if answer is None and isinstance(fields.get("solution"), str):
        answer = extract_boxed(fields["solution"])
    # JSON files often hold numbers as answers.
    if type(answer) in (int, float):
        answer = str(answer)
    # An answer of GSM8K is a solution that ends with "#### NUMBER".
    text = answer.rpartition("####")[2].strip() if isinstance(answer, str) else ""
    if not isinstance(question, str) or not question.strip() or not text:
        raise DataFormatError(
            f"{where}: got question {question!r:.80} and answer {answer!r:.80}, expected "
            f"{_EXPECTED}"
        )
    return Problem(question.strip(), text)


def read_problems(path: str, split: str = "train") -> list[Problem]:
    """Returns the problems of a local file, or of a split of a local folder."""
    problems = [problem_of(row, where) for where, row in local_rows(path, split, _EXPECTED)]
    if not problems:
        raise DataValidationError(f"{path}: got no problem, expected one at least")
    return problems


def problems_from_hub(env: str, *, test: bool) -> list[Problem]:
    """Returns the problems to train on, or to evaluate on, of one of ``HUB_NAMES``.

    Raises ``DataError`` if the Hub cannot be reached and there is no local copy.
    """
    problems: list[Problem] = []
    for path, split, names in _SOURCES[env][int(test)]:
        for name in names:
            try:
                rows = load_hf_dataset(path, split, name, instead="")
            except DataError as error:
                raise DataError(
                    f"env={env} needs {path} (split {split}): {error}. Either be online once, or "
                    "give a local copy: dataset_path=FILE.jsonl (and test_path=FILE.jsonl), each "
                    f"line {_EXPECTED}; or a folder with train.jsonl and test.jsonl. "
                    "env=arithmetic and env=reasoning_gym:chain_sum need no data"
                ) from error
            problems += _rows_of(rows, path)
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
