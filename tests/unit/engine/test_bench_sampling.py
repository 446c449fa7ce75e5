"""The sampling benchmark: a real run of tiny size, both samplers, and the report's arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench_runs import IN_PROCESS

from benchmarks.engine.config import SamplingConfig, check_sampling_config
from benchmarks.engine.sampling import products, report, runner, sides
from benchmarks.engine.sampling.adapter import write_adapter
from benchmarks.engine.sampling.requests import (
    Request,
    check_context,
    draw_cases,
    draw_probes,
    from_json,
    to_json,
    warm_up,
)
from benchmarks.engine.sampling.runner import static_batches
from tinker_cookbook.engine.devices import peak_memory_bytes
from tinker_cookbook.exceptions import ConfigurationError, TrainingError

pytest_plugins = ("bench_runs",)

MIXED = [
    Request([1, 5, 9], 1, 6),
    Request(list(range(3, 40)), 1, 2),
    Request([7], 3, 4),
    Request([2] * 12, 1, 9),
]


# --- the whole of it -------------------------------------------------------------------------


def test_tiny_run(in_process_bench, monkeypatch) -> None:
    monkeypatch.setattr(products, "_SECONDS", 0.0)
    small = {
        "mixed_requests": 6,
        "mixed_shortest": 2,
        "mixed_longest": 12,
        "single_prompt_tokens": 4,
        "single_answer_tokens": 5,
    }
    config = SamplingConfig(
        **IN_PROCESS,
        **small,
        cases=("mixed", "single"),
        batch_sizes=(3, 6),
        greedy_prompts=2,
        greedy_tokens=6,
    )
    result, printed = in_process_bench(runner, config)

    assert result["agreement"]["same_prompts"] == result["agreement"]["prompts"] == 2
    assert result["agreement"]["tokens"] == 12
    assert [p["rows"] for p in result["products"]] == list(products.ROWS)
    mixed = result["cases"]["mixed"]
    assert set(result["cases"]) == {"mixed", "single"}
    assert result["cases"]["single"]["workload"]["useful_tokens"] == 5
    requests = draw_cases(config, 1024)["mixed"]
    assert mixed["workload"]["useful_tokens"] == sum(r.tokens for r in requests)
    # Batches of three in both orders; of all six there is one.
    trials = mixed["variants"]["generate"]["trials"]
    assert len(trials) == 3
    best = min(trials, key=lambda trial: trial["seconds"])
    assert mixed["variants"]["generate"]["batches"] == best["batches"]
    assert mixed["variants"]["engine"]["trials"] == []
    for variant in mixed["variants"].values():
        (run,) = variant["runs"]
        speed = mixed["workload"]["useful_tokens"] / run["seconds"]
        assert variant["tokens_per_second"] == pytest.approx(speed)
        assert 0 < run["first_step_seconds"] < run["first_token_seconds"] < 5
        assert (
            50 << 20
            < run["loaded_bytes"]
            <= run["peak_bytes"]
            <= peak_memory_bytes(torch.device("cpu"))
        )
        assert variant["ceiling_share"] > 0
    for word in ("mixed", "generate", "ceiling", "engine / generate", "2 of 2 prompts"):
        assert word in printed


# --- both sides do what was asked ------------------------------------------------------------


@pytest.fixture(scope="module")
def setup(stories_model: str, tmp_path_factory: pytest.TempPathFactory) -> sides.Setup:
    adapter = tmp_path_factory.mktemp("bench") / "adapter"
    write_adapter(Path(stories_model), adapter, rank=4, seed=0)
    return sides.Setup(Path(stories_model), adapter, "cpu", "float32", rank=4)


BATCHES = [None, sides.StaticBatches(4, by_length=True), sides.StaticBatches(6, by_length=False)]


def _greedy(setup: sides.Setup, batches: sides.StaticBatches | None) -> sides.Answers:
    with sides.open_side(setup, batches) as side:
        return side.sample(MIXED, temperature=0.0)


def test_sides_agree_in_any_batches(setup: sides.Setup) -> None:
    """Left padding, sorting and cutting change nothing, and both apply the same adapter."""
    alone = _greedy(setup, sides.StaticBatches(1, by_length=False))
    assert [len(answer) for answer in alone] == [6, 2, 4, 4, 4, 9]
    for batches in BATCHES:
        assert _greedy(setup, batches) == alone, batches


@pytest.mark.parametrize("batches", BATCHES[:2])
def test_the_adapter_is_applied(
    setup: sides.Setup, batches: sides.StaticBatches | None, tmp_path: Path
) -> None:
    other = tmp_path / "adapter"
    write_adapter(setup.folder, other, rank=4, seed=1)
    changed = sides.Setup(setup.folder, other, "cpu", "float32", rank=4)
    assert _greedy(changed, batches) != _greedy(setup, batches)


@pytest.mark.parametrize("batches", BATCHES[:2])
def test_samples_are_drawn_with_their_lengths(
    setup: sides.Setup, batches: sides.StaticBatches | None
) -> None:
    requests = [Request([1], 16, 3), Request([4, 5], 1, 9)]
    torch.manual_seed(0)
    with sides.open_side(setup, batches) as side:
        answers = side.sample(requests)
    sides.check_lengths(requests, answers)
    assert len({tuple(answer) for answer in answers[:16]}) > 8  # at temperature 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generate_computes_in_the_asked_type(setup: sides.Setup, dtype: torch.dtype) -> None:
    """peft would otherwise keep the adapter in fp32 and convert back and forth."""
    asked = sides.Setup(setup.folder, setup.adapter, "cpu", str(dtype)[6:], rank=4)
    side = sides.GenerateSide(asked, sides.StaticBatches(1, by_length=False))
    assert {weight.dtype for weight in side._model.parameters()} == {dtype}


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(TrainingError, match="sample 1 has 2 tokens, expected 3"):
        sides.check_lengths([Request([1], 2, 3)], [[1, 2, 3], [1, 2]])
    with pytest.raises(TrainingError, match="gave 1 answers for 2"):
        sides.check_lengths([Request([1], 2, 3)], [[1, 2, 3]])


# --- what is asked for -----------------------------------------------------------------------


def test_cases_have_the_published_sizes() -> None:
    cases = draw_cases(SamplingConfig(), 1000)
    mixed, group, (single,) = cases["mixed"], cases["group"], cases["single"]
    assert len(mixed) == 64
    lengths = [n for request in mixed for n in (len(request.prompt), request.tokens)]
    assert 16 <= min(lengths) < 32
    assert 240 < max(lengths) <= 256
    assert {(len(r.prompt), r.samples, r.tokens) for r in group} == {(200, 16, 64)}
    assert len({tuple(request.prompt) for request in group}) == 8
    assert (len(single.prompt), single.samples, single.tokens) == (64, 1, 128)
    again = draw_cases(SamplingConfig(cases=("single", "mixed")), 1000)
    assert again == {"single": [single], "mixed": mixed}
    assert draw_cases(SamplingConfig(seed=1), 1000)["mixed"] != mixed
    assert from_json(json.loads(json.dumps(to_json(mixed)))) == mixed


def test_warming_up_leaves_no_prefix_of_the_timed_prompts() -> None:
    requests = draw_cases(SamplingConfig(), 1000)["group"]
    warm = warm_up(requests, 1000)
    probes = draw_probes(requests, 1000, 5)
    assert sum(request.samples for request in warm) == 128
    assert {len(probe) for probe in probes} == {200}
    starts = {tuple(request.prompt[:4]) for request in requests}
    assert not starts & {tuple(request.prompt[:4]) for request in warm}
    assert not starts & {tuple(probe[:4]) for probe in probes}


def test_ways_to_batch() -> None:
    cases = draw_cases(SamplingConfig(), 1000)
    config = SamplingConfig(batch_sizes=(64, 8, 128))
    ways = {case: static_batches(config, requests) for case, requests in cases.items()}
    names = {case: [report.batches_text(way) for way in of] for case, of in ways.items()}
    assert names == {"mixed": ["8", "8 sorted", "64"], "group": ["8", "64", "128"], "single": ["1"]}


def test_a_context_too_short_is_said_first() -> None:
    check_context([Request([1] * 8, 1, 8)], 16)
    check_context([], 16)  # greedy_prompts=0
    with pytest.raises(ConfigurationError, match=r"context is 15 tokens, but .* 16"):
        check_context([Request([1] * 8, 1, 8)], 15)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mixed_requests": 0}, "mixed_requests: got 0"),
        ({"group_samples": 0}, "group_samples: got 0"),
        ({"greedy_prompts": -1}, "greedy_prompts: got -1"),
        ({"mixed_shortest": 300}, "mixed_longest: got 256"),
        ({"batch_sizes": (8, 0)}, "batch_sizes: got (8, 0)"),
        ({"variants": ("generat",)}, "did you mean 'generate'?"),
        ({"cases": ("mixed", "mixed")}, "each at most once"),
        ({"output": "/no/such/folder/x.json"}, "output: the folder of"),
    ],
)
def test_settings_are_checked_first(settings: dict, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_sampling_config(SamplingConfig(**settings))
    assert words in str(caught.value)


def test_products_are_those_of_the_model(
    stories_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_SECONDS", 0.0)
    body, head = products._draw(Path(stories_model), torch.device("cpu"), torch.float32)
    assert len(body) == 5 * 7  # layers of Llama's seven matrices
    assert head.shape == (512, 64)
    found = products.measure_products(Path(stories_model), torch.device("cpu"), torch.float32)
    assert [p.rows for p in found] == list(products.ROWS)
    assert all(p.body_seconds > p.head_seconds > 0 for p in found)


# --- the report ------------------------------------------------------------------------------


def _run(seconds: float, **changes: object) -> dict:
    run = {
        "status": "ok",
        "seconds": seconds,
        "first_token_seconds": 0.5,
        "first_step_seconds": 0.001,
        "loaded_bytes": 1 << 29,
        "peak_bytes": 1 << 30,
        "threads": 2,
        "notes": [],
        "products": None,
    }
    return run | changes


def _products(seconds: float) -> list[dict]:
    return [
        {"rows": 1, "body_seconds": seconds, "head_seconds": seconds},
        {"rows": 8, "body_seconds": 2 * seconds, "head_seconds": 2 * seconds},
    ]


def _build(engine: list[dict], generate: list[dict], greedy: dict | None = None) -> dict:
    tokens = {"status": "ok", "tokens": [[1, 2, 3], [4, 5, 6]]}
    measured = {
        "engine": report.Measured(engine),
        "generate": report.Measured(generate, {"batch_size": 8, "by_length": True}),
    }
    return report.build(
        settings={"model": "m", "dtype": "float32", "rank": 4},
        machine={"device": "cpu", "threads": 2},
        model_parameters=10,
        cases={"mixed": MIXED},
        measured={"mixed": measured},
        greedy={"engine": tokens, "generate": tokens} if greedy is None else greedy,
    )


def _printed(result: dict) -> str:
    import io

    from rich.console import Console

    out = io.StringIO()
    report.print_table(result, Console(file=out, width=120))
    return out.getvalue()


def test_ratios_and_shares() -> None:
    """29 tokens of 53 prompt tokens: the prompts cost 53 rows of 0.25 s each at the best rate, the
    answers 29 rows of 0.5 s at one row, of which six samples have no more measured."""
    engine = [_run(4.0, products=_products(2.0)), _run(2.0, products=_products(1.0))]
    generate = [_run(8.0), _run(6.0, peak_bytes=1 << 29)]
    result = _build(engine, generate)
    case = result["cases"]["mixed"]
    assert case["workload"]["useful_tokens"] == 6 + 2 + 12 + 9
    assert case["workload"]["prompt_tokens"] == 3 + 37 + 1 + 12
    assert case["ratio"]["tokens_per_second"] == {"pairs": [2.0, 3.0], "median": 2.5}
    assert case["ratio"]["peak_bytes"]["pairs"] == [1.0, 2.0]
    assert [p["rows_per_second"] for p in result["products"]] == [0.5, 2.0]
    assert case["ceiling"]["rows"] == 1
    assert case["ceiling"]["tokens_per_second"] == pytest.approx(29 / (53 * 0.25 + 29 * 2.0))
    assert case["variants"]["engine"]["tokens_per_second"] == 29 / 3.0
    share = case["variants"]["engine"]["ceiling_share"]
    assert share == pytest.approx(29 / 3.0 / case["ceiling"]["tokens_per_second"])
    assert report.exit_status(result) == 0
    text = _printed(result)
    assert "2.50 (2.00, 3.00) x tokens/s" in text
    assert "8 sorted" in text


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"status": "ok", "tokens": [[1, 2, 3], [4, 5, 7]]}, "1 of 2 prompts only"),
        ({"status": "killed", "error": "out of memory"}, "did not come to an end"),
    ],
)
def test_no_ratio_where_greedy_tokens_differ(other: dict, words: str) -> None:
    engine = {"status": "ok", "tokens": [[1, 2, 3], [4, 5, 6]]}
    result = _build([_run(1.0)], [_run(2.0)], {"engine": engine, "generate": other})
    assert result["cases"]["mixed"]["ratio"] is None
    assert report.exit_status(result) == 1
    assert words in _printed(result)


def test_one_variant_lost_for_memory() -> None:
    killed = {"status": "killed", "error": "most likely out of memory"}
    result = _build([_run(1.0, products=_products(1.0))], [killed])
    assert result["cases"]["mixed"]["ratio"] is None
    assert report.exit_status(result) == 0
    assert "most likely out of memory" in _printed(result)
    broken = {"status": "failed", "error": "KeyError: 'x'"}
    assert report.exit_status(_build([_run(1.0)], [broken])) == 1
    assert report.exit_status(_build([killed], [killed])) == 1
