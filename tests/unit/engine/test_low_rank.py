"""Adapters that share a product on a GPU give each row its own term, and none of the others'."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tinker_cookbook.engine.model.low_rank import LowRank, Part, add_together

IN, OUT, ROWS = 16, 24, 40


def _term(rank: int) -> LowRank:
    return LowRank(torch.randn(rank, IN), torch.randn(OUT, rank))


@pytest.mark.parametrize("ranks", [(4,), (4, 8), (4, 8, 2, 300, 400)])
def test_rows_get_the_lora_of_their_adapter(ranks):
    torch.manual_seed(0)
    terms = [_term(rank) for rank in ranks]
    bounds = [0, 3, 4, 12, 20, 33, ROWS]
    parts = [(terms[i % len(terms)], *pair) for i, pair in enumerate(pairwise(bounds))]
    del parts[3]  # rows without an adapter
    x, out = torch.randn(ROWS, IN), torch.randn(ROWS, OUT)
    expected = out.clone()
    for term, first, end in parts:
        expected[first:end] += x[first:end] @ term.a.t() @ term.b.t()
    for _ in range(2):  # the second time with the stack of the first
        found = out.clone()
        add_together(found, x, parts)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_nan_of_an_adapter_stays_in_its_rows():
    torch.manual_seed(0)
    nan, inf = torch.full((OUT, 4), torch.nan), torch.full((4, IN), torch.inf)
    terms = [_term(4), LowRank(_term(4).a, nan), LowRank(inf, _term(4).b), _term(8)]
    parts: list[Part] = [(term, 10 * i, 10 * i + 10) for i, term in enumerate(terms)]
    found = torch.zeros(ROWS, OUT)
    add_together(found, torch.randn(ROWS, IN), parts)
    finite = found.isfinite()
    assert finite[:10].all()
    assert finite[30:].all()
    assert not finite[10:30].any()
