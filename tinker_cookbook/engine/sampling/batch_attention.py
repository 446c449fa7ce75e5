"""Attention over a batch that mixes decode tokens and prefill chunks.

The tokens of all sequences form one row [1, T], so every linear layer is a single product. Only
attention needs to know which token belongs to which sequence: a ``BatchLayout`` holds the run of
tokens of each. New keys and values are written to the KV cache before attention reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from tinker_cookbook.engine.kernels import PagedAttention
from tinker_cookbook.engine.model.attention_hook import AttentionCall
from tinker_cookbook.engine.sampling.padded_attention import PaddedAttention
from tinker_cookbook.engine.sampling.paged_cache import TokenSpan


class BatchLayout:
    """Runs of tokens of a step, one for each sequence, consecutive in the batch."""

    def __init__(self, runs: Sequence[TokenSpan]) -> None:
        self.runs = runs
        self.windows_seen: dict[int, int | None] = {}
        """Sliding window of each layer that was called. The check at load reads it."""

    @cached_property
    def _attention(self) -> PagedAttention | PaddedAttention:
        # Created at the first layer and used by all, because the runs are the same.
        kind = PagedAttention if self.runs[0].table.cache.native else PaddedAttention
        return kind(self.runs)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Writes keys and values to the cache; returns the attention [T, heads, D]."""
        return self._attention(call)
