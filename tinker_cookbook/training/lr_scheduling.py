"""Learning-rate schedules as multipliers of the peak learning rate."""

from __future__ import annotations

import math
from typing import Literal, get_args

from tinker_cookbook.exceptions import ConfigurationError, nearest

LRSchedule = Literal["linear", "cosine", "constant"]


def compute_schedule_lr_multiplier(
    lr_schedule: LRSchedule, step: int, total_steps: int, warmup_steps: int = 0
) -> float:
    """Returns the multiplier of the peak learning rate for the 0-based update ``step``.

    With s = ``step``, S = ``total_steps``, w = ``warmup_steps``::

        s < w:      (s + 1) / w            # not 0 at the first update, which would be wasted
        s >= w:     p = (s - w) / (S - w)
                    linear 1 - p, cosine (1 + cos(pi p)) / 2, constant 1

    Steps past the end use the final value. Raises ConfigurationError for an unknown schedule
    or invalid numbers.
    """
    names = get_args(LRSchedule)
    if lr_schedule not in names:
        raise ConfigurationError(
            f"lr_schedule={lr_schedule!r} is unknown; expected one of {', '.join(names)}"
            f"{nearest(lr_schedule, names)}"
        )
    if total_steps < 1 or step < 0:
        raise ConfigurationError(
            f"step={step}, total_steps={total_steps}: expected step >= 0 and total_steps >= 1"
        )
    if not 0 <= warmup_steps <= total_steps:
        raise ConfigurationError(
            f"warmup_steps={warmup_steps} must lie between 0 and the {total_steps} steps of the "
            f"run, or the learning rate never reaches its peak; lower warmup_steps"
        )
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if lr_schedule == "constant":
        return 1.0
    # Before the division, because the divisor is 0 if all steps are warmup steps.
    if step >= total_steps:
        return 0.0
    done = (step - warmup_steps) / (total_steps - warmup_steps)
    return 1.0 - done if lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
