"""Helpers that user code of training loops builds on."""

from __future__ import annotations

import io
import json
import urllib.request
import warnings

import pytest

from tinker_cookbook.utils import cost_estimation
from tinker_cookbook.utils.cost_estimation import CostTracker, TokenUsage, rates_from_pricing_entry
from tinker_cookbook.utils.deprecation import deprecated, make_deprecated_module_getattr
from tinker_cookbook.utils.misc_utils import (
    all_same,
    concat_lists,
    dict_mean,
    iteration_dir,
    lookup_func,
    not_none,
    safezip,
    split_list,
)


def test_small_helpers():
    assert dict_mean([{"a": 1, "b": None}, {"a": 3, "c": 2}]) == {"a": 2.0, "c": 2.0}
    assert all_same([])
    assert not all_same([1, 2])
    assert [len(part) for part in split_list(range(10), 4)] == [2, 3, 2, 3]
    assert concat_lists(split_list(range(10), 4)) == list(range(10))
    with pytest.raises(ValueError, match="num_splits: got 3 for 2"):
        split_list([1, 2], 3)
    with pytest.raises(ValueError, match="zip"):
        list(safezip([1], [1, 2]))
    assert not_none(0) == 0
    with pytest.raises(AssertionError):
        not_none(None)
    assert lookup_func("os.path:join") is lookup_func("join", "os.path")
    with pytest.raises(ValueError, match=r"expected 'package\.module:name'"):
        lookup_func("join")
    assert iteration_dir(None, 1) is None
    assert str(iteration_dir("run", 12)).endswith("iteration_000012")


def test_a_deprecated_name_warns_at_the_caller():
    @deprecated(message="Use new.")
    def old():
        return 3

    with pytest.warns(DeprecationWarning, match="Use new") as caught:
        assert old() == 3
    assert caught[0].filename == __file__
    moved = make_deprecated_module_getattr("m", {"join": ("os.path.join", None)})
    with pytest.warns(DeprecationWarning, match=r"os\.path\.join"):
        assert moved("join") is lookup_func("os.path:join")
    with pytest.raises(AttributeError), warnings.catch_warnings():
        moved("other")


def test_tokens_and_their_cost(monkeypatch):
    entry = {
        "tinker_id": "m", "prefill": "$2", "cached_prefill": "$0.5", "sample": "$4", "train": "$6",
    }  # fmt: skip
    rates = rates_from_pricing_entry(entry)
    assert rates is not None
    assert rates_from_pricing_entry({**entry, "train": "n/a"}) is None
    tracker = CostTracker(rates)
    tracker.record_step(TokenUsage(sampled=1_000_000, trained=1_000_000))
    metrics = tracker.record_step(TokenUsage(prefill_cached=1_000_000))
    assert (metrics["cost/step_usd"], metrics["cost/cumulative_usd"]) == (0.5, 10.5)
    assert metrics["tokens/cumulative/sampled"] == 1_000_000
    calls = []
    monkeypatch.setattr(cost_estimation, "_pricing_fetched", False)

    def urlopen(request, timeout):
        calls.append(request.full_url)
        return io.StringIO(json.dumps([entry]))

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    assert cost_estimation.fetch_model_pricing("m") == rates
    assert cost_estimation.fetch_model_pricing("other") is None
    assert len(calls) == 1
