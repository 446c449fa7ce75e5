"""Shards a base model that does not fit one device among the processes of torchrun, by FSDP2.

Each process keeps a shard of every matrix of the decoder's layers. A layer's matrices are gathered
before it runs, forward or backward, and freed after it; nothing else changes, since they have no
gradient. Gathering is a collective: all processes must run the layers the same number of times. One
whose pass fails in the middle therefore takes part in the gathers that are left (``Gathers``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tinker_cookbook.engine.extensions.quantized import shardable_layout
from tinker_cookbook.engine.kernels import Layout, MakeShardable, ShardableLayout
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.placement import ShardedMatrix, whole_parameters
from tinker_cookbook.exceptions import ConfigurationError

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class FSDPMatrix(ShardedMatrix):
    """A matrix that FSDP shards.

    Its layout is created from ``weight`` [..., in], as [rows, in] on ``device``, when its layer is
    sharded: all layers at once may not fit the device.
    """

    def __init__(self, weight: Tensor, device: torch.device, make: MakeShardable) -> None:
        super().__init__()
        self._weight: Tensor | None = weight.detach()
        self._device, self._make = device, make
        self._names: list[str] = []
        self._layout: ShardableLayout
        self.frozen = GatheredWeight(self)

    def prepare(self) -> None:
        """Creates the parameters that FSDP shards."""
        if self._weight is None:
            return
        layout = self._make(self._matrix(self._weight))
        self._weight = None
        for number, tensor in enumerate(layout.tensors):
            self._names.append(f"part{number}")
            self.register_parameter(self._names[-1], nn.Parameter(tensor, requires_grad=False))
        # Without the tensors: the parameters are their only place.
        self._layout = layout.of([tensor.new_empty(0) for tensor in layout.tensors])

    @property
    def parts(self) -> list[Tensor]:
        """The parameters: this process's shards, or the whole tensors while the layer runs."""
        return [cast("Tensor", getattr(self, name)) for name in self._names]

    @property
    def layout(self) -> Layout:
        """The matrix; read at each use, because a copy would be the memory that is to be saved."""
        if self._weight is not None:  # the trials of single modules before the sharding
            return shardable_layout("auto")(self._matrix(self._weight))
        return self._layout.of(self.parts)

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.to(self._device).flatten(0, -2)


class GatheredWeight:
    """A sharded matrix in place of ``FrozenWeight``."""

    def __init__(self, matrix: FSDPMatrix) -> None:
        self._matrix = matrix

    @property
    def forward(self) -> Layout:
        """For ``x W^T``."""
        return self._matrix.layout

    @property
    def backward(self) -> Layout:
        """For ``gradient W``."""
        return self._matrix.layout.transposed()


class Gathers:
    """Counts the gathers of a sharded base model, so that a process can catch up with the others.

    Every micro-batch gathers the same layers in the same order in all processes: first to last in
    the forward pass, last to first in the backward pass.
    """

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._inputs: dict[int, Tensor] = {}
        """An empty part of each place that was gathered, in the order of the forward pass."""
        self._group: Any = None
        self._count = 0

    @property
    def recovers(self) -> bool:
        """Whether FSDP can forget a pass that failed (torch 2.13)."""
        return hasattr(self._decoder, "reset_iter_state")

    def of_pass(self, names: Iterable[str], *, backward: bool) -> list[int]:
        """Returns the places that a micro-batch gathers, in order, with adapters for ``names``."""
        forward = list(self._inputs)
        adapted = [int(found[1]) for name in names if (found := _LAYER.search(name))]
        if not backward or not adapted:
            return forward
        # Autograd stops at the first layer with an adapter; FSDP prefetches one layer more.
        last = max(min(adapted) - 1, 0)
        return [*forward, *(place for place in reversed(forward) if place >= last)]

    def start(self) -> None:
        """Starts to count."""
        self._count = 0
        if self.recovers:
            # FSDP notes every forward pass until the next backward pass, and a server that only
            # samples has none.
            self._decoder.reset_iter_state()

    def catch_up(self, expected: Sequence[int]) -> None:
        """Takes part in the gathers of ``expected`` that this process has not made since ``start``.

        FSDP forgets the pass that failed; what is gathered is thrown away.
        """
        self._decoder.reset_iter_state()
        for place in expected[self._count :]:
            self.gather(place, None, self._inputs[place], self._group)

    def gather(
        self, place: int, output: Tensor | None, own: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Gathers the shards of all processes, of the size of ``own``, into ``output``."""
        from torch import distributed

        if place not in self._inputs:
            # One element that looks like a part: its contents do not matter, its size does.
            self._inputs[place] = torch.zeros(1, dtype=own.dtype, device=own.device).expand_as(own)
            self._group = group
        self._count += 1
        if output is None:
            own, output = own.contiguous(), own.new_empty(own.numel() * group.size())
        # Its name since torch 2.13, and before.
        gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
        return gather(output, own, group=group, async_op=async_op)


class _OfPlace:
    """The gathers of one layer, as FSDP's ``set_custom_all_gather`` expects them."""

    def __init__(self, gathers: Gathers, place: int) -> None:
        self._gathers, self._place = gathers, place

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        return self._gathers.gather(self._place, output_tensor, input_tensor, group, async_op)


class Sharding:
    """How one base model is sharded; ``gathers`` exist once its layers are."""

    gathers: Gathers

    def __init__(self, base_dtype: str = "auto") -> None:
        self._make = shardable_layout(base_dtype)

    def matrix(self, weight: Tensor, device: torch.device) -> FSDPMatrix:
        """Returns a module for ``weight`` [..., in] that ``shard_layers`` will shard."""
        return FSDPMatrix(weight, device, self._make)

    def shard_layers(self, decoder: Any, device: torch.device) -> None:
        """Shards the matrices of the decoder's layers. Every process calls it."""
        self.gathers = _shard_layers(decoder, device)


def gathers_of(base: BaseModel) -> Gathers:
    """Returns those of a sharded base model."""
    assert isinstance(base.sharding, Sharding)
    return base.sharding.gathers


def _shard_layers(decoder: Any, device: torch.device) -> Gathers:
    """Shards the matrices of the decoder; those of one layer after another go to ``device``."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigurationError(
            f"shard_base=true: {type(decoder).__name__} has no plain list of layers whose matrices "
            "could be sharded; set shard_base=false"
        )
    # No list of the matrices: it would keep each one whole until the last layer is sharded.
    whole = set(whole_parameters(decoder).values())
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    gathers = Gathers(decoder)
    parts: tuple[Any, ...] = (*layers, decoder)
    for place, part in enumerate(parts):
        for module in part.modules():
            if isinstance(module, FSDPMatrix):
                module.prepare()
        # Freed after the forward pass too: several layers at once are what does not fit.
        fully_shard(part, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
        part.set_custom_all_gather(_OfPlace(gathers, place))
    # By default FSDP prefetches by the order of all forward passes since the last backward pass, so
    # that the first layer would gather the last one of a pass without gradients. The first layer
    # prefetches nothing: it is whole by then.
    for place, part in enumerate(parts):
        part.set_modules_to_backward_prefetch([parts[max(place - 1, 0)]])
    return gathers
