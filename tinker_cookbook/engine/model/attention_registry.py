"""Replacement of a model's attention by the engine's own; shared by all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def register(name: str, forward: Callable[..., Any]) -> None:
    """Registers ``forward`` with transformers, without a mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, _no_mask)


@contextmanager
def using(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Sets ``variable`` to ``value`` inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def causal_bias(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
    """Returns fp32 [Q, K]: 0 for visible keys, -inf for others, from positions [Q] and [K]."""
    seen = key <= query[:, None]
    if window is not None:
        seen &= key > query[:, None] - window
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None
