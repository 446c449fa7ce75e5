"""Settings of the benchmark on a GPU."""

from __future__ import annotations

import chz

from benchmarks.engine.config import Config as TrainingConfig
from benchmarks.gpu.goals import RANK, ROW_TOKENS
from benchmarks.harness import check_least, check_output
from tinker_cookbook.exceptions import ConfigurationError


@chz.chz
class Config:
    """Settings; those of TRL are as in ``benchmarks.engine``. The defaults are the configuration of
    the published figures in ``goals``."""

    models: tuple[str, ...] = chz.field(
        default=("shape:qwen3-0.6b", "shape:qwen3-4b", "shape:qwen3-8b"),
        doc="Models, one after another: random weights of a true shape, Hub names or folders",
    )
    row_tokens: int = chz.field(default=ROW_TOKENS, doc="Tokens of each row, all of them trained")
    batch_size: int = chz.field(default=8, doc="Rows of a step")
    steps: int = chz.field(default=3, doc="Timed steps of a repeat")
    warmup: int = chz.field(default=1, doc="Warm-up steps, which are not timed")
    repeats: int = chz.field(default=2, doc="Number of runs of each variant, in the order A B A B")
    variants: tuple[str, ...] = chz.field(
        default=("engine", "trl"), doc="Variants to run, in this order: engine, trl, plain, stock"
    )
    dtype: str = chz.field(default="auto", doc="float32, bfloat16 or auto")
    device: str = chz.field(default="auto", doc="auto, cuda, cuda:N, mps or cpu")
    rank: int = chz.field(default=RANK, doc="Rank of the LoRA adapter, on the layers' matrices")
    trl_python: str | None = chz.field(
        default=None, doc="A Python with trl and liger-kernel; default: this"
    )
    trl_batch_size: int = chz.field(default=1, doc="trl: rows in memory at once")
    trl_gradient_checkpointing: bool = chz.field(
        default=False, doc="trl: recompute all layers, where memory runs out without"
    )
    seed: int = chz.field(default=0, doc="Seed of adapter, weights and tokens")
    output: str | None = chz.field(default=None, doc="Also write the JSON object to this file")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for settings that are wrong whatever the models are."""
        check_least(self, {"row_tokens": 2, "batch_size": 1, "steps": 1, "repeats": 1, "rank": 1})
        check_output(self.output)
        if not self.models:
            raise ConfigurationError("models: got none, expected at least one")

    def of(self, model: str) -> TrainingConfig:
        """Returns the settings of ``benchmarks.engine`` for one model."""
        names = (
            *("batch_size", "steps", "warmup", "repeats", "variants", "dtype", "device", "rank"),
            *("trl_python", "trl_batch_size", "trl_gradient_checkpointing", "seed"),
        )
        return TrainingConfig(
            model=model,
            data=f"random:{self.row_tokens}-{self.row_tokens}",
            train_unembed=False,  # TRL cannot train it
            **{name: getattr(self, name) for name in names},
        )
