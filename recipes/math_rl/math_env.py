r"""Word problems and competition problems, graded by the result in the answer.

Where the result is in the answer:

======  ==============================================================  ==========================
env     the result                                                      well formed
======  ==============================================================  ==========================
MATH    what the last ``\boxed{…}`` holds                               there is a ``\boxed{…}``
GSM8K   the number after the last ``####`` or in the last               there is a ``####`` with a
        ``\boxed{…}``, as in ``grading.numbers.final_number``            number
======  ==============================================================  ==========================

GSM8K accepts several formats, so that a model which can add but does not know the format has a
reward to learn from; the format reward (``format_coef``) trains the format.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import chz

from tinker_cookbook.grading.mathematics import grade_math
from tinker_cookbook.grading.numbers import check_gsm8k, marked_number
from tinker_cookbook.grading.texts import boxed_answer, extract_boxed
from tinker_cookbook.grading.worker_pool import DEFAULT_TIMEOUT_SECONDS
from tinker_cookbook.recipes.math_rl.math_grading import (
    grade_answer,
    grade_answer_math_verify,
    run_with_timeout_signal,
)
from tinker_cookbook.recipes.math_rl.problems import Problem, problems_from_hub
from tinker_cookbook.renderers import Message, Renderer, get_renderer
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.envs.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

logger = logging.getLogger(__name__)

_BOXED = r"Write your final answer in \boxed{}."
_HASHES = "Write your final answer, a number without units, on a last line that begins with ####."

MATH_FEWSHOT: tuple[Message, ...] = (
    {
        "role": "user",
        "content": f"A square has a diagonal of length 6. What is its area? {_BOXED}",
    },
    {
        "role": "assistant",
        "content": "The diagonal of a square with side $s$ is $s\\sqrt{2}$, so $s\\sqrt{2} = 6$ "
        "and $s^2 = 36 / 2 = 18$. The area is \\boxed{18}.",
    },
)
GSM8K_FEWSHOT: tuple[Message, ...] = (
    {
        "role": "user",
        "content": "A tray holds 12 seedlings. Mara fills 5 trays and gives 8 seedlings away. How "
        f"many does she have left? {_HASHES}",
    },
    {
        "role": "assistant",
        "content": "Mara fills 5 trays with 12 seedlings each: 5 * 12 = 60.\nShe gives 8 away: "
        "60 - 8 = 52.\n#### 52",
    },
)


class MathEnv(ProblemEnv):
    r"""One problem whose answer goes into ``\boxed{}``, graded by mathematical equality."""

    def __init__(
        self,
        problem: str,
        answer: str,
        renderer: Renderer,
        convo_prefix: list[Message] | None = None,
        format_coef: float = 0.1,
        grading_timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        super().__init__(renderer, convo_prefix, format_coef=format_coef)
        self.problem, self.answer = problem, answer
        self.grading_timeout_seconds = grading_timeout_seconds

    @classmethod
    def question_suffix(cls) -> str:
        """Returns the instruction on the format of the answer."""
        return _BOXED

    @staticmethod
    def standard_fewshot_prefix() -> list[Message]:
        """Returns a worked example, to put before the question."""
        return list(MATH_FEWSHOT)

    def get_question(self) -> str:
        """Returns the problem, and where to put the answer."""
        return f"{self.problem} {self.question_suffix()}"

    async def check_answer(self, sample_str: str) -> bool:
        """Returns whether what is boxed equals the reference; in a process with a timeout."""
        given = boxed_answer(sample_str)
        return given is not None and await grade_math(
            given[1], self.answer, timeout_seconds=self.grading_timeout_seconds
        )

    def check_format(self, sample_str: str) -> bool:
        """Returns whether anything is boxed."""
        return bool(extract_boxed(sample_str))

    def get_reference_answer(self) -> str:
        """Returns the correct answer."""
        return self.answer


class Gsm8kEnv(MathEnv):
    """One word problem whose answer is a number after ``####``."""

    @classmethod
    def question_suffix(cls) -> str:
        """Returns the instruction on the format of the answer."""
        return _HASHES

    async def check_answer(self, sample_str: str) -> bool:
        """Returns whether the number found equals the reference."""
        # Lenient, so that a model that ignores the format still has a reward to learn from.
        return check_gsm8k(sample_str, self.answer)

    def check_format(self, sample_str: str) -> bool:
        """Returns whether there is a number after ``####``."""
        return marked_number(sample_str) is not None


def safe_grade(
    given_answer: str, ground_truth: str, grader: str = "sympy", timeout: float = 1.0
) -> bool:
    """Returns whether two answers are equal; one that cannot be compared in ``timeout`` s is wrong.

    ``grader`` is ``sympy`` or ``math_verify``; both names mean ``grade_answer``.
    """
    graders = {"sympy": grade_answer, "math_verify": grade_answer_math_verify}
    # In another process, because an expression such as a tower of powers can take very long.
    verdict = run_with_timeout_signal(
        graders[grader], args=(given_answer, ground_truth), timeout_seconds=timeout
    )
    if verdict is None:
        logger.warning("grading %.80r against %.80r took too long", given_answer, ground_truth)
    return bool(verdict)


def extract_gsm8k_final_answer(text: str) -> str:
    """Returns the rest of the line after the last ``####``; raises ``ValueError`` without one.

    Commas are removed if the line begins with ``####``.
    """
    lines = [line.strip() for line in text.splitlines()]
    # A line that begins with #### wins over #### within a sentence.
    marked = [line for line in lines if line.startswith("####")]
    if marked:
        return marked[-1].removeprefix("####").strip().removeprefix(":").replace(",", "").strip()
    within = re.findall(r"####\s*(.+)", text)
    if not within:
        raise ValueError(
            f"No GSM8K final answer: got {text[-80:]!r}, expected a text that ends in '#### NUMBER'"
        )
    return within[-1].strip()


# The datasets of the original cookbook, one class each, for code that subclasses them. All of them
# request the answer in \\boxed{} and grade it by mathematical equality; the recipe itself uses
# ``datasets.MathDatasetBuilder``, which reads local files as well.


class MathDataset(ProblemDataset[Problem]):
    """Problems of MATH, shuffled by ``seed``; the test split is MATH-500 in its own order.

    The test split has one episode of each problem.
    """

    env: ClassVar[str] = "math"

    def __init__(
        self,
        batch_size: int,
        group_size: int,
        renderer: Renderer,
        convo_prefix: Sequence[Message] | None = None,
        split: Literal["train", "test"] = "train",
        seed: int = 0,
    ) -> None:
        problems = problems_from_hub(self.env, test=split == "test")
        if split == "train":
            random.Random(seed).shuffle(problems)
        # Advantages need several answers to a problem; evaluation does not.
        size = group_size if split == "train" else 1
        prefix = list(convo_prefix) if convo_prefix else None

        def group(problem: Problem) -> EnvGroupBuilder:
            thunk = partial(MathEnv, problem.question, problem.answer, renderer, prefix)
            return ProblemGroupBuilder(thunk, size, self.env)

        # The order is fixed by the seed: batch k is the same one in every epoch.
        super().__init__(problems, group, batch_size, shuffle=False)


class Gsm8kDataset(MathDataset):
    """Problems of GSM8K."""

    env: ClassVar[str] = "gsm8k"


class PolarisDataset(MathDataset):
    """Problems of Polaris."""

    env: ClassVar[str] = "polaris"


class DeepMathDataset(MathDataset):
    """Problems of DeepMath."""

    env: ClassVar[str] = "deepmath"


@chz.chz
class _NamedDatasetBuilder(RLDatasetBuilder):
    batch_size: int = chz.field(doc="Problems per step")
    model_name_for_tokenizer: str = chz.field(doc="Model of the tokenizer")
    renderer_name: str = chz.field(doc="Chat format")
    group_size: int = chz.field(doc="Episodes per problem")
    seed: int = chz.field(default=0, doc="Seed of the order of problems")

    kind: ClassVar[type[MathDataset]]
    splits: ClassVar[tuple[Literal["train", "test"], ...]] = ("train",)

    def _build(self) -> list[MathDataset]:
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))
        prefix = getattr(self, "convo_prefix", None)
        if prefix == "standard":
            prefix = MathEnv.standard_fewshot_prefix()
        make = partial(self.kind, self.batch_size, self.group_size, renderer, prefix)
        return [make(split, self.seed) for split in self.splits]

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Loads the problems, in a thread: loading may download."""
        train, *test = await asyncio.to_thread(self._build)
        return train, test[0] if test else None


@chz.chz
class MathDatasetBuilder(_NamedDatasetBuilder):
    """MATH, and MATH-500 to evaluate on."""

    convo_prefix: list[Message] | Literal["standard"] | None = chz.field(
        default="standard", doc="Messages before the question; standard: a worked example"
    )

    kind = MathDataset
    splits = ("train", "test")


@chz.chz
class Gsm8kDatasetBuilder(MathDatasetBuilder):
    """GSM8K, both splits."""

    kind = Gsm8kDataset


@chz.chz
class PolarisDatasetBuilder(_NamedDatasetBuilder):
    """Polaris, without a test split."""

    kind = PolarisDataset


@chz.chz
class DeepMathDatasetBuilder(_NamedDatasetBuilder):
    """DeepMath, without a test split."""

    kind = DeepMathDataset


DATASET_BUILDER_MAP: Mapping[str, type[_NamedDatasetBuilder]] = {
    "math": MathDatasetBuilder,
    "polaris": PolarisDatasetBuilder,
    "deepmath": DeepMathDatasetBuilder,
    "gsm8k": Gsm8kDatasetBuilder,
}


def get_math_dataset_builder(
    dataset_name: str,
    batch_size: int,
    model_name_for_tokenizer: str,
    renderer_name: str,
    group_size: int,
    seed: int = 0,
) -> RLDatasetBuilder:
    """Returns the builder of ``math``, ``polaris``, ``deepmath`` or ``gsm8k``."""
    return DATASET_BUILDER_MAP[dataset_name](
        batch_size=batch_size,
        model_name_for_tokenizer=model_name_for_tokenizer,
        renderer_name=renderer_name,
        group_size=group_size,
        seed=seed,
    )
