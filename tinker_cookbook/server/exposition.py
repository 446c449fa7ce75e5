"""The page of metrics for Prometheus: counters (see ``metrics``) and the server's present state."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from shutil import disk_usage

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tinker_cookbook.engine.devices import free_memory_bytes
from tinker_cookbook.server.metrics import PREFIX, REGISTRY
from tinker_cookbook.server.state import ServerState


def exposition(state: ServerState) -> Response:
    """Returns all metrics in Prometheus' text format. Blocks: it measures the disk."""
    gauges = CollectorRegistry()
    gauges.register(_Gauges(state))
    body = generate_latest(REGISTRY) + generate_latest(gauges)
    return Response(body, media_type=CONTENT_TYPE_LATEST)


class _Gauges(Collector):
    """The present state of the server."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yields one metric for each quantity."""
        state, sessions = self._state, self._state.sessions()
        operations = sum(not one.future.done() for one in list(state.requests.values()))
        for name, text, value in (
            ("sessions", "Open sessions", len(sessions)),
            ("runs", "Runs in memory", sum(len(one.models) for one in sessions)),
            ("samplers", "Open samplers", sum(len(one.samplers) for one in sessions)),
            ("operations_running", "Operations that have not ended", operations),
            (
                "free_memory_bytes",
                "Free memory of the device",
                free_memory_bytes(state.engine.choice.device),
            ),
            ("disk_free_bytes", "Free space for checkpoints", disk_usage(state.keys.root).free),
            ("disk_quota_bytes", "Quota of each owner; +Inf: none", state.keys.quota_bytes or inf),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value)
        disk = GaugeMetricFamily(
            PREFIX + "disk_used_bytes", "Files of an owner's runs", labels=["owner"]
        )
        for name in state.keys.names:
            disk.add_metric([name], state.keys.owner(name).store.used_bytes())
        yield disk
        load = {
            "num_requests_running": "Samples that are being generated",
            "num_requests_waiting": "Samples that wait for a row of the batch",
            "kv_cache_usage_perc": "Used share of the KV cache; 1 is all of it",
        }
        models = state.engine.sampling_load()
        for index, (name, text) in enumerate(load.items()):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model"])
            for model, values in models.items():
                if (value := values[index]) is not None:
                    gauge.add_metric([model], value)
            yield gauge
