"""Datasets of problems: batches of groups over a list of problems, and their builder."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import chz

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.envs.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import at_least, number

P = TypeVar("P")


class ProblemDataset(RLDataset, Generic[P]):
    """Every problem once, in batches of ``groups_per_batch``; the last batch may be smaller.

    The problems keep the order of the list until ``set_epoch`` shuffles them.
    """

    def __init__(
        self,
        problems: Sequence[P],
        make_group: Callable[[P], EnvGroupBuilder],
        groups_per_batch: int,
        shuffle: bool = True,
    ) -> None:
        """``make_group`` returns the builder of a problem's group; called when its batch is
        requested."""
        if not problems:
            raise DataValidationError("problems: got none, expected at least one")
        self._problems, self._make_group, self._shuffle = problems, make_group, shuffle
        self._groups_per_batch = groups_per_batch
        self._order = list(range(len(problems)))

    def data_sources(self) -> dict[str, Any]:
        """Returns the problems."""
        return {"": self._problems}

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns the groups of batch ``index``."""
        start = index * self._groups_per_batch
        here = self._order[start : start + self._groups_per_batch]
        # A slice accepts negative and large indices, which would hide an error.
        if index < 0 or not here:
            raise IndexError(f"batch {index} of a dataset with {len(self)} batches")
        return [self._make_group(self._problems[i]) for i in here]

    def __len__(self) -> int:
        return -(-len(self._problems) // self._groups_per_batch)

    def set_epoch(self, seed: int) -> None:
        """Shuffles the problems, if ``shuffle`` is set; the order depends only on ``seed``."""
        if self._shuffle:
            # The permutation depends only on the seed, not on the previous order, so a resumed run
            # gets the same order.
            count = len(self._problems)
            self._order = random.Random(seed).sample(range(count), count)


@chz.chz
class ProblemDatasetBuilder(RLDatasetBuilder):
    """Base of the builders of problems; a subclass defines ``load`` and ``env_thunk``.

    A recipe makes it with ``config.builder_of(MyDatasetBuilder)``.
    """

    model_name_for_tokenizer: str = chz.field(doc="Model that has the tokenizer")
    renderer_name: str = chz.field(doc="Chat format")
    batch_size: int = chz.field(validator=at_least(1), doc="Problems per step")
    group_size: int = chz.field(validator=at_least(1), doc="Episodes per problem")
    test_group_size: int = number(1, "Episodes of a problem in evaluation", low=1)
    seed: int = chz.field(default=0, doc="Seed of the problems and of their order")

    shuffle: ClassVar[bool] = True
    """Whether the training problems are shuffled in each epoch."""

    def load(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Returns the problems to train on and those to evaluate on (there may be none).

        Runs in a thread.
        """
        raise NotImplementedError(f"{type(self).__name__} must define load")

    def env_thunk(self, problem: Any, renderer: Renderer) -> Callable[[], Env]:
        """Returns what creates one environment of a problem.

        It must be picklable if groups run in other processes (a ``functools.partial`` is).
        """
        raise NotImplementedError(f"{type(self).__name__} must define env_thunk")

    def tag(self, problem: Any) -> str:
        """Returns the name under which the metrics of the problem are logged."""
        return "problems"

    def renderer(self) -> Renderer:
        """Returns the renderer of prompts and answers."""
        return get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))

    def group(self, renderer: Renderer, size: int, problem: Any) -> EnvGroupBuilder:
        """Returns ``size`` episodes of a problem."""
        return ProblemGroupBuilder(self.env_thunk(problem, renderer), size, self.tag(problem))

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Returns the training set, and the test set if there are problems to evaluate on."""
        return await asyncio.to_thread(self._build)

    def _build(self) -> tuple[RLDataset, RLDataset | None]:
        self.check()
        train, test = self.load()
        group = partial(self.group, self.renderer())
        train_set = ProblemDataset(
            train, partial(group, self.group_size), self.batch_size, self.shuffle
        )
        if not len(test):
            return train_set, None
        test_group = partial(group, self.test_group_size)
        return train_set, ProblemDataset(test, test_group, len(test), shuffle=False)
