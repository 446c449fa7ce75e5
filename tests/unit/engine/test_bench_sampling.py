"""The sampling benchmark: a real run of tiny size, the samplers, and the report's arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench_runs import IN_PROCESS

from benchmarks.engine import ceilings
from benchmarks.engine.config import SamplingConfig
from benchmarks.engine.flops import ModelSize
from benchmarks.engine.sampling import report, runner, sides
from benchmarks.engine.sampling.adapter import write_adapter
from benchmarks.engine.sampling.requests import (
    Request,
)
from tinker_cookbook.engine.devices import peak_memory_bytes

pytest_plugins = ("bench_runs",)

MIXED = [
    Request([1, 5, 9], 1, 6),
    Request(list(range(3, 40)), 1, 2),
    Request([7], 3, 4),
    Request([2] * 12, 1, 9),
]


def test_tiny_run(in_process_bench, monkeypatch) -> None:
    monkeypatch.setattr(ceilings, "_probed", lambda: (1e10, 1e11, 0.0))
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    config = SamplingConfig(
        **IN_PROCESS,
        variants=("engine", "llama.cpp", "generate"),
        cases=("decode", "mixed"),
        decode_rows=(1, 3),
        decode_prompt_tokens=9,
        decode_answer_tokens=10,
        mixed_requests=6,
        mixed_shortest=2,
        mixed_longest=12,
        batch_size=3,
    )
    result, printed = in_process_bench(runner, config)

    table = result["dtypes"]["float32"]
    assert list(table["limits"]) == ["decode 1", "decode 3", "mixed"]
    assert table["ceilings"] == {"bandwidth": 1e10, "flops": 1e11, "method": "probe.c"}
    for name in ("engine", "generate"):
        found = table["variants"][name]["cases"]
        for case in ("decode 1", "decode 3"):
            assert 0 < found[case]["tokens_per_second"] <= found[case]["fastest"]
            assert 0 < found[case]["prompt_seconds"] < 5
            # Of ten tokens one comes from the prompt's pass, and the last pass has no next one.
            assert found[case]["measured"] == "8 steps"
        assert found["mixed"]["measured"] == "all steps"
        peak = found["mixed"]["peak_bytes"]
        assert 50 << 20 < peak < 1.1 * peak_memory_bytes(torch.device("cpu"))
        assert 0 < found["mixed"]["limit_share"] < 1
    ratio = table["variants"]["generate"]["cases"]["decode 3"]["engine_speed"]
    assert len(ratio["pairs"]) == 1
    assert table["variants"]["llama.cpp"]["status"] == "not installed"
    for word in ("decode 3", "limit: ", "engine / it", "[llama-cpp]", "probe.c"):
        assert word in printed


@pytest.fixture(scope="module")
def setup(stories_model: str, tmp_path_factory: pytest.TempPathFactory) -> sides.Setup:
    adapter = tmp_path_factory.mktemp("bench") / "adapter"
    write_adapter(Path(stories_model), adapter, rank=4, seed=0)
    return sides.Setup(Path(stories_model), adapter, "cpu", "float32", rank=4)


VARIANTS = ("engine", "generate")


def test_sides_agree_in_any_batches(setup: sides.Setup, tmp_path: Path) -> None:
    """Left padding and cutting change nothing, and both apply the same adapter."""
    with sides.open_side(setup, "engine") as engine, sides.open_side(setup, "generate") as generate:
        alone = generate.sample(MIXED, 0.0, batch_size=1)
        assert [len(answer) for answer in alone] == [6, 2, 4, 4, 4, 9]
        for batch_size in (4, None):
            assert generate.sample(MIXED, 0.0, batch_size) == alone
        assert engine.sample(MIXED, 0.0) == alone
    other = tmp_path / "adapter"
    write_adapter(setup.folder, other, rank=4, seed=1)
    changed = sides.Setup(setup.folder, other, "cpu", "float32", rank=4)
    for variant in VARIANTS:
        with sides.open_side(changed, variant) as side:
            assert side.sample(MIXED, 0.0) != alone


def _run(speed: float, **changes: object) -> dict:
    case = {
        "tokens_per_second": speed,
        "fastest": 2 * speed,
        "cpu_seconds": 1 / speed,
        "prompt_seconds": 0.5,
        "measured": "9 steps",
        "peak_bytes": 1 << 30,
    }
    run = {"status": "ok", "cases": {"decode 2": case}, "peak_bytes": 1 << 30, "notes": []}
    return run | {"others": 0.01, "steal": 0.0} | changes


def _build(runs: dict[str, list[dict]]) -> dict:
    machine = {"status": "ok", "flops": 1e9, "bandwidth": 1e6, "method": "probe.c"}
    return report.build(
        settings={"model": "m", "dtype": "float32", "rank": 4},
        machine={"device": "cpu"},
        size=SIZE,
        cases={"decode 2": [Request([1] * 3, 1, 5)] * 2},
        tables=[report.Table("float32", 4, [machine], runs)],
    )


SIZE = ModelSize(
    total=5000, body=3000, head=1000, lora_body=100, lora_head=50, layers=2, attention_width=16,
    kv_width=8, hidden=16, inner=32, vocab=64, context=64,
)  # fmt: skip


def _printed(result: dict) -> str:
    import io

    from rich.console import Console

    out = io.StringIO()
    report.print_tables(result, Console(file=out, width=120))
    return out.getvalue()


def test_limits_ratios_and_load() -> None:
    """Five steps read 4,600 weights each; two answers look at 4 to 8 tokens, 32 numbers a token."""
    before = [_run(10.0), _run(25.0, others=0.4)]
    result = _build({"engine": [_run(40.0), _run(50.0)], "before": before})
    table = result["dtypes"]["float32"]
    memory = (5 * 4600 + 2 * (4 + 5 + 6 + 7 + 8) * 32) * 4 / 1e6
    limits = table["limits"]["decode 2"]
    assert limits == {"tokens_per_second": pytest.approx(10 / memory), "by": "memory"}
    found = table["variants"]["before"]["cases"]["decode 2"]
    assert found["engine_speed"] == {"pairs": [4.0, 2.0], "median": 3.0}
    assert found["engine_cpu"] == {"pairs": [0.25, 0.5], "median": 0.375}
    engine = table["variants"]["engine"]["cases"]["decode 2"]
    assert (engine["tokens_per_second"], engine["fastest"]) == (45.0, 100.0)
    assert engine["limit_share"] == pytest.approx(45 / limits["tokens_per_second"])
    assert report.exit_status(result) == 0
    text = _printed(result)
    assert "engine / it 3.00 (4.00, 2.00) x tok/s" in text
    assert "THE MACHINE WAS BUSY" in text
    assert "at most 40%" in text
    assert "the machine was idle" in _printed(_build({"engine": [_run(40.0)]}))
