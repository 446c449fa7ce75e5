"""Embeddings and output head of a quantised base model, in 8 bits each.

They are a large part of a small model. A head that is tied to the embeddings shares their table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tinker_cookbook.engine.kernels import FrozenWeight, Int8Table


class QuantizedEmbedding(nn.Module):
    """Reads rows of a table; ``scale`` multiplies them, as Gemma does."""

    def __init__(self, embedding: nn.Embedding, table: Int8Table) -> None:
        super().__init__()
        self._table = table
        self._scale = _scale_of(embedding)
        # Transformers and the kernels look at its dtype and device.
        self.weight = _emptied(embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns embeddings [..., H] of token ids [...]."""
        rows = self._table.rows(tokens)
        return rows if self._scale is None else rows * self._scale.to(rows.dtype)


def quantize_tables(model: Any, make: type[Int8Table] = Int8Table) -> FrozenWeight:
    """Replaces the embeddings of a model by 8-bit ones, frees the head's matrix, and returns it in
    8 bits."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    weight = FrozenWeight(head.weight, make)
    # Embeddings that compute something else are kept as they are.
    if type(embedding).forward is nn.Embedding.forward or _scale_of(embedding) is not None:
        table = weight.forward if tied else make(embedding.weight.detach())
        assert isinstance(table, make)
        model.set_input_embeddings(QuantizedEmbedding(embedding, table))
    head.weight = _emptied(head.weight)
    return weight


def _scale_of(embedding: nn.Embedding) -> Tensor | None:
    scale = getattr(embedding, "embed_scale", None)
    return scale if isinstance(scale, Tensor) else None


def _emptied(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(weight[:0, :0]), requires_grad=False)
