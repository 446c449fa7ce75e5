"""Where the frozen weights of a base model are: on one device, or sharded among processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from tinker_cookbook.engine.kernels import Layout, MakeLayout


class Frozen(Protocol):
    """A frozen matrix ``W``, such as ``FrozenWeight``."""

    @property
    def forward(self) -> Layout:
        """For ``x W^T``."""
        ...

    @property
    def backward(self) -> Layout:
        """For ``gradient W``."""
        ...


class ShardedMatrix(nn.Module):
    """A frozen matrix of which each process keeps a shard; whole only while its layer runs."""


@dataclass(frozen=True)
class Placement:
    """Device and layout of frozen weights; ``layout`` ``None``: the fastest one. ``sharding`` as in
    ``BaseModel``."""

    device: torch.device
    layout: MakeLayout | None = None
    sharding: Any = None


def whole_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Returns the parameters that each process keeps whole, by name: all without sharding."""
    sharded = {name for name, one in model.named_modules() if isinstance(one, ShardedMatrix)}
    return {n: p for n, p in model.named_parameters() if n.rpartition(".")[0] not in sharded}
