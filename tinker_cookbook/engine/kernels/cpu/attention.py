"""Paged attention for all running sequences in one call per layer (``attention.c``).

torch's operators cannot read through a block table: ``batch_attention`` copies the blocks of every
sequence in every layer. The kernel reads them in place, and only the filled part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from tinker_cookbook.engine.kernels.cpu.build import KernelCall, library
from tinker_cookbook.engine.model.attention_hook import AttentionCall

_TILE = 16
"""Prefill tokens that one thread processes at a time."""

_int64, _pointer = ctypes.c_int64, ctypes.c_void_p


class CallOfAttention(KernelCall):
    """Mirrors ``struct Attention`` of attention.c."""

    kernel = 3
    _fields_ = (
        *((name, _int64) for name in ("runs", "heads", "kv_heads", "width")),
        *((name, _int64) for name in ("value_width", "window")),
        *((name, _int64 * 2) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, _pointer) for name in ("query", "key", "value", "out")),
        *((name, _pointer) for name in ("run_first", "run_count", "position", "seen")),
        *((name, _pointer) for name in ("first_page", "pages")),
        *((name, _pointer) for name in ("keys", "values", "sinks")),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
        ("half", ctypes.c_int32),
    )


def page_tokens(dtype: torch.dtype, device: torch.device) -> int | None:
    """Returns the tokens per page of the KV cache; ``None`` if paged attention is unavailable."""
    supported = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    routines = library() if supported else None
    return None if routines is None else int(routines.tinker_page())


class PagedAttention:
    """Attention of one step, with the block tables of its sequences.

    The runs are ``TokenSpan``s of ``sampling.paged_cache`` (which imports this module), consecutive
    in the batch.
    """

    def __init__(self, runs: Sequence[Any]) -> None:
        # Split long runs into tiles, so that several threads share the prefill of one prompt.
        tiles = [
            (run.position + i, run.first + i, min(_TILE, run.count - i), number)
            for number, run in enumerate(runs)
            for i in range(0, run.count, _TILE)
        ]
        columns = np.array(tiles, dtype=np.int64).T.copy()
        self._position, self._first, self._count, number = columns
        tables = [[block.index for block in run.table.blocks] for run in runs]
        # One flat list of page numbers. Each tile has the index of its sequence's first page.
        ends = np.cumsum([0, *map(len, tables)])
        self._first_page = ends[number]
        self._pages = np.fromiter(chain.from_iterable(tables), np.int64, ends[-1])
        self._cache = runs[0].table.cache
        self._seen = None
        if any(run.last_seen is not None for run in runs):
            self._seen = np.concatenate([run.seen for run in runs]) + 1
        # The call holds only addresses, so the arrays are attributes to keep them alive.
        self.call = CallOfAttention(
            runs=len(tiles),
            run_first=self._first.ctypes.data,
            run_count=self._count.ctypes.data,
            position=self._position.ctypes.data,
            seen=None if self._seen is None else self._seen.ctypes.data,
            first_page=self._first_page.ctypes.data,
            pages=self._pages.ctypes.data,
        )

    def __call__(self, attention: AttentionCall) -> torch.Tensor:
        """Writes keys and values to the cache; returns the attention [T, heads, D].

        Raises:
            TypeError: query, key or value does not have the cache's dtype.
            RuntimeError: out of memory.
        """
        query, key, value = attention.query, attention.key, attention.value
        layer = attention.layer
        dtype = self._cache.dtype
        # The kernel reads raw addresses: another dtype would be read as garbage, without an error.
        if not query.dtype == key.dtype == value.dtype == dtype:
            kinds = [str(tensor.dtype) for tensor in (query, key, value)]
            raise TypeError(f"query, key and value are {kinds}, expected {dtype}")
        # The kernel supports any strides of tokens and heads, but a head must be contiguous.
        query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query, key, value))
        # Padding tokens belong to no run: their result is 0.
        out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        call = self.call
        call.heads, call.width = query.shape[1:]
        call.kv_heads, call.value_width = value.shape[1:]
        # In C, 0 means no window.
        call.window, call.scale = attention.window or 0, attention.scale
        call.cap = attention.softcap or 0
        sinks = None if attention.sinks is None else attention.sinks.float().contiguous()
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.half = query.dtype == torch.bfloat16
        call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        call.query_stride[:] = query.stride()[:2]
        call.key_stride[:] = key.stride()[:2]
        call.value_stride[:] = value.stride()[:2]
        call.keys = self._cache.keys[layer].data_ptr()
        call.values = self._cache.values[layer].data_ptr()
        call.out = out.data_ptr()
        call.run(torch.get_num_threads())
        return out
