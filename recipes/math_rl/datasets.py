"""GSM8K, MATH, Polaris, DeepMath, or problems from files of yours, as batches of environments."""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial
from pathlib import Path

import chz

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, nearest
from tinker_cookbook.recipes.math_rl.math_env import GSM8K_FEWSHOT, MATH_FEWSHOT, Gsm8kEnv, MathEnv
from tinker_cookbook.recipes.math_rl.problems import (
    HUB_NAMES,
    Problem,
    problems_from_hub,
    read_problems,
)
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.envs.grading import DEFAULT_TIMEOUT_SECONDS, require_math_verify
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.envs.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

logger = logging.getLogger(__name__)


@chz.chz
class MathDatasetBuilder(RLDatasetBuilder):
    """Problems of GSM8K, MATH, Polaris or DeepMath, or of files of yours in their place."""

    env: str = chz.field(doc=f"One of {', '.join(HUB_NAMES)}")
    model_name_for_tokenizer: str = chz.field(doc="Whose tokenizer turns text into tokens")
    renderer_name: str = chz.field(doc="Chat format")
    groups_per_batch: int = chz.field(doc="Problems a step")
    group_size: int = chz.field(doc="Episodes of a problem")
    dataset_path: str | None = chz.field(default=None, doc="Problems to train on: file or folder")
    test_path: str | None = chz.field(default=None, doc="Problems to evaluate on")
    num_test: int = chz.field(default=100, doc="Most problems to evaluate on; 0: no evaluation")
    include_fewshot: bool = chz.field(default=False, doc="Show a worked example first")
    format_coef: float = chz.field(default=0.1, doc="Taken off the reward of a badly formed answer")
    grading_timeout_seconds: float = chz.field(
        default=DEFAULT_TIMEOUT_SECONDS, doc="After which an answer counts as wrong"
    )
    seed: int = chz.field(default=0, doc="Seed of the order of problems")

    def check(self) -> None:
        """Raises for a setting that cannot work, and for a file that is not there."""
        if self.env not in HUB_NAMES:
            raise ConfigurationError(
                f"env: got {self.env!r}, expected one of {', '.join(HUB_NAMES)}"
                f"{nearest(self.env, HUB_NAMES)}"
            )
        if self.env != "gsm8k":  # whose answers are plain numbers
            require_math_verify()
        if self.num_test < 0:
            raise ConfigurationError(f"num_test: got {self.num_test}, expected at least 0")
        if not 0 < self.grading_timeout_seconds < float("inf"):
            raise ConfigurationError(
                f"grading_timeout_seconds: got {self.grading_timeout_seconds}, expected a finite "
                "number above 0"
            )
        for name in ("dataset_path", "test_path"):
            path = getattr(self, name)
            if path is not None and not Path(path).expanduser().exists():
                raise DataValidationError(
                    f"{name}: there is no file or folder {path} (searched from {Path.cwd()})"
                )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Reads both parts; problems of the test part are not trained on."""
        self.check()
        return await asyncio.to_thread(self._build)

    def _build(self) -> tuple[RLDataset, RLDataset | None]:
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))
        test = self._test_problems()
        known = {problem.question for problem in test}
        everything = self._training_problems()
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
                "expected problems of its own to train on"
            )
        test = random.Random(self.seed).sample(test, min(self.num_test, len(test)))
        return (
            ProblemDataset(
                training, partial(self._group, renderer, self.group_size), self.groups_per_batch
            ),
            ProblemDataset(test, partial(self._group, renderer, 1), self.groups_per_batch)
            if test
            else None,
        )

    def _training_problems(self) -> list[Problem]:
        if self.dataset_path is not None:
            return read_problems(self.dataset_path)
        return problems_from_hub(self.env, test=False)

    def _test_problems(self) -> list[Problem]:
        if self.num_test == 0:
            return []
        if self.test_path is not None:
            return read_problems(self.test_path, "train" if _is_file(self.test_path) else "test")
        if self.dataset_path is None:
            return problems_from_hub(self.env, test=True)
        folder = Path(self.dataset_path).expanduser()
        if folder.is_dir() and any(f.name.startswith("test") for f in folder.rglob("*.*")):
            return read_problems(self.dataset_path, "test")
        return []

    def _group(self, renderer: Renderer, size: int, problem: Problem) -> EnvGroupBuilder:
        kind, fewshot = (
            (Gsm8kEnv, GSM8K_FEWSHOT) if self.env == "gsm8k" else (MathEnv, MATH_FEWSHOT)
        )
        env = partial(
            kind,
            problem.question,
            problem.answer,
            renderer,
            list(fewshot) if self.include_fewshot else None,
            self.format_coef,
            self.grading_timeout_seconds,
        )
        return ProblemGroupBuilder(env, size, self.env)


def _is_file(path: str) -> bool:
    return Path(path).expanduser().is_file()
