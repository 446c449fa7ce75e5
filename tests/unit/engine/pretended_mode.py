"""Tensors of a pretended CUDA device, and the mode that computes their operators on the CPU.

``pretended_device`` adds the kernels that only CUDA has.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_device_constructors()  # torch lists its functions once: before ``torch.tensor`` is replaced

_WAITS = ["_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2"]
"""Operators whose result the host needs: it waits for the device."""

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
        device = PretendedMode.entered
        if device is None:
            raise RuntimeError(f"{func}: a device tensor is used outside of the PretendedDevice")
        return device.compute(func, args, kwargs or {})


def held(value: Any) -> Any:
    """Returns the CPU tensor of a device tensor, and anything else as it is."""
    return value.held if isinstance(value, DeviceTensor) else value


class PretendedMode(TorchDispatchMode):
    """The device without kernels of its own, entered in the thread that computes.

    Attributes:
        used: how often each kernel that only CUDA has was used.
        syncs: how often the host waited, by operator.
        total_bytes: memory of the device; what live tensors take is subtracted from it.
    """

    entered: PretendedMode | None = None

    def __init__(self, total_bytes: int = 16 << 30) -> None:
        super().__init__()
        self.total_bytes = total_bytes
        self.used: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self._loading = False
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._patches = ExitStack()

    def allocated_bytes(self) -> int:
        """Returns the bytes of all live device tensors."""
        self._storages = {k: s for k, s in self._storages.items() if not s[0].expired()}
        return sum(size for _, size in self._storages.values())

    def free_bytes(self) -> int:
        """Returns the bytes that no live tensor takes."""
        return max(0, self.total_bytes - self.allocated_bytes())

    def __enter__(self) -> Self:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        torch._C._ensureCUDADeviceGuardSet()
        lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        self._patches.callback(torch._C._set_only_lift_cpu_tensors, lifted)
        for owner, name, value in (
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (torch.cuda, "mem_get_info", self._memory),
            (torch.cuda, "memory_reserved", lambda device=None: 0),
            (torch.cuda, "memory_allocated", lambda device=None: 0),
            (torch.cuda, "max_memory_allocated", lambda device=None: 0),
            (torch, "inference_mode", torch.no_grad),  # its tensors have no dispatch to Python
            *(
                (auto, "from_pretrained", self._loader(auto.from_pretrained))
                for auto in (AutoModelForCausalLM, AutoModelForImageTextToText)
            ),
            (torch, "tensor", partial(_tensor, torch.tensor)),
            (PretendedMode, "entered", self),
            *self.functions(),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, value))
        # Not ``mock.patch.dict``, which also forgets modules that were imported meanwhile: torch
        # cannot import them twice.
        for name, module in self.modules().items():
            self._patches.callback(_restore, name, sys.modules.get(name, _restore))
            sys.modules[name] = module
        return super().__enter__()

    def functions(self) -> list[tuple[Any, str, Any]]:
        """Returns functions that the device replaces: owner, name, replacement."""
        return []

    def modules(self) -> dict[str, Any]:
        """Returns modules that are installed with the device; importing a ``None`` fails."""
        return {}

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
        """Checks and computes one operator."""
        (name, short), leaves = _names(func), _leaves((args, kwargs))
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
            if isinstance(args[1], DeviceTensor):
                self.syncs["copy_ to the host"] += 1
            func(*map(held, args), **kwargs)
            return args[0]
        if on_device:
            self._check_same_device(short, leaves)
        if short in _WAITS or (short in _TAKES_CPU_INDEX and _has_mask(args[1])):
            self.syncs[short] += 1
        plain_args, plain = _mapped(held, (args, kwargs))
        if kind == "cuda":
            plain["device"] = _CPU
        out = EMULATED.get(name, func)(*plain_args, **plain)
        if short == "_local_scalar_dense":
            return out
        # An operator in place returns its argument.
        known = {id(tensor.held): tensor for tensor in on_device}
        return _mapped(lambda leaf: self._wrapped(leaf, known), out)

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
        if to_device:
            return self._wrapped(out)
        self.syncs["_to_copy to the host"] += 1
        return out

    def _check_same_device(self, name: str, leaves: list[Any]) -> None:
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DeviceTensor):
                continue
            if not leaf.dim():  # CUDA takes CPU tensors of no dimension
                continue
            if name in _TAKES_CPU_INDEX and not leaf.is_floating_point():
                continue
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found cuda:0 and a "
                f"CPU tensor of shape {tuple(leaf.shape)}"
            )


@cache
def _names(func: Any) -> tuple[str, str]:
    """Returns an operator's name, and the part of it that the lists of this file have."""
    name = str(func)
    return name, name.split(".")[1] if name.startswith("aten.") else name


# As ``tree_leaves`` and ``tree_map`` of torch, in a fifth of the time: operators have no other
# containers.
def _leaves(value: Any) -> list[Any]:
    kind = type(value)
    if kind is tuple or kind is list:
        return [leaf for one in value for leaf in _leaves(one)]
    return _leaves([*value.values()]) if kind is dict else [value]


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_mapped(change, one) for one in value])
    return {k: _mapped(change, v) for k, v in value.items()} if kind is dict else change(value)


def _tensor(make: Callable[..., torch.Tensor], data: Any, **kwargs: Any) -> torch.Tensor:
    """``torch.tensor``, which reads device tensors in a list in C++."""
    if isinstance(data, list):
        data = _mapped(lambda one: one.tolist() if isinstance(one, DeviceTensor) else one, data)
    return make(data, **kwargs)


def _restore(name: str, module: Any) -> None:
    """Sets a module of ``sys.modules`` back; the function itself stands for none."""
    if module is _restore:
        sys.modules.pop(name, None)
    else:
        sys.modules[name] = module


def entered() -> PretendedMode:
    """Returns the device in use."""
    assert PretendedMode.entered is not None
    return PretendedMode.entered


def _has_mask(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
