"""What the worker does for the sampling benchmark (see ``benchmarks.engine.worker``)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.engine.sampling import llama_cpp
from benchmarks.engine.sampling.adapter import write_adapter
from benchmarks.engine.sampling.requests import from_json
from benchmarks.engine.sampling.sides import Setup, measure


def sample(job: dict[str, Any]) -> dict[str, Any]:
    """One run of one side on all cases."""
    cases = {case: from_json(requests) for case, requests in job["cases"].items()}
    if job["variant"] == "llama.cpp":
        return dataclasses.asdict(llama_cpp.measure(_gguf_file(job), cases, job["seconds"]))
    measured = measure(_setup(job), job["variant"], cases, job["seconds"], job["batch_size"])
    return dataclasses.asdict(measured)


def gguf(job: dict[str, Any]) -> dict[str, Any]:
    """Writes the model for llama.cpp; in the process that measures, this would slow it down."""
    llama_cpp.write_model(_setup(job), _gguf_file(job))
    return {}


def adapter(job: dict[str, Any]) -> dict[str, Any]:
    """Writes the adapter."""
    write_adapter(Path(job["folder"]), Path(job["adapter"]), job["rank"], job["seed"])
    return {}


def _gguf_file(job: dict[str, Any]) -> Path:
    return Path(f"{job['adapter']}-{job['dtype']}.gguf")


def _setup(job: dict[str, Any]) -> Setup:
    return Setup(
        folder=Path(job["folder"]),
        adapter=Path(job["adapter"]),
        device=job["device"],
        dtype=job["dtype"],
        rank=job["rank"],
    )
