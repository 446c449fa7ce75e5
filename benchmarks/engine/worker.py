"""One measurement in a process of its own: reads a job file, writes a result file.

A process of its own gives each variant a peak memory that is its own, and when the system kills
it for its memory, the benchmark goes on.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import conversations
from benchmarks.engine.ceilings import measure_ceilings
from benchmarks.engine.sampling import jobs as sampling_jobs
from benchmarks.engine.shapes import write_random_model
from benchmarks.engine.shared_prefix import measure as shared_prefix
from benchmarks.engine.variants import RUNNERS, Setup
from tinker_cookbook.engine.devices import cpu_threads
from tinker_cookbook.exceptions import OutOfMemoryError, TinkerCookbookError


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
    )
    return dataclasses.asdict(RUNNERS[job["variant"]](setup, batches))


def _ceilings(job: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(job["device"])
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads())
    shape = job["shape"]
    return dataclasses.asdict(
        measure_ceilings(device, getattr(torch, job["dtype"]), (shape[0], shape[1], shape[2]))
    )


def _random_model(job: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, job["dtype"])
    write_random_model(Path(job["folder"]), torch.device(job["device"]), dtype, job["seed"])
    return {}


_KINDS = {
    "variant": _variant,
    "ceilings": _ceilings,
    "random_model": _random_model,
    "sample": sampling_jobs.sample,
    "greedy": sampling_jobs.greedy,
    "adapter": sampling_jobs.adapter,
    "shared_prefix": shared_prefix.run,
}


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, OutOfMemoryError, MemoryError)):
        return True
    return "can't allocate memory" in str(error)  # torch's CPU allocator raises RuntimeError


def _volunteer_for_the_oom_killer() -> None:
    """Where memory runs out, this process shall go, not the one that reports it."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    except OSError:
        return  # not Linux, or not allowed: the kernel then picks the largest process


def main(job_file: str, result_file: str) -> int:
    """Runs the job; the exit status is 0 if it was done."""
    _volunteer_for_the_oom_killer()
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    try:
        result = {"status": "ok", **_KINDS[job["kind"]](job)}
    except Exception as error:
        status = "out of memory" if _is_out_of_memory(error) else "failed"
        first_line = (str(error).splitlines() or [""])[0]
        result = {"status": status, "error": f"{type(error).__name__}: {first_line}"}
        if not isinstance(error, TinkerCookbookError) and status == "failed":
            traceback.print_exc()
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")
    return 0 if result["status"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
