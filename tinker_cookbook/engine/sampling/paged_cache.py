"""Keys and values in pages, for the compiled routine (``native/attention.c``).

A sequence is a list of pages. One that begins like another has the full pages of that beginning in
common with it: the samples of a prompt, a next turn and what is kept for it. So they take no
memory of their own, are never copied, and are read once for all who are near each other in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tinker_cookbook.engine.kernels.cpu.build import library, suits
from tinker_cookbook.engine.sampling.kv_cache import AnyCache, KVCache, LayerShape


@dataclass(eq=False)
class Page:
    """Memory for the tokens of a page in all layers, and how many sequences hold it."""

    memory: torch.Tensor
    address: int
    users: int = 1


@dataclass(eq=False)
class PagedSlot:
    """The pages of one sequence; ``length`` tokens of them are filled."""

    cache: PagedCache
    pages: list[Page] = field(default_factory=list)
    length: int = 0

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return len(self.pages) * self.cache.page


class PagedCache:
    """All pages of one base model.

    Of layer ``i`` a page holds keys [kv heads, width, page] from element ``keys_at[i]`` on, and
    values [kv heads, page, width] from ``values_at[i]``.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device
    ) -> None:
        routines = library("attention")
        assert routines is not None, "asked for by ``suits``"
        self.page = int(routines.tinker_page())
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
        """Memory that one token takes in all layers."""
        return self._size // self.page * self.dtype.itemsize

    def capacity(self, length: int) -> int:
        """Tokens that the pages of a sequence of ``length`` tokens hold."""
        return -(-length // self.page) * self.page

    def groups(self, slots: Iterable[PagedSlot]) -> Iterator[list[PagedSlot]]:
        """``slots``, all together."""
        if together := list(slots):
            yield together

    def new(self, length: int) -> PagedSlot:
        """An empty sequence with room for ``length`` tokens."""
        return self.grow(PagedSlot(self), length)

    def reserve(self, length: int, count: int) -> None:
        """Nothing to do: a page is as quickly had as many."""

    def grow(self, slot: PagedSlot, length: int) -> PagedSlot:
        """``slot`` itself, with room for ``length`` tokens."""
        while slot.capacity < length:
            slot.pages.append(self._take())
        return slot

    def to_grow(self, slot: PagedSlot) -> int:
        """Tokens for which ``grow`` takes memory."""
        return self.page

    def copy(self, slot: PagedSlot, length: int, room: int) -> PagedSlot:
        """A further sequence that begins with the first ``length`` tokens of ``slot``."""
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
        """Takes over a sequence that has ended, without the pages that it did not need."""
        needed = self.capacity(slot.length) // self.page
        self._release(slot.pages[needed:])
        del slot.pages[needed:]
        return slot

    def free(self, slot: PagedSlot) -> None:
        """Gives back what nobody else holds."""
        self._release(slot.pages)
        slot.pages = []

    def shrink(self) -> None:
        """Gives back all memory that no sequence needs."""
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
) -> AnyCache:
    """Pages where the compiled routine computes all that the layers ask for, else arenas."""
    if suits(dtype, device) and all(shape.plain for shape in shapes):
        return PagedCache(shapes, dtype, device)
    return KVCache(shapes, dtype, device, longest)
