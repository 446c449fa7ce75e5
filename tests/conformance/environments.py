"""Environments for packages whose pins do not fit ours, each made once and kept between runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
CACHE = Path.home() / ".cache" / "tinker_cookbook_tests" / "environments"


def python_with(name: str, *packages: str) -> Path:
    """Python of the environment ``name``, which has ``packages`` and everything that this one has.

    What is installed here is seen through a .pth file, after the packages of the environment, so
    that torch and transformers are not installed again. Skips where the packages cannot be had.
    """
    folder = CACHE / name
    python = folder / "bin" / "python"
    if python.exists():
        return python
    part = folder.with_name(f"{name}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(part)], check=True)
    (site,) = (part / "lib").glob("python*/site-packages")
    (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [str(part / "bin" / "python"), "-m", "pip", "install", "-q", *packages]
    found = subprocess.run(install, capture_output=True, text=True)
    if found.returncode:
        shutil.rmtree(part, ignore_errors=True)
        pytest.skip(f"{' '.join(packages)} cannot be installed: {found.stderr[-300:]}")
    # Only a complete environment gets the name: an interrupted one is made again.
    part.rename(folder)
    return python


def run_in(python: Path, *words: str, timeout: float = 900, **env: str) -> str:
    """Runs a command of the environment on this checkout; returns what it printed."""
    done = subprocess.run(
        [str(python), *words],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_WAIT_POLICY": "PASSIVE", **env},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout
