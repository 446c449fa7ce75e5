"""Compiles the C kernels of this folder once for each machine.

The library is cached in ``TINKER_COOKBOOK_HOME``. Its name has a hash of source, flags, compiler
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
# ``-std=c11`` alone forbids fused multiply-adds, which make attention a fifth faster.
_FLAGS += ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
_SECONDS = 120


@cache
def library() -> ctypes.CDLL | None:
    """Loads the kernels; returns ``None``, with one log line, if they cannot be compiled."""
    if os.environ.get(SWITCH, "1") == "0" or sys.platform != "linux":
        return None
    # Prefer gcc: clang needs an OpenMP runtime that torch does not include.
    names = (os.environ.get("CC"), "gcc", "cc")
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if compiler is None:
        logger.info("No C compiler was found: sampling and training are slower (install gcc).")
        return None
    try:
        # ``CDLL`` releases the GIL during a call.
        return ctypes.CDLL(str(_built(Path(__file__).with_name("step.c"), compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        text = "%s did not compile the kernels, so the engine is slower (gcc does, or set CC): %s"
        logger.warning(text, compiler, detail)
        return None


def _built(source: Path, compiler: str) -> Path:
    """Returns the path of the library, compiled if it is not in the cache."""
    flags = _FLAGS
    if platform.machine() in ("x86_64", "AMD64"):
        flags += ("-mprefer-vector-width=512",)  # by default compilers use only 256-bit vectors
    # Use torch's OpenMP runtime: another copy would start a second thread pool.
    openmp = next(map(str, sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))), "")
    # The result of ``-march=native`` depends on the processor.
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    # ``step.c`` includes the other files.
    sources = [file.read_text() for file in sorted(source.parent.glob("*.[ch]"))]
    what = (sources, flags, compiler, os.stat(compiler).st_mtime, openmp, sorted(kinds))
    folder = home_dir() / "native"
    built = folder / f"{source.stem}-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.so"
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    # Build in the same folder: a rename within one file system is atomic.
    with tempfile.TemporaryDirectory(dir=folder) as work:
        compiled, linked = Path(work, "o.o"), Path(work, "o.so")
        _run([compiler, *flags, "-c", str(source), "-o", str(compiled)])
        # Link torch's runtime by path: ``-fopenmp`` would link the compiler's own.
        _run([compiler, "-shared", str(compiled), "-o", str(linked), openmp or "-fopenmp"])
        os.replace(linked, built)  # if two processes compile, their libraries are equal
    return built


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)


class Operation(ctypes.Structure):
    """Mirrors ``struct Operation`` of step.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kernel", "count")),
        ("calls", ctypes.c_void_p),
    )


class KernelCall(ctypes.Structure):
    """Arguments of a kernel, as a structure in C. It holds only addresses, so the tensors must
    live as long as the call."""

    kernel: int
    """The number in step.c."""

    def run(self, threads: int) -> None:
        """Runs this call alone. Raises ``RuntimeError`` if memory runs out."""
        run((Operation * 1)((self.kernel, 1, ctypes.addressof(self))), threads)


def run(operations: ctypes.Array[Operation], threads: int) -> None:
    """Runs operations one after another. Raises ``RuntimeError`` if memory runs out."""
    routines = library()
    assert routines is not None, "kernels are used only where the library exists"
    numbers = (ctypes.c_int64(len(operations)), ctypes.c_int64(threads))
    if routines.tinker_run(operations, *numbers):
        raise RuntimeError("out of memory: the sums of attention did not fit")
