"""Chooses device and dtype, with the reason, and measures free memory."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from tinker_cookbook.engine.device_names import check_device_name, check_dtype_name
from tinker_cookbook.exceptions import ConfigurationError

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class DeviceChoice:
    """Device and dtype of the base model, with the reasons."""

    device: torch.device
    dtype: torch.dtype
    device_reason: str
    dtype_reason: str


def choose_device(device: str = "auto", dtype: str = "auto") -> DeviceChoice:
    """Resolves the settings ``device`` and ``dtype``.

    Args:
        device: ``auto`` (CUDA, else MPS, else the CPU), ``cuda``, ``cuda:N``, ``mps`` or ``cpu``.
        dtype: ``auto``, ``float32``/``fp32``, ``bfloat16``/``bf16`` or ``float16``/``fp16``
            (CUDA only). On a CPU ``auto`` is bfloat16 if the processor supports it, because
            emulated bfloat16 is slower than float32.

    Raises:
        ConfigurationError: unknown value, or a device or dtype that this machine does not have.
    """
    requested = check_device_name(device)
    kind, _, index = requested.partition(":")
    reason = "requested"
    has_mps = torch.backends.mps.is_available()
    if requested == "auto":
        if torch.cuda.is_available():
            kind, reason = "cuda", f"a GPU was found: {torch.cuda.get_device_name()}"
        elif has_mps:
            kind, reason = "mps", "Apple's GPU was found"
        else:
            kind, reason = "cpu", "no GPU was found"
        requested = kind
    elif kind == "cuda":
        _require_cuda(requested, int(index or 0))
    elif kind == "mps" and not has_mps:
        raise ConfigurationError(
            "device: got 'mps', but torch finds no Apple GPU here; set device=cpu or device=auto"
        )
    chosen, dtype_reason = _choose_dtype(check_dtype_name(dtype), kind)
    return DeviceChoice(torch.device(requested), chosen, reason, dtype_reason)


def cpu_threads() -> int:
    """Returns the number of threads: the usable cores, limited by a container's CPU quota.

    torch counts the machine's cores; a container's CPU quota is invisible to it, and threads
    beyond the quota are put to sleep in the middle of an operation. OMP_NUM_THREADS takes
    precedence.
    """
    requested = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if requested.isdigit() and int(requested) > 0:
        return int(requested)
    has_affinity = hasattr(os, "sched_getaffinity")
    # Affinity limits the process to some cores, a quota to a share of their time.
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota, _, period = _cgroup_text("cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return max(1, cores)


def free_memory_bytes(device: torch.device) -> int:
    """Returns the bytes that can still be allocated on ``device``.

    On CUDA this includes the reserve of torch's allocator; on a CPU it is the memory that the
    kernel can make available without swapping, or the rest of the container's limit.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        limit = torch.mps.recommended_max_memory()
        return max(0, limit - torch.mps.current_allocated_memory())
    available = _proc_value_kib("/proc/meminfo", "MemAvailable")
    if available is not None:
        free = available * 1024
    else:
        # Other systems would need another package; half of the memory is a low estimate.
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    # The memory limit of a container; its page cache counts as free.
    limit, used = (_cgroup_text(name) for name in ("memory.max", "memory.current"))
    if not (limit.isdigit() and used.isdigit()):
        return free
    statistics = _cgroup_text("memory.stat").split()
    try:
        cached = int(statistics[statistics.index("inactive_file") + 1])
    except (ValueError, IndexError):
        cached = 0
    return min(free, max(0, int(limit) - int(used) + cached))


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak memory use: torch's on CUDA, the process's resident set elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    high_water = _proc_value_kib("/proc/self/status", "VmHWM")
    if high_water is not None:
        return high_water * 1024
    import resource  # absent on Windows, which has no VmHWM either

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _require_cuda(requested: str, index: int) -> None:
    if not torch.cuda.is_available():
        build = "built without CUDA" if torch.version.cuda is None else "finding no usable GPU"
        raise ConfigurationError(
            f"device: got {requested!r}, but torch {torch.__version__} is {build}; set device=cpu "
            "or device=auto, or install a CUDA build of torch and check that nvidia-smi lists the "
            "GPU"
        )
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigurationError(
            f"device: got {requested!r}, but this machine shows {count} GPU(s), "
            f"cuda:0 to cuda:{count - 1}; choose one of them or check CUDA_VISIBLE_DEVICES"
        )


def _choose_dtype(requested: str, kind: str) -> tuple[torch.dtype, str]:
    """Returns the dtype for a kind of device, and the reason."""
    # A requested dtype is used even if it is slow, with a note in the reason.
    native = cpu_bfloat16() if kind == "cpu" else None
    if requested != "auto":
        dtype = getattr(torch, requested)
        if dtype == torch.float16 and kind != "cuda":
            raise ConfigurationError(
                f"dtype: got {requested!r} on device {kind}, but float16 is offered on cuda only; "
                "set dtype=float32 or dtype=bfloat16"
            )
        if dtype == torch.bfloat16 and kind == "cpu" and native is None:
            return dtype, "requested, although this processor only emulates it (float32 is faster)"
        return dtype, "requested"
    if kind == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "this GPU computes bfloat16"
        return torch.float32, "this GPU does not compute bfloat16"
    if kind == "mps":
        return torch.float32, "bfloat16 is not offered by every Apple GPU; dtype=bfloat16 tries it"
    if native is not None:
        return torch.bfloat16, f"this processor computes bfloat16 ({native})"
    return torch.float32, "this processor does not compute bfloat16, and emulating it is slower"


def cpu_bfloat16() -> str | None:
    """Returns the processor feature for bfloat16 products, or ``None``."""
    flags = _cpu_flags()
    return next((name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in flags), None)


@cache
def _cpu_flags() -> set[str]:
    """Returns the processor's feature flags as named by the operating system."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux
        return {name for name, present in torch.cpu.get_capabilities().items() if present is True}
    listed = (line for line in lines if line.startswith(("Features", "flags")))
    return set(next(listed, "").partition(":")[2].split())


def _proc_value_kib(file: str, key: str) -> int | None:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)


def _cgroup_text(file: str) -> str:
    """Returns the content of a file of the container's control group; empty if it has none."""
    try:
        return (_CGROUP / file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
