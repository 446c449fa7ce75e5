"""How the engine's own attention takes the place of a model's: what its kinds have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def register(name: str, forward: Callable[..., Any]) -> None:
    """Makes ``forward`` known to transformers, which then builds no mask for it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, _no_mask)


@contextmanager
def using(variable: ContextVar[T], value: T) -> Iterator[None]:
    """``variable`` has ``value`` inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def causal_bias(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
    """fp32 [Q, K]: 0 where a query sees a key, -inf elsewhere, given positions [Q] and [K]."""
    seen = key <= query[:, None]
    if window is not None:
        seen &= key > query[:, None] - window
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None
