"""Shared settings, datasets and teachers of the on-policy distillation recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import (
    ANSWER,
    HUB_PROMPTS,
    DistillationDatasetConfig,
    PromptOnlyDatasetBuilder,
    TeacherConfig,
)
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.recipes.start import DEMO_MODEL, check_dataset_name, example_data
from tinker_cookbook.renderers import Message
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.training.lr_scheduling import LRSchedule

SUMS = "sums"
EXAMPLE = "example"
DATASETS = (SUMS, EXAMPLE, *HUB_PROMPTS)
SUMS_HINT = f" Say {ANSWER}."
# Without examples the demo model ignores the hint. Their operands do not occur in the problems.
SUMS_EXAMPLES = ((120, 345), (17, 30), (61, 14))
BRIEF = "Answer in one short sentence."


@chz.chz
class TeacherSettings:
    """A dataset and its teacher."""

    dataset: str = chz.field(default=SUMS, doc=f"{', '.join(DATASETS)}, or a JSONL file of prompts")
    teacher_model: str | None = chz.field(
        default=None, doc="Base model of the teacher; default: the student's"
    )
    teacher_checkpoint: str | None = weights_field(
        "sampler_weights",
        "The teacher's own weights on it; default, where teacher_model is the student's: "
        "load_checkpoint_path",
    )
    teacher_renderer_name: str | None = chz.field(
        default=None, doc="The teacher's chat format; default: the student's"
    )
    teacher_prompt: str | None = chz.field(
        default=None,
        doc="System prompt that only the teacher sees: a text, or a .txt or .md file. Default: "
        "one that requests brevity, for the example, where nothing else sets the teacher apart",
    )
    teacher_hint: str | None = chz.field(
        default=None,
        doc="Text after the question that only the teacher sees; {answer} in it is the answer. "
        "Default: one that names it, for sums, where nothing else sets the teacher apart",
    )


@chz.chz
class OnPolicyLoopSettings(train_on_policy.Config):
    """Settings of on-policy distillation on any environments; None is derived and printed."""

    model_name: str = DEMO_MODEL
    groups_per_batch: int = 8
    group_size: int = 8
    learning_rate: float | None = None  # a quarter of the recommended rate
    lr_schedule: LRSchedule = "linear"
    center_teacher_kl: bool | None = chz.field(  # type: ignore[assignment]
        default=None,
        doc="Take the mean of the batch's tokens of the same dataset as baseline; default: "
        "wherever the whole batch trains at once and n_teacher_targets is 0",
    )
    reward_coef: float = 0.0
    max_tokens: int | None = chz.field(  # type: ignore[assignment]
        default=None, doc="Maximum tokens to sample in an answer; default: 12 for sums, else 256"
    )
    eval_every: int = 5
    save_every: int = 10

    def build_dataset(self) -> list[DistillationDatasetConfig]:
        """Returns the datasets with their teachers."""
        raise NotImplementedError

    def resolved(self) -> train_on_policy.Config:
        """Returns the config of the loop; settings that follow from the data are filled in."""
        datasets = self.dataset_configs or self.build_dataset()
        max_tokens, center = self.max_tokens, self.center_teacher_kl
        if max_tokens is None:
            # A sum needs few tokens, an answer in words many.
            sums = all(isinstance(d.dataset_builder, ArithmeticDatasetBuilder) for d in datasets)
            max_tokens = 12 if sums else 256
        if center is None:
            # The baseline is a mean over the whole batch, which streaming does not have at once,
            # and a loss over distributions uses no advantages.
            center = self.num_minibatches is None and not self.n_teacher_targets
        filled = chz.replace(
            self, dataset_configs=datasets, max_tokens=max_tokens, center_teacher_kl=center
        )
        return super(OnPolicyLoopSettings, filled).resolved()


@chz.chz
class OnPolicySettings(OnPolicyLoopSettings):
    """The same on prompts."""

    max_prompt_tokens: int | None = chz.field(
        default=1024, doc="Prompts with more tokens are left out"
    )
    max_prompts: int | None = chz.field(default=None, doc="Maximum prompts of each dataset")
    max_operand: int = chz.field(default=9, doc="sums: largest operand")
    n_batches: int = chz.field(default=25, doc="sums: steps per epoch")
    num_test: int = chz.field(default=10, doc="sums: number of held-out sums; 0: no evaluation")


def dataset_with_teacher(
    cli: OnPolicySettings, settings: TeacherSettings
) -> DistillationDatasetConfig:
    """Builds a dataset with its teacher."""
    name = settings.dataset
    check_dataset_name(name, DATASETS)
    # The teacher is by default the student before training, from its checkpoint if it has one.
    own_start = cli.load_checkpoint_path if settings.teacher_model is None else None
    teacher = TeacherConfig(
        base_model=settings.teacher_model or cli.model_name,
        load_checkpoint_path=settings.teacher_checkpoint or own_start,
        renderer_name=settings.teacher_renderer_name,
        **_own_prompt(settings),
    )
    prompts: RLDatasetBuilder
    if name == SUMS:
        prompts = cli.builder_of(ArithmeticDatasetBuilder, include_fewshot=False)
    else:
        path = str(example_data("conversations.jsonl")) if name == EXAMPLE else name
        prompts = cli.builder_of(PromptOnlyDatasetBuilder, dataset_name=path)
    return DistillationDatasetConfig(
        dataset_builder=prompts, teacher_config=teacher, groups_per_batch=cli.groups_per_batch
    )


def _own_prompt(settings: TeacherSettings) -> dict[str, Any]:
    """Returns the teacher's own prompt: the settings, or a default where nothing else is set."""
    own = {
        "system_prompt": text_or_file(settings.teacher_prompt),
        "answer_hint": settings.teacher_hint,
    }
    if any([*own.values(), settings.teacher_model, settings.teacher_checkpoint]):
        return own
    # Here the teacher is the student itself, so only its prompt can make it better.
    if settings.dataset == SUMS:
        examples: list[Message] = []
        for x, y in SUMS_EXAMPLES:
            # The examples have the hint too, so that they show how to use it.
            question = f"What is {x} + {y}?{SUMS_HINT.replace(ANSWER, str(x + y))}"
            examples.append(Message(role="user", content=question))
            examples.append(Message(role="assistant", content=str(x + y)))
        return {"answer_hint": SUMS_HINT, "convo_prefix": examples}
    if settings.dataset == EXAMPLE:
        return {"system_prompt": BRIEF}
    raise ConfigurationError(
        f"teacher_model, teacher_checkpoint, teacher_prompt: got none with dataset="
        f"{settings.dataset}, so the teacher would be the student itself; expected one of them"
    )


def text_or_file(value: str | None) -> str | None:
    """Returns a text, read from a file if ``value`` names one (``….txt`` or ``….md``)."""
    if value is None or not value.endswith((".txt", ".md")):
        return value
    return Path(value).expanduser().read_text(encoding="utf-8").strip()
