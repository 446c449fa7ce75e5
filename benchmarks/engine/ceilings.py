"""What the machine can do at best: rate of matrix products and memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_SECONDS = 0.6
_LEAST_RUNS = 3


@dataclass(frozen=True)
class Ceilings:
    """Best rates seen. ``shape`` is (tokens, in, out) of the product that is like the model's."""

    matmul_flops: float
    """FLOP/s of [tokens, in] x [in, out]."""
    matmul_square_flops: float
    """FLOP/s of a large square product."""
    bandwidth: float
    """Bytes/s read plus written by a copy too large for any cache."""
    shape: tuple[int, int, int]


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> Ceilings:
    """Measures for a few seconds; the best run counts, as other work only slows a run down."""
    side = 2048 if device.type == "cpu" else 8192
    return Ceilings(
        matmul_flops=_matmul(device, dtype, shape),
        matmul_square_flops=_matmul(device, dtype, (side, side, side)),
        bandwidth=_bandwidth(device),
        shape=shape,
    )


def _bandwidth(device: torch.device) -> float:
    copied = (256 << 20) if device.type == "cpu" else (2 << 30)
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * copied / best_seconds(lambda: target.copy_(source), device)


def _matmul(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    tokens, inner, outer = shape
    generator = torch.Generator(device=device).manual_seed(0)
    x = torch.randn(tokens, inner, generator=generator, device=device, dtype=dtype)
    weight = torch.randn(outer, inner, generator=generator, device=device, dtype=dtype)
    out = torch.empty(tokens, outer, device=device, dtype=dtype)
    seconds = best_seconds(lambda: torch.mm(x, weight.t(), out=out), device)
    return 2.0 * tokens * inner * outer / seconds


def best_seconds(
    work: Callable[[], object], device: torch.device, seconds: float = _SECONDS
) -> float:
    """Least seconds of one run, the first (which warms up) left out."""
    work()
    synchronize(device)
    best, runs, start = float("inf"), 0, time.perf_counter()
    while runs < _LEAST_RUNS or time.perf_counter() - start < seconds:
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
