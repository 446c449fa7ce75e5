"""Where the frozen weights of a base model are: on one device, or sharded among processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

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


class ShardedMatrix(nn.Module, ABC):
    """A frozen matrix of which each process keeps a shard; whole only while its layer runs."""

    frozen: Frozen

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """The matrix; read at each use, because a copy would be the memory that is to be saved."""


class Sharding(Protocol):
    """How one base model is sharded (``extensions.parallel.sharding``)."""

    def matrix(self, weight: Tensor, device: torch.device) -> ShardedMatrix:
        """Returns a module for ``weight`` [..., in] that ``shard_layers`` will shard."""
        ...

    def shard_layers(self, decoder: Any, device: torch.device) -> None:
        """Shards the matrices of the decoder's layers. Every process calls it."""
        ...


@dataclass(frozen=True)
class Placement:
    """Device and layout of frozen weights; ``layout`` ``None``: the fastest one."""

    device: torch.device
    layout: MakeLayout | None = None
    sharding: Sharding | None = None


def whole_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Returns the parameters that each process keeps whole, by name: all without sharding."""
    sharded = {name for name, one in model.named_modules() if isinstance(one, ShardedMatrix)}
    return {n: p for n, p in model.named_parameters() if n.rpartition(".")[0] not in sharded}
