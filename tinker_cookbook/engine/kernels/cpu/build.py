"""Compiles the C kernels of this folder once for each machine.

The library is cached below ``TINKER_COOKBOOK_HOME``. Its name has a hash of source, flags, compiler
and processor, so another machine with the same home directory does not use it. Without a compiler,
or with ``TINKER_COOKBOOK_NATIVE=0``, torch's own operators are used.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

from tinker_cookbook.engine.home import home_dir

logger = logging.getLogger(__name__)

SWITCH = "TINKER_COOKBOOK_NATIVE"
_FLAGS = ("-std=c11", "-O3", "-march=native", "-fPIC", "-fopenmp")
_FLAGS += ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
_SECONDS = 120
_DTYPES = (torch.float32, torch.bfloat16)


def suits(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether the kernels support this device and dtype and are compiled."""
    return device.type == "cpu" and dtype in _DTYPES and library("attention") is not None


@cache
def library(name: str) -> ctypes.CDLL | None:
    """Loads the kernels of ``name.c``; returns ``None``, with one log line, if they cannot be
    compiled."""
    if os.environ.get(SWITCH, "1") == "0" or sys.platform != "linux":
        return None
    source = Path(__file__).with_name(f"{name}.c")
    compiler = _compiler()
    if compiler is None:
        logger.info("No C compiler was found: sampling and training are slower (install gcc).")
        return None
    try:
        built = _built(source, compiler)
        return ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        text = "%s did not compile %s, so the engine is slower (gcc does, or set CC): %s"
        logger.warning(text, compiler, name, detail)
        return None


def _compiler() -> str | None:
    """Finds a compiler, gcc first: clang needs an OpenMP runtime that torch does not bring."""
    names = (os.environ.get("CC"), "gcc", "cc")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _built(source: Path, compiler: str) -> Path:
    """Returns the path of the library, compiled if it is not in the cache."""
    flags = (*_FLAGS, *_widest_vectors())
    openmp = _openmp_of_torch()
    sources = [file.read_text() for file in (source, *sorted(source.parent.glob("*.h")))]
    what = (sources, flags, compiler, os.stat(compiler).st_mtime, openmp, _processor())
    folder = home_dir() / "native"
    built = folder / f"{source.stem}-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.so"
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        compiled, linked = Path(work, "o.o"), Path(work, "o.so")
        _run([compiler, *flags, "-c", str(source), "-o", str(compiled)])
        link = [openmp] if openmp else ["-fopenmp"]
        _run([compiler, "-shared", str(compiled), "-o", str(linked), *link])
        os.replace(linked, built)  # whoever was first, the same content
    return built


def _widest_vectors() -> tuple[str, ...]:
    """Returns the flag for full-width AVX-512, of which compilers use half by default."""
    return ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()


def _openmp_of_torch() -> str | None:
    """Returns torch's OpenMP runtime; another copy would start a second pool of threads."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return str(found[0]) if found else None


def _processor() -> str:
    """Returns the processor's identification, on which ``-march=native`` depends."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "\n".join(sorted(kinds))


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
