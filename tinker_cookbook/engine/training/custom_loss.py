"""Losses that the caller computes from log-probabilities, under real autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError

CustomLossFn = Callable[
    [Sequence[int], "list[torch.Tensor]"], "tuple[torch.Tensor, dict[str, float]]"
]
"""``loss_fn(indices, logprobs)``: numbers of the datums, and a leaf [T] of autograd for each;
returns the loss (one element) and metrics."""


@dataclass(frozen=True)
class CustomResult:
    """Value and metrics of a loss, and its gradient for the log-probabilities of each datum."""

    value: float
    metrics: dict[str, float]
    gradients: list[torch.Tensor]


def evaluate(
    loss_fn: CustomLossFn, indices: Sequence[int], logprobs: Sequence[torch.Tensor]
) -> CustomResult:
    """Calls ``loss_fn`` once; raises ``DataValidationError`` for what cannot be a loss.

    The gradient is zero where the loss does not use a log-probability.
    """
    leaves = [values.detach().clone().requires_grad_() for values in logprobs]
    with torch.enable_grad():
        result = loss_fn(indices, leaves)
    if not isinstance(result, tuple) or len(result) != 2:
        raise DataValidationError(
            f"loss_fn: returned {type(result).__name__}, expected a tuple (loss, metrics)"
        )
    value, metrics = result
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise DataValidationError(
            f"loss_fn: returned {type(value).__name__} "
            f"{tuple(value.shape) if isinstance(value, torch.Tensor) else ''} as loss, expected a "
            "tensor of one element"
        )
    if not value.requires_grad:
        raise DataValidationError(
            "loss_fn: the loss does not depend on the log-probabilities it was given; compute it "
            "with torch operations, without .item() or .detach()"
        )
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    gradients = []
    for index, leaf, gradient in zip(indices, leaves, found, strict=True):
        gradient = torch.zeros_like(leaf) if gradient is None else gradient.float()
        if not torch.isfinite(gradient).all():
            raise DataValidationError(
                f"loss_fn: its gradient is not finite at datum {index}; check for log(0) or 0/0"
            )
        gradients.append(gradient)
    return CustomResult(float(value.detach()), dict(metrics), gradients)


def check_group_size(group_size: object, count: int) -> None:
    """Refuses what is no number of datums, or does not divide a batch of ``count`` of them."""
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 1:
        raise ConfigurationError(
            f"loss_fn.group_size: got {group_size!r}, expected a whole number of datums, at "
            "least 1; leave it out if the loss couples the whole batch"
        )
    if count % group_size:
        raise DataValidationError(
            f"data: got {count} datums, expected a multiple of loss_fn.group_size={group_size}; "
            f"the last {count % group_size} are no whole group"
        )
