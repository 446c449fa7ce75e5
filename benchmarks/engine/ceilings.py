"""What the machine can do at best: rate of multiply-adds and memory bandwidth."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tinker_cookbook.engine.devices import cpu_threads

_SECONDS = 0.6
_LEAST_RUNS = 3
_PROBE = Path(__file__).with_name("probe.c")


@dataclass(frozen=True)
class Ceilings:
    """Best rates seen, in FLOP/s and bytes/s, and the program that measured them."""

    flops: float
    bandwidth: float
    method: str


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measures for a few seconds; the best run counts, as other work only slows a run down.

    On a CPU a C program measures that uses no library: ``probe.c``. Torch measures on other
    devices, without a compiler, and bfloat16 where the processor has AMX, which the probe has not.
    """
    rates = _probed() if device.type == "cpu" else None
    if rates is not None and not (dtype == torch.bfloat16 and _has_amx()):
        flops = rates[2] if dtype == torch.bfloat16 and rates[2] else rates[1]
        return Ceilings(flops, rates[0], "probe.c")
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads())
    bandwidth, method = (rates[0], "torch, probe.c") if rates else (_bandwidth(device), "torch")
    return Ceilings(_matmul(device, dtype), bandwidth, method)


def _probed() -> tuple[float, float, float] | None:
    """Bytes/s, float32 FLOP/s, bfloat16 FLOP/s (0: no instructions); None without a compiler."""
    compiler = shutil.which(os.environ.get("CC") or "gcc") or shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/probe"
        command = [compiler, "-O3", "-march=native", "-fopenmp", str(_PROBE), "-o", program]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        command = [program, str(cpu_threads()), str(_SECONDS)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    bandwidth, float32, bfloat16 = map(float, done.stdout.split())
    return bandwidth, float32, bfloat16


def _has_amx() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def _bandwidth(device: torch.device) -> float:
    copied = (256 << 20) if device.type == "cpu" else (2 << 30)
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * copied / _best_seconds(lambda: target.copy_(source), device)


def _matmul(device: torch.device, dtype: torch.dtype) -> float:
    side = 2048 if device.type == "cpu" else 8192
    x, y = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * side**3 / _best_seconds(lambda: torch.mm(x, y.t()), device)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Least seconds of one run, the first (which warms up) left out."""
    work()
    synchronize(device)
    best, runs, start = float("inf"), 0, time.perf_counter()
    while runs < _LEAST_RUNS or time.perf_counter() - start < _SECONDS:
        began = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
        runs += 1
    return best


def synchronize(device: torch.device) -> None:
    """Waits for the device, so that a clock read afterwards means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
