"""Attention over the slots of running sequences, one call a layer for all of them.

The torch operators of ``batch_attention`` take a dozen calls for each arena and each block of a
prompt, and read the whole of every slot; this reads what is filled, once (``attention.c``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tinker_cookbook.engine.kv_cache import Arena
from tinker_cookbook.engine.native.build import library

_TILE = 16
"""Tokens of a prompt that one thread takes at a time."""

_int64, _pointer = ctypes.c_int64, ctypes.c_void_p


class _Call(ctypes.Structure):
    """``Call`` of attention.c, in its order."""

    _fields_ = (
        *((name, _int64) for name in ("runs", "heads", "kv_heads", "width")),
        *((name, _int64) for name in ("value_width", "window", "threads")),
        *((name, _int64 * 2) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, _pointer) for name in ("query", "key", "value", "out")),
        *((name, _pointer) for name in ("run_first", "run_count", "keys_at", "values_at")),
        *((name, _pointer) for name in ("capacity", "position")),
        ("scale", ctypes.c_float),
        ("half", ctypes.c_int32),
    )


class Run(NamedTuple):
    """``tokens`` tokens of the sequence in ``slot`` of ``arena``, those at ``position`` and
    after it; ``first`` is where they begin in the row of tokens.
    """

    arena: Arena
    slot: int
    position: int
    first: int
    tokens: int


class SlotAttention:
    """The attention of one step: for each layer, where the slots of its tokens lie in memory.

    The runs follow each other in the row of tokens.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        tiles = [
            Run(run.arena, run.slot, run.position + i, run.first + i, min(_TILE, run.tokens - i))
            for run in runs
            for i in range(0, run.tokens, _TILE)
        ]
        arenas = list(dict.fromkeys(tile.arena for tile in tiles))
        number = {arena: i for i, arena in enumerate(arenas)}
        arena = np.array([number[tile.arena] for tile in tiles])
        slot, self._position, self._first, self._count = (
            np.array(column, dtype=np.int64) for column in list(zip(*tiles, strict=True))[1:]
        )
        self._dtype = arenas[0].dtype
        self._tokens = int(self._first[-1] + self._count[-1])
        self._capacity = np.array([tile.arena.capacity for tile in tiles], dtype=np.int64)
        self._keys = _addresses([a.keys for a in arenas], arena, slot)
        self._values = _addresses([a.values for a in arenas], arena, slot)
        self._call = _Call(
            runs=len(tiles),
            threads=torch.get_num_threads(),
            run_first=self._first.ctypes.data,
            run_count=self._count.ctypes.data,
            position=self._position.ctypes.data,
            capacity=self._capacity.ctypes.data,
        )
        self._routine = library("attention").tinker_attend  # type: ignore[union-attr]

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Stores ``key`` [T, kv heads, D] and ``value``; returns what ``query`` attends to.

        Rows of the result [T, heads, D] after the last run are 0.

        Raises:
            TypeError: one of them is not of the arenas' dtype.
            RuntimeError: out of memory.
        """
        if not query.dtype == key.dtype == value.dtype == self._dtype:
            kinds = [str(tensor.dtype) for tensor in (query, key, value)]
            raise TypeError(f"query, key and value are {kinds}, expected {self._dtype}")
        query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query, key, value))
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        out[self._tokens :] = 0
        call = self._call
        call.heads, call.width = query.shape[1:]
        call.kv_heads, call.value_width = value.shape[1:]
        call.window, call.scale = window or 0, scale
        call.half = query.dtype == torch.bfloat16
        call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        call.query_stride[:] = query.stride()[:2]
        call.key_stride[:] = key.stride()[:2]
        call.value_stride[:] = value.stride()[:2]
        call.keys_at = self._keys[layer].ctypes.data
        call.values_at = self._values[layer].ctypes.data
        call.out = out.data_ptr()
        if self._routine(ctypes.byref(call)):
            raise RuntimeError("out of memory: the sums of attention did not fit")
        return out


def _addresses(
    of_arenas: Sequence[Sequence[torch.Tensor]], arena: np.ndarray, slot: np.ndarray
) -> np.ndarray:
    """Where the ``slot`` of each run in its ``arena`` begins in memory, [layers, runs]."""
    first = np.array([[tensor.data_ptr() for tensor in tensors] for tensors in of_arenas])
    step = np.array([[t.stride(0) * t.element_size() for t in ts] for ts in of_arenas])
    return np.ascontiguousarray((first[arena] + step[arena] * slot[:, None]).T, dtype=np.int64)
