"""Estimates tokens, time and memory of a run from its first steps."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.hyperparam_utils import get_lora_param_count, get_vision_lora_param_count
from tinker_cookbook.utils.cost_estimation import TokenCostRates

if TYPE_CHECKING:
    from tinker_cookbook.training.config import TrainingConfig


@dataclass(frozen=True)
class RunEstimate:
    """Estimate for the remaining steps of a run.

    Attributes:
        steps: Number of steps.
        tokens: Input tokens of these steps.
        seconds: Their time, including evaluations but not loading.
        peak_bytes: Peak memory of the process so far, ``None`` if unknown.
        memory: Kind of memory: ``RAM`` or ``GPU``.
        cost_usd: Cost at a hosted backend, ``None`` without a price.
        checkpoints: Checkpoints that these steps save at intervals, and their bytes on this disk.
    """

    steps: int
    tokens: int
    seconds: float
    peak_bytes: int | None = None
    memory: str = ""
    cost_usd: float | None = None
    checkpoints: tuple[int, int] = (0, 0)

    def line(self) -> str:
        """Returns the estimate as one line."""
        parts = [f"{self.steps:,} steps", f"{short_count(self.tokens)} tokens"]
        parts.append(f"about {duration(self.seconds)}")
        if self.peak_bytes is not None:
            parts.append(f"peak {self.peak_bytes / 1e9:.1f} GB {self.memory}")
        count, disk = self.checkpoints
        if disk:
            size = f"{disk / 1e9:.1f} GB" if disk >= 1e9 else f"{disk / 1e6:.0f} MB"
            parts.append(f"{size} of disk for {count} checkpoint{'s' if count != 1 else ''}")
        if self.cost_usd is not None:
            parts.append(f"about ${self.cost_usd:.2f} for training tokens")
        return f"estimate: {', '.join(parts)}"


def estimate_run(
    steps: int,
    tokens: int,
    step_seconds: float,
    step_tokens: int,
    done_seconds: float,
    done_tokens: int,
    other_seconds: float,
    *,
    local: bool,
    rates: TokenCostRates | None = None,
    checkpoints: tuple[int, int] = (0, 0),
) -> RunEstimate:
    """Returns the estimate from one timed step.

    The remaining tokens are assumed to take as long as those of the timed step; ``done_*`` count
    the steps so far, including warm-up, and ``other_seconds`` is the time of evaluations and
    samples.
    """
    left = max(tokens - done_tokens, 0) * step_seconds / max(step_tokens, 1)
    peak, memory = peak_memory() if local else (None, "")
    cost = None if rates is None else tokens * rates.train_usd_per_million / 1e6
    seconds = done_seconds + left + other_seconds
    return RunEstimate(steps, tokens, seconds, peak, memory, cost, checkpoints)


def periodic_checkpoints(config: TrainingConfig, steps: int, interval: int) -> tuple[int, int]:
    """Returns how many checkpoints ``steps`` steps save, one per interval, and their bytes."""
    count = (steps - 1) // interval if interval else 0
    try:
        flags, parameters = (config.train_mlp, config.train_attn, config.train_unembed), 0
        if any(flags):
            parameters = get_lora_param_count(config.model_name, config.lora_rank, *flags)
        if config.train_vision:
            parameters += get_vision_lora_param_count(config.model_name, config.lora_rank)
    except TinkerCookbookError:  # a model of an unknown form
        return 0, 0
    # The adapter, and two moments of the optimizer, in float32.
    return count, count * parameters * 12


def peak_memory() -> tuple[int | None, str]:
    """Returns the peak memory of this process in bytes, on the GPU if it uses one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated()), "GPU"
    try:
        import resource
    except ImportError:  # Windows
        return None, ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak * (1 if sys.platform == "darwin" else 1024), "RAM"


def short_count(number: float) -> str:
    """Returns ``950``, ``61k`` or ``1.3M``."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        # Rounded to three digits, 999,600 is 1M.
        if number >= limit * (0.9995 if limit > 1e3 else 1):
            return f"{number / limit:.3g}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Returns ``45 s``, ``5 min 20 s`` or ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def lifetime(seconds: float) -> str:
    """Returns ``7 days``, or a shorter time as :func:`duration` does."""
    return duration(seconds) if seconds < 2 * 86400 else f"{seconds / 86400:.3g} days"
