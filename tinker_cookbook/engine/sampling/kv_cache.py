"""Contiguous KV cache for torch's own operators.

Each sequence has a slot in an arena: per layer a tensor [slots, kv heads, capacity, head dim], in
which used slots come first. Sequences of similar length share an arena, so attention is one
batched product over contiguous memory with little padding. A sequence that outgrows its arena
moves to the next one. (Torch's operators would have to gather pages in every layer of every step; a
move copies a sequence only a few times.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's cache for one token: number of kv heads, widths of key and value.

    ``plain``: softmax attention without soft cap and without sinks.
    """

    heads: int
    key: int
    value: int
    plain: bool = True


class KVSlot(Protocol):
    """Cache of one sequence, of which ``length`` tokens are filled."""

    length: int

    @property
    def capacity(self) -> int:
        """Number of tokens that fit."""
        ...


class KVCache(Protocol):
    """Interface of a KV cache; each implementation has its own type of slot."""

    @property
    def bytes_per_token(self) -> int:
        """Returns the bytes that one token takes in all layers."""
        ...

    def groups(self, slots: Iterable[Any]) -> Iterator[Sequence[KVSlot]]:
        """Groups ``slots`` by their place in memory."""
        ...

    def capacity(self, length: int) -> int:
        """Returns the capacity of a slot for ``length`` tokens."""
        ...

    def new(self, length: int) -> KVSlot:
        """Allocates an empty slot for ``length`` tokens."""
        ...

    def reserve(self, length: int, count: int) -> None:
        """Allocates memory for ``count`` further slots of ``length`` tokens."""
        ...

    def grow(self, slot: Any, length: int) -> KVSlot:
        """Returns ``slot``, or a larger slot with its content, with capacity for ``length``
        tokens."""
        ...

    def to_grow(self, slot: Any) -> int:
        """Returns the number of tokens that ``grow`` allocates."""
        ...

    def copy(self, slot: Any, length: int, room: int) -> KVSlot:
        """Allocates a slot of ``room`` tokens and copies the first ``length`` tokens of
        ``slot``."""
        ...

    def adopt(self, slot: Any) -> KVSlot:
        """Takes over the slot of a finished sequence."""
        ...

    def free(self, slot: Any) -> None:
        """Frees a slot."""
        ...

    def shrink(self) -> None:
        """Frees all unused memory."""
        ...


@dataclass(eq=False)
class Slot:
    """Cache of one sequence in an arena; ``length`` tokens of it are filled."""

    arena: Arena
    index: int
    length: int = 0

    @property
    def capacity(self) -> int:
        """Number of tokens that fit."""
        return self.arena.capacity


class Arena:
    """Slots of one capacity; used slots come first."""

    def __init__(
        self,
        capacity: int,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity = capacity
        self._shapes, self.dtype, self.device = shapes, dtype, device
        self.slots: list[Slot] = []
        self.keys = [self._empty(0, shape.heads, shape.key, by_column=True) for shape in shapes]
        self.values = [self._empty(0, shape.heads, shape.value) for shape in shapes]

    def take(self) -> Slot:
        """Allocates a slot after the used ones."""
        held = len(self.keys[0])
        if len(self.slots) == held:
            self._resize(held + max(8, held // 4))
        slot = Slot(self, len(self.slots))
        self.slots.append(slot)
        return slot

    def reserve(self, count: int) -> None:
        """Allocates memory for ``count`` further slots at once."""
        if len(self.slots) + count > len(self.keys[0]):
            self._resize(len(self.slots) + count)

    def give_back(self, slot: Slot) -> None:
        """Frees a slot; the last one moves into its place."""
        last = self.slots.pop()
        vacated = last.index
        if last is not slot:
            for tensor in (*self.keys, *self.values):
                tensor[slot.index] = tensor[vacated]
            last.index = slot.index
            self.slots[last.index] = last
        # The sequence may have held NaN, which no weight of zero keeps from the next one here.
        for tensor in (*self.keys, *self.values):
            tensor[vacated].zero_()
        if 4 * len(self.slots) < len(self.keys[0]):
            self._resize(2 * len(self.slots))

    def shrink(self) -> None:
        """Frees memory of unused slots."""
        if len(self.slots) < len(self.keys[0]):
            self._resize(len(self.slots))

    def _resize(self, count: int) -> None:
        # One layer at a time: the old tensor is freed at once.
        for layer, shape in enumerate(self._shapes):
            new = self._empty(count, shape.heads, shape.key, by_column=True)
            self.keys[layer] = self._moved(self.keys[layer], new)
            new = self._empty(count, shape.heads, shape.value)
            self.values[layer] = self._moved(self.values[layer], new)

    def _moved(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        taken = len(self.slots)
        new[:taken] = old[:taken]
        return new

    def _empty(
        self, count: int, heads: int, width: int, *, by_column: bool = False
    ) -> torch.Tensor:
        """Allocates [count, heads, capacity, width]; ``by_column`` stores it as [.., width,
        capacity].

        Attention multiplies queries with transposed keys. On a CPU this takes half the time if
        the transpose is contiguous; with torch's bfloat16 products there is little to gain.
        """
        # Zeros, because attention multiplies what lies beyond a sequence's end by zero, and
        # memory that was never written may hold NaN.
        kind = {"dtype": self.dtype, "device": self.device}
        wide = self.device.type == "cpu" and self.dtype == torch.float32
        if by_column and wide:
            return torch.zeros(count, heads, width, self.capacity, **kind).transpose(2, 3)
        return torch.zeros(count, heads, self.capacity, width, **kind)


@dataclass
class ArenaCache:
    """KV cache of one base model, in arenas.

    ``shapes`` has one entry for each layer; ``longest`` is the maximum sequence length.
    """

    shapes: Sequence[LayerShape]
    dtype: torch.dtype
    device: torch.device
    longest: int
    _arenas: dict[int, Arena] = field(default_factory=dict)

    def groups(self, slots: Iterable[Slot]) -> Iterator[list[Slot]]:
        """Groups ``slots`` by arena, short ones first."""
        chosen = set(slots)
        for capacity in sorted(self._arenas):
            if here := [slot for slot in self._arenas[capacity].slots if slot in chosen]:
                yield here

    @property
    def bytes_per_token(self) -> int:
        """Returns the bytes that one token takes in all layers."""
        numbers = sum(shape.heads * (shape.key + shape.value) for shape in self.shapes)
        return numbers * self.dtype.itemsize

    def capacity(self, length: int) -> int:
        """Returns the capacity of a slot for ``length`` tokens."""
        return min(self.longest, _round_up(length))

    def new(self, length: int) -> Slot:
        """Allocates an empty slot for ``length`` tokens."""
        return self._arena(length).take()

    def reserve(self, length: int, count: int) -> None:
        """Allocates memory for ``count`` further slots of ``length`` tokens."""
        self._arena(length).reserve(count)

    def grow(self, slot: Slot, length: int) -> Slot:
        """Returns ``slot``, or a larger slot with its content, with capacity for ``length``
        tokens."""
        if length <= slot.arena.capacity:
            return slot
        moved = self.copy(slot, slot.length, length)
        slot.arena.give_back(slot)
        return moved

    def to_grow(self, slot: Slot) -> int:
        """Returns the number of tokens that ``grow`` allocates before it frees the old slot."""
        return 2 * slot.capacity

    def adopt(self, slot: Slot) -> Slot:
        """Takes over the slot of a finished sequence from another cache."""
        kept = self.copy(slot, slot.length, slot.length)
        slot.arena.give_back(slot)
        return kept

    def copy(self, slot: Slot, length: int, room: int) -> Slot:
        """Allocates a slot of ``room`` tokens and copies the first ``length`` tokens of
        ``slot``."""
        new = self.new(room)
        for source, target in (
            (slot.arena.keys, new.arena.keys),
            (slot.arena.values, new.arena.values),
        ):
            for here, there in zip(source, target, strict=True):
                there[new.index, :, :length] = here[slot.index, :, :length]
        new.length = length
        return new

    def free(self, slot: Slot) -> None:
        """Frees a slot."""
        slot.arena.give_back(slot)

    def shrink(self) -> None:
        """Frees all unused memory."""
        for arena in self._arenas.values():
            arena.shrink()

    def _arena(self, length: int) -> Arena:
        capacity = self.capacity(length)
        if capacity not in self._arenas:
            self._arenas[capacity] = Arena(capacity, self.shapes, self.dtype, self.device)
        return self._arenas[capacity]


def _round_up(length: int) -> int:
    """Rounds up to the next of 64, 96, 128, 192, 256, 384, 512, 768 …

    Finer steps would save padding, but attention is one call for each arena, and a call with few
    rows costs as much as the saved padding.
    """
    size = 64
    while size < length:
        power = size & (size - 1) == 0
        size = size // 2 * 3 if power else size // 3 * 4
    return size
