"""The calculation of docs/scale.md: its arithmetic, and that the page has its tables."""

from __future__ import annotations

import itertools
from pathlib import Path

import chz
import pytest

from benchmarks.scale_on_paper import (
    COUNTS,
    MODELS,
    Parts,
    operations_per_token,
    parts_table,
    replica_of,
    row_of,
    tables,
)
from tinker_cookbook.doctor.fits import SHAPES

PARTS = Parts()
PAGE = Path(__file__).resolve().parents[3] / "docs" / "scale.md"
SMALL, LARGE = (SHAPES[MODELS[size]] for size in ("8B", "70B"))


def test_one_gpu_trains_at_its_share_of_the_peak():
    row = row_of(SMALL, 1, chz.replace(PARTS, call=0.0))
    expected = PARTS.peak * PARTS.mfu / operations_per_token(SMALL, PARTS.tokens)
    assert row.sft_rate == pytest.approx(expected)
    # 4 operations for each of 7.5 billion weights, and a few percent for adapter and attention.
    assert 1 < operations_per_token(SMALL, PARTS.tokens) / (4 * 7.5e9) < 1.2
    assert row.sft_dollars == pytest.approx(PARTS.price / 3600 / row.sft_rate * 1e6)


def test_a_model_that_is_larger_than_a_card_needs_several():
    assert replica_of(SMALL, PARTS) == 1
    assert replica_of(LARGE, PARTS) == 4  # 141 GB, and 72 GB of a card can be filled
    assert row_of(LARGE, 1, PARTS) is None
    assert replica_of(LARGE, chz.replace(PARTS, memory=400e9)) == 1


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["8B", "70B"])
def test_more_gpus_are_faster_and_cost_no_less(shape):
    rows = [row for count in COUNTS if (row := row_of(shape, count, PARTS))]
    for fewer, more in itertools.pairwise(rows):
        assert more.sft_rate > fewer.sft_rate
        assert more.sample_seconds <= fewer.sample_seconds
        assert more.rl_dollars >= 0.99 * fewer.rl_dollars
    # Every answer takes its tokens times the shortest decode step, on however many GPUs.
    assert rows[-1].sample_seconds >= PARTS.tokens * PARTS.launch


def test_the_page_has_what_the_script_prints():
    text = PAGE.read_text(encoding="utf-8")
    assert parts_table(PARTS) in text
    assert tables(PARTS) in text
