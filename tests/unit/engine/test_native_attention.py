"""The routine in C against attention in float64, and what happens where it cannot be had."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tinker_cookbook.engine.kernels.cpu import build
from tinker_cookbook.engine.model.attention_hook import AttentionCall
from tinker_cookbook.engine.sampling import paged_cache
from tinker_cookbook.engine.sampling.batch_attention import BatchLayout
from tinker_cookbook.engine.sampling.paged_cache import LayerShape, PagedCache, TokenSpan

CPU = torch.device("cpu")
LENGTHS, COUNTS = (5, 130, 400, 64, 0, 300), (1, 1, 37, 1, 30, 1)
SHAPES = {
    "three heads to a key": (9, LayerShape(3, 64, 64), None),
    "one head to a key, odd widths": (4, LayerShape(4, 20, 12), None),
    "six heads to a key": (12, LayerShape(2, 128, 128), None),
    "short window": (8, LayerShape(2, 128, 64), 7),
    "window longer than a chunk": (4, LayerShape(1, 32, 48), 150),
    "soft cap": (6, LayerShape(2, 64, 64, plain=False), None),
    "sinks and a window": (6, LayerShape(2, 64, 64, plain=False), 40),
}

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


class Batch:
    """Sequences of ``LENGTHS`` tokens, each with some more to come."""

    def __init__(self, case: str, dtype: torch.dtype) -> None:
        heads, shape, self.window = SHAPES[case]
        generator = torch.Generator().manual_seed(0)
        cache = PagedCache([shape, shape], dtype, CPU)
        self.tables = [cache.new(length + 40) for length in LENGTHS]
        tokens = sum(LENGTHS) + sum(COUNTS)
        self.query = torch.randn(heads, tokens, shape.key, generator=generator).to(dtype)
        self.key = torch.randn(tokens, shape.heads, shape.key, generator=generator).to(dtype)
        self.value = torch.randn(tokens, shape.heads, shape.value, generator=generator).to(dtype)
        self.scale, self.cap = shape.key**-0.5, 1.5 if case == "soft cap" else None
        sinks = torch.randn(heads, generator=generator)
        self.sinks = sinks if case.startswith("sinks") else None
        self.past = [
            TokenSpan(table, 0, sum(LENGTHS[:i]), length)
            for i, (table, length) in enumerate(zip(self.tables, LENGTHS, strict=True))
        ]
        self.attend([run for run in self.past if run.count])

    def runs(self, *, image: bool = False) -> list[TokenSpan]:
        """With an ``image`` the last 25 tokens of each run see one another."""
        runs = []
        for table, length, count in zip(self.tables, LENGTHS, COUNTS, strict=True):
            seen = np.arange(length, length + count)
            seen[-25:] = seen[-1]
            first = sum(LENGTHS) + sum(run.count for run in runs)
            runs.append(TokenSpan(table, length, first, count, last_seen=seen if image else None))
        return runs

    def attend(self, runs: list[TokenSpan]) -> torch.Tensor:
        begin, end = runs[0].first, runs[-1].first + runs[-1].count
        # As the layers give them: heads are not next to tokens.
        inputs = self.query.transpose(0, 1)[begin:end], self.key[begin:end], self.value[begin:end]
        call = AttentionCall(1, *inputs, self.scale, self.window, self.cap, self.sinks)
        layout = BatchLayout([replace(run, first=run.first - begin) for run in runs])
        return F.pad(layout.attend(call), (0, 0, 0, 0, begin, 0))

    def expected(self, past: TokenSpan, run: TokenSpan) -> torch.Tensor:
        """Attention [tokens, heads, D] in float64."""
        length, rows = run.position + run.count, []
        for one in (past, run):
            rows += range(one.first, one.first + one.count)
        keys, values = (part[rows].double().transpose(0, 1) for part in (self.key, self.value))
        group = len(self.query) // len(keys)
        query = self.query[:, run.first : run.first + run.count].double()
        scores = query @ keys.repeat_interleave(group, 0).transpose(1, 2) * self.scale
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        at, key = torch.arange(run.position, length)[:, None], torch.arange(length)
        mask = key <= torch.from_numpy(run.seen)[:, None]
        if self.window is not None:
            mask &= key > at - self.window
        scores = scores.masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, run.count, 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., :length]
        return (weights @ values.repeat_interleave(group, 0)).transpose(0, 1)


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", SHAPES)
def test_equals_attention_in_float64(
    case: str, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In C, and in torch's operators (where bfloat16 weights are rounded)."""
    if not native:
        monkeypatch.setattr(paged_cache, "page_tokens", lambda *_: None)
    batch = Batch(case, dtype)
    runs = batch.runs(image=True)
    out = batch.attend(runs)
    for past, run in zip(batch.past, runs, strict=True):
        here = slice(run.first, run.first + run.count)
        expected = batch.expected(past, run)
        unit = 2e-6 if dtype == torch.float32 else 2**-8  # of a number around one
        bound = unit * (1 + expected.abs()) * (1 if native else 3)
        assert ((out[here].double() - expected).abs() <= bound).all(), run


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", SHAPES)
def test_batch_invariance(case: str, dtype: torch.dtype) -> None:
    together, alone = Batch(case, dtype), Batch(case, dtype)
    out = together.attend(together.runs())
    for run in alone.runs():
        for i in range(run.count):  # read as part of a prompt, or drawn one by one
            single = TokenSpan(run.table, run.position + i, run.first + i, 1)
            at = run.first + i
            assert torch.equal(alone.attend([single])[at], out[at])


@needs_compiler
def test_nan_propagates() -> None:
    batch = Batch("three heads to a key", torch.float32)
    run = batch.runs()[1]
    run.table.cache.keys[1][run.table.blocks[1].index, 1, 3, 6] = torch.nan
    out = batch.attend([run])[run.first]
    assert out[3:6].isnan().all()
    assert not out[:3].isnan().any()
    assert not out[6:].isnan().any()


@needs_compiler
def test_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", str(tmp_path))
    assert build.library.__wrapped__() is not None
    (built,) = (tmp_path / "native").iterdir()
    monkeypatch.setattr(build, "_run", lambda command: pytest.fail(f"ran {command}"))
    assert build.library.__wrapped__() is not None
    assert list((tmp_path / "native").iterdir()) == [built]


def test_falls_back_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", str(tmp_path))
    monkeypatch.setenv(build.SWITCH, "0")
    assert build.library.__wrapped__() is None
    assert not caplog.records
    monkeypatch.setenv(build.SWITCH, "1")
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert build.library.__wrapped__() is None
    assert "the engine is slower" in caplog.text
    assert "no such flag" in caplog.text
