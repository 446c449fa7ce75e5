"""bf16 attention for CPU training against a float64 reference and torch's own kernel."""

from __future__ import annotations

import engine_reference as ref
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tinker_cookbook.engine.kernels.cpu import training_attention as cpu_attention


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_output_and_gradients(masked, kv_heads):
    torch.manual_seed(0)
    batch, heads, length, width = 2, 6, 70, 16
    shapes = [(batch, n, length, width) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s).bfloat16().requires_grad_() for s in shapes)
    mask = None
    visible = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, 1, -1, -1)
    if masked:
        visible = visible.clone()
        visible[1, :, 40:, 10:40] = False
        mask = visible
    upstream = torch.randn(batch, heads, length, width)

    def reference(dtype):
        out = F.scaled_dot_product_attention(
            *(t.to(dtype) for t in (q, k, v)), attn_mask=visible, enable_gqa=True, scale=0.2
        )
        return out, torch.autograd.grad(out, (q, k, v), upstream.to(dtype))

    exact, exact_grads = reference(torch.float64)
    fused, fused_grads = reference(torch.bfloat16)
    out, _ = cpu_attention.attention_forward(torch.nn.Module(), q, k, v, mask, scaling=0.2)
    grads = torch.autograd.grad(out, (q, k, v), upstream.transpose(1, 2).bfloat16())

    def error(found, expected):
        return float((found.double() - expected.double()).norm() / expected.double().norm())

    assert error(out.transpose(1, 2), exact) <= max(1.3 * error(fused, exact), 4e-3)
    for found, expected, other in zip(grads, exact_grads, fused_grads, strict=True):
        assert error(found, expected) <= max(1.3 * error(other, expected), 6e-3)


def test_a_bf16_model_uses_it_and_agrees_with_fp32(tiny_base, monkeypatch):
    """Gradients of a bf16 model point where those of its fp32 copy point."""
    calls = []
    original = cpu_attention._Attention.apply

    def counting(*args):
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(cpu_attention._Attention, "apply", counting)
    directions = []
    rng = np.random.default_rng(0)
    exact = tiny_base("llama")
    data = ref.supervised(rng, exact, (40, 30))
    for base in (exact, tiny_base("llama", torch.bfloat16)):
        run = ref.make_run(base, spec=None)
        run.forward_backward(data, "cross_entropy")
        assert len(calls) == (3 if base is not exact else 0)
        directions.append(torch.cat([g.flatten() for g in run._gradients.values()]))
    assert torch.cosine_similarity(*directions, dim=0) > 0.995
