"""The benchmark: real runs of tiny size, and its arithmetic against independent references."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import forks
import numpy as np
import pytest
import torch

from benchmarks.engine import conversations, report, shapes, variants
from benchmarks.engine.flops import model_size

MODULE = "benchmarks.engine"


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", MODULE, *arguments]
    return forks.run(command)


@pytest.mark.slow
def test_tiny_run_from_the_command_line(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = ("model=shape:tiny", "data=random:16-64", "dtype=float32", "device=cpu")
    done = _bench(*arguments, "repeats=1", "steps=2", "batch_size=4", f"output={output}")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(output.read_text()) == result

    assert result["ratios_withheld"] is None
    assert result["agreement"]["agree"]
    assert result["agreement"]["all_steps"] < 1e-5
    engine, plain = result["variants"]["engine"], result["variants"]["plain"]
    (pair,) = result["ratios"]["plain"]["tokens_per_second"]["pairs"]
    assert pair == pytest.approx(engine["tokens_per_second"] / plain["tokens_per_second"])
    for variant in (engine, plain):
        (run,) = variant["runs"]
        # A model that knows nothing has a loss of log(vocabulary).
        assert run["first_loss"] == pytest.approx(math.log(1024), rel=0.02)
        assert len(run["losses"]) == len(run["seconds"]) == 2
        tokens = result["workload"]["tokens"]
        assert variant["tokens_per_second"] == pytest.approx(tokens / sum(run["seconds"]))
        assert 50 << 20 < run["loaded_bytes"] <= run["peak_bytes"] < 4 << 30
        assert 0 < variant["ceiling_share"] < 1
    rows = conversations.random_conversations("random:16-64", 12, 1024, seed=0)
    assert result["workload"]["tokens"] == sum(len(row.tokens) for row in rows[4:])
    assert result["versions"]["torch"] == torch.__version__
    assert result["device"] == "cpu"
    assert result["threads"] >= 1
    for title in ("engine", "plain", "ceiling", "GiB", "GB/s"):
        assert title in done.stdout


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_variants_train_alike(
    stories_model: str, dtype: str, tolerance: float, monkeypatch
) -> None:
    monkeypatch.setitem(variants.ADAM, "lr", 3e-3)  # so that a few steps change the loss
    rows = conversations.random_conversations("random:8-40", 6, 500, seed=1)
    setup = variants.Setup(Path(stories_model), "cpu", dtype, rank=4, seed=3, warmup=1)
    engine, plain = (run(setup, [rows] * 4) for run in (variants.run_engine, variants.run_plain))
    assert plain.first_loss - plain.losses[-1] > 20 * tolerance
    assert engine.adapter_parameters == plain.adapter_parameters
    assert engine.first_loss == pytest.approx(plain.first_loss, rel=tolerance)
    assert engine.losses == pytest.approx(plain.losses, rel=tolerance)


def test_flops_are_those_that_torch_counts(stories_model: str) -> None:
    """One unpadded row, all of it trained, eager attention: torch counts the same but for what
    the formula's docstring says, and the gradient for the embeddings that nobody needs."""
    from torch.utils.flop_counter import FlopCounterMode

    size, rank, length = model_size(Path(stories_model)), 4, 48
    setup = variants.Setup(Path(stories_model), "cpu", "float32", rank, seed=0, warmup=1)
    model = variants._peft_model(setup, torch.device("cpu"), torch.float32)
    model.base_model.model.set_attn_implementation("eager")
    ids = torch.arange(3, 3 + length)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    attention = 6 * size.layers * size.attention_width * length**2
    first = model.base_model.model.model.layers[0].self_attn
    projections = (first.q_proj, first.k_proj, first.v_proj)
    unneeded = 2 * length * sum(p.weight.numel() + rank * p.in_features for p in projections)
    # torch multiplies the masked half of the attention matrix as well
    expected = size.flops([length], length, rank) + attention - unneeded
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("qwen3-0.6b", 596_049_920), ("qwen3-4b", 4_022_468_096), ("qwen3-8b", 8_190_735_360)],
)
def test_shapes_have_the_published_size(name: str, parameters: int, tmp_path: Path) -> None:
    shapes.shape_config(f"shape:{name}").save_pretrained(tmp_path)
    assert model_size(tmp_path).total == parameters


def _run(seconds: float, loss: float = 2.0, **changes: object) -> dict:
    run = {
        "status": "ok",
        "first_loss": loss,
        "losses": [loss],
        "seconds": [seconds],
        "loaded_bytes": 1 << 29,
        "peak_bytes": 1 << 30,
        "adapter_parameters": 10,
        "threads": 2,
        "notes": [],
    }
    return run | changes


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    """``build(runs)`` gives the report of two rows of 100 tokens, half of them trained."""
    folder = tmp_path_factory.mktemp("shape")
    shapes.shape_config("shape:tiny").save_pretrained(folder)
    size = model_size(folder)
    row = conversations.Conversation(np.arange(100), np.arange(100) >= 50)
    ceiling = {"status": "ok", "flops": 3e9, "bandwidth": 1e10, "method": "probe.c"}

    def report_of(runs: dict) -> dict:
        return report.build(
            settings={"batch_size": 2, "rank": 4, "model": "shape:tiny", "dtype": "float32"},
            machine={"device": "cpu", "threads": 2},
            size=size,
            timed=[row, row],
            runs=runs,
            ceilings=[ceiling, {"status": "killed", "error": "x"}],
            notes=[],
        )

    return report_of


def _printed(result: dict) -> str:
    import io

    from rich.console import Console

    out = io.StringIO()
    report.print_table(result, Console(file=out, width=120))
    return out.getvalue()


def test_ratios_are_of_pairs(build) -> None:
    engine = [_run(1.0), _run(4.0, peak_bytes=3 << 28), _run(1.0)]
    plain = [_run(3.0), _run(8.0), _run(5.0)]
    result = build({"engine": engine, "plain": plain, "stock": [_run(2.0)]})
    assert result["ratios"]["stock"]["tokens_per_second"]["pairs"] == [2.0]
    assert result["ratios"]["plain"]["tokens_per_second"] == {
        "pairs": [3.0, 2.0, 5.0],
        "median": 3.0,
    }
    assert result["ratios"]["plain"]["peak_bytes"] == {"pairs": [1.0, 0.75, 1.0], "median": 1.0}
    assert result["variants"]["plain"]["tokens_per_second"] == 200 / 5.0
    assert result["variants"]["plain"]["trained_tokens_per_second"] == 100 / 5.0
    share = result["workload"]["model_flops"] / 1.0 / 3e9
    assert result["variants"]["engine"]["ceiling_share"] == pytest.approx(share)
    assert report.exit_status(result) == 0
    assert "3.00 (3.00, 2.00, 5.00) x tokens/s" in _printed(result)


@pytest.mark.parametrize("changes", [{"loss": 2.03}, {"loss": math.nan}, {"adapter_parameters": 9}])
def test_no_ratio_where_the_work_differs(build, changes: dict) -> None:
    result = build({"engine": [_run(1.0, **changes)], "plain": [_run(3.0)]})
    assert result["ratios"] is None
    assert report.exit_status(result) == 1
    assert "no ratio" in _printed(result)
