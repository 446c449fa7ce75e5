"""The chunked head against full logits and autograd."""

from __future__ import annotations

import pytest
import torch

from tinker_cookbook.engine.kernels import compiled_softmax
from tinker_cookbook.engine.kernels.cpu.linear import FrozenWeight, _Plain
from tinker_cookbook.engine.model import head as head_module
from tinker_cookbook.engine.model.head import Head, SavedSoftmax
from tinker_cookbook.engine.model.low_rank import LowRank

T, H, V, R = 37, 12, 50, 3


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(head_module, "_CHUNK_BYTES_CPU", 4 * V * 10)  # ten rows a chunk


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", ["plain", "bias", "scale", "softcap", "all"])
@pytest.mark.parametrize("layout", [None, _Plain])
def test_forward_and_backward_equal_autograd(layout, lora, wide, kind):
    check_against_autograd(layout, lora, wide, kind)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["plain", "scale"])
def test_the_compiled_softmax_equals_autograd(lora, kind, monkeypatch):
    functions = (compiled_softmax.gradient, compiled_softmax.target_logprobs)
    monkeypatch.setattr(Head, "_compiled", lambda self, targets: functions)
    check_against_autograd(None, lora, False, kind)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", ["plain", "scale", "softcap"])
def test_on_a_gpu(wide, kind, monkeypatch):
    assert compiled_softmax.compiled() is not None
    monkeypatch.setattr(head_module, "_CHUNK_BYTES_GPU", 4 * V * 10)
    with torch.device("cuda"):
        check_against_autograd(None, True, wide, kind)


def check_against_autograd(layout, lora, wide, kind) -> None:
    torch.manual_seed(0)
    bias = torch.randn(V) if kind in ("bias", "all") else None
    scale = 0.3 if kind in ("scale", "all") else 1.0
    cap = 2.0 if kind in ("softcap", "all") else None
    weight = torch.randn(V, H)
    head = Head(FrozenWeight(weight, layout), bias, scale, cap)
    hidden = torch.randn(T, H, requires_grad=True)
    a, b = (torch.randn(R, H, requires_grad=True), torch.randn(V, R, requires_grad=True))
    pair = (a, b) if lora else None
    targets = torch.randint(0, V, (T, 4) if wide else (T,))
    if wide:
        targets[:, 1] = targets[:, 0]
    upstream = torch.randn(targets.shape)
    upstream[torch.randperm(T)[: T // 2]] = 0

    z = hidden @ weight.t() + (0 if bias is None else bias)
    z = (z + hidden @ a.t() @ b.t() if lora else z) * scale
    z = cap * torch.tanh(z / cap) if cap else z
    logprobs = z.log_softmax(-1).gather(1, targets if wide else targets[:, None])
    logprobs = logprobs if wide else logprobs[:, 0]
    leaves = [hidden, a, b] if lora else [hidden]
    expected = torch.autograd.grad(logprobs, leaves, upstream)

    plain = None if pair is None else LowRank(a.detach(), b.detach())
    filled = torch.full(targets.shape, torch.nan)
    found = head.backward(hidden.detach(), targets, upstream, plain, filled)
    assert head.chunk_rows == 10
    torch.testing.assert_close(head.logprobs(hidden.detach(), targets, plain), logprobs.detach())
    torch.testing.assert_close(filled, logprobs.detach())
    torch.testing.assert_close(found.hidden, expected[0], atol=1e-5, rtol=1e-5)
    if lora:
        torch.testing.assert_close(found.a, expected[1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.b, expected[2], atol=1e-5, rtol=1e-5)
    else:
        assert found.a is None


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("chunks", [0, 2, 99])
def test_what_a_forward_pass_kept_changes_nothing(monkeypatch, chunks, wide):
    torch.manual_seed(4)
    head, hidden = Head(FrozenWeight(torch.randn(V, H)), scale=0.3), torch.randn(T, H)
    pair = LowRank(torch.randn(R, H), torch.randn(V, R))
    targets = torch.randint(0, V, (T, 4) if wide else (T,))
    upstream = torch.randn(targets.shape)
    upstream[::3] = 0
    expected = head.backward(hidden, targets, upstream, pair)
    kept = SavedSoftmax(torch.randperm(T)[:31], _left=chunks * 4 * V * 10)
    at = kept.positions
    logprobs = head.logprobs(hidden[at], targets[at], pair, kept)
    torch.testing.assert_close(logprobs, head.logprobs(hidden, targets, pair)[at])
    rows = []
    original = Head.logits

    def counting(self, hidden, lora):
        rows.append(len(hidden))
        return original(self, hidden, lora)

    monkeypatch.setattr(Head, "logits", counting)
    found = head.backward(hidden, targets, upstream, pair, kept=kept)
    spared = at[: chunks * 10] % 3 != 0
    assert sum(rows) == T - len(range(0, T, 3)) - int(spared.sum())
    for one, other in zip(vars(found).values(), vars(expected).values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert not list(kept.take())


def test_topk_equals_a_full_sort():
    torch.manual_seed(1)
    weight, hidden = torch.randn(V, H), torch.randn(T, H)
    head = Head(FrozenWeight(weight))
    values, ids = head.topk(hidden, 5, None)
    full = (hidden @ weight.t()).log_softmax(-1)
    expected, order = full.sort(-1, descending=True)
    torch.testing.assert_close(values, expected[:, :5])
    assert torch.equal(ids, order[:, :5])


def test_positions_without_gradient_cost_no_backward(monkeypatch):
    torch.manual_seed(2)
    head, rows = Head(FrozenWeight(torch.randn(V, H))), []
    original = Head._through_layer

    def counting(self, dz, *args):
        rows.append(len(dz))
        return original(self, dz, *args)

    monkeypatch.setattr(Head, "_through_layer", counting)
    upstream = torch.zeros(T)
    upstream[[3, 30]] = 1
    head.backward(torch.randn(T, H), torch.zeros(T, dtype=torch.long), upstream, None)
    assert sum(rows) == 2


def test_bf16_logits_are_not_rounded_to_bf16():
    """Every value of the product fits fp32; plain bf16 output would be off by up to 0.06."""
    torch.manual_seed(3)
    weight, hidden = torch.randn(V, 64).bfloat16(), torch.randn(T, 64).bfloat16()
    pair = LowRank(torch.randn(R, 64).bfloat16(), torch.randn(V, R).bfloat16())
    exact = hidden.double() @ weight.double().t()
    plain = (hidden @ weight.t()).double()
    assert (plain - exact).abs().max() > 0.02
    for head in (Head(FrozenWeight(weight)), Head(FrozenWeight(weight, _Plain))):
        assert (head.logits(hidden, None).double() - exact).abs().max() < 1e-3
    # CPUs with bfloat16 instructions round the adapter's inner values to bfloat16, others do not.
    found = Head(FrozenWeight(weight)).logits(hidden, pair).double()
    inner = (hidden @ pair.a.t()).double(), hidden.double() @ pair.a.double().t()
    assert min((found - exact - low @ pair.b.double().t()).abs().max() for low in inner) < 2e-3
