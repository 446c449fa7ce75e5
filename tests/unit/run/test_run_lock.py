from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.lock import RunLock, lock_holder

HOLD = (
    "import sys, time\n"
    "from tinker_cookbook.run.lock import RunLock\n"
    "with RunLock(sys.argv[1]):\n"
    "    print('held', flush=True)\n"
    "    time.sleep(60)\n"
)


@pytest.fixture
def holder(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_second_process_is_told_who_holds_the_folder(tmp_path, holder):
    pattern = rf"log_path={re.escape(str(tmp_path))} is in use .*pid {holder.pid} on .*started 20"
    with pytest.raises(ConfigurationError, match=pattern), RunLock(tmp_path):
        pass
    assert f"pid {holder.pid}" in (lock_holder(tmp_path) or "")


def test_kill_9_frees_the_folder(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert lock_holder(tmp_path) is None
    with RunLock(tmp_path):
        assert f"pid {os.getpid()}" in (lock_holder(tmp_path) or "")
    assert lock_holder(tmp_path) is None


def test_a_forked_worker_does_not_keep_the_lock_of_its_killed_parent(tmp_path):
    program = (
        "import os, sys, time\n"
        "from tinker_cookbook.run.lock import RunLock\n"
        "lock = RunLock(sys.argv[1]).__enter__()\n"
        "worker = os.fork()\n"
        "if worker == 0:\n"
        "    print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    try:
        assert f"pid {parent.pid}" in (lock_holder(tmp_path) or "")
        parent.kill()
        parent.wait()
        os.kill(worker, 0)  # it lives
        assert lock_holder(tmp_path) is None
    finally:
        os.kill(worker, signal.SIGKILL)
        parent.stdout.close()


def test_a_worker_that_ends_does_not_free_the_lock_of_its_parent(tmp_path):
    with RunLock(tmp_path):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert lock_holder(tmp_path) is not None
