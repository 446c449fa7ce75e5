"""Kills a writer of a checkpoint before each of its calls that change files: test_store_crashes.py.

The process forks its writers, so that torch is imported once for all of them.
Usage: store_crash_driver.py ROOT
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from tinker_cookbook.engine.checkpoints.store import CheckpointStore, RunInfo

PATH = "tinker://crash/weights/latest"


def write(store: CheckpointStore, step: int) -> None:
    store.write_checkpoint(
        "crash",
        "weights",
        "latest",
        adapter={f"a{i}": torch.full((20_000,), float(step)) for i in range(3)},
        adapter_config={"r": step},
        optimizer={"m": torch.full((50_000,), float(step))},
        state={"step": step},
        overwrite=True,
    )


def check(root: Path) -> int:
    """Opens the store as the next process would, and returns the step it holds, whole."""
    checkpoint = CheckpointStore(root).read_checkpoint(PATH, with_optimizer=True)
    assert checkpoint.optimizer is not None
    step = checkpoint.state["step"]
    for tensor in (*checkpoint.adapter.values(), *checkpoint.optimizer.values()):
        assert (tensor == step).all()
    assert checkpoint.adapter_config["r"] == step
    names = sorted(os.listdir(root / "runs" / "crash" / "weights"))
    assert names == ["latest"], f"left over: {names}"
    return step


def die_at(call: int) -> None:
    """Kills this process just before its ``call``-th call that changes the file system."""
    left = call

    def dying(real):
        def wrapped(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return wrapped

    for owner, name in ((os, "rename"), (os, "fsync"), (os, "mkdir"), (os, "unlink")):
        setattr(owner, name, dying(getattr(owner, name)))
    os.rmdir = dying(os.rmdir)


def at_every_step(root: Path) -> dict[str, object]:
    steps, call = [], 0
    while True:
        call += 1
        before = check(root)
        child = os.fork()
        if child == 0:
            store = CheckpointStore(root)
            die_at(call)
            write(store, before + 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        after = check(root)
        assert after in (before, before + 1)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert after == before + 1
            return {"calls": call - 1, "new_after": steps}
        if after == before + 1:
            steps.append(call)


def main() -> None:
    root = Path(sys.argv[1])
    store = CheckpointStore(root)
    store.create_run("crash", RunInfo(base_model="m", lora_rank=1))
    write(store, 1)
    print(json.dumps(at_every_step(root)))


if __name__ == "__main__":
    main()
