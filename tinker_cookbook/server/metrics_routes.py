"""What the server is doing, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tinker_cookbook.engine.devices import free_memory_bytes
from tinker_cookbook.server.access import TheHost, TheOwner
from tinker_cookbook.server.state import ServerState

router = APIRouter(tags=["metrics"])


@router.get("/metrics", response_model=None)
async def metrics(owner: TheOwner, host: TheHost) -> Response:
    """Counters and gauges of the whole server; a scraper sends its key as a bearer token."""
    registry = CollectorRegistry()
    registry.register(_Collector(host))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class _Collector:
    """Reads the state when it is asked."""

    def __init__(self, host: ServerState) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        host = self._host
        sessions = host.sessions()
        device = host.engine.choice.device
        gauges = {
            "sessions": ("Open sessions", len(sessions)),
            "runs": ("Runs in memory", sum(len(one.models) for one in sessions)),
            "samplers": ("Open samplers", sum(len(one.samplers) for one in sessions)),
            "requests_running": ("Requests that have not ended", host.board.running()),
            "samples_waiting": ("Samples that were asked for and not ended", host.waiting.count),
            "free_memory_bytes": ("Of the device", free_memory_bytes(device)),
            "uptime_seconds": ("Since the start", time.time() - host.started_at),
        }
        counters = {
            "trained_tokens": ("Tokens of forward passes", host.trained_tokens),
            "sampled_tokens": (
                "Tokens sampled, also for requests that were cancelled",
                host.engine.sampled_tokens,
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"tinker_cookbook_{name}", text, value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"tinker_cookbook_{name}", text, value)
