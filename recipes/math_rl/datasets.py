"""GSM8K, MATH, Polaris, DeepMath, or problems from user files, as batches of environments."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import chz

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    DataFormatError,
    DataValidationError,
    nearest,
)
from tinker_cookbook.grading.mathematics import require_math_verify
from tinker_cookbook.grading.numbers import reference_number
from tinker_cookbook.grading.texts import extract_boxed
from tinker_cookbook.grading.worker_pool import DEFAULT_TIMEOUT_SECONDS
from tinker_cookbook.recipes.math_rl.math_env import GSM8K_FEWSHOT, MATH_FEWSHOT, Gsm8kEnv, MathEnv
from tinker_cookbook.recipes.start import check_files, local_rows
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.envs.problem_dataset import ProblemDatasetBuilder
from tinker_cookbook.rl.types import Env
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset
from tinker_cookbook.supervised.json_files import local_splits
from tinker_cookbook.training.config import number

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
    if not isinstance(row, Mapping):
        raise DataFormatError(f"{where}: got {type(row).__name__}, expected {_EXPECTED}")
    question = row.get("question", row.get("problem"))
    answer = row.get("answer", row.get("final_answer"))
    # MATH has a worked solution only; the boxed expression is its answer.
    if answer is None and isinstance(row.get("solution"), str):
        answer = extract_boxed(row["solution"])
    # JSON files often hold numbers as answers.
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    # An answer of GSM8K is a solution that ends with "#### NUMBER".
    if isinstance(answer, str):
        answer = answer.rpartition("####")[2].strip()
    for name, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise DataFormatError(
                f"{where}: {name}: got {value!r}; expected text; a row is {_EXPECTED}, got the "
                f"fields {', '.join(map(str, row))}"
            )
    assert isinstance(question, str)
    assert isinstance(answer, str)
    return Problem(question.strip(), answer)


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


def _require_number(problem: Problem) -> None:
    # Otherwise every answer would be wrong without a word.
    if reference_number(problem.answer) is None:
        raise DataFormatError(
            f"answer: got {problem.answer[-80:]!r} for {problem.question[:80]!r}, expected a "
            "number, or a solution that ends with '#### NUMBER', since env=gsm8k compares numbers; "
            "env=math compares other answers"
        )


@chz.chz
class MathDatasetBuilder(ProblemDatasetBuilder):
    """Problems of GSM8K, MATH, Polaris or DeepMath, or of user files instead."""

    env: str = chz.field(doc=f"One of {', '.join(HUB_NAMES)}")
    dataset_path: str | None = chz.field(default=None, doc="Problems to train on: file or folder")
    test_path: str | None = chz.field(default=None, doc="Problems to evaluate on")
    num_test: int = number(100, "Maximum problems to evaluate on; 0: no evaluation")
    include_fewshot: bool = chz.field(default=False, doc="Show a worked example first")
    format_coef: float = chz.field(default=0.1, doc="Penalty for an answer in a wrong format")
    grading_timeout_seconds: float = chz.field(
        default=DEFAULT_TIMEOUT_SECONDS, doc="Seconds after which an answer is graded as wrong"
    )

    def check(self) -> None:
        """Raises for a setting that cannot work, and for a missing file."""
        if self.env not in HUB_NAMES:
            raise ConfigurationError(
                f"env: got {self.env!r}, expected one of {', '.join(HUB_NAMES)}"
                f"{nearest(self.env, HUB_NAMES)}"
            )
        if self.env != "gsm8k":  # its answers are plain numbers
            require_math_verify()
        if not 0 < self.grading_timeout_seconds < float("inf"):
            raise ConfigurationError(
                f"grading_timeout_seconds: got {self.grading_timeout_seconds}, expected a finite "
                "number above 0"
            )
        check_files(self, "dataset_path", "test_path")

    def load(self) -> tuple[list[Problem], list[Problem]]:
        """Returns both parts; problems of the test part are not trained on."""
        test = self._test_problems()
        # Some sources overlap: MATH-500 is part of the MATH test split, which is trained on.
        known = {problem.question for problem in test}
        if self.dataset_path is not None:
            everything = read_problems(self.dataset_path)
        else:
            everything = problems_from_hub(self.env, test=False)
        if self.env == "gsm8k":
            for problem in (*everything, *test):
                _require_number(problem)
        training = [problem for problem in everything if problem.question not in known]
        if len(training) < len(everything):
            logger.info(
                "%d problems of the test part occur in the training part too; they are not "
                "trained on",
                len(everything) - len(training),
            )
        if not training:
            raise DataValidationError(
                f"dataset_path={self.dataset_path}: every problem is in the test part too; "
                "expected other problems to train on"
            )
        # Sampled after the overlap is removed, so a larger num_test removes no more training data.
        count = min(self.num_test, len(test))
        return training, random.Random(self.seed).sample(test, count)

    def _test_problems(self) -> list[Problem]:
        if self.num_test == 0:
            return []
        if self.test_path is not None:
            # A file has one split, which the loader calls train.
            is_file = Path(self.test_path).expanduser().is_file()
            return read_problems(self.test_path, "train" if is_file else "test")
        if self.dataset_path is None:
            return problems_from_hub(self.env, test=True)
        # A local folder may have a test split, as train.jsonl and test.jsonl.
        folder = Path(self.dataset_path).expanduser()
        if folder.is_dir() and "test" in local_splits(folder):
            return read_problems(self.dataset_path, "test")
        return []

    def env_thunk(self, problem: Problem, renderer: Renderer) -> Callable[[], Env]:
        """Returns the environment of a problem."""
        kind, fewshot = MathEnv, MATH_FEWSHOT
        if self.env == "gsm8k":
            kind, fewshot = Gsm8kEnv, GSM8K_FEWSHOT
        return partial(
            kind,
            problem.question,
            problem.answer,
            renderer,
            list(fewshot) if self.include_fewshot else None,
            self.format_coef,
            self.grading_timeout_seconds,
        )

    def tag(self, problem: Problem) -> str:
        """Returns the name of the dataset."""
        return self.env
