"""On-policy distillation: the student samples, and the teachers score every token.

    python -m tinker_cookbook.distillation.train_on_policy model_name=… log_path=… max_tokens=… \\
        dataset_configs.0.dataset_builder=module:Class …
    python -m tinker_cookbook.distillation.train_on_policy --help

The loop is ``rl.train`` with all its modes; only the advantages come from the teachers
(``on_policy_teachers``). Rewards of the environments can be added.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, ClassVar

import chz

from tinker_cookbook import model_info
from tinker_cookbook.distillation.datasets import (
    CompositeDataset,
    DistillationDatasetConfig,
    open_teacher,
)
from tinker_cookbook.distillation.on_policy_prompts import (
    AnswerEndings,
    TeacherGroupBuilder,
    TeacherView,
)
from tinker_cookbook.distillation.on_policy_teachers import (
    Teacher,
    TeacherSignal,
    TopKSignal,
)
from tinker_cookbook.distillation.topk_distributions import check_top_k
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl import train
from tinker_cookbook.rl.dataset_utils import ChainedRLDataset
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import REQUIRED, number, prepared, setting
from tinker_cookbook.training.server_needs import Need
from tinker_cookbook.training.session import TrainingSession
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import official_names
from tinker_cookbook.vocabulary import check_same_vocabulary

__getattr__ = official_names(__name__)


_OF_RL = (
    "dataset_builder",
    "random_rewards",
    "kl_reference_config",
    "kl_reference_model",
    "kl_reference_path",
)


@chz.chz
class Config(train.Config):
    """Settings of an on-policy distillation."""

    dataset_builder: RLDatasetBuilder = setting(None, "Has no effect: dataset_configs has the data")
    dataset_configs: list[DistillationDatasetConfig] = chz.field(
        default_factory=list,
        doc="Datasets and their teachers; a batch has groups of each",
        metadata=REQUIRED,
    )
    recipe_defaults: ClassVar[dict[str, Any]] = {
        **train.Config.recipe_defaults,
        "loss_normalization": "sum",
    }
    kl_penalty_coef: float = number(1.0, "Weight of the teachers' KL penalty")
    center_teacher_kl: bool = setting(
        False,
        "Subtract the mean KL of the dataset's tokens in the batch as a baseline: learns "
        "faster and allows higher learning rates, mostly if the teacher is far",
    )
    n_teacher_targets: int = setting(
        0,
        "Train on the KL over this many of the teacher's most probable tokens per position, "
        "which has less noise; 0: only on the sampled token",
    )
    reward_coef: float = setting(1.0, "Weight of the environments' rewards; 0: only in the metrics")

    def resolved(self) -> Config:
        """Returns the config with all values that follow from others."""
        for name in _OF_RL:
            if getattr(self, name):
                raise ConfigurationError(
                    f"{name}: got {getattr(self, name)!r:.80}, expected none: the data are in "
                    "dataset_configs, and their teachers are the reference"
                )
        return self._filled(Config, "dataset_configs", **self._derived())

    def data_builder(self) -> RLDatasetBuilder:
        """Returns the builder of the combined data."""
        return _TeacherDatasetBuilder(config=self)

    def _reference(self) -> None:
        """The teachers are the reference."""

    def check_data(self) -> None:
        """Raises ``ConfigurationError`` for settings of the data that cannot work."""
        if not self.dataset_configs:
            raise ConfigurationError("dataset_configs: got none, expected at least one")
        check_vocabularies(self)

    def check(self) -> None:
        """Raises ``ConfigurationError`` for the first invalid setting."""
        super().check()
        if self.kl_penalty_coef == 0:
            raise ConfigurationError(
                "kl_penalty_coef: got 0, so the teachers would have no effect; expected more "
                "(1 is usual), or rl.train for rewards alone"
            )
        if self.remove_constant_reward_groups:
            raise ConfigurationError(
                "remove_constant_reward_groups: got True, which would remove groups that the "
                "teachers need for training; expected False"
            )
        if self.center_teacher_kl and self.stream_minibatch_config is not None:
            raise ConfigurationError(
                "center_teacher_kl: got True with stream_minibatch_config, but the mean is over "
                "the whole batch, which is incomplete when the first minibatch trains; leave one "
                "out"
            )
        for i, part in enumerate(self.dataset_configs):
            part.teacher_config.check(f"dataset_configs[{i}].teacher_config")
            part.dataset_builder.check()
        if self.n_teacher_targets:
            self._check_topk()

    def _check_topk(self) -> None:
        """Raises for settings that the loss over top-K distributions does not support."""
        vocab_size = len(get_tokenizer(self.model_name))
        check_top_k("n_teacher_targets", self.n_teacher_targets, vocab_size)
        for name, expected in (
            ("kl_discount_factor", 0),
            ("reward_coef", 0),
            ("loss_fn", "importance_sampling"),
            ("loss_normalization", "sum"),
            ("importance_ratio_cap", 0),
            ("center_teacher_kl", False),
        ):
            if getattr(self, name) != expected:
                raise ConfigurationError(
                    f"{name}: got {getattr(self, name)} with n_teacher_targets="
                    f"{self.n_teacher_targets}, expected {expected}: the teachers' distributions "
                    "are the loss, without the advantages of sampled tokens"
                )
        for i, part in enumerate(self.dataset_configs):
            # The loss compares distributions per position, so both models must read the same
            # tokens.
            if self.sees_other_prompt(part):
                raise ConfigurationError(
                    f"n_teacher_targets: got {self.n_teacher_targets}, but the teacher of "
                    f"dataset_configs[{i}] has another prompt or chat format; expected 0, "
                    "or a teacher with the student's prompt"
                )

    def server_needs(self) -> list[Need]:
        """Returns the required server features: the teachers' scores, and the loss."""
        needs = [need for need in super().server_needs() if need.feature != "prompt_logprobs"]
        if not self.n_teacher_targets:
            return [*needs, Need("prompt_logprobs", "on-policy distillation")]
        setting = f"n_teacher_targets={self.n_teacher_targets}"
        fewer = "set n_teacher_targets=0"
        needs = [need for need in needs if not need.feature.startswith("loss:")]
        return [
            *needs,
            Need("custom_loss", setting, fewer),
            Need("topk_targets", setting, fewer),
            Need("topk_prompt_logprobs", setting, fewer),
        ]

    def student_renderer_name(self, part: DistillationDatasetConfig) -> str:
        """Returns the student's chat format: the dataset's, or else the run's."""
        name = getattr(part.dataset_builder, "renderer_name", None) or self.renderer_name
        return model_info.resolve_renderer_name(self.model_name, name)[0]

    def sees_other_prompt(self, part: DistillationDatasetConfig) -> bool:
        """Returns whether a dataset's teacher has another prompt than the student."""
        teacher = part.teacher_config
        other = teacher.renderer_name not in (None, self.student_renderer_name(part))
        return other or teacher.has_own_prompt


def _own_view(
    config: Config, part: DistillationDatasetConfig
) -> tuple[TeacherView | None, AnswerEndings | None]:
    """Returns prompt and endings for a teacher with another prompt, else None."""
    # A teacher with the same prompt scores the student's tokens directly.
    if not config.sees_other_prompt(part):
        return None, None
    teacher, name = part.teacher_config, config.student_renderer_name(part)
    student = get_renderer(name, get_tokenizer(config.model_name))
    renderer = get_renderer(teacher.renderer_name or name, get_tokenizer(teacher.base_model))
    prefix = tuple(teacher.convo_prefix or ())
    view = TeacherView(renderer, teacher.system_prompt, prefix, teacher.answer_hint)
    return view, AnswerEndings(student, renderer)


async def main(config: Config, rollout_executor: Executor | None = None) -> None:
    """Trains, or resumes the run in ``config.log_path``.

    ``rollout_executor`` runs the groups (see ``set_rollout_executor``); default: the event loop.
    Before sampling, raises ``ConfigurationError`` for an invalid setting or a
    teacher with another vocabulary, and ``CheckpointError`` if a teacher's weights are missing.
    """
    async with prepared(config) as config:
        teachers = partial(_open_teachers, config)
        await train.run(config, config.data_builder(), teachers, rollout_executor)


def check_vocabularies(config: Config) -> None:
    """Raises ``ConfigurationError`` for a teacher with another vocabulary than the student."""
    # The teacher scores the student's token ids, which differ in another vocabulary.
    for i, part in enumerate(config.dataset_configs):
        check_same_vocabulary(
            config.model_name,
            part.teacher_config.base_model,
            f"dataset_configs[{i}].teacher_config.base_model",
        )


async def _open_teachers(config: Config, session: TrainingSession) -> TeacherSignal:
    k, teachers = config.n_teacher_targets, []
    # Targets of a teacher with a larger vocabulary are limited to the student's ids.
    vocab_size = len(await asyncio.to_thread(get_tokenizer, config.model_name))
    for i, part in enumerate(config.dataset_configs):
        where = f"dataset_configs[{i}].teacher_config"
        client = await open_teacher(session, config, part.teacher_config, where)
        _, endings = _own_view(config, part)
        teachers.append(Teacher(client, endings, k, vocab_size))
    signal = TopKSignal if k else TeacherSignal
    return signal(
        teachers,
        config.kl_penalty_coef,
        config.kl_discount_factor,
        config.reward_coef,
        config.center_teacher_kl,
    )


@chz.chz
class _TeacherDatasetBuilder(RLDatasetBuilder):
    """Combines all datasets of a config; tags each group with its teacher."""

    config: Config

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Returns the combined training data, and the combined test data if any."""
        parts = self.config.dataset_configs
        built = [await part.dataset_builder() for part in parts]
        # The tag of the dataset selects the teacher when the batch is scored.
        composite = CompositeDataset(
            [dataset for dataset, _ in built], [part.groups_per_batch for part in parts]
        )
        views = [_own_view(self.config, part)[0] for part in parts]
        tests = [test for _, test in built if test is not None]
        return TeacherDataset(composite, views), ChainedRLDataset(tests) if tests else None


class TeacherDataset(RLDataset):
    """Groups of several datasets, each with the view of its teacher."""

    def __init__(self, inner: CompositeDataset, views: Sequence[TeacherView | None]) -> None:
        self._inner, self._views = inner, list(views)

    def data_sources(self) -> dict[str, Any]:
        """Returns the datasets."""
        return {"": self._inner}

    def __len__(self) -> int:
        return len(self._inner)

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns the groups of all datasets, with their views."""
        return [
            TeacherGroupBuilder(group, number, self._views[number])
            for number, groups in enumerate(self._inner.get_parts(index))
            for group in groups
        ]

    def set_epoch(self, seed: int) -> None:
        """Shuffles the datasets for another epoch."""
        self._inner.set_epoch(seed)


if __name__ == "__main__":
    run_entrypoint(main)
