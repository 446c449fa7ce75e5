"""Keys and values of the sequences that are being sampled, for torch's own operators.

Each sequence has a slot in an arena: per layer a tensor [slots, kv heads, capacity, head dim], of
which the first slots are taken. Sequences of like length share an arena, so that attention is one
batched product over contiguous memory with little padding; a sequence that outgrows its arena
moves to the next. (Pages would have to be gathered at every layer of every step; a move copies a
sequence a handful of times in its life.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token: for each head a key and a value of these widths.

    ``plain`` is attention by softmax alone, with neither a cap on its scores nor sinks.
    """

    heads: int
    key: int
    value: int
    plain: bool = True


class AnySlot(Protocol):
    """The place of one sequence, of which ``length`` tokens are filled."""

    length: int

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        ...


class AnyCache(Protocol):
    """What a batch asks of its cache; each kind has slots of its own."""

    @property
    def bytes_per_token(self) -> int:
        """Memory that one token takes in all layers."""
        ...

    def groups(self, slots: Iterable[Any]) -> Iterator[Sequence[AnySlot]]:
        """``slots``, as they lie."""
        ...

    def capacity(self, length: int) -> int:
        """Tokens that the slot of a sequence of ``length`` tokens holds."""
        ...

    def new(self, length: int) -> AnySlot:
        """An empty slot with room for ``length`` tokens."""
        ...

    def reserve(self, length: int, count: int) -> None:
        """Makes room for ``count`` further slots of ``length`` tokens."""
        ...

    def grow(self, slot: Any, length: int) -> AnySlot:
        """``slot``, or one with its content, with room for ``length`` tokens."""
        ...

    def to_grow(self, slot: Any) -> int:
        """Tokens for which ``grow`` takes memory."""
        ...

    def copy(self, slot: Any, length: int, room: int) -> AnySlot:
        """A further slot with the first ``length`` tokens of ``slot`` and room for ``room``."""
        ...

    def adopt(self, slot: Any) -> AnySlot:
        """Takes over a sequence that has ended."""
        ...

    def free(self, slot: Any) -> None:
        """Gives back a slot."""
        ...

    def shrink(self) -> None:
        """Gives back all memory that no sequence needs."""
        ...


@dataclass(eq=False)
class Slot:
    """The place of one sequence; ``length`` tokens of it are filled."""

    arena: Arena
    index: int
    length: int = 0

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.arena.capacity


class Arena:
    """Slots of one capacity; those taken are the first."""

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
        """A slot behind those taken."""
        held = len(self.keys[0])
        if len(self.slots) == held:
            self._resize(held + max(8, held // 4))
        slot = Slot(self, len(self.slots))
        self.slots.append(slot)
        return slot

    def reserve(self, count: int) -> None:
        """Makes room for ``count`` further slots, so that they need not be moved one by one."""
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
        """Gives back memory that no slot needs."""
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
        """[count, heads, capacity, width]; ``by_column`` has it [.., width, capacity] in memory.

        Queries are multiplied with transposed keys, and a CPU takes half the time for it if the
        transpose lies row by row; with torch's own products in bfloat16 there is little to gain.
        """
        # Zeros, because attention multiplies what lies beyond a sequence's end by zero, and
        # memory that was never written may hold NaN.
        kind = {"dtype": self.dtype, "device": self.device}
        wide = self.device.type == "cpu" and self.dtype == torch.float32
        if by_column and wide:
            return torch.zeros(count, heads, width, self.capacity, **kind).transpose(2, 3)
        return torch.zeros(count, heads, self.capacity, width, **kind)


@dataclass
class KVCache:
    """All arenas of one base model.

    ``shapes`` has one entry for each layer; ``longest`` is the longest sequence there may be.
    """

    shapes: Sequence[LayerShape]
    dtype: torch.dtype
    device: torch.device
    longest: int
    _arenas: dict[int, Arena] = field(default_factory=dict)

    def groups(self, slots: Iterable[Slot]) -> Iterator[list[Slot]]:
        """``slots`` as they lie: those of one arena together, short ones first."""
        chosen = set(slots)
        for capacity in sorted(self._arenas):
            if here := [slot for slot in self._arenas[capacity].slots if slot in chosen]:
                yield here

    @property
    def bytes_per_token(self) -> int:
        """Memory that one token takes in all layers."""
        numbers = sum(shape.heads * (shape.key + shape.value) for shape in self.shapes)
        return numbers * self.dtype.itemsize

    def capacity(self, length: int) -> int:
        """Tokens that the slot of a sequence of ``length`` tokens holds."""
        return min(self.longest, _round_up(length))

    def new(self, length: int) -> Slot:
        """An empty slot with room for ``length`` tokens."""
        return self._arena(length).take()

    def reserve(self, length: int, count: int) -> None:
        """Makes room for ``count`` further slots of ``length`` tokens."""
        self._arena(length).reserve(count)

    def grow(self, slot: Slot, length: int) -> Slot:
        """``slot``, or one with its content, with room for ``length`` tokens."""
        if length <= slot.arena.capacity:
            return slot
        moved = self.copy(slot, slot.length, length)
        slot.arena.give_back(slot)
        return moved

    def to_grow(self, slot: Slot) -> int:
        """Tokens for which ``grow`` takes memory, until the old slot is free."""
        return 2 * slot.capacity

    def adopt(self, slot: Slot) -> Slot:
        """Takes over a sequence of another cache that has ended."""
        kept = self.copy(slot, slot.length, slot.length)
        slot.arena.give_back(slot)
        return kept

    def copy(self, slot: Slot, length: int, room: int) -> Slot:
        """A further slot with the first ``length`` tokens of ``slot`` and room for ``room``."""
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
        """Gives back a slot."""
        slot.arena.give_back(slot)

    def shrink(self) -> None:
        """Gives back all memory that no sequence needs."""
        for arena in self._arenas.values():
            arena.shrink()

    def _arena(self, length: int) -> Arena:
        capacity = self.capacity(length)
        if capacity not in self._arenas:
            self._arenas[capacity] = Arena(capacity, self.shapes, self.dtype, self.device)
        return self._arenas[capacity]


def _round_up(length: int) -> int:
    """The next of 64, 96, 128, 192, 256, 384, 512, 768 …

    Finer steps would save padding, but attention is a call for each arena, and calls with a few
    rows cost as much as what they save.
    """
    size = 64
    while size < length:
        power = size & (size - 1) == 0
        size = size // 2 * 3 if power else size // 3 * 4
    return size
