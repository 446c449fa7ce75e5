"""The process settings are measured, not read back: page faults of large repeated buffers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tinker_cookbook

_PROBE = """
import json, os, resource, sys, threading
if sys.argv[1] == "with":
    import tinker_cookbook
import torch

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def allocate():
    for i in range(10):
        large = torch.ones(8_000_000 + i % 7 * 1000)
        small = torch.ones(4_000_000 + i % 5 * 1000)
        del large, small

def measure(counts):
    for _ in range(4):  # the heap grows for a few rounds until every size finds its place
        allocate()
    before = faults()
    allocate()
    counts.append(faults() - before)

counts = []
measure(counts)
worker = threading.Thread(target=measure, args=(counts,))
worker.start(); worker.join()
names = {"policy": "OMP_WAIT_POLICY", "spins": "GOMP_SPINCOUNT"}
print(json.dumps({"counts": counts, **{k: os.environ.get(v) for k, v in names.items()}}))
"""

_ROOT = str(Path(tinker_cookbook.__file__).parent.parent)
_KNOBS = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_ARENA_MAX",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
)


def _probe(how: str, **environment: str) -> dict:
    kept = {key: value for key, value in os.environ.items() if key not in _KNOBS}
    environment = {**kept, "PYTHONPATH": _ROOT, **environment}
    command = [sys.executable, "-c", _PROBE, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator settings")
def test_large_buffers_are_kept_in_the_main_and_in_a_worker_thread():
    plain, ours = _probe("without"), _probe("with")
    assert (ours["policy"], ours["spins"]) == ("PASSIVE", "2000")
    assert ours["counts"][0] < 3_000, (ours, plain)
    assert plain["counts"][1] > 7_000, "the worker thread's arena is no trouble here any more"
    assert ours["counts"][1] < 0.1 * plain["counts"][1], (ours, plain)


_IMPORTS = """
import gc, sys, threading, types
from tinker_cookbook._process import importing_libraries

def collects():
    with importing_libraries():
        return gc.isenabled()

seen = []
with importing_libraries():
    sys.modules["torch"] = types.ModuleType("torch")
    thread = threading.Thread(target=lambda: seen.append(collects()))
    thread.start(); thread.join()
    seen.append(gc.isenabled())  # the thread has not switched it on
seen += [gc.isenabled(), gc.get_freeze_count() > 1000]
gc.unfreeze()
seen += [collects(), gc.get_freeze_count() > 1000]  # torch is there: nothing more is frozen
gc.disable()
collects()
print(*seen, gc.isenabled())
"""


def test_imports_pause_the_garbage_collector_and_freeze_what_the_first_one_creates():
    environment = {**os.environ, "PYTHONPATH": _ROOT}
    command = [sys.executable, "-c", _IMPORTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False True True False False False"
