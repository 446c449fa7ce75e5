"""What the worker does for the sampling benchmark (see ``benchmarks.engine.worker``)."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.sampling.adapter import write_adapter
from benchmarks.engine.sampling.products import measure_products
from benchmarks.engine.sampling.requests import from_json
from benchmarks.engine.sampling.sides import Setup, StaticBatches, measure, open_side
from tinker_cookbook.engine.devices import cpu_threads


def sample(job: dict[str, Any]) -> dict[str, Any]:
    """One run of one side on one case; the engine's process then measures the ceiling, too."""
    batches = job["batches"]
    static = None if batches is None else StaticBatches(**batches)
    found = dataclasses.asdict(measure(_setup(job), from_json(job["requests"]), static))
    return found | {"products": _products(job) if static is None else None}


def greedy(job: dict[str, Any]) -> dict[str, Any]:
    """The most probable tokens of a few prompts: all at once, or one by one with ``generate``."""
    batches = None if job["variant"] == "engine" else StaticBatches(1, by_length=False)
    with open_side(_setup(job), batches) as side:
        return {"tokens": side.sample(from_json(job["requests"]), temperature=0.0)}


def adapter(job: dict[str, Any]) -> dict[str, Any]:
    """Writes the adapter."""
    write_adapter(Path(job["folder"]), Path(job["adapter"]), job["rank"], job["seed"])
    return {}


def _setup(job: dict[str, Any]) -> Setup:
    return Setup(
        folder=Path(job["folder"]),
        adapter=Path(job["adapter"]),
        device=job["device"],
        dtype=job["dtype"],
        rank=job["rank"],
    )


def _products(job: dict[str, Any]) -> list[dict[str, Any]]:
    gc.collect()  # the model is gone, and so shall its memory be
    device = torch.device(job["device"])
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads())  # the engine set its own thread only
    found = measure_products(Path(job["folder"]), device, getattr(torch, job["dtype"]))
    return [dataclasses.asdict(products) for products in found]
