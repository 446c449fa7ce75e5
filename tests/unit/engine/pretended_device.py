"""A CUDA device for tests on a machine without one: tensors say ``cuda:0``, numbers are in RAM.

Inside ``with PretendedDevice() as device`` every operator is checked as CUDA checks it and is then
computed on the CPU. An operator that mixes CPU tensors and device tensors fails, and so does code
that reads a device tensor through numpy or by its address. Waits of the host, and uses of kernels
that only CUDA has (attention, Liger's functions, two products), are counted.

It does not show errors of real kernels (alignment, missing dtypes), real memory or speed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import emulated_attention
import torch
from pretended_mode import DEVICE, DeviceTensor, PretendedMode, emulates, entered, held

from tinker_cookbook.engine.kernels.cuda import attention as cuda_attention
from tinker_cookbook.engine.kernels.cuda import softmax

__all__ = ["DEVICE", "PretendedDevice"]


@emulates("aten.mm.dtype")
def _mm(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if left.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("mm: out_dtype is for factors of half precision")
    return left.to(dtype) @ right.to(dtype)


@emulates("aten.histc.default")
def _histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    # CUDA alone counts whole numbers.
    return torch.histc(x.float(), bins, min, max).to(x.dtype)


@emulates("aten._grouped_mm.default")
def _grouped_mm(left: torch.Tensor, right: torch.Tensor, ends: Any, *rest: Any) -> torch.Tensor:
    entered().used["_grouped_mm"] += 1
    out = torch.ops.aten._grouped_mm.default(left, right, ends, *rest)
    if left.dim() == right.dim() == 2:
        # As on Blackwell, where the result of a group without rows is undefined.
        sizes = ends.diff(prepend=ends.new_zeros(1))
        out[sizes == 0] = torch.nan
    return out


class _Sdpa(torch.autograd.Function):
    """Attention as one kernel, computed in fp32."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: Any) -> Any:
        if any(t is not None and not isinstance(t, DeviceTensor) for t in (q, k, v, bias)):
            raise RuntimeError("scaled_dot_product_attention: a tensor is not on the device")
        ctx.causal, ctx.scale = causal, scale
        ctx.save_for_backward(q, k, v, bias)
        out = _softmax_attention(held(q), held(k), held(v), held(bias), causal, scale)
        # The fused kernels return it in this order of memory.
        return entered()._wrapped(out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        q, k, v, bias = map(held, ctx.saved_tensors)
        with torch.enable_grad():
            leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
            out = _softmax_attention(*leaves, bias, ctx.causal, ctx.scale)
            found = torch.autograd.grad(out, leaves, held(upstream[0]).float())
        wrapped = (entered()._wrapped(gradient.to(q.dtype)) for gradient in found)
        return (*wrapped, None, None, None)


def _softmax_attention(q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: Any) -> Any:
    """Attention [N, heads, L, D] of CPU tensors, in fp32."""
    q, k, v = q.float(), k.float(), v.float()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


_usual_sdpa = torch.nn.functional.scaled_dot_product_attention


def sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not isinstance(query, DeviceTensor):
        return _usual_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                           enable_gqa=enable_gqa)  # fmt: skip
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        empty = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = empty.masked_fill(~attn_mask, -torch.inf)
    return _Sdpa.apply(query, key, value, attn_mask, is_causal, scale)


@emulates("torch_attn._varlen_attn.default")
def _varlen(query: Any, *args: Any) -> Any:
    width = query.shape[-1]
    if query.dtype not in (torch.bfloat16, torch.float16) or width > 256 or width % 8:
        raise RuntimeError(f"varlen_attn: flash attention has no kernel for {query.dtype}, {width}")
    entered().used["varlen"] += 1
    return emulated_attention.varlen_forward(query, *args)


emulates("torch_attn._varlen_attn_backward.default")(emulated_attention.varlen_backward)


def one_kernel(
    name: str,
    function: Callable[..., Any],
    *,
    overwrites: tuple[int, ...] = (),
    overwrites_backward: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Returns ``function`` of CPU tensors as one kernel of the device, with gradients.

    A kernel may write its results, or its gradients, over the arguments whose numbers are given, as
    Liger's do.
    """

    class OneKernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            device = entered()
            device.used[name] += 1
            on_device = {n: arg for n, arg in enumerate(args) if isinstance(arg, DeviceTensor)}
            ctx.rest = {n: arg for n, arg in enumerate(args) if n not in on_device}
            ctx.numbers = list(on_device)
            ctx.save_for_backward(*on_device.values())
            out = function(*map(held, args))
            outs = (out,) if isinstance(out, torch.Tensor) else out
            for number, result in zip(overwrites, outs, strict=False):
                held(args[number]).copy_(result)
            wrapped = tuple(map(device._wrapped, outs))
            return wrapped[0] if isinstance(out, torch.Tensor) else wrapped

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            device = entered()
            saved = dict(zip(ctx.numbers, map(held, ctx.saved_tensors), strict=True))
            args = [{**saved, **ctx.rest}[number] for number in range(len(ctx.needs_input_grad))]
            needed = [number for number, on in enumerate(ctx.needs_input_grad) if on]
            given = list(args)
            with torch.enable_grad():
                for number in needed:
                    given[number] = args[number].detach().clone().requires_grad_()
                out = function(*given)
                outs = [out] if isinstance(out, torch.Tensor) else list(out)
                found = torch.autograd.grad(outs, [given[n] for n in needed], map(held, upstream))
            gradients: list[Any] = [None] * len(args)
            for number, gradient in zip(needed, found, strict=True):
                gradients[number] = device._wrapped(gradient)
                if number in overwrites_backward:
                    args[number].copy_(gradient)
            return tuple(gradients)

    return OneKernel.apply


def _flex_kernel(q: Any, k: Any, v: Any, score_mod: Any, seen: Any, scale: float) -> Any:
    out, lse = emulated_attention.flex(q, k, v, score_mod, seen, scale)
    # torch returns it in this order of memory.
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse


def flex(
    q: Any, k: Any, v: Any, score_mod: Any, mask: Any, scale: float, grouped: bool,
    return_aux: Any = None, kernel_options: Any = None,
) -> Any:  # fmt: skip
    if any(t.device != DEVICE for t in (q, k, v, mask.kv_indices, mask.full_q_indices)):
        raise RuntimeError("flex_attention: a tensor is not on the device")
    seen = held(emulated_attention.seen_under(mask, torch.arange(q.shape[2], device=DEVICE)))
    attend = one_kernel("flex", _flex_kernel)
    out, lse = attend(q, k, v, score_mod, seen, scale)
    return out if return_aux is None else (out, SimpleNamespace(lse=lse))


def liger_kernel() -> SimpleNamespace:
    """Returns a package with those of Liger's functions that the engine uses."""

    def named(name: str, function: Callable[..., Any], **options: Any) -> SimpleNamespace:
        return SimpleNamespace(apply=one_kernel(f"liger {name}", function, **options))

    return SimpleNamespace(
        ops=SimpleNamespace(
            LigerRMSNormFunction=named("norm", _rms_norm),
            LigerSiLUMulFunction=named("silu", _silu, overwrites_backward=(0, 1)),
            LigerGELUMulFunction=named("gelu", _gelu, overwrites_backward=(0, 1)),
            LigerRopeFunction=named("rope", _rope, overwrites=(0, 1)),
        )
    )


def _rms_norm(
    x: Any, weight: Any, eps: float, offset: float, casting: str, in_place: bool
) -> torch.Tensor:
    assert not in_place
    assert casting == "gemma"
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (offset + weight.float())).to(x.dtype)


def _silu(gate: Any, up: Any) -> torch.Tensor:
    return torch.nn.functional.silu(gate.float()).to(up.dtype) * up


def _gelu(gate: Any, up: Any) -> torch.Tensor:
    return torch.nn.functional.gelu(gate.float(), approximate="tanh").to(up.dtype) * up


def _rope(q: Any, k: Any, cosine: Any, sine: Any) -> tuple[torch.Tensor, torch.Tensor]:
    def rotated(x: Any) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        # Liger's kernel reads the first half only.
        cos, sin = (each.chunk(2, -1)[0].repeat(1, 1, 2)[:, None] for each in (cosine, sine))
        out = x * cos + torch.cat([-second, first], -1) * sin
        return out.transpose(1, 2).contiguous().transpose(1, 2)

    return rotated(q), rotated(k)


class PretendedDevice(PretendedMode):
    """The device. With ``liger``, Liger's kernels are installed."""

    def __init__(self, total_bytes: int = 16 << 30, *, liger: bool = False) -> None:
        super().__init__(total_bytes)
        self._liger = liger

    def functions(self) -> list[tuple[Any, str, Any]]:
        return [
            (torch.nn.functional, "scaled_dot_product_attention", sdpa),
            (cuda_attention, "_flex_attention", lambda device_type: flex),
            (softmax, "compiled", lambda: (softmax.gradient, softmax.target_logprobs)),
        ]

    def modules(self) -> dict[str, Any]:
        package = liger_kernel() if self._liger else None
        return {"liger_kernel": package, "liger_kernel.ops": package and package.ops}
