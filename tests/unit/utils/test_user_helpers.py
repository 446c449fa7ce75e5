"""Helpers that user code of training loops builds on."""

from __future__ import annotations

import io
import json
import urllib.request

from tinker_cookbook.utils import cost_estimation
from tinker_cookbook.utils.cost_estimation import CostTracker, TokenUsage, rates_from_pricing_entry


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
