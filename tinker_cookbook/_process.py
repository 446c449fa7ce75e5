"""Process-wide settings a CPU run needs, applied before torch loads its thread pool.

Two defaults of the C runtime make CPU training and decoding several times slower than the
processor allows, and neither is visible to a user:

* OpenMP workers *spin* between the many small operations of a decode step. With as many threads
  as cores, the spinning threads steal time from the one that has work (5-10x slower decode was
  measured on two cores). ``OMP_WAIT_POLICY=PASSIVE`` makes them sleep; libgomp reads it once,
  when torch loads it.
* glibc hands large buffers back to the kernel on every ``free`` and faults them in again on the
  next ``malloc``. Training allocates the same activations each step, so keep them.

A value that the user exported wins.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BELOW_BYTES = 1 << 30


def prepare_process() -> None:
    """Sets the OpenMP wait policy and the allocator thresholds; safe to call twice."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if sys.platform == "linux":
        _keep_large_buffers()


def _keep_large_buffers() -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl and others: their allocator has no such knob
        return
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(_M_MMAP_THRESHOLD, _KEEP_BELOW_BYTES)
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def openmp_policy_came_too_late() -> bool:
    """True when torch was imported before this package, so that its threads already spin."""
    return "torch" in sys.modules and os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE"
