"""Both layouts of a frozen matrix compute what plain products do."""

from __future__ import annotations

import engine_reference as ref
import numpy as np
import pytest
import torch

from tinker_cookbook.engine import frozen as frozen_module
from tinker_cookbook.engine.frozen import DenseWeight, PackedWeight, frozen

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def pack_small_ones(monkeypatch):
    monkeypatch.setattr(frozen_module, "SMALLEST", 0)


def layouts(weight: torch.Tensor) -> list[DenseWeight | PackedWeight]:
    packed = frozen(weight)
    return [DenseWeight(weight), *([packed] if isinstance(packed, PackedWeight) else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 64, 257])
def test_products_in_both_directions(rows, dtype):
    torch.manual_seed(rows)
    weight, bias = torch.randn(48, 80).to(dtype), torch.randn(48).to(dtype)
    x, gradient = torch.randn(rows, 80).to(dtype), torch.randn(rows, 48).to(dtype)
    exact = x.double() @ weight.double().t()
    tolerance = (
        {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 8e-3}
    )
    for layout in layouts(weight):
        torch.testing.assert_close(layout.product(x).double(), exact, **tolerance)
        with_bias = exact + bias.double()
        torch.testing.assert_close(layout.product(x, bias).double(), with_bias, **tolerance)
        back = gradient.double() @ weight.double()
        torch.testing.assert_close(layout.back(gradient).double(), back, **tolerance)
        assert torch.equal(layout.dense(), weight)
        assert (layout.shape, layout.dtype) == ((48, 80), dtype)


def test_what_bfloat16_rounds_away_can_be_had():
    torch.manual_seed(0)
    weight, x = torch.randn(48, 80).bfloat16(), torch.randn(7, 80).bfloat16()
    exact = x.double() @ weight.double().t()
    for layout in layouts(weight):
        rounded = layout.product(x)
        lost = layout.rounding_error(x, rounded)
        assert (rounded.double() - exact).abs().max() > 0.02
        assert (rounded.double() + lost.double() - exact).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype):
    """What makes a sample the same whatever else is in the batch."""
    packed = frozen(torch.randn(576, 1536).to(dtype))
    if (
        not isinstance(packed, PackedWeight)
        or "AVX512" not in torch.backends.cpu.get_cpu_capability()
    ):
        pytest.skip("shown for oneDNN on AVX-512 alone")
    x = torch.randn(300, 1536).to(dtype)
    together = packed.product(x)
    for rows in (2, 8, 32, 170):
        assert torch.equal(packed.product(x[:rows].contiguous()), together[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_memory_to_spare_no_second_copy_is_kept(dtype, monkeypatch):
    weight, gradient = torch.randn(48, 80).to(dtype), torch.randn(9, 48).to(dtype)
    roomy, tight = frozen(weight), frozen(weight)
    if not (isinstance(roomy, PackedWeight) and isinstance(tight, PackedWeight)):
        pytest.skip("no packed layout on this processor")
    expected = roomy.back(gradient)
    monkeypatch.setattr(frozen_module, "free_memory_bytes", lambda _: 1 << 20)
    assert torch.equal(tight.back(gradient), expected)
    assert tight._backward is None
    assert roomy._backward is not None


def test_other_dtypes_and_small_matrices_stay_as_they_are(monkeypatch):
    assert isinstance(frozen(torch.randn(4, 4).half()), DenseWeight)
    monkeypatch.undo()
    assert isinstance(frozen(torch.randn(64, 172)), DenseWeight)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2_bias", "gemma3"])
def test_a_packed_model_equals_peft(kind, tmp_path, record_property):
    base = ref.load_base(ref.make_model(kind, tmp_path / "model"))
    data = ref.supervised(np.random.default_rng(0), base, (40, 23, 57, 8))
    run = ref.make_run(base)
    output = run.forward_backward(data, "cross_entropy")
    loss_of = ref.weighted(data)
    ref.errors_of(run, base, tmp_path / "peft", data, loss_of, output, record_property).check()
