"""Settings of the measurement."""

from __future__ import annotations

import chz

from tinker_cookbook.engine.device_names import check_device_name, check_dtype_name
from tinker_cookbook.exceptions import ConfigurationError


@chz.chz
class Config:
    """Settings of the measurement."""

    model_name: str = chz.field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        doc="Base model; a small model shows the overhead of the server best",
    )
    device: str = chz.field(default="auto", doc="auto, cuda, mps or cpu")
    dtype: str = chz.field(default="auto", doc="auto, float32 or bfloat16")
    lora_rank: int = chz.field(default=32, doc="Rank of the adapter")
    calls: int = chz.field(default=100, doc="Calls of each kind on each side")
    warmup: int = chz.field(default=10, doc="Warm-up calls, which are not timed")
    batch_size: int = chz.field(default=8, doc="Datums of a training pass")
    length: int = chz.field(default=256, doc="Tokens of a datum")
    prompt: int = chz.field(default=64, doc="Tokens of a prompt")
    max_tokens: int = chz.field(default=16, doc="Tokens of a sample")
    seed: int = chz.field(default=0, doc="Seed of the tokens")
    output: str | None = chz.field(default=None, doc="File for the JSON object")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for settings that are wrong whatever the model is."""
        check_device_name(self.device)
        check_dtype_name(self.dtype)
        least = {"warmup": 0, "length": 2}
        for name in (
            "lora_rank",
            "calls",
            "warmup",
            "batch_size",
            "length",
            "prompt",
            "max_tokens",
        ):
            value = getattr(self, name)
            if value < least.get(name, 1):
                raise ConfigurationError(
                    f"{name}: got {value}, expected at least {least.get(name, 1)}"
                )
