"""All layouts of a frozen matrix compute what plain products do."""

from __future__ import annotations

import os

import pytest
import torch

from tinker_cookbook.engine.devices import cpu_bfloat16
from tinker_cookbook.engine.kernels.cpu import linear as frozen_module
from tinker_cookbook.engine.kernels.cpu.build import library
from tinker_cookbook.engine.kernels.cpu.linear import (
    FrozenWeight,
    _OneDnn,
    _Panels,
    _Plain,
)
from tinker_cookbook.engine.model.lora import _AdaptedProduct
from tinker_cookbook.engine.model.low_rank import AdapterIndex, LowRank

DTYPES = [torch.float32, torch.bfloat16]


def layouts(weight: torch.Tensor) -> list[FrozenWeight]:
    """Those that this processor can have."""
    out: list[FrozenWeight] = [FrozenWeight(weight, _Plain)]
    if library() is not None:
        out += [FrozenWeight(weight, _Panels), FrozenWeight(weight, without_pairs)]
    half = weight.dtype == torch.bfloat16
    mkldnn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if mkldnn and (not half or torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        out.append(FrozenWeight(weight, _OneDnn))
    return out


def without_pairs(weight: torch.Tensor) -> _Panels:
    """The panels of a processor that cannot multiply pairs of bfloat16 numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frozen_module, "_has_pairs", lambda: False)
        return _Panels(weight)


SHAPES = [(48, 80), (130, 40), (7, 2100), (6, 2100)]
"""[out, in]: whole panels, panels cut short, more inputs than stay in a cache."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 64, 257])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_in_both_directions(shape, rows, dtype):
    torch.manual_seed(rows)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    x, gradient = torch.randn(rows, shape[1]).to(dtype), torch.randn(rows, shape[0]).to(dtype)
    exact = x.double() @ weight.double().t()
    tolerance = (
        {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 8e-3}
    )
    for layout in layouts(weight):
        torch.testing.assert_close(layout.forward.product(x).double(), exact, **tolerance)
        with_bias = exact + bias.double()
        torch.testing.assert_close(layout.forward.product(x, bias).double(), with_bias, **tolerance)
        back = gradient.double() @ weight.double()
        torch.testing.assert_close(layout.backward.product(gradient).double(), back, **tolerance)
        assert torch.equal(layout.forward.dense(), weight)
        assert (layout.shape, layout.dtype) == (shape, dtype)


def test_what_bfloat16_rounds_away_can_be_had():
    torch.manual_seed(0)
    weight, x = torch.randn(48, 80).bfloat16(), torch.randn(7, 80).bfloat16()
    exact = x.double() @ weight.double().t()
    for layout in layouts(weight):
        assert (layout.forward.product(x).double() - exact).abs().max() > 0.02
        assert layout.forward.product_fp32(x).dtype == torch.float32
        assert (layout.forward.product_fp32(x).double() - exact).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariance(dtype):
    """What makes a sample the same whatever else is in the batch."""
    # oneDNN chooses among its AMX kernels for bfloat16 by the number of rows.
    without_amx = os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX512_CORE_BF16"
    if dtype == torch.bfloat16 and cpu_bfloat16() == "amx_bf16" and not without_amx:
        pytest.skip("on CPUs with AMX this holds with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 alone")
    x = torch.randn(300, 1536).to(dtype)
    for layout in layouts(torch.randn(576, 1536).to(dtype))[1:]:
        few = (2, 8, 32, 170)
        if isinstance(layout.forward, _Panels):
            few = (1, 2, 3, 7, 8, 9, 31, 170)
        elif "AVX512" not in torch.backends.cpu.get_cpu_capability():
            continue  # shown for oneDNN on AVX-512 alone
        together = layout.forward.product(x)
        for rows in few:
            assert torch.equal(layout.forward.product(x[-rows:].contiguous()), together[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_next_to_each_other(dtype):
    x = torch.randn(80, 9).to(dtype).t()
    wide = torch.randn(9, 200).to(dtype)[:, 20:100]
    for layout in layouts(torch.randn(48, 80).to(dtype)):
        for rows in (x, wide):
            found, expected = (
                layout.forward.product(rows),
                layout.forward.product(rows.contiguous()),
            )
            if isinstance(
                layout.forward, _Plain
            ):  # torch may sum a row that is not in order otherwise
                torch.testing.assert_close(found, expected)
            else:
                assert torch.equal(found, expected)


def low_rank(rank: int, dtype: torch.dtype) -> LowRank:
    return LowRank(torch.randn(rank, 80).to(dtype), torch.randn(130, rank).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 32, 100])
def test_low_rank_terms_are_added(rank, dtype):
    torch.manual_seed(rank)
    weight, bias, x = torch.randn(130, 80), torch.randn(130), torch.randn(70, 80)
    weight, bias, x = weight.to(dtype), bias.to(dtype), x.to(dtype)
    one, other = low_rank(rank, dtype), low_rank(rank, dtype)
    plain = x.double() @ weight.double().t() + bias.double()
    terms = [(x.double() @ t.a.double().t()) @ t.b.double().t() for t in (one, other)]
    mixed = plain.clone()
    mixed[3:5] += terms[0][3:5]
    mixed[5:50] += terms[1][5:50]
    for layout in layouts(weight):
        cases = [
            ([], plain),
            ([(one, 0, 70)], plain + terms[0]),
            ([(one, 3, 5), (other, 5, 50)], mixed),
        ]
        for parts, expected in cases:
            found = layout.forward.adapted(x, bias, parts).double()
            off = (found - expected).abs() / (expected.abs() + rank**0.5 * 9)
            assert off.max() < (2e-6 if dtype == torch.float32 else 1.2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 70, 1500])
@pytest.mark.parametrize("rank", [1, 32, 100])
def test_gradients_equal_autograd(rank, tokens, dtype):
    """Of a layer with an adapter, in every layout; rows that do not lie side by side as well."""
    torch.manual_seed(rank)
    weight, bias = torch.randn(130, 80).to(dtype), torch.randn(130).to(dtype)
    a, b = low_rank(rank, dtype).a, low_rank(rank, dtype).b
    x, upstream = torch.randn(tokens, 90).to(dtype)[:, 4:84], torch.randn(tokens, 130).to(dtype)
    exact = [t.double().requires_grad_() for t in (x, a, b)]
    out = exact[0] @ weight.double().t() + bias.double() + exact[0] @ exact[1].t() @ exact[2].t()
    expected = [out, *torch.autograd.grad(out, exact, upstream.double())]
    for layout in layouts(weight):
        leaves = [t.detach().requires_grad_() for t in (x, a, b)]
        term = LowRank(*leaves[1:])
        found = _AdaptedProduct.apply(leaves[0], layout, bias, term, *leaves[1:])
        gradients = torch.autograd.grad(found, leaves, upstream)
        for got, want in zip([found, *gradients], expected, strict=True):
            off = (got.double() - want).norm() / want.norm()
            assert off < (1e-6 if dtype == torch.float32 else 1e-2)
        first = _AdaptedProduct.apply(x, layout, bias, term, *leaves[1:])  # as in the first layer
        for got, want in zip(
            torch.autograd.grad(first, leaves[1:], upstream), gradients[1:], strict=True
        ):
            off = (got.double() - want.double()).norm() / want.double().norm()
            assert off < (1e-6 if dtype == torch.float32 else 1e-2)


def test_a_term_below_the_last_bit_of_bfloat16_is_kept():
    """It is added before the only rounding, in sampling and in training of one or several runs."""
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(shape).bfloat16() for shape in ((130, 80), (130,), (200, 80)))
    terms = [low_rank(rank, x.dtype) for rank in (32, 5)]
    for term in terms:
        term.b *= 1e-4  # the last bit of a typical output is 6e-2
    parts = [(terms[0], 0, 90), (terms[1], 90, 200)]
    owners = AdapterIndex((torch.arange(200) >= 90).long(), ((0, 32), (1, 5)))
    a, b = torch.cat([term.a for term in terms]), torch.cat([term.b for term in terms], 1)
    wide = [(x[i:j].double() @ t.a.double().t()) @ t.b.double().t() for t, i, j in parts]
    effect = torch.cat(wide)
    exact = x.double() @ weight.double().t() + bias.double() + effect
    for layout in (one.forward for one in layouts(weight)[1:]):
        alone = [layout.trained(x[i:j], bias, term) for term, i, j in parts]
        together, lows = layout.trained(x, bias, LowRank(a, b, owners))
        for found in (
            layout.adapted(x, bias, parts),
            torch.cat([out for out, _ in alone]),
            together,
        ):
            assert ((found - exact).abs() <= (exact.bfloat16() - exact).abs() + 1e-4).all()
            change = (found - layout.product(x, bias)).double()
            assert 0.9 < (change * effect).sum() / effect.square().sum() < 1.1
            if isinstance(layout, _Panels):
                assert torch.equal(found, together)
        assert torch.equal(lows, torch.block_diag(*(low for _, low in alone)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_memory_to_spare_no_second_copy_is_kept(dtype, monkeypatch):
    weight, gradient = torch.randn(48, 80).to(dtype), torch.randn(9, 48).to(dtype)
    for roomy, tight in zip(layouts(weight)[1:], layouts(weight)[1:], strict=True):
        monkeypatch.undo()
        expected = roomy.backward.product(gradient)
        monkeypatch.setattr(frozen_module, "free_memory_bytes", lambda _: 1 << 20)
        assert torch.equal(tight.backward.product(gradient), expected)
        assert tight._backward is None


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(threads):
    if library() is None:
        pytest.skip("needs a C compiler")
    layout, x = _Panels(torch.randn(130, 2100)), torch.randn(300, 2100)
    expected, before = layout.product(x), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(layout.product(x), expected)
    finally:
        torch.set_num_threads(before)
