"""Spans of a run: as metrics, as rows, as a chart and as a trace file."""

from __future__ import annotations

import asyncio
import json

import pytest

from tinker_cookbook.training.tracing import RunTrace
from tinker_cookbook.utils.trace import (
    get_scope_context,
    scope,
    scope_span,
    trace_iteration,
    update_scope_context,
)


@scope
async def outer():
    get_scope_context().attributes["kind"] = "outer"
    inner()
    return 1


@scope
def inner():
    update_scope_context({"kind": "inner"})


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_an_iteration_has_the_time_of_each_span():
    async def run():
        with trace_iteration(step=0) as window:
            await asyncio.gather(outer(), outer())
            async with scope_span("once"):
                await asyncio.sleep(0.01)
        return window.get_timing_metrics()

    metrics = asyncio.run(run())
    assert metrics["time/outer:count"] == metrics["time/inner:count"] == 2
    assert metrics["time/outer:total"] == pytest.approx(2 * metrics["time/outer:mean"])
    assert 0.01 <= metrics["time/once"] <= metrics["time/total"]


def test_a_run_writes_its_spans_as_its_settings_ask(tmp_path):
    quiet = RunTrace(str(tmp_path / "quiet"), enable_trace=False, span_chart_every=0)
    (tmp_path / "quiet").mkdir()
    quiet.start(1)
    inner()
    quiet.next(1)
    quiet.close()
    assert [path.name for path in (tmp_path / "quiet").iterdir()] == ["timing_spans.jsonl"]
    trace = RunTrace(str(tmp_path), enable_trace=True, span_chart_every=2)
    trace.start(1)
    for step in (1, 2):
        inner()
        trace.next(step)
    trace.close()
    assert [row["step"] for row in read(tmp_path / "timing_spans.jsonl")] == [1, 2]
    # A run that goes on from step 1 writes the later steps again.
    resumed = RunTrace(str(tmp_path), enable_trace=False, span_chart_every=0)
    resumed.start(2)
    inner()
    resumed.next(2)
    resumed.close()
    assert [row["step"] for row in read(tmp_path / "timing_spans.jsonl")] == [1, 2]
    assert (tmp_path / "iteration_000002" / "timing_gantt.html").exists()
    assert not (tmp_path / "iteration_000001").exists()
    assert {e["name"] for e in read(tmp_path / "trace_events.jsonl")} >= {"inner"}
