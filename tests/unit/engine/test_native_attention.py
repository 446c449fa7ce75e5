"""The routine in C against attention in float64, and what happens where it cannot be had."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tinker_cookbook.engine.kernels.cpu import build
from tinker_cookbook.engine.kernels.cpu.attention import PagedAttention
from tinker_cookbook.engine.model.attention_hook import AttentionCall
from tinker_cookbook.engine.sampling.paged_cache import BlockTable, LayerShape, PagedCache, Run

CPU = torch.device("cpu")
LENGTHS, COUNTS = (5, 130, 400, 64, 0, 300), (1, 1, 37, 1, 30, 1)
SHAPES = {
    "three heads to a key": (9, LayerShape(3, 64, 64), None),
    "one head to a key, odd widths": (4, LayerShape(4, 20, 12), None),
    "six heads to a key": (12, LayerShape(2, 128, 128), None),
    "short window": (8, LayerShape(2, 128, 64), 7),
    "window longer than a chunk": (4, LayerShape(1, 32, 48), 150),
}

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


class Batch:
    """Sequences of ``LENGTHS`` tokens, each with some more to come, and three rows of nothing."""

    def __init__(self, heads: int, shape: LayerShape, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.shape, cache = shape, PagedCache([shape, shape], dtype, CPU)
        self.tables = [cache.new(length + 40) for length in LENGTHS]
        for pool in (*cache.keys, *cache.values):
            pool.normal_(generator=generator)
        rows = sum(COUNTS) + 3
        self.query = torch.randn(heads, rows, shape.key, generator=generator).to(dtype)
        self.key = torch.randn(rows, shape.heads, shape.key, generator=generator).to(dtype)
        self.value = torch.randn(rows, shape.heads, shape.value, generator=generator).to(dtype)
        self.scale = shape.key**-0.5

    def runs(self) -> list[Run]:
        firsts = [sum(COUNTS[:i]) for i in range(len(COUNTS))]
        return [
            Run(table, length, first, count)
            for table, length, first, count in zip(
                self.tables, LENGTHS, firsts, COUNTS, strict=True
            )
        ]

    def attend(self, runs: list[Run], window: int | None) -> torch.Tensor:
        query = self.query.transpose(0, 1)  # as the layers give it: heads are not next to tokens
        call = AttentionCall(1, query, self.key, self.value, self.scale, window, None, None)
        return PagedAttention(runs)(call)

    def held(self, table: BlockTable) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv heads, T, D] of the second layer."""
        index = [block.index for block in table.blocks]
        keys, values = table.cache.keys[1][index].transpose(2, 3), table.cache.values[1][index]
        return keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)

    def expected(self, table: BlockTable, run: Run, window: int | None) -> torch.Tensor:
        """Attention [tokens, heads, D] in float64, from what the cache holds by now."""
        length = run.position + run.count
        keys, values = (held[:, :length].double() for held in self.held(table))
        group = len(self.query) // len(keys)
        query = self.query[:, run.first : run.first + run.count].double()
        scores = query @ keys.repeat_interleave(group, 0).transpose(1, 2) * self.scale
        at, seen = torch.arange(run.position, length)[:, None], torch.arange(length)
        mask = seen <= at
        if window is not None:
            mask &= seen > at - window
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights @ values.repeat_interleave(group, 0)).transpose(0, 1)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", SHAPES)
def test_equals_attention_in_float64(case: str, dtype: torch.dtype) -> None:
    heads, shape, window = SHAPES[case]
    batch = Batch(heads, shape, dtype)
    runs = batch.runs()
    out = batch.attend(runs, window)
    for table, run in zip(batch.tables, runs, strict=True):
        new = slice(run.position, run.position + run.count)
        here = slice(run.first, run.first + run.count)
        keys, values = batch.held(table)
        assert torch.equal(keys[:, new], batch.key[here].transpose(0, 1))
        assert torch.equal(values[:, new], batch.value[here].transpose(0, 1))
        expected = batch.expected(table, run, window)
        unit = 2e-6 if dtype == torch.float32 else 2**-8  # of a number around one
        bound = unit * (1 + expected.abs())
        assert ((out[here].double() - expected).abs() <= bound).all(), run
    assert not out[sum(COUNTS) :].any()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", SHAPES)
def test_a_token_is_the_same_to_the_bit_in_any_company(case: str, dtype: torch.dtype) -> None:
    heads, shape, window = SHAPES[case]
    together, alone = Batch(heads, shape, dtype), Batch(heads, shape, dtype)
    out = together.attend(together.runs(), window)
    for run in alone.runs():
        for i in range(run.count):  # read as part of a prompt, or drawn one by one
            single = Run(run.table, run.position + i, run.first + i, 1)
            at = run.first + i
            assert torch.equal(alone.attend([single], window)[at], out[at])


@needs_compiler
def test_not_a_number_stays_visible() -> None:
    batch = Batch(9, LayerShape(3, 64, 64), torch.float32)
    run = batch.runs()[1]
    run.table.cache.keys[1][run.table.blocks[1].index, 1, 3, 6] = torch.nan
    out = batch.attend([run], None)[run.first]
    assert out[3:6].isnan().all()
    assert not out[:3].isnan().any()
    assert not out[6:].isnan().any()


@needs_compiler
def test_another_dtype_is_refused() -> None:
    batch = Batch(9, LayerShape(3, 64, 64), torch.float32)
    batch.value = batch.value.double()
    with pytest.raises(TypeError, match=r"float64.*expected torch\.float32"):
        batch.attend(batch.runs(), None)


@needs_compiler
def test_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", str(tmp_path))
    assert build.library.__wrapped__() is not None
    (built,) = (tmp_path / "native").iterdir()
    monkeypatch.setattr(build, "_run", lambda command: pytest.fail(f"ran {command}"))
    assert build.library.__wrapped__() is not None
    assert list((tmp_path / "native").iterdir()) == [built]


def test_is_done_without(
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
