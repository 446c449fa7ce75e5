r"""GSM8K, MATH, Polaris and DeepMath as one dataset class each, for code that subclasses them.

All of them request the answer in ``\boxed{}`` and grade it by mathematical equality. The recipe
itself uses ``datasets.MathDatasetBuilder``, which reads local files as well.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import chz

from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.recipes.math_rl.datasets import Problem, problems_from_hub
from tinker_cookbook.recipes.math_rl.math_env import MathEnv
from tinker_cookbook.renderers import Message, Renderer, get_renderer
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.envs.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer


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
        if split not in ("train", "test"):
            raise ConfigurationError(f"split: got {split!r}, expected 'train' or 'test'")
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

    def prefix(self) -> list[Message] | None:
        """Returns the messages before the question."""
        return None

    def _build(self) -> list[MathDataset]:
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))
        make = partial(self.kind, self.batch_size, self.group_size, renderer, self.prefix())
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

    def prefix(self) -> list[Message] | None:
        """Returns ``convo_prefix``, or the worked example."""
        if isinstance(self.convo_prefix, str):
            return MathEnv.standard_fewshot_prefix()
        return self.convo_prefix


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
    if dataset_name not in DATASET_BUILDER_MAP:
        raise ConfigurationError(
            f"dataset_name: got {dataset_name!r}, expected one of "
            f"{', '.join(DATASET_BUILDER_MAP)}{nearest(dataset_name, DATASET_BUILDER_MAP)}"
        )
    return DATASET_BUILDER_MAP[dataset_name](
        batch_size=batch_size,
        model_name_for_tokenizer=model_name_for_tokenizer,
        renderer_name=renderer_name,
        group_size=group_size,
        seed=seed,
    )
