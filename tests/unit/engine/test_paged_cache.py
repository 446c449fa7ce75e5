"""Pages are shared by sequences that begin alike, written by nobody else, and never lost."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from engine_reference import draw, run_batch

from tinker_cookbook.engine.sampling.kv_cache import ArenaCache, LayerShape
from tinker_cookbook.engine.sampling.paged_cache import PagedCache, cache_for
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scheduler import Scheduler

CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 8, 4), LayerShape(1, 16, 16)]

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture
def cache() -> PagedCache:
    return PagedCache(SHAPES, torch.float32, CPU)


def test_layers_lie_one_after_another(cache):
    token = 2 * (8 + 4) + 16 + 16
    assert cache.bytes_per_token == token * 4
    assert cache.keys_at == [0, cache.page * 24]
    assert cache.values_at == [cache.page * 16, cache.page * 40]
    assert cache.new(1).pages[0].memory.numel() == token * cache.page


def test_a_copy_shares_full_pages_and_owns_the_rest(cache):
    slot = cache.new(2 * cache.page + 10)
    for number, page in enumerate(slot.pages):
        page.memory.fill_(number)
    other = cache.copy(slot, 2 * cache.page + 5, 3 * cache.page + 1)
    assert other.pages[:2] == slot.pages[:2]
    assert other.pages[2] is not slot.pages[2]
    assert torch.equal(other.pages[2].memory, slot.pages[2].memory)
    assert len(other.pages) == 4
    assert other.length == 2 * cache.page + 5
    at_an_end = cache.copy(slot, cache.page, cache.page + 1)
    assert at_an_end.pages[0] is slot.pages[0]
    assert at_an_end.pages[1] not in (*slot.pages, *other.pages)


def test_a_page_is_free_when_its_last_user_is(cache):
    slot = cache.new(cache.page)
    other = cache.copy(slot, cache.page, cache.page)
    (page,) = slot.pages
    cache.free(slot)
    assert not cache._free
    assert cache.new(1).pages[0] is not page
    cache.free(other)
    assert cache._free == [page]
    assert cache.new(1).pages[0] is page


def test_growing_takes_a_page_and_moves_nothing(cache):
    slot = cache.new(1)
    first = slot.pages[0]
    assert cache.grow(slot, cache.page) is slot
    assert slot.capacity == cache.page
    assert cache.grow(slot, cache.page + 1) is slot
    assert slot.capacity == 2 * cache.page
    assert slot.pages[0] is first


def test_what_ends_keeps_no_page_that_it_did_not_need(cache):
    slot = cache.new(5 * cache.page)
    slot.length = cache.page + 1
    assert cache.adopt(slot).capacity == 2 * cache.page
    assert len(cache._free) == 3
    cache.shrink()
    assert not cache._free


def test_the_choice(cache):
    assert isinstance(cache_for(SHAPES, torch.float32, CPU, 100), PagedCache)
    capped = [*SHAPES, LayerShape(1, 8, 8, plain=False)]
    assert isinstance(cache_for(capped, torch.float32, CPU, 100), ArenaCache)
    assert isinstance(cache_for(SHAPES, torch.float64, CPU, 100), ArenaCache)


def test_samples_of_a_prompt_share_its_pages(stories_base):
    sampler = Sampler(stories_base, None)
    scheduler = Scheduler(stories_base, stories_base.kv_shapes)
    page = scheduler._active.page
    prompt = np.arange(3, 3 + 2 * page + 9)
    settings = SamplingSettings(max_tokens=20, seed=0)
    scheduler.add(sample_request(sampler, prompt, 6, settings))
    for _ in range(4):
        scheduler.step()
    held = [slot.pages for slot in scheduler._rows]
    assert len(held) == 6
    assert len({id(p) for pages in held for p in pages}) == 2 + 6
    assert all(p.users == 7 for p in held[0][:2])  # those samples, and what is kept for others


def test_no_page_is_lost(stories_base):
    """Whatever ends, goes away or comes again, all pages are free in the end, or kept."""
    sampler = Sampler(stories_base, None)
    settings = SamplingSettings(max_tokens=90, seed=0)
    prompts = [np.arange(3, 3 + n) for n in (5, 64, 130, 200)]
    requests = [sample_request(sampler, p, 5, settings) for p in prompts]
    scheduler = Scheduler(stories_base, stories_base.kv_shapes)
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
    pages = {id(p): p for entry in scheduler._prefixes._entries for p in entry.slot.pages}
    users = [sum(p in e.slot.pages for e in scheduler._prefixes._entries) for p in pages.values()]
    assert [p.users for p in pages.values()] == users
    del sampler, request, requests, again
    scheduler._prefixes.trim(0)
    assert not any(p.users for p in pages.values())


def test_a_next_turn_reads_what_the_last_one_left(stories_base):
    """The pages of a finished sample serve longer and shorter prompts, to the same bits."""
    sampler = Sampler(stories_base, None)
    settings = SamplingSettings(max_tokens=100, seed=1, temperature=1.0)
    first = sample_request(sampler, np.arange(3, 90), 1, settings)
    scheduler = run_batch(stories_base, [first])
    answer = first.future.result()[0].tokens
    turn = np.concatenate([first.prompt, answer, [9, 8, 7]])
    second = sample_request(sampler, turn, 2, settings)
    third = sample_request(sampler, turn[:120], 1, settings)
    for request in (second, third):
        scheduler.add(request)
    while scheduler.busy:
        scheduler.step()
    assert second.future.result()[0].cached_prompt_tokens > 150
    for request in (second, third):
        alone = draw(Sampler(stories_base, None), request.prompt, request.num_samples, settings)
        found = request.future.result()
        assert [s.tokens for s in found] == [s.tokens for s in alone]
        assert [s.logprobs for s in found] == [s.logprobs for s in alone]
