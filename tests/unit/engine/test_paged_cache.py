"""Blocks are shared by sequences with a common prefix, written by one only, and never lost."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from engine_reference import without_compiler

from tinker_cookbook.engine.sampling import paged_cache, prefix_cache
from tinker_cookbook.engine.sampling.paged_cache import BLOCK, LayerShape, PagedCache
from tinker_cookbook.engine.sampling.prefix_cache import Prefill, PrefixCache
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scheduler import Scheduler
from tinker_cookbook.engine.training.prefix_tree import common_prefix

CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 8, 4), LayerShape(1, 16, 16)]

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture(params=["native", "torch"])
def cache(request, monkeypatch) -> PagedCache:
    """With the layout of the C kernel, and with that of torch's operators."""
    monkeypatch.setattr(paged_cache, "page_tokens", lambda *_: BLOCK * (request.param == "native"))
    return PagedCache(SHAPES, torch.float32, CPU)


def pools(cache) -> list[torch.Tensor]:
    return [*cache.keys, *cache.values]


def test_fork_shares_full_blocks(cache):
    table = cache.new(2 * BLOCK + 10)
    for number, block in enumerate(table.blocks):
        for pool in pools(cache):
            pool[block.index] = number + 1
    forks = cache.fork(table, 2 * BLOCK + 5, 2)
    for other in forks:
        assert other.blocks[:2] == table.blocks[:2]
        assert other.length == 2 * BLOCK + 5
        assert len(other.blocks) == 3
        for pool in pools(cache):
            assert (pool[other.blocks[2].index] == 3).all()
    last = [one.blocks[2] for one in (table, *forks)]
    assert len(set(last)) == 3
    (at_an_end,) = cache.fork(table, BLOCK)
    assert at_an_end.blocks == table.blocks[:1]
    cache.grow(at_an_end, BLOCK + 1)
    assert at_an_end.blocks[1] not in (*table.blocks, *last)
    assert cache.active_tokens == 6 * BLOCK


def test_block_reference_counts(cache):
    table = cache.new(BLOCK)
    (other,) = cache.fork(table, BLOCK)
    (block,) = table.blocks
    cache.free(table)
    assert block not in cache._free
    assert cache.active_tokens == BLOCK
    cache.free(other)
    assert block in cache._free
    assert cache.active_tokens == 0
    assert cache.new(1).blocks == [block]


def test_growth_allocates_one_block(cache):
    table = cache.new(1)
    first = table.blocks[0]
    cache.grow(table, BLOCK)
    assert table.capacity == BLOCK
    cache.grow(table, BLOCK + 1)
    assert table.capacity == 2 * BLOCK
    assert table.blocks[0] is first


def test_kept_prefix_has_minimal_blocks(cache):
    table = cache.new(5 * BLOCK)
    table.length = BLOCK + 1
    (other,) = cache.fork(table, BLOCK)
    cache.keep(table)
    assert table.capacity == 2 * BLOCK
    assert (cache.active_tokens, cache.kept_tokens) == (BLOCK, BLOCK)  # the first is in use
    cache.free(other)
    assert (cache.active_tokens, cache.kept_tokens) == (0, 2 * BLOCK)
    cache.shrink()
    assert not cache._free
    assert len(cache.keys[0]) == 2


def test_memory_shrinks_and_grows_without_changing_a_block(cache):
    tables = [cache.new(BLOCK) for _ in range(40)]
    for number, table in enumerate(tables):
        for pool in pools(cache):
            pool[table.blocks[0].index] = number
    kept = tables[30:]
    for table in tables[:30]:
        cache.free(table)
    cache.shrink()
    assert [len(pool) for pool in pools(cache)] == [10] * 4
    cache.new(20 * BLOCK)
    for number, table in enumerate(kept, 30):
        for pool in pools(cache):
            assert (pool[table.blocks[0].index] == number).all()
    for table in kept:
        cache.free(table)


def test_freed_blocks_hold_no_nan(monkeypatch):
    """torch's products multiply what is past the end of a sequence by 0."""
    monkeypatch.setattr(paged_cache, "page_tokens", lambda *_: None)
    cache = PagedCache(SHAPES, torch.float32, CPU)
    table = cache.new(3 * BLOCK)
    for pool in pools(cache):
        pool[table.blocks[1].index] = torch.nan
    cache.free(table)
    assert not any(pool.any() for pool in pools(cache))


@pytest.fixture(params=["native", "torch"])
def base(request, stories_base, monkeypatch):
    if request.param == "torch":
        without_compiler(monkeypatch, stories_base)
    return stories_base


def test_no_block_leaks(base):
    """Whatever ends, goes away or comes again, all blocks are free in the end, or kept."""
    sampler = Sampler(base, None)
    settings = SamplingSettings(max_tokens=90, seed=0)
    prompts = [np.arange(3, 3 + n) for n in (5, 64, 130, 200)]
    requests = [sample_request(sampler, p, 5, settings) for p in prompts]
    scheduler = Scheduler(base, base.kv_shapes)
    for request in requests:
        scheduler.add(request)
    for _ in range(10):
        scheduler.step()
    requests[1].future.cancel()
    while scheduler.busy:
        scheduler.step()
    again = sample_request(sampler, requests[2].future.result()[0].tokens, 2, settings)
    scheduler.add(again)
    while scheduler.busy:
        scheduler.step()
    tables = [entry.table for entry in scheduler._prefixes._entries]
    blocks = {id(b): b for table in tables for b in table.blocks}
    kept = [sum(b in table.blocks for table in tables) for b in blocks.values()]
    assert [b.kept for b in blocks.values()] == kept
    cache = scheduler._cache
    assert (cache.active_tokens, cache.kept_tokens) == (0, len(blocks) * BLOCK)
    del sampler, request, requests, again
    with torch.inference_mode():
        scheduler._prefixes.trim(0)
    assert not any(b.users or b.kept for b in blocks.values())
    assert cache.kept_tokens == 0


class Table:
    """The KV cache of an entry, as far as the prefix cache reads it."""

    def __init__(self, length: int) -> None:
        self.length = length


class Kept(list):
    """A cache that notes which tables are kept."""

    free = list.remove

    def keep(self, table: Table) -> None:
        """The test has added it already."""

    @property
    def kept_tokens(self) -> int:
        return sum(table.length for table in self)


def test_longest_prefix_match_and_lru_eviction(stories_base, monkeypatch):
    """As a search through all sequences finds it; with few tokens many prefixes are common."""
    monkeypatch.setattr(prefix_cache, "SHORTEST", 2)
    rng = np.random.default_rng(0)
    mine, other = Sampler(stories_base, None), Sampler(stories_base, None)
    kept = Kept()
    prefixes = PrefixCache(kept, 150)
    for _ in range(600):
        tokens = rng.choice([1, 255, 256, 70_000], size=rng.integers(2, 12))
        entries = [e for e in prefixes._entries if e.owner() is mine]
        common = [common_prefix(entry.tokens, tokens[:-1]) for entry in entries]
        longest = max(common, default=0)
        source, shared = prefixes.find(Prefill(mine, tokens, []), (), 1)
        assert shared == (longest if longest >= 2 else 0)
        if source is not None:
            assert common_prefix(source.tokens, tokens) >= shared
            assert list(prefixes._entries)[-1] is source
        running = [Prefill(mine, rng.choice([1, 255], size=6), []) for _ in range(8)]
        source, shared = prefixes.find(Prefill(mine, tokens, []), running, 1)
        assert shared == max(
            longest if longest >= 2 else 0,
            *(common_prefix(prefill.tokens, tokens[:-1]) for prefill in running),
        )
        table = Table(len(tokens))
        kept.append(table)
        prefixes.adopt(mine if rng.random() < 0.7 else other, tokens, table)
        rows = [(e.owner(), e.key) for e in prefixes._entries]
        assert not any(a is b and x != y and x.startswith(y) for a, x in rows for b, y in rows)
        assert len(set(rows)) == len(rows)
        assert kept.kept_tokens <= 150 == prefixes._budget
        assert {id(entry.table) for entry in prefixes._entries} == {id(table) for table in kept}
    del mine, running, source, rows
    prefixes.purge()
    assert all(entry.owner() is other for entry in prefixes._entries)
