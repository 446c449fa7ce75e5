"""Process-wide settings for CPUs, applied before torch loads its thread pool.

The defaults of the runtime libraries make training and decoding on a CPU several times slower than
necessary, or use more memory:

* OpenMP workers *spin* for milliseconds between the many small operations of a decode step. With
  as many threads as cores, the spinning threads take time from the working one (5-10x
  slower decode was measured on two cores). ``OMP_WAIT_POLICY=PASSIVE`` makes them sleep, but waking
  one takes about 70 us, at thousands of operations a second. ``GOMP_SPINCOUNT`` lets libgomp's
  workers spin for about 10 us first, which bridges the usual gap (training was 1.1x quicker in
  float32 and 1.25x in bfloat16). libgomp reads both once, when torch loads it.
* glibc returns large buffers to the kernel on every ``free`` and faults them in again on the next
  ``malloc``. Training allocates the same activations each step, so glibc is set to keep them.
* glibc gives every additional thread an arena of 64 MiB pieces that it unmaps as soon as they are
  empty, ignoring the thresholds. The engine computes in a worker thread, so all threads share
  the main arena (a training step then has a fifth of the page faults, and a lower memory peak).
* oneDNN keeps the last 1024 compiled kernels, one per shape, of 0.6 MB each. An eighth
  of them is enough.

Values exported by the user are kept.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

# mallopt's parameters: (equivalent environment variable, number in malloc.h, value set here).
_MALLOC_SETTINGS = (
    ("MALLOC_MMAP_THRESHOLD_", -3, 1 << 30),
    ("MALLOC_TRIM_THRESHOLD_", -1, 2**31 - 1),
    ("MALLOC_ARENA_MAX", -8, 1),
)


def prepare_process() -> None:
    """Sets the OpenMP wait policy and the allocator thresholds; safe to call twice."""
    if os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE").upper() == "PASSIVE":
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if sys.platform == "linux":
        _keep_large_buffers()


def _keep_large_buffers() -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # other C libraries, such as musl, lack this function
        return
    for variable, parameter, value in _MALLOC_SETTINGS:
        if variable not in os.environ:
            mallopt(parameter, value)


@contextmanager
def importing_libraries() -> Iterator[None]:
    """Context for the import of torch and transformers, which create 300,000 Python objects.

    Meanwhile the garbage collector is off: it would search all objects again and again. If this is
    the first import of torch, all objects are then frozen (``gc.freeze``), because modules live as
    long as the process: later collections skip them, and so does the one at the exit.
    """
    first = "torch" not in sys.modules
    with _pause.lock:
        if not _pause.depth:
            _pause.was_on = gc.isenabled()
            gc.disable()
        _pause.depth += 1
    try:
        yield
    finally:
        with _pause.lock:
            _pause.depth -= 1
            if not _pause.depth and _pause.was_on:
                gc.enable()
    # Not after an import by the program: it may have created large objects since then.
    if first and "torch" in sys.modules:
        gc.collect()  # what is garbage now would never be freed
        gc.freeze()


class _Pause:
    """Threads that import libraries; the last one switches the garbage collector on again."""

    lock = threading.Lock()
    depth = 0
    was_on = True


_pause = _Pause()


def leave_torch_out() -> None:
    """Makes later imports of torch raise ImportError, unless torch is already loaded."""
    sys.modules.setdefault("torch", cast("Any", None))
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # about running without torch


def torch_is_left_out() -> bool:
    """Returns whether ``leave_torch_out`` prevents the import of torch in this process."""
    return sys.modules.get("torch", sys) is None


def openmp_policy_came_too_late() -> bool:
    """Returns whether torch was imported before this package, so that its threads already spin."""
    return "torch" in sys.modules and os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE"
