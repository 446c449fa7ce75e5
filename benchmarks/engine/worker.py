"""The process of one part of the engine's benchmarks."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import conversations
from benchmarks.engine.ceilings import measure_ceilings
from benchmarks.engine.sampling import jobs as sampling_jobs
from benchmarks.engine.shapes import write_random_model
from benchmarks.engine.shared_prefix import measure as shared_prefix
from benchmarks.engine.trl_variant import run_trl
from benchmarks.engine.variants import RUNNERS, Setup
from benchmarks.engine.vision import measure as vision
from benchmarks.harness import run_worker


def _variant(job: dict[str, Any]) -> dict[str, Any]:
    rows = conversations.load(Path(job["data"]))
    size = job["batch_size"]
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    setup = Setup(
        folder=Path(job["folder"]),
        device=job["device"],
        dtype=job["dtype"],
        rank=job["rank"],
        seed=job["seed"],
        warmup=job["warmup"],
        train_unembed=job["train_unembed"],
        trl_batch_size=job["trl_batch_size"],
        trl_gradient_checkpointing=job["trl_gradient_checkpointing"],
    )
    run = run_trl if job["variant"] == "trl" else RUNNERS[job["variant"]]
    return dataclasses.asdict(run(setup, batches))


def _ceilings(job: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(job["device"])
    return dataclasses.asdict(measure_ceilings(device, getattr(torch, job["dtype"])))


def _random_model(job: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, job["dtype"])
    write_random_model(Path(job["folder"]), torch.device(job["device"]), dtype, job["seed"])
    return {}


_KINDS = {
    "variant": _variant,
    "ceilings": _ceilings,
    "random_model": _random_model,
    "sample": sampling_jobs.sample,
    "adapter": sampling_jobs.adapter,
    "gguf": sampling_jobs.gguf,
    "shared_prefix": shared_prefix.run,
    "vision": vision.run,
}


if __name__ == "__main__":
    status = run_worker(lambda job: _KINDS[job["kind"]](job), *sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # threads of llama.cpp may never end
