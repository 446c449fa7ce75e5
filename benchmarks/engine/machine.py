"""What a number was measured with: code, libraries, processor."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tinker_cookbook.engine.devices import cpu_threads

_LIBRARIES = ("torch", "transformers", "peft", "numpy")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Facts for the JSON object; ``commit`` is ``None`` outside a checkout of this package."""
    commit, changed = _commit()
    return {
        "device": str(device),
        "cpu": _cpu_name(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "threads": cpu_threads(),
        "commit": commit,
        "uncommitted_changes": changed,
        "versions": {"python": platform.python_version()}
        | {library: _version(library) for library in _LIBRARIES},
    }


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> tuple[str | None, bool | None]:
    here = Path(__file__).resolve()
    # Installed into someone's checkout (a virtual environment there) is not part of it.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None, None
    commit = _git(here.parent, "rev-parse", "HEAD")
    changed = _git(here.parents[2], "status", "--porcelain", "--", "tinker_cookbook", "benchmarks")
    return commit, None if changed is None else bool(changed)


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=True, text=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
