"""Divides memory between training and sampling, bounds caches, detects out-of-memory errors, frees
cached memory."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch

from tinker_cookbook.engine.devices import free_memory_bytes

K = TypeVar("K")
V = TypeVar("V")

_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")


def out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means out of memory: torch has an exception type for CUDA but only a
    message for MPS and CPU; Python and numpy raise ``MemoryError``."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


@dataclass
class KnownLimits:
    """Limits found by out-of-memory errors while training a base model, shared by its runs.

    ``failed_tokens``: tokens of the smallest micro-batch that did not fit, when ``failed_free``
    bytes were free. ``recomputed``: number of tokens of a row -> share of the layers that had to be
    recomputed (activation checkpointing) for it to fit.
    """

    failed_tokens: int | None = None
    failed_free: int = 0
    recomputed: dict[int, float] = field(default_factory=dict)

    def budget(self, tokens: int, free: Callable[[], int] = lambda: 0) -> int:
        """Returns ``tokens``, or half of the failed number if that is lower.

        With more bytes ``free`` than at the failure, the limit grows in proportion: memory that a
        sampler or another run has returned can be used again.
        """
        if self.failed_tokens is None:
            return tokens
        half, now = max(1, self.failed_tokens // 2), free()
        # Measurements vary slightly between passes, which must not cause the same failure again.
        if now > self.failed_free * 5 // 4 > 0:
            half = half * now // self.failed_free
        return min(tokens, half)

    def note_failed(self, tokens: int, free: int) -> None:
        """Records that this many tokens did not fit into ``free`` bytes."""
        self.failed_tokens, self.failed_free = tokens, free

    def learn(self, found: Iterable[KnownLimits], free: int) -> bool:
        """Includes what ranks have found that began a pass with these limits, and returns whether
        that is anything new; ``free`` are the bytes free now."""
        new = [limits for limits in found if limits != self]
        known = self.failed_tokens, self.failed_free
        failed = [
            one.failed_tokens
            for one in new
            if one.failed_tokens and (one.failed_tokens, one.failed_free) != known
        ]
        if failed:
            self.note_failed(min(failed), free)
        for limits in new:
            for tokens, share in limits.recomputed.items():
                self.note_recomputed(tokens, share)
        return bool(new)

    def recomputed_share(self, tokens: int) -> float:
        """Returns the share of layers to recompute for this many tokens: the share that as many or
        fewer needed."""
        if not self.recomputed:  # the usual case
            return 0
        return max((share for most, share in self.recomputed.items() if most <= tokens), default=0)

    def note_recomputed(self, tokens: int, share: float) -> None:
        """Records that this many tokens fitted only with a share of the layers recomputed."""
        self.recomputed[tokens] = max(share, self.recomputed.get(tokens, 0))


def release_cached_memory(device: torch.device) -> None:
    """Frees the allocator's cached memory, for a smaller attempt or for other programs."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    else:
        # The package makes glibc keep all free pages; this returns them to the operating system.
        with suppress(AttributeError, OSError, TypeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


class BoundedCache(Generic[K, V]):
    """Values with their sizes, at most ``budget`` bytes together; the least recently used go first.
    Any thread may use it."""

    def __init__(self, budget: int) -> None:
        self._budget, self._bytes = budget, 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Returns a value; ``None`` if it is not kept."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Keeps a value of a size, in place of one with the same key."""
        self.pop(key)
        with self._lock:
            self._values[key] = value, nbytes
            self._bytes += nbytes
            while self._bytes > self._budget:
                self._bytes -= self._values.popitem(last=False)[1][1]

    def pop(self, key: K) -> V | None:
        """Removes and returns a value; ``None`` if it is not kept."""
        with self._lock:
            value, nbytes = self._values.pop(key, (None, 0))
            self._bytes -= nbytes
            return value


class MemoryBudget:
    """Divides a GPU's memory between training and the KV caches of the samplers.

    Both get shares of the memory that is free without any KV cache, so they fit together whichever
    comes first: half for the activations of a micro-batch and two fifths for all KV caches and
    kept features of images. The rest is for temporary tensors and for fragmentation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._caches: WeakSet[Any] = WeakSet()

    def add(self, cache: Any) -> None:
        """Includes a cache in the budget, by its ``nbytes``, while it lives."""
        self._caches.add(cache)

    def training_bytes(self) -> int:
        """Returns the memory that the activations of a micro-batch may use now."""
        free, held = self._measure()
        # A sequence that is alone may exceed the share of the KV caches.
        return min((free + held) // 2, free)

    def cache_tokens(self, cache: Any, context_length: int) -> int:
        """Returns the maximum number of tokens in a ``PagedCache``, including current ones."""
        if self._device.type == "cpu":
            # At least one full context, so that any request can run.
            tokens = free_memory_bytes(self._device) // 2 // cache.bytes_per_token
            return max(context_length, tokens)
        free, held = self._measure()
        share = (free + held) * 2 // 5 - (held - cache.nbytes)
        return max(0, share) // cache.bytes_per_token

    def _measure(self) -> tuple[int, int]:
        return free_memory_bytes(self._device), sum(cache.nbytes for cache in self._caches)
