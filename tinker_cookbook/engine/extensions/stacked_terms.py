"""Adapters of several runs, stacked so that one product per layer computes all of them.

There are two forms:

* *masked*: ``A`` [sum of r, in] and ``B`` [out, sum of r]. Each token computes the ranks of all
  adapters, and a mask sets those of other runs' adapters to 0. It takes as many kernels as one
  adapter, on any device, but its cost grows with the number of runs.
* *grouped*: ``A`` [G, r, in] and ``B`` [G, out, r]. torch's grouped product multiplies each run's
  tokens with the run's own adapter, so a token costs the same for any number of runs.

Source: batched adapters as in S-LoRA (arXiv 2311.03285).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.lora import Adapter, Target, TermGradients
from tinker_cookbook.engine.model.low_rank import (
    MOST_RANKS,
    AdapterIndex,
    ExpertStack,
    GroupedLowRank,
    LowRank,
    RowGroups,
    Terms,
)

MOST_MASKED = 128
"""Maximum sum of ranks for which a masked product is used although the grouped one has a kernel.
An estimate, not measured: a grouped product launches two kernels (the first reads the group sizes),
which for a pass of 4,096 tokens of an 8B model take as long as about 100 more ranks."""

_ALIGNMENT = 8
"""The grouped product needs sizes that are multiples of this (16 bytes of bfloat16)."""


def can_stack(base: BaseModel, adapters: Sequence[Adapter]) -> bool:
    """Returns whether the adapters can be computed together."""
    covered = _covered(adapters)
    # Rows of the vision tower are patches, whose adapters the owners of tokens do not tell.
    if any(target.group == "vision" for target in covered):
        return False
    experts = any(target.experts for target in covered)
    if _can_group(base, adapters):
        return base.groups_experts or not experts
    # Rows of experts are sorted by expert, which a mask does not follow.
    return not experts and sum(adapter.spec.rank for adapter in adapters) <= MOST_RANKS


def _can_group(base: BaseModel, adapters: Sequence[Adapter]) -> bool:
    if base.device.type != "cuda" or base.dtype != torch.bfloat16:
        return False
    # On other devices it is a loop that copies the group sizes to the host (pytorch #161407).
    has_kernel = torch.cuda.get_device_capability(base.device)[0] in (9, 10)
    ranks = {adapter.spec.rank for adapter in adapters}
    return has_kernel and len(ranks) == 1 and ranks.pop() % _ALIGNMENT == 0


def _aligned(target: Target) -> bool:
    return target.in_features % _ALIGNMENT == target.out_features % _ALIGNMENT == 0


def _covered(adapters: Sequence[Adapter]) -> list[Target]:
    """Returns the layers that any of the adapters covers."""
    found = {t.name: t for adapter in adapters for t in adapter.spec.covered(adapter.targets)}
    return list(found.values())


class StackedTerms:
    """The stacked adapters of several runs on ``base``: one term for each layer that any of them
    covers."""

    def __init__(self, base: BaseModel, adapters: Sequence[Adapter]) -> None:
        each = [adapter.terms(base.dtype) for adapter in adapters]
        self._device, self._count = base.device, len(adapters)
        few = sum(adapter.spec.rank for adapter in adapters) <= MOST_MASKED
        group = _can_group(base, adapters)
        self._layers: dict[str, _Masked | _Grouped | _Experts] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for target in _covered(adapters):
            name = target.name
            terms = {n: found[name] for n, found in enumerate(each) if name in found}
            if target.experts:
                self._layers[name] = _Experts(terms, self._count, target.experts)
            # The head computes its adapters one by one and needs them side by side.
            elif group and not few and _aligned(target) and name != base.unembed_name:
                self._layers[name] = _Grouped(terms, self._count, copies)
            else:
                self._layers[name] = _Masked(terms)
        if copies:
            # A few kernels copy all adapters of all layers.
            to, source = zip(*copies, strict=True)
            torch._foreach_copy_(to, source)  # pyright: ignore[reportPrivateImportUsage]
        for layer in self._layers.values():
            layer.a.requires_grad_()
            layer.b.requires_grad_()

    def of(self, owners: np.ndarray) -> Terms:
        """Returns the terms for tokens that belong to the adapters ``owners`` [T], ascending."""
        tokens = _Tokens(owners, self._count, self._device)
        return {name: layer.term(tokens) for name, layer in self._layers.items()}

    def split(self, gradients: TermGradients) -> list[TermGradients]:
        """Returns the gradients of each adapter's terms, as contiguous tensors."""
        out: list[TermGradients] = [{} for _ in range(self._count)]
        for name, pair in gradients.items():
            for number, a, b in self._layers[name].split(*pair):
                out[number][name] = a, b
        return out


class _Tokens:
    """The adapter of each token of a micro-batch, in the forms that the layers need."""

    def __init__(self, owners: np.ndarray, count: int, device: torch.device) -> None:
        self._numbers, self._count, self._device = owners, count, device
        self._owners: dict[tuple[tuple[int, int], ...], AdapterIndex] = {}

    @cached_property
    def of_token(self) -> Tensor:
        """Index of each token's adapter, [T]."""
        return torch.from_numpy(self._numbers).to(self._device)

    @cached_property
    def groups(self) -> RowGroups:
        """The rows of each adapter."""
        ends = np.searchsorted(self._numbers, np.arange(self._count), side="right")
        complete = bool((np.diff(ends, prepend=0) > 0).all())
        return RowGroups(torch.from_numpy(ends.astype(np.int32)).to(self._device), complete)

    def owners(self, members: tuple[tuple[int, int], ...]) -> AdapterIndex:
        """Returns the owners among ``members``. Most layers have the same and share a mask."""
        if members not in self._owners:
            self._owners[members] = AdapterIndex(self.of_token, members)
        return self._owners[members]


# The stacked adapters of one layer, ``a`` and ``b``, in three forms. ``term`` returns the term of a
# micro-batch, and ``split`` yields the index and the gradients of each adapter, given the term's.


class _Masked:
    def __init__(self, terms: Mapping[int, LowRank]) -> None:
        self._members = tuple((number, len(term.a)) for number, term in terms.items())
        self.a = torch.cat([term.a for term in terms.values()])
        self.b = torch.cat([term.b for term in terms.values()], 1)

    def term(self, tokens: _Tokens) -> LowRank:
        return LowRank(self.a, self.b, tokens.owners(self._members))

    def split(self, a: Tensor, b: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        numbers, ranks = zip(*self._members, strict=True)
        # One kernel copies the columns of all adapters.
        parts = [b.new_empty(len(b), rank) for rank in ranks]
        torch.split_with_sizes_copy(b, ranks, 1, out=parts)
        yield from zip(numbers, a.split(ranks), parts, strict=True)


class _Grouped:
    """``copies`` receives (to, from) of each tensor, for one call that copies all of them."""

    def __init__(
        self, terms: Mapping[int, LowRank], count: int, copies: list[tuple[Tensor, Tensor]]
    ) -> None:
        self._numbers = list(terms)
        first = next(iter(terms.values()))
        # An adapter that does not cover the layer has zeros.
        create = first.a.new_empty if len(terms) == count else first.a.new_zeros
        self.a, self.b = (create(count, *side.shape) for side in (first.a, first.b))
        for number, term in terms.items():
            copies += [(self.a[number], term.a), (self.b[number], term.b)]

    def term(self, tokens: _Tokens) -> LowRank:
        return GroupedLowRank(self.a, self.b, tokens.groups)

    def split(self, a: Tensor, b: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        yield from ((number, a[number], b[number]) for number in self._numbers)


class _Experts:
    """A group for each expert and adapter, in this order."""

    def __init__(self, terms: Mapping[int, LowRank], count: int, experts: int) -> None:
        self._numbers, self._count, self._experts = list(terms), count, experts
        split = {number: term.by_expert(experts) for number, term in terms.items()}
        self.a = _stacked({number: term.a for number, term in split.items()}, count)
        self.b = _stacked({number: term.b for number, term in split.items()}, count)

    def term(self, tokens: _Tokens) -> LowRank:
        return ExpertStack(self.a, self.b, tokens.of_token, self._count)

    def split(self, a: Tensor, b: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        for number in self._numbers:
            mine = (side.unflatten(0, (self._experts, -1))[:, number] for side in (a, b))
            yield number, *LowRank.of_experts(*mine)


def _stacked(own: Mapping[int, Tensor], count: int) -> Tensor:
    """Returns [E * count, ...] of tensors [E, ...]; an adapter that does not cover the layer has
    zeros."""
    like = next(iter(own.values()))
    zeros = torch.zeros_like(like) if len(own) < count else like
    return torch.stack([own.get(number, zeros) for number in range(count)], 1).flatten(0, 1)
