"""Norms, gates and rotary embeddings in one pass equal what transformers and autograd compute."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import engine_reference as ref
import pytest
import torch
from torch.nn import functional as F
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama import modeling_llama

from tinker_cookbook.engine.kernels import fusing
from tinker_cookbook.engine.kernels.cpu import elementwise
from tinker_cookbook.engine.kernels.cpu.build import library

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [576, 48, 7]
"""Whole vectors, and rows that end within one."""


def kernels(dtype: torch.dtype) -> fusing.Elementwise:
    functions = elementwise.elementwise(dtype)
    assert functions is not None
    return functions


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (2 * torch.randn(shape)).to(dtype)


def check(
    found: torch.Tensor, leaves: list[torch.Tensor], exact, dtype: torch.dtype, wider: float = 1
) -> None:
    """Compares ``found`` and its gradients with ``exact`` of the leaves in fp64."""
    upstream = draw(*found.shape, dtype=dtype)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = exact(*wide)
    pairs = zip(
        [found, *torch.autograd.grad(found, leaves, upstream)],
        [expected, *torch.autograd.grad(expected, wide, upstream.double())],
        strict=True,
    )
    for got, want in pairs:
        assert got.dtype == dtype
        scale = 3e-7 * wider if dtype == torch.float32 else 1.2e-2
        torch.testing.assert_close(got.double(), want, rtol=scale, atol=scale * 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 60])
def test_norm(rows, width, dtype):
    torch.manual_seed(width)
    x, weight = draw(rows, 3, width, dtype=dtype).requires_grad_(), torch.randn(width)
    norm = elementwise._norm_of(weight, 1e-5, plus_one=False)
    check(norm(x), [x], lambda x: F.rms_norm(x, (width,), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(70, 576), (3, 5, 7), (1, 1)])
@pytest.mark.parametrize("gelu", [False, True])
def test_gate(gelu, shape, dtype):
    torch.manual_seed(shape[0])
    gate, up = (draw(*shape, dtype=dtype).requires_grad_() for _ in range(2))
    gate.data.view(-1)[0] = -120.0  # e^120 has no place in fp32
    activation = partial(F.gelu, approximate="tanh") if gelu else F.silu
    found = elementwise._Gated.apply(gelu, gate, up)
    # An error in the argument of e^x is as large as the argument.
    check(found, [gate, up], lambda g, u: activation(g) * u, dtype, wider=1 + 9 * gelu)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("width", [64, 20])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_rotation(batch, width, side_by_side, dtype):
    torch.manual_seed(width)
    q, k = (draw(batch, 9, heads, width, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    if side_by_side:
        q, k = q.contiguous(), k.contiguous()
    q.requires_grad_()
    k.requires_grad_()
    cos, sin = (draw(batch, 9, width, dtype=dtype) for _ in range(2))
    wide = cos.double(), sin.double()
    for number, leaf in enumerate((q, k)):
        rotated = elementwise._Rotated.apply(q, k, cos, sin)[number]

        def exact(x, number=number):
            pair = (x, k.detach().double()) if number == 0 else (q.detach().double(), x)
            return modeling_llama.apply_rotary_pos_emb(*pair, *wide)[number]

        check(rotated, [leaf], exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariance(dtype):
    x, up, weight = draw(300, 50, dtype=dtype), draw(300, 50, dtype=dtype), torch.randn(50)
    norms = elementwise._Norm.apply(weight, 1e-6, True, x)
    gates = elementwise._Gated.apply(False, x, up)
    for rows in (slice(0, 1), slice(7, 20), slice(299, 300)):
        alone = elementwise._Norm.apply(weight, 1e-6, True, x[rows])
        assert torch.equal(alone, norms[rows])
        assert torch.equal(elementwise._Gated.apply(False, x[rows], up[rows]), gates[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [modeling_llama.LlamaRMSNorm, Gemma3RMSNorm])
def test_norms_of_both_kinds_are_recognised(kind, dtype):
    norm = kind(48, eps=1e-6).to(dtype).requires_grad_(False)
    norm.weight.normal_()
    own = fusing.fused_norm(norm, dtype, kernels(dtype))
    assert own is not None
    x = draw(20, 48, dtype=dtype)
    difference = (own(x).float() - norm(x).float()).abs().max()
    assert difference <= (2e-6 if dtype == torch.float32 else 2**-5)


def test_unknown_modules_are_not_fused():
    class OtherRMSNorm(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * 1.01

    functions = kernels(torch.float32)
    other = OtherRMSNorm(48).requires_grad_(False)
    assert fusing.fused_norm(other, torch.float32, functions) is None

    def interleaved(q, k, cos, sin):
        return modeling_llama.apply_rotary_pos_emb(q.flip(-1), k, cos, sin)

    for function in (interleaved, lambda x, cos, sin: x):
        module = SimpleNamespace(apply_rotary_pos_emb=function)
        assert not fusing.rotates_alike(module, torch.float32, ref.CPU, functions)
    assert fusing.rotates_alike(modeling_llama, torch.float32, ref.CPU, functions)


def test_a_model_is_fused_and_transformers_is_as_before(tmp_path, monkeypatch):
    folder = ref.make_model("llama", tmp_path)
    usual = modeling_llama.apply_rotary_pos_emb
    base = ref.load_base(folder)
    kinds = [type(module).__name__ for module in base._model.modules()]
    assert kinds.count("FusedNorm") == 2 * base.config.num_hidden_layers + 1
    assert "LlamaRMSNorm" not in kinds
    assert modeling_llama.apply_rotary_pos_emb is usual
    seen = []
    record = elementwise.rotate
    monkeypatch.setattr(elementwise, "rotate", lambda *a, **k: seen.append(1) or record(*a, **k))
    with base.adapted({}):
        fast = base.hidden(torch.arange(3, 40)[None])
    assert len(seen) == 2 * base.config.num_hidden_layers
    assert modeling_llama.apply_rotary_pos_emb is usual
    monkeypatch.setattr(elementwise, "library", lambda: None)
    plain = ref.load_base(folder)
    assert not any(type(module).__name__ == "FusedNorm" for module in plain._model.modules())
    expected = plain.hidden(torch.arange(3, 40)[None])
    torch.testing.assert_close(fast, expected, rtol=1e-5, atol=1e-5)
