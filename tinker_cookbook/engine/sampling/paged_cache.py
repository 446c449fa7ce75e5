"""Paged KV cache: one pool of blocks per layer, and a block table for each sequence.

Blocks are reference-counted. Sequences with a common prefix share its full blocks: the samples of a
prompt, the next turn of a conversation, prompts with the same instruction, and scored texts.
Attention reads a sequence through its block table, so sharing needs no copy and no extra memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from tinker_cookbook.engine.kernels import page_tokens, zeros_in_huge_pages

BLOCK = 64
"""Tokens of a block; ``PAGE`` in ``kernels/cpu/attention.c``."""

Slots: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Block and offset [T] of tokens."""


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's cache for one token: number of kv heads, widths of key and value.

    ``plain``: softmax attention without soft cap and without sinks.
    """

    heads: int
    key: int
    value: int
    plain: bool = True


@dataclass(eq=False)
class Block:
    """Block of ``BLOCK`` tokens at ``index`` of every layer's pool.

    ``users`` counts the running sequences that reference it, ``kept`` the cached prefixes.
    """

    index: int
    users: int = 0
    kept: int = 0


@dataclass(eq=False)
class BlockTable:
    """Blocks of one sequence; the first ``length`` tokens are filled."""

    cache: PagedCache
    blocks: list[Block] = field(default_factory=list)
    length: int = 0
    kept: bool = False
    """Whether it belongs to a cached prefix and not to a running sequence."""

    @property
    def capacity(self) -> int:
        """Number of tokens that fit."""
        return len(self.blocks) * BLOCK


class PagedCache:
    """Pools of the blocks of one base model.

    ``keys[i]`` of layer i is [blocks, kv heads, BLOCK, width] and ``values[i]`` likewise. The C
    kernel (``native``) stores the keys of a block and head in its own order. With a number of
    ``choices`` (``RouterReplay.width``), ``choices[0]`` is [blocks, BLOCK, number]: the experts
    that each token was routed to.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        choices: int = 0,
    ) -> None:
        self.plain = all(shape.plain for shape in shapes)
        self.native = page_tokens(dtype, device) == BLOCK
        self.dtype, self.device = dtype, device
        numbers = sum(shape.heads * (shape.key + shape.value) for shape in shapes)
        self.bytes_per_token = numbers * dtype.itemsize + choices * torch.int16.itemsize
        one = torch.empty(0, BLOCK, choices, dtype=torch.int16, device=device)
        self.choices: list[torch.Tensor] = [one] if choices else []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for shape in shapes:
            for pools, width in ((self.keys, shape.key), (self.values, shape.value)):
                pools.append(torch.empty(0, shape.heads, BLOCK, width, dtype=dtype, device=device))
        self._blocks: list[Block] = []
        self._free: list[Block] = []
        # On a GPU, copies and clears of all sequences are batched in a few kernels by ``settle``.
        self._later = device.type != "cpu"
        self._copies: dict[Block, Block] = {}  # target -> source
        self._stale: dict[Block, None] = {}
        self._active = 0

    @property
    def nbytes(self) -> int:
        """Memory of the pools, in bytes."""
        return len(self._blocks) * BLOCK * self.bytes_per_token

    @property
    def active_tokens(self) -> int:
        """Number of tokens in blocks that running sequences reference."""
        return self._active * BLOCK

    @property
    def kept_tokens(self) -> int:
        """Number of tokens in blocks that only cached prefixes reference."""
        return (len(self._blocks) - len(self._free) - self._active) * BLOCK

    def write(self, layer: int, at: Slots, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes the first of ``key`` and ``value`` [T, kv heads, D]; not for a native cache."""
        blocks, offsets = at
        self.keys[layer][blocks, :, offsets] = key[: len(blocks)]
        self.values[layer][blocks, :, offsets] = value[: len(blocks)]

    def new(self, length: int) -> BlockTable:
        """Returns the table of an empty sequence, with room for ``length`` tokens."""
        table = BlockTable(self)
        self.grow(table, length)
        return table

    def grow(self, table: BlockTable, length: int) -> None:
        """Appends blocks to ``table`` until ``length`` tokens fit."""
        table.blocks += self._take(-(-length // BLOCK) - len(table.blocks))

    def fork(self, table: BlockTable, length: int, count: int = 1) -> list[BlockTable]:
        """Returns ``count`` tables that begin with the first ``length`` tokens of ``table``.

        They share its full blocks. Each gets a copy of the last, partly filled block.
        """
        # A partly filled block gets new tokens, which differ for each table, so it is copied. Full
        # blocks are never written again and can be shared.
        full = length // BLOCK
        tails = self._take(count) if length % BLOCK and count else []
        if tails and self._later:
            self._copy_later(table.blocks[full], tails)
        elif tails:
            targets = torch.tensor([tail.index for tail in tails], device=self.device)
            for pool in (*self.keys, *self.values, *self.choices):
                pool[targets] = pool[table.blocks[full].index].clone()
        forks = []
        for number in range(count):
            # A block counts as active once, however many sequences share it.
            for block in table.blocks[:full]:
                self._active += not block.users
                block.users += 1
            blocks = table.blocks[:full] + tails[number : number + 1]
            forks.append(BlockTable(self, blocks, length))
        return forks

    def keep(self, table: BlockTable) -> None:
        """Makes the table of a running sequence a cached prefix and frees its unused blocks."""
        needed = -(-table.length // BLOCK)
        # References of the cached prefix first, so that no block is free in between.
        for block in table.blocks[:needed]:
            block.kept += 1
        self._release(table.blocks, kept=False)
        del table.blocks[needed:]
        table.kept = True

    def free(self, table: BlockTable) -> None:
        """Frees the blocks that no other table references."""
        self._release(table.blocks, table.kept)
        table.blocks = []

    def write_choices(self, runs: Sequence[TokenSpan], chosen: torch.Tensor) -> None:
        """Stores the choices [T, number] of a step's tokens."""
        where = slots(runs)
        self.choices[0][where] = chosen[: len(where[0])].to(torch.int16)

    def read_choices(self, table: BlockTable) -> np.ndarray:
        """Returns the choices [T, number] of a sequence's tokens."""
        self.settle()
        index = torch.tensor([block.index for block in table.blocks], device=self.device)
        return self.choices[0][index].flatten(0, 1)[: table.length].cpu().numpy()

    @torch.inference_mode()  # as in a step, since tensors made there are changed only there
    def shrink(self) -> None:
        """Returns the memory of all unused blocks, once they are more than a quarter."""
        # ``_take`` adds a quarter: without this bound, each request copies the pools twice.
        if len(self._free) > len(self._blocks) // 4:
            self._resize(len(self._blocks) - len(self._free))

    def _take(self, count: int) -> list[Block]:
        """Takes ``count`` blocks for a running sequence."""
        if count <= 0:
            return []
        if (missing := count - len(self._free)) > 0:
            # By a quarter: each resize copies the pools, so growth by single blocks would be slow.
            held = len(self._blocks)
            self._resize(held + max(missing, 8, held // 4))
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            block.users = 1
        self._active += count
        return taken

    def _release(self, blocks: Sequence[Block], kept: bool) -> None:
        """Removes one reference to each block, of a cached prefix or of a running sequence."""
        freed = []
        for block in blocks:
            if kept:
                block.kept -= 1
            else:
                block.users -= 1
                self._active -= not block.users
            if not (block.users or block.kept):
                freed.append(block)
        self._free += freed
        if self._later:
            for block in freed:
                self._copies.pop(block, None)
                self._stale[block] = None
        elif freed and not self.native:
            self._zero(freed)

    def settle(self) -> None:
        """Performs the copies and clears that ``fork`` and ``free`` have postponed."""
        copies, stale = self._copies, list(self._stale)
        self._copies, self._stale = {}, {}
        if copies:
            numbers = [[block.index for block in side] for side in (copies, copies.values())]
            target, source = torch.tensor(numbers, device=self.device)
            # Read all sources before writing any target: a freed source may be a target now.
            for pool in (*self.keys, *self.values, *self.choices):
                pool[target] = pool[source]
        if stale:
            self._zero(stale)

    def _copy_later(self, source: Block, targets: Sequence[Block]) -> None:
        if source in self._copies:  # its own copy is still pending
            self.settle()
        for target in targets:
            self._copies[target] = source
            self._stale.pop(target, None)

    def _zero(self, blocks: Sequence[Block]) -> None:
        # Positions beyond a sequence's end get weight zero in torch's products, which does
        # not remove the NaN that a diverged run may have left.
        index = torch.tensor([block.index for block in blocks], device=self.device)
        for pool in (*self.keys, *self.values):
            pool[index] = 0

    def _resize(self, count: int) -> None:
        """Moves all blocks in use to the front of pools of ``count`` blocks."""
        self.settle()
        used = [block for block in self._blocks if block.users or block.kept]
        index = torch.tensor([block.index for block in used], dtype=torch.long, device=self.device)
        # One layer at a time, so that only one layer's old pool exists next to the new ones.
        for pools in (self.keys, self.values, self.choices):
            for layer, old in enumerate(pools):
                shape = (count, *old.shape[1:])
                new = zeros_in_huge_pages(shape, old.dtype) if self.native else old.new_zeros(shape)
                torch.index_select(old, 0, index, out=new[: len(used)])
                pools[layer] = new
        # Tables hold blocks and not indices, so they stay valid.
        for number, block in enumerate(used):
            block.index = number
        self._free = [Block(number) for number in range(len(used), count)]
        self._blocks = used + self._free


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """``count`` tokens of a sequence in one step, which begin at ``position`` in the sequence and
    at ``first`` in the batch. ``decodes`` marks a decode token. ``last_seen`` [count] is the last
    position that each token sees, if that is not its own."""

    table: BlockTable
    position: int
    first: int
    count: int
    decodes: bool = False
    last_seen: np.ndarray | None = None

    @property
    def seen(self) -> np.ndarray:
        """The last position that each token sees, [count]."""
        own = np.arange(self.position, self.position + self.count)
        return own if self.last_seen is None else self.last_seen


def slots(runs: Sequence[TokenSpan]) -> Slots:
    """Returns block and offset [T] of each token of ``runs``, on the device of their cache."""
    blocks, offsets = [], []
    for run in runs:
        at = np.arange(run.position, run.position + run.count)
        indices = np.array([block.index for block in run.table.blocks])
        blocks.append(indices[at // BLOCK])
        offsets.append(at % BLOCK)
    device = runs[0].table.cache.device
    both = torch.from_numpy(np.stack([np.concatenate(blocks), np.concatenate(offsets)])).to(device)
    return both[0], both[1]
