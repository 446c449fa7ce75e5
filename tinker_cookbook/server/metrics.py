"""Metrics for Prometheus.

Names and units are those of vLLM's server where it has the same metric, with this package's prefix.
Labels have few values: routes by their template, base models, owners, classes of errors.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
)

from tinker_cookbook.engine.sampling.requests import RequestStats, Sample

REGISTRY = CollectorRegistry()
PREFIX = "tinker_cookbook_"
_MODEL = ("model", "owner")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(PREFIX + name, text, labels, registry=REGISTRY)


def _histogram(
    name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SECONDS
) -> Histogram:
    return Histogram(PREFIX + name, text, labels, registry=REGISTRY, buckets=buckets)


HTTP_REQUESTS = _counter(
    "http_requests", "HTTP requests, also refused ones", "method", "route", "status", "owner"
)
HTTP_SECONDS = _histogram(
    "http_request_duration_seconds", "Duration of HTTP requests, with their bodies", "route"
)
ERRORS = _counter("errors", "Errors by class; category user: refusals", "error", "category")
OPERATIONS = _counter(
    "operations", "Finished operations of the Tinker API", "operation", *_MODEL, "outcome"
)
OPERATION_SECONDS = _histogram(
    "operation_duration_seconds", "Time from the arrival of an operation to its end", "operation"
)
TRAINING_TOKENS = _counter("training_tokens", "Tokens of forward and backward passes", *_MODEL)
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of ended sampling requests", *_MODEL)
GENERATION_TOKENS = _counter(
    "generation_tokens", "Sampled tokens of ended sampling requests, also cancelled ones", *_MODEL
)
SAMPLES = _counter("request_success", "Ended samples", *_MODEL, "finished_reason")
E2E_SECONDS = _histogram(
    "e2e_request_latency_seconds", "Time from a sampling request to its end", "model"
)
QUEUE_SECONDS = _histogram(
    "request_queue_time_seconds", "Time until the first sample of a request runs", "model"
)
FIRST_TOKEN_SECONDS = _histogram(
    "time_to_first_token_seconds", "Time until the first token of a sampling request", "model"
)
TOKEN_SECONDS = _histogram(
    "request_time_per_output_token_seconds",
    "Time after the first token, divided by the further tokens of each sample",
    "model",
    buckets=_TOKEN_SECONDS,
)
ProcessCollector(registry=REGISTRY)


def count_error(error: BaseException, category: str) -> None:
    """Counts an error of a request: ``user`` for a refusal, else ``server``."""
    ERRORS.labels(type(error).__name__, category).inc()


def count_operation(
    operation: str, model: str, owner: str, started: float, done: Future[Any]
) -> None:
    """Counts an operation that has ended and arrived at ``started``, of ``time.monotonic``."""
    outcome = "cancelled" if done.cancelled() else "error" if done.exception() else "ok"
    OPERATIONS.labels(operation, model, owner, outcome).inc()
    OPERATION_SECONDS.labels(operation).observe(time.monotonic() - started)


def count_sample(stats: RequestStats, done: Future[list[Sample]]) -> None:
    """Counts a sampling request that has ended. Runs on the engine's thread."""
    now, model, labels = time.monotonic(), stats.model, (stats.model, stats.owner or "")
    if done.cancelled():
        reasons = ["abort"]
    elif done.exception() is not None:
        reasons = ["error"]
    else:
        reasons = [sample.stop_reason for sample in done.result()]
    for reason in reasons:
        SAMPLES.labels(*labels, reason).inc()
    PROMPT_TOKENS.labels(*labels).inc(stats.prompt_tokens)
    GENERATION_TOKENS.labels(*labels).inc(stats.sampled_tokens)
    E2E_SECONDS.labels(model).observe(now - stats.queued_at)
    if stats.started_at is not None:
        QUEUE_SECONDS.labels(model).observe(stats.started_at - stats.queued_at)
    if stats.first_token_at is not None:
        FIRST_TOKEN_SECONDS.labels(model).observe(stats.first_token_at - stats.queued_at)
        if (further := stats.sampled_tokens / len(reasons) - 1) > 0:
            TOKEN_SECONDS.labels(model).observe((now - stats.first_token_at) / further)
