"""The benchmark of shared prefixes: a real run of tiny size, and what it compares."""

from __future__ import annotations

import numpy as np
import pytest
from bench_runs import IN_PROCESS

from benchmarks.engine.config import SharedPrefixConfig
from benchmarks.engine.shared_prefix import measure, runner

pytest_plugins = ("bench_runs",)

JOB = {
    "seed": 0,
    "groups": 3,
    "group_size": 4,
    "distinct": 5,
    "prompt_tokens": 90,
    "answer_tokens": 12,
}


def test_tiny_run(in_process_bench) -> None:
    sizes = {name: value for name, value in JOB.items() if name != "seed"}
    config = SharedPrefixConfig(**IN_PROCESS, **sizes, steps=2)
    result, printed = in_process_bench(runner, config)

    shared, distinct = result["cases"]["shared"], result["cases"]["distinct"]
    assert shared["tokens"] == 3 * 4 * 101
    assert distinct["tokens"] == 5 * 101
    for case in (shared, distinct):
        agreement = case["agreement"]
        assert agreement["agree"]
        assert max(agreement["logprobs"], agreement["grad_norms"]) < 1e-5
        for variant in case["variants"].values():
            (run,) = variant["runs"]
            assert len(run["seconds"]) == len(run["losses"]) == 2
            assert variant["tokens_per_second"] == pytest.approx(
                case["tokens"] / np.median(run["seconds"])
            )
    # Three prompts and twelve answers, each less its last token; rows may be padded to 8.
    computed = {name: of["computed_tokens"] for name, of in shared["variants"].items()}
    assert 3 * (90 + 4 * 11) <= computed["shared"] <= 3 * 136
    assert 12 * 101 <= computed["unshared"] <= 12 * 104
    computed = {name: of["computed_tokens"] for name, of in distinct["variants"].items()}
    assert computed["shared"] == computed["unshared"]
    for word in ("shared / unshared", "differences of log-probabilities", "tok/s"):
        assert word in printed


def test_sequences_of_a_group_share_their_prompt_and_nothing_else() -> None:
    shared = measure.sample_tokens({**JOB, "case": "shared"}, 1000)
    assert [len(row) for row in shared] == [102] * 12
    assert len({row[:90].tobytes() for row in shared}) == 3
    assert len({row[90:].tobytes() for row in shared}) == 12
    distinct = measure.sample_tokens({**JOB, "case": "distinct"}, 1000)
    assert len({row[:2].tobytes() for row in distinct}) == len(distinct) == 5
