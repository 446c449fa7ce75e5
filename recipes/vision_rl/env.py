"""Episodes of one question about a generated picture."""

from __future__ import annotations

from functools import partial

import chz

from tinker_cookbook.grading.numbers import last_number
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.recipes.vision_rl.pictures import KINDS, Kind, Picture, make_pictures
from tinker_cookbook.renderers import Message, Renderer, get_renderer
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.envs.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.keys import also_named

_TEST_SEED, START_SEED = 10**9, 10**9 + 1
"""Seeds of the pictures to evaluate on, and of those of the supervised training."""


class PictureEnv(ProblemEnv):
    """One picture and its question; the reward is 1 if the last number of the answer is right."""

    def __init__(self, renderer: Renderer, picture: Picture) -> None:
        super().__init__(renderer)
        self._picture = picture
        _, self._question, self._answer = picture.draw()

    @property
    def messages(self) -> list[Message]:
        """The prompt's message: picture and question."""
        return [self._picture.message()]

    def get_question(self) -> str:
        """Returns the question."""
        return self._question

    def get_reference_answer(self) -> str:
        """Returns the right answer."""
        return self._answer

    def check_answer(self, sample_str: str) -> bool:
        """Returns whether the last number is the right one."""
        return last_number(sample_str) == self._answer


def picture_renderer(model_name: str, renderer_name: str) -> Renderer:
    """Returns the renderer of a model that takes images."""
    processor = get_image_processor(model_name)
    return get_renderer(renderer_name, get_tokenizer(model_name), image_processor=processor)


@also_named(batch_size="groups_per_batch", n_batches="num_batches")
@chz.chz
class PictureDatasetBuilder(RLDatasetBuilder):
    """Pictures to train on, and others to evaluate on."""

    model_name_for_tokenizer: str = chz.field(doc="Model of tokenizer and image processor")
    renderer_name: str = chz.field(doc="Chat format with images")
    groups_per_batch: int = number(16, "Pictures per step", low=1)
    group_size: int = number(8, "Answers per picture", low=1)
    num_batches: int = number(100, "Steps per epoch", low=1)
    num_test: int = number(120, "Pictures to evaluate on; 0: no evaluation")
    kinds: list[Kind] = chz.field(
        default_factory=lambda: list(KINDS), doc=f"Of {', '.join(KINDS)}, separated by commas"
    )
    seed: int = chz.field(default=0, doc="Seed of the pictures")

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Returns the training set, and the test set if there are test pictures."""
        renderer = picture_renderer(self.model_name_for_tokenizer, self.renderer_name)
        count = self.num_batches * self.groups_per_batch
        train = ProblemDataset(
            make_pictures(count, self.seed, self.kinds),
            partial(_group, renderer, self.group_size),
            self.groups_per_batch,
        )
        if not self.num_test:
            return train, None
        # The same pictures for all seeds, so that their curves can be compared.
        test = make_pictures(self.num_test, _TEST_SEED, self.kinds)
        group = partial(_group, renderer, 1)
        return train, ProblemDataset(test, group, len(test), shuffle=False)


def _group(renderer: Renderer, size: int, picture: Picture) -> EnvGroupBuilder:
    return ProblemGroupBuilder(partial(PictureEnv, renderer, picture), size, picture.kind)
