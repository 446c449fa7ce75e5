"""Divides a base model that does not fit one device among the ranks of torchrun, by FSDP2.

Each rank keeps a part of every matrix of the decoder's layers. A layer's matrices are gathered
before it runs, forward or backward, and freed after it; nothing else changes, since they have no
gradient. Gathering is a collective: all ranks must run the layers the same number of times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tinker_cookbook.engine.model.lora import AdapterLinear
from tinker_cookbook.exceptions import ConfigurationError


def whole_parts(model: Any) -> list[nn.Parameter]:
    """Returns the parameters that each rank keeps whole: all where nothing is divided."""
    return [part for name, part in model.named_parameters() if not name.endswith(".divided")]


def divide_layers(decoder: Any, device: torch.device) -> None:
    """Divides the matrices of the hooked layers; those of one layer after another go to ``device``.
    Every rank calls it."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = getattr(decoder, "layers", None)
    hooked = (module for module in decoder.modules() if isinstance(module, AdapterLinear))
    if not isinstance(layers, nn.ModuleList) or any(module.divided is None for module in hooked):
        raise ConfigurationError(
            f"shard_base=true: {type(decoder).__name__} has no plain list of layers whose matrices "
            "could be divided; set shard_base=false"
        )
    # No list of the matrices: it would keep each one whole until the last layer is divided.
    whole = set(whole_parts(decoder))
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for part in (*layers, decoder):
        # Freed after the forward pass too: several layers at once are what does not fit.
        fully_shard(part, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
