"""Settings of the comparison and their checks."""

from __future__ import annotations

import shutil
import sys

import chz

from tinker_cookbook.engine.bench.checks import check_choices, check_least, check_output
from tinker_cookbook.exceptions import ConfigurationError

VARIANTS = ("ours", "trl")


@chz.chz
class Config:
    """Settings of the comparison with TRL."""

    model_name: str = chz.field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct", doc="Hub name or local folder of the model"
    )
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    dtype: str = chz.field(default="float32", doc="float32, bfloat16 or auto")
    device: str = chz.field(default="auto", doc="auto, cuda, cuda:N, mps or cpu")
    steps: int = chz.field(default=6, doc="Steps of a run; the first is not timed")
    repeats: int = chz.field(default=1, doc="Times each variant runs, in turn: A B A B")
    variants: tuple[str, ...] = chz.field(default=VARIANTS, doc="Which run, in this order")
    groups_per_batch: int = chz.field(default=8, doc="Problems a step")
    group_size: int = chz.field(default=8, doc="Samples of each problem")
    max_tokens: int = chz.field(default=10, doc="Most tokens of an answer")
    lora_rank: int = chz.field(default=32, doc="Rank of the LoRA adapter, on the linear layers")
    train_unembed: bool = chz.field(
        default=False, doc="Ours also adapts the unembedding layer, as recipes do; TRL cannot"
    )
    learning_rate: float | None = chz.field(default=None, doc="Default: the recipe's")
    seed: int = chz.field(default=0, doc="Seed of adapter, problems and sampling")
    trl_python: str = chz.field(
        default=sys.executable, doc="A Python that has trl and what this package needs"
    )
    trl_batch_size: int | None = chz.field(
        default=None, doc="Samples of a training pass of TRL's; default: all of a step"
    )
    trl_gradient_checkpointing: bool = chz.field(
        default=False, doc="TRL's own default is true: slower, with less memory"
    )
    output: str | None = chz.field(default=None, doc="Also write the JSON object to this file")

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.groups_per_batch * self.group_size


def check_config(config: Config) -> None:
    """Raises ``ConfigurationError`` for what can be told without loading anything."""
    names = ("repeats", "groups_per_batch", "max_tokens", "lora_rank")
    check_least(config, dict.fromkeys(names, 1) | {"steps": 2, "group_size": 2})
    check_choices("variants", config.variants, VARIANTS)
    check_output(config.output)
    if shutil.which(config.trl_python) is None:
        raise ConfigurationError(
            f"trl_python: {config.trl_python} is no program; give the path of a Python that has trl"
        )
    size = config.trl_batch_size
    if size is not None and (size < 1 or config.samples % size):
        raise ConfigurationError(
            f"trl_batch_size: got {size}, expected a divisor of groups_per_batch x group_size = "
            f"{config.samples}"
        )
