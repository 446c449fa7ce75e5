"""The calculation of docs/scale.md: its arithmetic, and that the page has its tables."""

from __future__ import annotations

from pathlib import Path

import chz
import pytest

from benchmarks.scale_on_paper import (
    MODELS,
    Parts,
    operations_per_token,
    parts_table,
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


def test_the_page_has_what_the_script_prints():
    text = PAGE.read_text(encoding="utf-8")
    assert parts_table(PARTS) in text
    assert tables(PARTS) in text
