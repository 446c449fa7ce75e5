"""Rows without padding, as on CUDA: masks, both kernels' arguments, and whole training passes.

The kernels are emulated by plain torch; the sparse one also runs as torch's own eager version.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import emulated_attention
import engine_reference as ref
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinker_cookbook.engine.kernels.cuda import attention
from tinker_cookbook.engine.model.attention_hook import AttentionCall, use_layout
from tinker_cookbook.engine.training import packed_attention
from tinker_cookbook.engine.training.micro_batch import pad_for, plan_for
from tinker_cookbook.engine.training.packed_attention import PackedLayout
from tinker_cookbook.engine.training.packing import pad, plan
from tinker_cookbook.engine.training.prefix_tree import lay_out
from tinker_cookbook.engine.training.tree_attention import TreeLayout

GROUPS = st.lists(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=5),
    min_size=1,
    max_size=3,
)


def visible(rows, window: int | None) -> np.ndarray:
    """[T, T] bool from the sequences: which places of the row each place attends to."""
    length = sum(len(row.tokens) for row in rows)
    out = np.zeros((length, length), dtype=bool)
    start = 0
    for row in rows:
        for where in row.where:
            for position, place in enumerate(where):
                first = 0 if window is None else max(0, position + 1 - window)
                out[start + place, start + where[first : position + 1]] = True
        start += len(row.tokens)
    return out


@given(GROUPS, st.sampled_from([None, 1, 3, 7]))
@settings(max_examples=200, deadline=None)
def test_blocks_and_rule_show_each_sequence_its_own_past(groups, window):
    rows = [lay_out([np.array(tokens) for tokens in group], shortest=1) for group in groups]
    expected = visible(rows, window)
    layout = PackedLayout.of(rows, ref.CPU)
    place = torch.arange(len(expected))
    rule = packed_attention._visible(layout._places, window)
    assert np.array_equal(rule(None, None, place[:, None], place[None]).numpy(), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "BLOCK", 4)
        some, whole = packed_attention._blocks(layout._segments, window)
    short = -len(expected) % 4
    padded = np.pad(expected, ((0, short), (0, short)))
    blocks = padded.reshape(len(padded) // 4, 4, len(padded) // 4, 4)
    assert np.array_equal(some, blocks.any((1, 3)))
    assert np.array_equal(whole, blocks.all((1, 3)))


def tree_rows(rng: np.random.Generator) -> list:
    """Turns of two conversations, several answers, and a sequence of its own: 840 tokens."""
    head = rng.integers(0, 9, 150)
    answers = [np.concatenate([head, rng.integers(0, 9, n)]) for n in (30, 1, 160)]
    longer = [np.concatenate([answers[2], rng.integers(0, 9, n)]) for n in (40, 70)]
    return [lay_out(answers + longer), lay_out([rng.integers(0, 9, 77)])]


@pytest.mark.slow  # 8 s: torch traces each case
@pytest.mark.parametrize(
    ("sinks", "softcap", "window"),
    [(False, None, None), (False, 2.0, 50), (True, None, 50), (True, 2.0, None)],
)
def test_torch_computes_the_sparse_kernel_as_emulated(window, softcap, sinks, monkeypatch):
    """FlexAttention itself, with its own gradients: its eager version has no check but the
    device's."""
    from torch.nn.attention import flex_attention as flex

    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    rows = tree_rows(np.random.default_rng(0))
    length = sum(len(row.tokens) for row in rows)
    torch.manual_seed(0)
    leaves = [torch.randn(length, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    logits = torch.randn(4) if sinks else None
    call = AttentionCall(0, *leaves, 0.3, window, softcap, logits)
    layout = PackedLayout.of(rows, ref.CPU)
    found = layout.attend(call)
    mask = layout._masks[window]
    monkeypatch.setattr(attention, "_flex_attention", lambda _: emulated_attention.flex_attention)
    expected = attention.sparse_attention(*leaves, mask, 0.3, softcap, logits)
    others = [expected]
    if softcap is None and not sinks:
        others.append(TreeLayout.of(rows, ref.CPU).attend(call))
    upstream = torch.randn_like(found)
    gradients = torch.autograd.grad(found, leaves, upstream)
    for other in others:
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-5)
        for got, want in zip(gradients, torch.autograd.grad(other, leaves, upstream), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    # torch would skip the same blocks, had it been given the rule alone.
    own = flex.create_block_mask(mask.mask_mod, None, None, length, length, device="cpu")
    assert torch.equal(mask.to_dense(), own.to_dense())
    for pair in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, pair), getattr(own, pair))


def test_packed_micro_batches_have_no_padding():
    rng = np.random.default_rng(3)
    sequences = [rng.integers(0, 50, n) for n in (40, 7, 100, 23, 60, 90, 5)]
    groups = plan(sequences, 120, packed=True)
    assert sorted(i for group in groups for i in group.indices) == list(range(7))
    assert [group.padded_tokens for group in groups] == [100, 90, 100, 35]
    for group in (*groups, *groups[2].halves(sequences)):
        batch = pad(group, sequences, ref.CPU)
        expected = np.concatenate([sequences[i] for i in group.indices])
        assert batch.tokens.tolist() == [expected.tolist()]
        assert batch.flat.tolist() == list(range(len(expected)))
        assert isinstance(batch.layout, PackedLayout)
    pairs = plan(sequences[:6], 120, packed=True, group_size=2)
    assert sorted(group.indices for group in pairs) == [(0, 1), (2, 3), (4, 5)]


@pytest.fixture
def emulated(monkeypatch) -> list[str]:
    """Both kernels on the CPU in fp32; the list gets the name of each call's kernel."""
    emulated_attention.register_on_cpu()
    calls: list[str] = []

    def counting(name: str) -> Any:
        usual = getattr(attention, name)
        return lambda *args: calls.append(name) or usual(*args)

    for name in ("packed_attention", "sparse_attention"):
        monkeypatch.setattr(attention, name, counting(name))
    monkeypatch.setattr(attention, "packs", lambda query, value: True)
    monkeypatch.setattr(attention, "_flex_attention", lambda _: emulated_attention.flex_attention)
    return calls


def examples(base, loss: str, *, shared: bool) -> list:
    rng = np.random.default_rng(5)
    head, data = ref.text(base, rng, 60), []
    for length in (30, 9, 44, 21, 1):
        tail = rng.integers(3, base.vocab_size, length)
        tokens = np.concatenate([head, tail]) if shared else tail
        inputs = {"target_tokens": rng.integers(0, base.vocab_size, len(tokens))}
        if loss == "ppo":
            inputs |= {name: rng.normal(size=len(tokens)) for name in ("logprobs", "advantages")}
        else:
            inputs["weights"] = rng.normal(size=len(tokens))
        data.append(ref.example(tokens, **inputs))
    return data


CASES = [
    pytest.param(kind, loss, shared, marks=() if quick else pytest.mark.slow)
    for kind in ("llama", "qwen3", "gemma3", "gemma2", "gpt_oss")
    for loss in ("cross_entropy", "ppo", "custom")
    for shared in (False, True)
    for quick in [(kind, loss) in (("gemma3", "ppo"), ("gemma2", "cross_entropy"))]
]


@pytest.mark.parametrize(("kind", "loss", "shared"), CASES)
def test_a_packed_pass_equals_the_padded_one(tiny_base, emulated, kind, loss, shared):
    base = tiny_base(kind)
    data = examples(base, loss, shared=shared)
    spec = {"spec": ref.AdapterSpec(rank=4, train_mlp=False)} if kind == "gpt_oss" else {}
    results = []
    usual = base.__dict__.copy()
    for packed in (False, True):
        base.__dict__ |= {
            "packs_rows": packed,
            "shares_prefixes": packed and shared,
            "shared_layout": PackedLayout,
        }
        sequences = [item.tokens for item in data]
        micros = plan_for(base, sequences, 10_000)
        layouts = {type(pad_for(base, micro, sequences).layout) for micro in micros}
        assert layouts == ({PackedLayout} if packed else {type(None)})
        run = ref.make_run(base, **spec)
        if loss == "custom":
            output = run.forward_backward_custom(
                data, lambda _, lps: (sum(lp.sigmoid().sum() for lp in lps), {})
            )
        else:
            output = run.forward_backward(data, loss)
        results.append((output, run._gradients))
        if not packed:
            assert not emulated
    base.__dict__.clear()
    base.__dict__.update(usual)
    plain = not shared and kind not in ("gemma2", "gpt_oss")
    assert (
        emulated == [f"{'packed' if plain else 'sparse'}_attention"] * base.config.num_hidden_layers
    )
    (padded, expected), (found, gradients) = results
    for got, want in zip(found.logprobs, padded.logprobs, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
    assert ref.relative_error(gradients, expected) <= 1e-4


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_the_check_finds_a_wrong_kernel(tiny_base, emulated, monkeypatch, kind):
    from tinker_cookbook.engine.model import attention_support

    base = tiny_base(kind)
    tokens = attention_support.probe_tokens(base.vocab_size, 19)
    with torch.no_grad():
        for groups in ([[tokens[:11]], [tokens[11:]]], [[tokens[:11], tokens[:14]]]):
            assert attention_support._row_agrees(base, PackedLayout, groups)
        monkeypatch.setattr(packed_attention, "_visible", lambda places, window: _all_before)
        monkeypatch.setattr(PackedLayout, "_bounds", (torch.tensor([0, 19], dtype=torch.int32), 19))
        assert not attention_support._row_agrees(base, PackedLayout, [[tokens[:11]], [tokens[11:]]])


@pytest.mark.parametrize("groups", [[[5], [9]], [[9, 14]]])
def test_the_check_needs_a_backward_pass_and_memory(
    tiny_base, emulated, monkeypatch, caplog, groups
):
    from tinker_cookbook.engine.model import attention_support

    base = tiny_base("qwen3")
    error = RuntimeError("No valid triton configs. OutOfMemoryError: out of resource: 114688")
    tokens = attention_support.probe_tokens(base.vocab_size, 19)
    sequences = [[tokens[:length] for length in group] for group in groups]

    def agrees() -> bool:
        with torch.no_grad():
            return attention_support._row_agrees(base, PackedLayout, sequences)

    def fail(*_: Any) -> None:
        raise error

    def without_backward(kernel: Any) -> Any:
        def attend(*args: Any) -> torch.Tensor:
            out = kernel(*args)
            if out.requires_grad:
                out.register_hook(fail)
            return out

        return attend

    assert agrees()
    for name in ("packed_attention", "sparse_attention"):
        monkeypatch.setattr(attention, name, without_backward(getattr(attention, name)))
    with caplog.at_level("INFO"):
        assert not agrees()
    assert "PackedLayout is not used: No valid triton configs" in caplog.text
    error = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        agrees()
    monkeypatch.setattr(base, "hidden_of_batch", fail)
    with pytest.raises(torch.OutOfMemoryError):
        attention_support.check_batch_attention(base, base._decoder)


def test_another_thread_sees_the_layout():
    """On CUDA, recomputed layers run in a thread of autograd."""
    from transformers import AttentionInterface

    config = SimpleNamespace(_attn_implementation="sdpa")
    layer = SimpleNamespace(config=config, layer_idx=0)
    layout = PackedLayout.of([lay_out([np.arange(5)])], ref.CPU)
    calls: list[AttentionCall] = []
    layout.attend = lambda call: calls.append(call) or call.query  # type: ignore[method-assign]
    heads = torch.randn(1, 2, 5, 8)
    with use_layout(config, layout), ThreadPoolExecutor(1) as thread:
        attend = AttentionInterface()[config._attn_implementation]
        out, _ = thread.submit(attend, layer, heads, heads, heads, None).result()
    assert torch.equal(out[0].transpose(0, 1), heads[0])
    assert len(calls) == 1


@pytest.mark.slow
def test_torch_compiles_soft_caps_of_any_value():
    """Traced as on CUDA, with gradients; FlexAttention refuses numbers that are inputs. 15 s."""
    from torch.nn.attention import flex_attention as flex

    attend = torch.compile(flex.flex_attention, dynamic=True, backend="aot_eager", fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_validate_device", lambda *_: None)  # refuses gradients on a CPU
        patch.setattr(attention, "_flex_attention", lambda _: attend)
        for softcap in (2.0, 50.0):
            for length in (300, 77):
                rows = [lay_out([np.arange(length)])]
                heads = torch.randn(length, 2, 16, requires_grad=True)
                call = AttentionCall(0, heads, heads, heads, 0.25, None, softcap, None)
                PackedLayout.of(rows, ref.CPU).attend(call).sum().backward()
                assert heads.grad is not None
                assert heads.grad.isfinite().all()


def _all_before(batch, head, q, k) -> torch.Tensor:
    return k <= q


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("case", ["alone", "shared", "soft cap", "sinks"])
def test_kernels_of_a_gpu(case, window, dtype, monkeypatch):
    """Both kernels themselves, with gradients, beside plain torch on the CPU."""
    device, rng = torch.device("cuda", 0), np.random.default_rng(0)
    rows = tree_rows(rng) if case == "shared" else [lay_out([rng.integers(0, 9, n)]) for n in (
        300, 77, 1, 150)]  # fmt: skip
    length = sum(len(row.tokens) for row in rows)
    torch.manual_seed(0)
    tensors = [torch.randn(length, heads, 64, dtype=dtype) for heads in (4, 2, 2)]
    upstream, sinks = torch.randn(length, 4, 64, dtype=dtype), torch.randn(4)
    results = []
    for where in (device, ref.CPU):
        if where == ref.CPU:
            monkeypatch.setattr(attention, "packs", lambda query, value: False)
            monkeypatch.setattr(
                attention, "_flex_attention", lambda _: emulated_attention.flex_attention
            )
        leaves = [tensor.to(where).requires_grad_() for tensor in tensors]
        logits = sinks.to(where) if case == "sinks" else None
        call = AttentionCall(0, *leaves, 0.2, window, 2.0 if case == "soft cap" else None, logits)
        out = PackedLayout.of(rows, where).attend(call)
        gradients = torch.autograd.grad(out, leaves, upstream.to(where))
        results.append([tensor.detach().float().cpu() for tensor in (out, *gradients)])
    for got, want in zip(*results, strict=True):
        error = float((got - want).norm() / want.norm())
        assert error <= (2e-2 if dtype == torch.bfloat16 else 1e-3)
