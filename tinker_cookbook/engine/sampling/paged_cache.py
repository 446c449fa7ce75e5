"""Paged KV cache for the C kernel (``kernels/cpu/attention.c``).

The block table of a sequence is a list of pages. Sequences with a common prefix share its full
pages: the samples of a prompt, the next turn of a conversation, and cached prefixes. Shared pages
need no extra memory, are never copied, and are read once for neighbouring sequences of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tinker_cookbook.engine.kernels import page_tokens
from tinker_cookbook.engine.sampling.kv_cache import ArenaCache, KVCache, LayerShape


@dataclass(eq=False)
class Page:
    """Memory of one page in all layers, with its reference count."""

    memory: torch.Tensor
    address: int
    users: int = 1


@dataclass(eq=False)
class PagedSlot:
    """Block table of one sequence; ``length`` tokens of its pages are filled."""

    cache: PagedCache
    pages: list[Page] = field(default_factory=list)
    length: int = 0

    @property
    def capacity(self) -> int:
        """Number of tokens that fit."""
        return len(self.pages) * self.cache.page


class PagedCache:
    """Paged KV cache of one base model.

    In a page the keys of layer ``i``, [kv heads, width, page], begin at element ``keys_at[i]``, and
    its values, [kv heads, page, width], at ``values_at[i]``.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device
    ) -> None:
        page = page_tokens(dtype, device)
        assert page is not None, "no kernel attends to pages here: see ``cache_for``"
        self.page = page
        self.dtype, self._device = dtype, device
        self.keys_at, self.values_at, self._size = [], [], 0
        for shape in shapes:
            self.keys_at.append(self._size)
            self._size += self.page * shape.heads * shape.key
            self.values_at.append(self._size)
            self._size += self.page * shape.heads * shape.value
        self._free: list[Page] = []

    @property
    def bytes_per_token(self) -> int:
        """Returns the bytes that one token takes in all layers."""
        return self._size // self.page * self.dtype.itemsize

    def capacity(self, length: int) -> int:
        """Returns the capacity of the pages of ``length`` tokens."""
        return -(-length // self.page) * self.page

    def groups(self, slots: Iterable[PagedSlot]) -> Iterator[list[PagedSlot]]:
        """Returns ``slots`` as one group."""
        if together := list(slots):
            yield together

    def new(self, length: int) -> PagedSlot:
        """Allocates an empty sequence for ``length`` tokens."""
        return self.grow(PagedSlot(self), length)

    def reserve(self, length: int, count: int) -> None:
        """Does nothing: pages are allocated on demand."""

    def grow(self, slot: PagedSlot, length: int) -> PagedSlot:
        """Appends pages to ``slot`` up to ``length`` tokens; returns it."""
        while slot.capacity < length:
            slot.pages.append(self._take())
        return slot

    def to_grow(self, slot: PagedSlot) -> int:
        """Returns the number of tokens that ``grow`` allocates."""
        return self.page

    def copy(self, slot: PagedSlot, length: int, room: int) -> PagedSlot:
        """Returns a new sequence that shares the first ``length`` tokens of ``slot``."""
        full = length // self.page
        new = PagedSlot(self, slot.pages[:full], length)
        for page in new.pages:
            page.users += 1
        if length % self.page:
            page = self._take()
            page.memory.copy_(slot.pages[full].memory)
            new.pages.append(page)
        return self.grow(new, room)

    def adopt(self, slot: PagedSlot) -> PagedSlot:
        """Takes over a finished sequence and frees its unused pages."""
        needed = self.capacity(slot.length) // self.page
        self._release(slot.pages[needed:])
        del slot.pages[needed:]
        return slot

    def free(self, slot: PagedSlot) -> None:
        """Frees the pages that no other sequence references."""
        self._release(slot.pages)
        slot.pages = []

    def shrink(self) -> None:
        """Frees all unused memory."""
        self._free.clear()

    def _take(self) -> Page:
        if self._free:
            page = self._free.pop()
            page.users = 1
            return page
        memory = torch.empty(self._size, dtype=self.dtype, device=self._device)
        return Page(memory, memory.data_ptr())

    def _release(self, pages: Sequence[Page]) -> None:
        for page in pages:
            page.users -= 1
            if not page.users:
                self._free.append(page)


def cache_for(
    shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device, longest: int
) -> KVCache:
    """Returns a paged cache if the C kernel supports all layers, else an arena cache."""
    if page_tokens(dtype, device) and all(shape.plain for shape in shapes):
        return PagedCache(shapes, dtype, device)
    return ArenaCache(shapes, dtype, device, longest)
