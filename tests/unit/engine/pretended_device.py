"""A CUDA device for tests on a machine without one: tensors say ``cuda:0``, numbers are in RAM.

Inside ``with PretendedDevice() as device`` every operator is checked as CUDA checks it and is then
computed on the CPU. An operator that mixes CPU tensors and device tensors fails, and so does code
that reads a device tensor through numpy or by its address. Kernels, waits of the host, copies to
the device and the attention backends that CUDA would choose are counted.

It does not show errors of real kernels (alignment, missing dtypes), real memory or speed.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import emulated_attention
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tinker_cookbook.engine.kernels.cuda import attention as cuda_attention

DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_PACKAGE = "tinker_cookbook/"

_WAITS = ["_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2"]
"""Operators whose result the host needs: it waits for the device."""

_ALLOCATES = [
    *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
    *("detach", "alias", "lift_fresh", "_reshape_alias"),
]
"""Operators that start no kernel."""

_WRITES = ["_foreach_mul_", "_foreach_copy_", "split_with_sizes_copy"]
"""Operators without a result, which CUDA computes for all their tensors in one kernel or a few."""

_TAKES_CPU_INDEX = ("index", "index_put_", "index_put", "_unsafe_index", "_index_put_impl_")

EMULATED: dict[str, Callable[..., Any]] = {}
"""Operators that exist on CUDA only, by name, with a function that computes them on the CPU."""


def emulates(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function for an operator that only CUDA has, as ``aten.mm.dtype``.

    The function gets the operator's arguments as plain CPU tensors.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        EMULATED[name] = function
        return function

    return register


class DeviceTensor(torch.Tensor):
    """Tensor of the pretended device; ``held`` has its numbers."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> DeviceTensor:
        # "meta" for C++, because a build without CUDA cannot make a tensor of it.
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device("meta"),
        )
        tensor.held = held
        return tensor

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = is_meta = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> DeviceTensor:
        return DeviceTensor(self.held.detach())

    @data.setter
    def data(self, value: DeviceTensor) -> None:
        assert value.shape == self.shape
        self.held = value.held

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, torch.Tensor):  # C++ would make a meta tensor, without a number
            value = DeviceTensor(torch.tensor(value, dtype=self.dtype))
        super().__setitem__(index, value)

    def tolist(self) -> Any:
        return self.cpu().tolist()  # one copy to the host, as on CUDA

    def data_ptr(self) -> int:
        raise RuntimeError("data_ptr: the address of a device tensor was asked for")

    def __repr__(self, **kwargs: Any) -> str:
        return f"DeviceTensor({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = PretendedDevice.entered
        if device is None:
            raise RuntimeError(f"{func}: a device tensor is used outside of the PretendedDevice")
        return device.compute(func, args, kwargs or {})


def held(value: Any) -> Any:
    """Returns the CPU tensor of a device tensor, and anything else as it is."""
    return value.held if isinstance(value, DeviceTensor) else value


class PretendedDevice(TorchDispatchMode):
    """The device, entered as a context manager in the thread that computes.

    Attributes:
        kernels: number of kernels by operator; without views and allocations.
        syncs: how often the host waited, by operator and line of the package.
        copies: number of copies from the host to the device.
        attention: calls of torch's fused attention by (backend, kind of mask).
        total_bytes: memory of the device; what live tensors take is subtracted from it.
    """

    entered: PretendedDevice | None = None

    def __init__(self, total_bytes: int = 16 << 30, *, liger: bool = False) -> None:
        super().__init__()
        self._liger = liger
        """Whether Liger's kernels are installed."""
        self.total_bytes = total_bytes
        self.kernels: Counter[str] = Counter()
        self.lines: Counter[tuple[str, str]] = Counter()
        """Kernels by operator and line of the package; counted while ``trace`` is set."""
        self.trace = False
        self.syncs: Counter[tuple[str, str]] = Counter()
        self.attention: Counter[tuple[str, str]] = Counter()
        self.copies = 0
        self._loading = False
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._patches = ExitStack()

    def reset(self) -> None:
        """Sets all counts to zero."""
        for counter in (self.kernels, self.lines, self.syncs, self.attention):
            counter.clear()
        self.copies = 0

    def allocated_bytes(self) -> int:
        """Returns the bytes of all live device tensors."""
        self._storages = {k: s for k, s in self._storages.items() if not s[0].expired()}
        return sum(size for _, size in self._storages.values())

    def free_bytes(self) -> int:
        """Returns the bytes that no live tensor takes."""
        return max(0, self.total_bytes - self.allocated_bytes())

    def __enter__(self) -> PretendedDevice:
        from transformers import AutoModelForCausalLM

        torch._C._ensureCUDADeviceGuardSet()
        lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        self._patches.callback(torch._C._set_only_lift_cpu_tensors, lifted)
        load = AutoModelForCausalLM.from_pretrained
        for owner, name, value in (
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (torch.cuda, "mem_get_info", self._memory),
            (torch.cuda, "memory_reserved", lambda device=None: 0),
            (torch.cuda, "memory_allocated", lambda device=None: 0),
            (torch.cuda, "max_memory_allocated", lambda device=None: 0),
            (torch.nn.functional, "scaled_dot_product_attention", _sdpa),
            (torch, "inference_mode", torch.no_grad),  # its tensors have no dispatch to Python
            (AutoModelForCausalLM, "from_pretrained", self._loader(load)),
            (cuda_attention, "_flex_attention", lambda device_type: _flex),
            (PretendedDevice, "entered", self),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, value))
        package = liger_kernel() if self._liger else None  # with None importing it fails
        modules: dict[str, Any] = {"liger_kernel": package}
        modules["liger_kernel.ops"] = None if package is None else package.ops
        self._patches.enter_context(mock.patch.dict(sys.modules, modules))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def _memory(self, device: Any = None) -> tuple[int, int]:
        return self.free_bytes(), self.total_bytes

    def _loader(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def from_pretrained(folder: Path, *args: Any, device_map: Any = None, **kwargs: Any) -> Any:
            # transformers makes real meta tensors, which must stay what they are.
            self._loading = True
            try:
                model = load(folder, *args, **kwargs)
            finally:
                self._loading = False
            # Straight to the device would need a file reader that knows it.
            return model if device_map is None else model.to(DEVICE)

        return from_pretrained

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Checks, computes and counts one operator."""
        name, leaves = str(func), tree_leaves((args, kwargs))
        on_device = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        asked = kwargs.get("device")
        kind = None if asked is None else torch.device(asked).type
        if kind == "meta" and not self._loading:  # C++ took it from a device tensor
            kind = "cuda"
        if not on_device and kind != "cuda":
            return func(*args, **kwargs)
        if func is torch.ops.aten.is_pinned.default:
            return False
        if name == "aten._to_copy.default":
            return self._to_copy(func, args[0], kwargs, kind)
        if name == "aten.copy_.default" and isinstance(args[0], DeviceTensor) != isinstance(
            args[1], DeviceTensor
        ):
            self._between(to_device=isinstance(args[0], DeviceTensor), name="copy_")
            func(*map(held, args), **kwargs)
            return args[0]
        short = name.split(".")[1] if name.startswith("aten.") else name
        if on_device:
            self._check_same_device(short, leaves)
        if short in _WAITS or (short in _TAKES_CPU_INDEX and _has_mask(args[1])):
            self._wait(short)
        plain_args, plain = tree_map(held, (args, kwargs))
        if kind == "cuda":
            plain["device"] = _CPU
        out = EMULATED.get(name, func)(*plain_args, **plain)
        self._count(short, out, plain_args, leaves)
        if short == "_local_scalar_dense":
            return out
        # An operator in place returns its argument.
        known = {id(tensor.held): tensor for tensor in on_device}
        return tree_map(lambda leaf: self._wrapped(leaf, known), out)

    def _wrapped(self, value: Any, known: dict[int, DeviceTensor] | None = None) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if known and (tensor := known.get(id(value))) is not None:
            return tensor
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in self._storages or self._storages[key][0].expired():
            self._storages[key] = StorageWeakRef(storage), storage.nbytes()
        return DeviceTensor(value)

    def _to_copy(self, func: Any, source: Any, kwargs: dict[str, Any], kind: str | None) -> Any:
        from_device = isinstance(source, DeviceTensor)
        to_device = kind == "cuda" or (kind is None and from_device)
        out = func(held(source), **{**kwargs, "device": _CPU})
        if from_device == to_device:
            self._add("_to_copy")
        else:
            self._between(to_device=to_device, name="_to_copy")
        return self._wrapped(out) if to_device else out

    def _between(self, *, to_device: bool, name: str) -> None:
        """Counts a copy between host and device; one to the host makes the host wait."""
        if to_device:
            self.copies += 1
        else:
            self._wait(f"{name} to the host")

    def _check_same_device(self, name: str, leaves: list[Any]) -> None:
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DeviceTensor):
                continue
            if not leaf.dim():  # CUDA takes CPU tensors of no dimension
                continue
            if name in _TAKES_CPU_INDEX and not leaf.is_floating_point():
                self.copies += 1
                continue
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found cuda:0 and a "
                f"CPU tensor of shape {tuple(leaf.shape)}"
            )

    def _wait(self, name: str) -> None:
        self.syncs[name, _line()] += 1

    def _count(self, name: str, out: Any, args: Any, leaves: list[Any]) -> None:
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if name in _WRITES:
            self._add(name)
        if name in _ALLOCATES or not tensors:
            return
        # A result in the memory of an argument is a view, if nothing was written.
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves(args)
            if isinstance(leaf, torch.Tensor)
        }
        view = all(tensor.untyped_storage()._cdata in given for tensor in tensors)
        if not (view and not name.endswith("_")):
            self._add(name)

    def _add(self, name: str, count: int = 1) -> None:
        self.kernels[name] += count
        if self.trace:
            self.lines[name, _line()] += count


def _line() -> str:
    """Returns the line of the package that is being run, as ``engine/model/head.py:90``."""
    for frame in reversed(traceback.extract_stack()):
        if _PACKAGE in frame.filename:
            return f"{frame.filename.rsplit(_PACKAGE)[-1]}:{frame.lineno}"
    return ""


def _has_mask(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


@emulates("aten.mm.dtype")
def _mm(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if left.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("mm: out_dtype is for factors of half precision")
    return left.to(dtype) @ right.to(dtype)


@emulates("aten.histc.default")
def _histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    # CUDA alone counts whole numbers.
    return torch.histc(x.float(), bins, min, max).to(x.dtype)


def attention_backend(dtype: torch.dtype, width: int, *, masked: bool, grouped: bool) -> str:
    """Returns the backend that CUDA chooses for ``scaled_dot_product_attention``."""
    if dtype in (torch.float16, torch.bfloat16) and not masked and width <= 256:
        return "flash"
    # The memory-efficient kernel takes a mask but needs a key for each query head.
    return "math" if grouped else "efficient"


class _Sdpa(torch.autograd.Function):
    """Attention as one kernel, computed in fp32."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: Any) -> Any:
        if any(t is not None and not isinstance(t, DeviceTensor) for t in (q, k, v, bias)):
            raise RuntimeError("scaled_dot_product_attention: a tensor is not on the device")
        device = PretendedDevice.entered
        assert device is not None
        grouped = q.shape[1] != k.shape[1]
        kind = "mask" if bias is not None else "causal" if causal else "plain"
        ctx.backend = attention_backend(
            q.dtype, q.shape[-1], masked=bias is not None, grouped=grouped
        )
        device.attention[ctx.backend, kind] += 1
        device._add(f"attention {ctx.backend}")
        ctx.causal, ctx.scale = causal, scale
        ctx.save_for_backward(q, k, v, bias)
        out = _softmax_attention(held(q), held(k), held(v), held(bias), causal, scale)
        # The fused kernels return it in this order of memory.
        out = out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        return device._wrapped(out)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        q, k, v, bias = map(held, ctx.saved_tensors)
        device = PretendedDevice.entered
        assert device is not None
        device._add(f"attention {ctx.backend} backward", 3)
        with torch.enable_grad():
            leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
            out = _softmax_attention(*leaves, bias, ctx.causal, ctx.scale)
            found = torch.autograd.grad(out, leaves, held(upstream[0]).float())
        wrapped = (device._wrapped(gradient.to(q.dtype)) for gradient in found)
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


def _sdpa(
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
    _entered().attention["varlen", "causal"] += 1
    return emulated_attention.varlen_forward(query, *args)


@emulates("torch_attn._varlen_attn_backward.default")
def _varlen_backward(*args: Any) -> Any:
    _entered()._add("attention varlen backward", 2)  # besides the one that is counted anyway
    return emulated_attention.varlen_backward(*args)


def one_kernel(
    name: str,
    function: Callable[..., Any],
    *,
    backward: int = 1,
    overwrites: tuple[int, ...] = (),
    overwrites_backward: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Returns ``function`` of CPU tensors as one kernel of the device, with gradients.

    ``backward`` is its number of kernels then. A kernel may write its results, or its gradients,
    over the arguments whose numbers are given, as Liger's do.
    """

    class OneKernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            device = _entered()
            device._add(name)
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
            device = _entered()
            device._add(f"{name} backward", backward)
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


def _entered() -> PretendedDevice:
    assert PretendedDevice.entered is not None
    return PretendedDevice.entered


def _flex_kernel(q: Any, k: Any, v: Any, score_mod: Any, seen: Any, scale: float) -> Any:
    out, lse = emulated_attention.flex(q, k, v, score_mod, seen, scale)
    # torch returns it in this order of memory.
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse


def _flex(
    q: Any, k: Any, v: Any, score_mod: Any, mask: Any, scale: float, grouped: bool,
    return_aux: Any = None,
) -> Any:  # fmt: skip
    device = _entered()
    if any(t.device != DEVICE for t in (q, k, v, mask.kv_indices, mask.full_q_indices)):
        raise RuntimeError("flex_attention: a tensor is not on the device")
    # The rule is a part of the kernel: what it computes is not counted.
    counts = device.kernels.copy()
    seen = held(emulated_attention.seen_under(mask, torch.arange(q.shape[2], device=DEVICE)))
    device.kernels = counts
    device.attention["flex", "blocks"] += 1
    attend = one_kernel("attention flex", _flex_kernel, backward=3)
    out, lse = attend(q, k, v, score_mod, seen, scale)
    return out if return_aux is None else (out, SimpleNamespace(lse=lse))


def liger_kernel() -> SimpleNamespace:
    """Returns a package with those of Liger's functions that the engine uses."""

    def named(name: str, function: Callable[..., Any], **options: Any) -> SimpleNamespace:
        return SimpleNamespace(apply=one_kernel(f"liger {name}", function, **options))

    return SimpleNamespace(
        ops=SimpleNamespace(
            # The gradient of a norm is written to zeros.
            LigerRMSNormFunction=named("norm", _rms_norm, backward=2),
            LigerSiLUMulFunction=named("silu", _silu, overwrites_backward=(0, 1)),
            LigerGELUMulFunction=named("gelu", _gelu, overwrites_backward=(0, 1)),
            LigerRopeFunction=named("rope", _rope, overwrites=(0, 1)),
        )
    )


def _rms_norm(
    x: Any, weight: Any, eps: float, offset: float, casting: str, in_place: bool
) -> torch.Tensor:
    assert not in_place
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if casting == "llama":
        return wide.to(x.dtype) * (offset + weight)
    assert casting == "gemma"
    return (wide * (offset + weight.float())).to(x.dtype)


def _silu(gate: Any, up: Any) -> torch.Tensor:
    return torch.nn.functional.silu(gate.float()).to(up.dtype) * up


def _gelu(gate: Any, up: Any) -> torch.Tensor:
    return torch.nn.functional.gelu(gate.float(), approximate="tanh").to(up.dtype) * up


def _rope(q: Any, k: Any, cosine: Any, sine: Any) -> tuple[torch.Tensor, torch.Tensor]:
    def rotated(x: Any) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = cosine[:, None], sine[:, None]
        out = x * cos + torch.cat([-second, first], -1) * sin
        return out.transpose(1, 2).contiguous().transpose(1, 2)

    return rotated(q), rotated(k)
