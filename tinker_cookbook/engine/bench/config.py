"""Settings of the benchmark and their checks."""

from __future__ import annotations

from pathlib import Path

import chz

from tinker_cookbook.exceptions import ConfigurationError, nearest

REFERENCES = ("plain", "stock")
VARIANTS = ("engine", *REFERENCES)


@chz.chz
class Config:
    """Settings of the benchmark."""

    model: str = chz.field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        doc="Hub name, local folder, or random weights of a true shape: shape:qwen3-0.6b, "
        "shape:qwen3-4b, shape:qwen3-8b, shape:tiny",
    )
    data: str = chz.field(
        default="random:40-400",
        doc="JSONL file of {messages} or {question, answer} rows, or random:MIN-MAX tokens",
    )
    dtype: str = chz.field(default="auto", doc="float32, bfloat16 or auto")
    device: str = chz.field(default="auto", doc="auto, cuda, cuda:N, mps or cpu")
    batch_size: int = chz.field(default=8, doc="Conversations a step")
    steps: int = chz.field(default=4, doc="Timed steps of a repeat")
    warmup: int = chz.field(default=1, doc="Steps before the clock starts")
    repeats: int = chz.field(default=2, doc="Times each variant runs, in turn: A B A B")
    variants: tuple[str, ...] = chz.field(
        default=("engine", "plain"),
        doc="Which run, in this order: engine, plain (transformers + peft), stock (plain without "
        "the process settings of this package)",
    )
    rank: int = chz.field(default=32, doc="Rank of the LoRA adapter, on all linear layers")
    max_length: int | None = chz.field(
        default=None, doc="Tokens after which conversations are cut; default: the model's context"
    )
    seed: int = chz.field(default=0, doc="Seed of adapter, random data and the order of rows")
    output: str | None = chz.field(default=None, doc="Also write the JSON object to this file")

    @property
    def conversations_needed(self) -> int:
        """Conversations a repeat uses; every step has its own."""
        return self.batch_size * (self.warmup + self.steps)


def check_config(config: Config) -> None:
    """Raises ``ConfigurationError`` for what can be told without loading anything."""
    for name, least in (("batch_size", 1), ("steps", 1), ("warmup", 1), ("repeats", 1)):
        _at_least(name, getattr(config, name), least)
    _at_least("rank", config.rank, 1)
    if config.max_length is not None:
        _at_least("max_length", config.max_length, 2)
    if not config.variants:
        raise ConfigurationError(f"variants: got none, expected some of {', '.join(VARIANTS)}")
    for variant in config.variants:
        if variant not in VARIANTS:
            raise ConfigurationError(
                f"variants: got {variant!r}, expected some of {', '.join(VARIANTS)}"
                + nearest(variant, VARIANTS)
            )
    if len(set(config.variants)) < len(config.variants):
        raise ConfigurationError(
            f"variants: got {','.join(config.variants)}, expected each at most once; set repeats "
            "to run them several times"
        )
    if config.output is not None and not Path(config.output).expanduser().parent.is_dir():
        raise ConfigurationError(
            f"output: the folder of {config.output} does not exist; create it or write elsewhere"
        )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigurationError(f"{name}: got {value}, expected a whole number >= {least}")
