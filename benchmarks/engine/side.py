"""What the processes of both sides have in common: job in, result out, peak memory."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import TinkerCookbookError


def run_worker(
    run: Callable[[dict[str, Any]], dict[str, Any]], job_file: str, result_file: str
) -> int:
    """Runs the job of ``job_file`` and writes its figures and the peak of its memory, in bytes."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    try:
        result = {"status": "ok", **run(job), "peak_bytes": _peak(job)}
    except Exception as error:  # whatever it is, the other side's figures stand
        first_line = (str(error).splitlines() or [""])[0]
        result = {"status": "failed", "error": f"{type(error).__name__}: {first_line}"}
        if not isinstance(error, TinkerCookbookError):
            traceback.print_exc()
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")
    return int(result["status"] != "ok")


def _peak(job: dict[str, Any]) -> int:
    from tinker_cookbook.engine.devices import choose_device, peak_memory_bytes

    return peak_memory_bytes(choose_device(job["device"], job["dtype"]).device)
