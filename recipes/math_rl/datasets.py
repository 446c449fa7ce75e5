"""GSM8K, MATH, Polaris, DeepMath, or problems from user files, as batches of environments."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import chz

from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.grading.mathematics import require_math_verify
from tinker_cookbook.grading.numbers import reference_number
from tinker_cookbook.recipes.math_rl.math_env import GSM8K_FEWSHOT, MATH_FEWSHOT, Gsm8kEnv, MathEnv
from tinker_cookbook.recipes.math_rl.problems import (
    HUB_NAMES,
    Problem,
    problems_from_hub,
    read_problems,
)
from tinker_cookbook.recipes.start import check_files
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.envs.problem_dataset import ProblemDatasetBuilder
from tinker_cookbook.rl.types import Env
from tinker_cookbook.supervised.json_files import local_splits
from tinker_cookbook.training.config import number


def _require_number(problem: Problem) -> None:
    # Otherwise every answer would be wrong without a word.
    if reference_number(problem.answer) is None:
        raise DataFormatError(
            f"answer: got {problem.answer[-80:]!r} for {problem.question[:80]!r}, expected a "
            "number, or a solution that ends with '#### NUMBER', since env=gsm8k compares numbers; "
            "env=math compares other answers"
        )


@chz.chz
class MathSettings:
    """Where the problems come from and how answers are graded; of the dataset and the recipe."""

    dataset_path: str | None = chz.field(default=None, doc="Problems to train on: file or folder")
    test_path: str | None = chz.field(default=None, doc="Problems to evaluate on")
    num_test: int = number(100, "Maximum problems to evaluate on; 0: no evaluation")
    include_fewshot: bool = chz.field(default=False, doc="Show a worked example first")
    format_coef: float = chz.field(default=0.1, doc="Penalty for an answer in a wrong format")


@chz.chz
class MathDatasetBuilder(MathSettings, ProblemDatasetBuilder):
    """Problems of GSM8K, MATH, Polaris or DeepMath, or of user files instead."""

    env: str = chz.field(doc=f"One of {', '.join(HUB_NAMES)}")

    def check(self) -> None:
        """Raises for a package that is not installed, and for a missing file."""
        if self.env != "gsm8k":  # its answers are plain numbers
            require_math_verify()
        check_files(self, "dataset_path", "test_path")

    def load(self) -> tuple[list[Problem], list[Problem]]:
        """Returns both parts; problems of the test part are not trained on."""
        test = self._test_problems()
        # Some sources overlap: MATH-500 is part of the MATH test split, which is trained on.
        known = {problem.question for problem in test}
        path = self.dataset_path
        everything = read_problems(path) if path else problems_from_hub(self.env, test=False)
        if self.env == "gsm8k":
            for problem in (*everything, *test):
                _require_number(problem)
        training = [problem for problem in everything if problem.question not in known]
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
        )

    def tag(self, problem: Problem) -> str:
        """Returns the name of the dataset."""
        return self.env
