"""Datasets made of others."""

from __future__ import annotations

import asyncio
from collections import Counter

import chz
import pytest

from tinker_cookbook.rl import EpochCycledRLDataset, InterleavedRLDatasetBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder


class Numbered(RLDataset):
    """Batches of the given sizes; a group is (name, number)."""

    def __init__(self, sizes, name="a"):
        self.sizes, self.name, self.epochs, self.asked = sizes, name, [], []

    def __len__(self):
        return len(self.sizes)

    def get_batch(self, index):
        self.asked.append(index)
        start = sum(self.sizes[:index])
        return [(self.name, start + i) for i in range(self.sizes[index])]

    def set_epoch(self, seed):
        self.epochs.append(seed)


@chz.chz
class NumberedBuilder(RLDatasetBuilder):
    sizes: tuple[int, ...]
    name: str
    test: bool = False

    async def __call__(self):
        return Numbered(self.sizes, self.name), Numbered((1,), self.name) if self.test else None


def batches(dataset):
    return [dataset.get_batch(i) for i in range(len(dataset))]


# --- several passes ---------------------------------------------------------------------------


def test_without_a_seed_each_pass_is_the_same():
    dataset = EpochCycledRLDataset(Numbered([2, 2, 1]), 2)
    assert len(dataset) == 6
    assert batches(dataset)[:3] == batches(dataset)[3:]


def test_with_a_seed_each_pass_has_all_batches_in_its_own_order():
    sizes = [1] * 8
    dataset = EpochCycledRLDataset(Numbered(sizes), 3, shuffle_seed=5)
    everything = batches(dataset)
    passes = [everything[8 * e : 8 * e + 8] for e in range(3)]
    assert all(sorted(p) == sorted(passes[0]) for p in passes)
    assert passes[0] != passes[1] != passes[2]
    other = EpochCycledRLDataset(Numbered(sizes), 3, shuffle_seed=6)
    assert batches(other) != everything


# --- mixtures ---------------------------------------------------------------------------------


def mixture(**changes):
    settings = {
        "sources": [
            NumberedBuilder(sizes=(2, 2, 1), name="a"),
            NumberedBuilder(sizes=(3,), name="b"),
        ],
        "weights": [3.0, 1.0],
        "groups_per_batch": 4,
        "total_batches": 100,
    } | changes
    return InterleavedRLDatasetBuilder(**settings)


def build(builder):
    return asyncio.run(builder())


def test_groups_are_drawn_by_weight_each_pass_over_a_source_in_an_order_of_its_own():
    train, test = build(mixture())
    drawn = [group for batch in batches(train) for group in batch]
    assert (len(train), len(drawn), test) == (100, 400, None)
    assert Counter(name for name, _ in drawn)["a"] == pytest.approx(300, abs=30)
    for name, size in (("a", 5), ("b", 3)):
        numbers = [number for group, number in drawn if group == name]
        passes = [numbers[i : i + size] for i in range(0, len(numbers) - size, size)]
        assert all(sorted(one) == list(range(size)) for one in passes)
        assert len({tuple(one) for one in passes}) > 1


def test_a_mixture_is_the_same_in_any_order_and_another_by_another_seed():
    train, _ = build(mixture())
    again, _ = build(mixture())
    full = batches(train)
    assert [again.get_batch(i) for i in (70, 3, 70)] == [full[70], full[3], full[70]]
    assert batches(build(mixture(seed=1))[0]) != full
    with pytest.raises(IndexError):
        train.get_batch(100)
