"""Episodes of one question about a generated picture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import chz

from tinker_cookbook.grading.numbers import last_number
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.recipes.vision_rl.pictures import KINDS, Kind, Picture, make_pictures
from tinker_cookbook.renderers import Content, Renderer, get_renderer
from tinker_cookbook.rl.envs.problem_dataset import ProblemDatasetBuilder
from tinker_cookbook.rl.envs.problem_env import ProblemEnv
from tinker_cookbook.rl.types import Env
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import number

_TEST_SEED, START_SEED = 10**9, 10**9 + 1
"""Seeds of the pictures to evaluate on, and of those of the supervised training."""


class PictureEnv(ProblemEnv):
    """One picture and its question; the reward is 1 if the last number of the answer is right."""

    def __init__(self, renderer: Renderer, picture: Picture) -> None:
        super().__init__(renderer)
        self._picture = picture
        _, _, self._answer = picture.draw()

    def get_question(self) -> Content:
        """Returns the picture and the question."""
        return self._picture.message()["content"]

    def get_reference_answer(self) -> str:
        """Returns the right answer."""
        return self._answer

    def check_answer(self, sample_str: str) -> bool:
        """Returns whether the last number is the right one."""
        return last_number(sample_str) == self._answer


@chz.chz
class PictureDatasetBuilder(ProblemDatasetBuilder):
    """Pictures to train on, and others to evaluate on."""

    n_batches: int = number(100, "Steps per epoch", low=1)
    num_test: int = number(120, "Pictures to evaluate on; 0: no evaluation")
    kinds: list[Kind] = chz.field(
        default_factory=lambda: list(KINDS), doc=f"Of {', '.join(KINDS)}, separated by commas"
    )

    def load(self) -> tuple[list[Picture], list[Picture]]:
        """Returns the pictures to train on and to evaluate on."""
        count = self.n_batches * self.batch_size
        # The same test pictures for all seeds, so that their curves can be compared.
        test = make_pictures(self.num_test, _TEST_SEED, self.kinds)
        return make_pictures(count, self.seed, self.kinds), test

    def renderer(self) -> Renderer:
        """Returns a renderer that takes images."""
        name = self.model_name_for_tokenizer
        return get_renderer(self.renderer_name, get_tokenizer(name), get_image_processor(name))

    def env_thunk(self, problem: Picture, renderer: Renderer) -> Callable[[], Env]:
        """Returns the environment of a picture."""
        return partial(PictureEnv, renderer, problem)

    def tag(self, problem: Picture) -> str:
        """Returns the kind of the picture."""
        return problem.kind
