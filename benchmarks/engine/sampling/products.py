"""The ceiling of sampling: the model's matrix products alone, at several numbers of rows.

All linear layers of the body and the unembedding, each with its own weights in the layout
that the engine gives them, one after another as in a forward pass; no attention, no norms, no
adapter, no sampling of tokens. A decode step of R samples cannot be faster than R rows through
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.engine.ceilings import best_seconds
from tinker_cookbook.engine.kernels import FrozenWeight

ROWS = (1, 8, 32, 64, 128, 256)
_SECONDS = 0.2


@dataclass(frozen=True)
class Products:
    """Shortest time of one pass of ``rows`` rows, in seconds."""

    rows: int
    body_seconds: float
    head_seconds: float


@torch.no_grad()
def measure_products(
    folder: Path, device: torch.device, dtype: torch.dtype, rows: tuple[int, ...] = ROWS
) -> list[Products]:
    """Times random weights with the shapes of the model in ``folder``."""
    body, head = _draw(folder, device, dtype)
    widths = {weight.shape[1] for weight in (*body, head)}
    found = []
    for count in rows:
        inputs = {w: torch.randn(count, w, device=device, dtype=dtype) for w in widths}
        body_seconds, head_seconds = (
            best_seconds(partial(_multiply, weights, inputs), device, _SECONDS)
            for weights in (body, [head])
        )
        found.append(Products(count, body_seconds, head_seconds))
    return found


def _multiply(weights: Sequence[FrozenWeight], inputs: Mapping[int, torch.Tensor]) -> None:
    for weight in weights:
        weight.forward.product(inputs[weight.shape[1]])


def _draw(
    folder: Path, device: torch.device, dtype: torch.dtype
) -> tuple[list[FrozenWeight], FrozenWeight]:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, local_files_only=True)
        )
    last = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not last]

    def random_weight(layer: torch.nn.Linear) -> FrozenWeight:
        return FrozenWeight(torch.randn(tuple(layer.weight.shape), device=device, dtype=dtype))

    return [random_weight(layer) for layer in layers], random_weight(last)
