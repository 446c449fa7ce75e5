"""Environments for packages whose pins do not fit ours, each made once and kept between runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
CACHE = Path.home() / ".cache" / "tinker_cookbook_tests" / "environments"


def python_with(name: str, *packages: str) -> Path:
    """Python of the environment ``name``, which has ``packages`` and everything that this one has.

    What is installed here is seen through a .pth file, after the packages of the environment, so
    that torch and transformers are not installed again. Skips where the packages cannot be had.
    """
    return _made_once(name, packages, sysconfig.get_path("purelib"))


def python_alone(name: str, *packages: str, without: Sequence[str] = ()) -> Path:
    """As ``python_with``, for packages that need other versions than this environment has.

    ``without`` names dependencies that are removed again.
    """
    return _made_once(name, packages, "", without)


def _made_once(name: str, packages: Sequence[str], ours: str, without: Sequence[str] = ()) -> Path:
    folder = CACHE / name
    python = folder / "bin" / "python"
    if python.exists():
        return python
    part = folder.with_name(f"{name}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(part)], check=True)
    if ours:
        (site,) = (part / "lib").glob("python*/site-packages")
        (site / "ours.pth").write_text(f"{ours}\n")
    pip = [str(part / "bin" / "python"), "-m", "pip"]
    found = subprocess.run([*pip, "install", "-q", *packages], capture_output=True, text=True)
    if found.returncode:
        shutil.rmtree(part, ignore_errors=True)
        pytest.skip(f"{' '.join(packages)} cannot be installed: {found.stderr[-300:]}")
    if without:
        subprocess.run([*pip, "uninstall", "-q", "-y", *without], check=True)
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
