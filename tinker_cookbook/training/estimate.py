"""Estimate of a run's time, and numbers as people read them."""

from __future__ import annotations

import sys

from rich.filesize import decimal

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.hyperparam_utils import get_lora_param_count
from tinker_cookbook.training.config import TrainingConfig, checkpoint_interval
from tinker_cookbook.utils.cost_estimation import TokenCostRates


def estimate_line(
    steps: int,
    tokens: int,
    seconds: float,
    *,
    local: bool,
    rates: TokenCostRates | None,
    checkpoints: tuple[int, int] = (0, 0),
) -> str:
    """Returns the estimate for the remaining steps of a run and their input tokens as one line.

    A local run adds the peak memory of this process so far and the disk space of its periodic
    ``checkpoints`` (number, bytes of one), a hosted one the cost by ``rates``.
    """
    parts = [f"{steps:,} steps", f"{short_count(tokens)} tokens", f"about {duration(seconds)}"]
    if local and (memory := peak_memory()):
        parts.append(f"peak {memory}")
    count, size = checkpoints
    if local and count and size:
        parts.append(f"{decimal(count * size)} of disk for {count} checkpoints")
    if rates is not None:
        cost = tokens * rates.train_usd_per_million / 1e6
        parts.append(f"about ${cost:.2f} for training tokens")
    return f"estimate: {', '.join(parts)}"


def checkpoint_space(config: TrainingConfig, steps: int) -> tuple[int, int]:
    """Returns the number of periodic checkpoints of a run of ``steps`` steps, and the bytes of one.

    The bytes are 0 if the size of the adapter is unknown, or all weights are trained.
    """
    every = checkpoint_interval(config, steps)
    parts = (config.train_mlp, config.train_attn, config.train_unembed)
    try:
        parameters = get_lora_param_count(config.model_name, config.lora_rank, *parts)
    except TinkerCookbookError:
        parameters = 0
    # In float32, with the two moments of the optimizer.
    return (steps - 1) // every if every else 0, parameters * 12


def peak_memory() -> str:
    """Returns ``"1.2 GB RAM"``, of the GPU if this process uses one; "" if unknown."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB GPU"
    try:
        import resource
    except ImportError:  # Windows
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return f"{peak * (1 if sys.platform == 'darwin' else 1024) / 1e9:.1f} GB RAM"


def short_count(number: float) -> str:
    """Returns ``950``, ``61k`` or ``1.3M``."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
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
