"""Addition of two numbers; the problems are sampled, so their number is not limited."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.grading.numbers import equal_numbers, last_number
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.envs.problem_dataset import ProblemDatasetBuilder
from tinker_cookbook.rl.envs.problem_env import ProblemEnv
from tinker_cookbook.rl.types import Env
from tinker_cookbook.training.config import number

# Three digits, so that it shows the format but no answer of a task with small operands.
FEWSHOT: tuple[Message, ...] = (
    {"role": "user", "content": "What is 120 + 345?"},
    {"role": "assistant", "content": "465"},
)


class ArithmeticEnv(ProblemEnv):
    """``What is x + y?`` The last number of the answer counts.

    An answer without any number, or one that was cut off, is badly formed.
    """

    def __init__(
        self,
        x: int,
        y: int,
        renderer: Renderer,
        convo_prefix: list[Message] | None = None,
        format_coef: float = 0.1,
        require_stop_sequence_for_format: bool = True,
    ) -> None:
        super().__init__(renderer, convo_prefix, format_coef, require_stop_sequence_for_format)
        self.x, self.y = x, y

    def get_question(self) -> str:
        """Returns the problem in words."""
        return f"What is {self.x} + {self.y}?"

    def check_answer(self, sample_str: str) -> bool:
        """Returns whether the last number is the sum."""
        number = last_number(sample_str)
        return number is not None and equal_numbers(number, self.get_reference_answer()) is True

    def check_format(self, sample_str: str) -> bool:
        """Returns whether there is a number at all."""
        return last_number(sample_str) is not None

    def get_reference_answer(self) -> str:
        """Returns the sum."""
        return str(self.x + self.y)

    @staticmethod
    def standard_fewshot_prefix() -> list[Message]:
        """Returns a worked example, to put before the question."""
        return list(FEWSHOT)


@chz.chz
class ArithmeticDatasetBuilder(ProblemDatasetBuilder):
    """Addition of two numbers from 0 to ``max_operand``.

    ``num_test`` sums are held out with both orders of their operands: of 3 + 4, also 4 + 3.
    """

    max_operand: int = number(9, "Largest operand", low=1)
    n_batches: int = number(40, "Steps per epoch", low=1)
    num_test: int = number(10, "Sums held out for evaluation")
    test_group_size: int = number(4, "Episodes of a held-out problem", low=1)
    include_fewshot: bool = chz.field(default=True, doc="Show a worked example first")
    format_coef: float = chz.field(default=0.1, doc="Penalty for an answer in a wrong format")

    shuffle = False  # it would bring equal problems into one batch

    def held_out(self) -> list[tuple[int, int]]:
        """Returns the operands of the held-out sums, the smaller one first."""
        # A separate random stream, so that the held-out sums do not depend on n_batches.
        rng = random.Random(f"{self.seed} held out")
        sampled: dict[tuple[int, int], None] = {}
        while len(sampled) < self.num_test:
            x, y = self._sample(rng)
            # Both orders of the operands are the same sum, so neither may be trained on.
            sampled[min(x, y), max(x, y)] = None
        return list(sampled)

    def training(self) -> list[tuple[int, int]]:
        """Returns the operands of all batches, which are sampled without repetition in a batch."""
        rng = random.Random(f"{self.seed} training")
        held_out = set(self.held_out())
        # A held-out sum excludes both orders of its operands, or one if they are equal.
        free = (self.max_operand + 1) ** 2 - sum(1 if x == y else 2 for x, y in held_out)
        pairs: list[tuple[int, int]] = []
        for _ in range(self.n_batches):
            batch: dict[tuple[int, int], None] = {}
            while len(batch) < min(self.batch_size, free):
                x, y = self._sample(rng)
                if (min(x, y), max(x, y)) not in held_out:
                    batch[x, y] = None
            # If there are fewer pairs than groups, all pairs occur equally often.
            pairs += itertools.islice(itertools.cycle(batch), self.batch_size)
        return pairs

    def _sample(self, rng: random.Random) -> tuple[int, int]:
        return rng.randint(0, self.max_operand), rng.randint(0, self.max_operand)

    def check(self) -> None:
        """Raises ``ConfigurationError`` if too few sums are left to train on."""
        # x + y and y + x count as one sum.
        sums = (self.max_operand + 1) * (self.max_operand + 2) // 2
        if self.num_test > sums // 2:
            raise ConfigurationError(
                f"num_test: got {self.num_test}, expected at most {sums // 2}, half of the {sums} "
                f"sums of numbers from 0 to {self.max_operand}"
            )

    def load(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Returns the sums to train on, and the held-out ones."""
        return self.training(), self.held_out()

    def env_thunk(self, problem: tuple[int, int], renderer: Renderer) -> Callable[[], Env]:
        """Returns the environment of a sum."""
        prefix = list(FEWSHOT) if self.include_fewshot else None
        return partial(ArithmeticEnv, *problem, renderer, prefix, self.format_coef)

    def tag(self, problem: tuple[int, int]) -> str:
        """Returns the name of the task."""
        return "arithmetic"
