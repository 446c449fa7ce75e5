"""Detects the features of this machine: device, memory, compiler and kernels, sandbox, vLLM."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass, field

import torch

from tinker_cookbook.doctor.packages import version_of
from tinker_cookbook.engine.devices import (
    DeviceChoice,
    choose_device,
    cpu_bfloat16,
    cpu_threads,
    free_memory_bytes,
)
from tinker_cookbook.engine.kernels.cpu.build import SWITCH, library
from tinker_cookbook.engine.sampler_settings import SamplerSettings
from tinker_cookbook.exceptions import ConfigurationError

_GPU_PACKAGES = ("triton", "liger-kernel", "flash-attn", "bitsandbytes", "torchao")


@dataclass(frozen=True)
class Found:
    """A feature: whether it is available, and details."""

    name: str
    there: bool
    detail: str


@dataclass(frozen=True)
class Machine:
    """Device and dtype that the engine chooses, memory in bytes, and detected features."""

    choice: DeviceChoice
    device_name: str
    cores: int
    threads: int
    ram_bytes: int
    free_bytes: int
    gpu_bytes: list[int] = field(default_factory=list)
    """Total memory of each GPU."""
    kernels: list[Found] = field(default_factory=list)

    @property
    def device_type(self) -> str:
        """Device type: cpu, cuda or mps."""
        return self.choice.device.type


def look(device: str = "auto", dtype: str = "auto") -> Machine:
    """Examines this machine; raises ``ConfigurationError`` for a missing device."""
    choice = choose_device(device, dtype)
    on_cuda = choice.device.type == "cuda"
    name = torch.cuda.get_device_name(choice.device) if on_cuda else _processor()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
    return Machine(
        choice=choice,
        device_name=name,
        cores=os.cpu_count() or 1,
        threads=cpu_threads(),
        ram_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        free_bytes=free_memory_bytes(choice.device),
        gpu_bytes=gpus,
        kernels=_cpu_kernels() if choice.device.type == "cpu" else _gpu_kernels(choice),
    )


def find_sandbox() -> Found:
    """Tests the sandbox tiers; reports the strongest one that works."""
    from tinker_cookbook.sandbox import launch

    problems = launch.tier_problems()
    works = [str(tier) for tier, problem in problems.items() if not problem]
    if works:
        return Found("sandbox", True, works[0])
    return Found("sandbox", False, "; ".join(f"{t}: {problem}" for t, problem in problems.items()))


def find_vllm() -> Found:
    """Looks for vLLM as the engine does: ``TINKER_COOKBOOK_VLLM_PYTHON``, this environment, the
    environment of the program ``vllm``."""
    try:
        return Found("vLLM", True, f"in the environment of {SamplerSettings().python()}")
    except ConfigurationError as error:
        return Found("vLLM", False, str(error))


def _cpu_kernels() -> list[Found]:
    if os.environ.get(SWITCH, "1") == "0":
        return [Found("C kernels", False, f"switched off by {SWITCH}=0")]
    names = (os.environ.get("CC"), "gcc", "cc")
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    loaded = library() is not None
    return [
        Found("C compiler", compiler is not None, compiler or "none (gcc)"),
        Found(
            "C kernels",
            loaded,
            "compiled" if loaded else "none: torch's own operators are used, which are slower",
        ),
        Found("bfloat16 products", cpu_bfloat16() is not None, cpu_bfloat16() or "emulated"),
    ]


def _gpu_kernels(choice: DeviceChoice) -> list[Found]:
    found: list[Found] = []
    if choice.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(choice.device)
        detail = f"CUDA {torch.version.cuda}, compute capability {major}.{minor}"
        found.append(Found("torch", True, f"{torch.__version__}, {detail}"))
        flash = torch.backends.cuda.is_flash_attention_available()
        found.append(Found("flash attention in torch", flash, "built in" if flash else "no"))
    for package in _GPU_PACKAGES:
        version = version_of(package)
        found.append(Found(package, version is not None, version or "not installed"))
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            line = next(line for line in file if line.startswith("model name"))
        return line.partition(":")[2].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
