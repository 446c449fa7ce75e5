"""Commands in real sandboxes: files, limits, isolation, clean-up (about 5 s, 5 more if slow)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tinker_cookbook.sandbox import (
    LocalSandbox,
    SandboxInterface,
    SandboxLimits,
    SandboxResource,
    SandboxTerminatedError,
    SandboxTier,
    SandboxUnavailableError,
    launch,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")
TIERS = [tier for tier, problem in launch.tier_problems().items() if not problem]


# The weaker tier has its turn with the slow tests, except where isolation itself is tested.
STRONGEST_FIRST = [*TIERS[:1], *(pytest.param(t, marks=pytest.mark.slow) for t in TIERS[1:])]


@pytest.fixture(params=STRONGEST_FIRST)
def tier(request) -> SandboxTier:
    return request.param


@pytest.fixture(params=TIERS)
def each_tier(request) -> SandboxTier:
    return request.param


@asynccontextmanager
async def sandbox(tier, **limits):
    made = await LocalSandbox.create(60, tier=tier, limits=SandboxLimits(**limits))
    try:
        yield made
    finally:
        await made.cleanup()


def run(work):
    return asyncio.run(work)


def test_commands_share_files_and_report_their_result(tier):
    async def main():
        async with sandbox(tier) as box:
            assert isinstance(box, SandboxInterface)
            await SandboxResource(box).send_heartbeat()
            await box.write_file(f"{box.workdir}/a/run.sh", "echo out; echo err >&2; exit 3", True)
            first = await box.run_command("./a/run.sh")
            assert (first.stdout, first.stderr, first.exit_code) == ("out\n", "err\n", 3)
            assert first.metrics["tier"] == tier
            assert 0 < first.metrics["seconds"] < 5
            await box.write_file(f"{box.workdir}/bytes", bytes(range(256)))
            assert await box.read_bytes(f"{box.workdir}/bytes") == bytes(range(256))
            assert (await box.read_file(f"{box.workdir}/a/run.sh", max_bytes=4)).stdout == "echo"
            missing = await box.read_file(f"{box.workdir}/none")
            assert missing.exit_code
            assert "none" in missing.stderr
            there = await box.run_command("pwd", workdir=f"{box.workdir}/a")
            assert there.stdout.strip().endswith("/a")
            large = "x" * 3_000_000
            await box.write_file(f"{box.workdir}/large", large)
            assert (await box.read_file(f"{box.workdir}/large")).stdout == large

    run(main())


def test_host_is_not_reachable(each_tier, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the host's secret")
    tmp_path.chmod(0o777)
    secret.chmod(0o666)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"

        async def main():
            async with sandbox(each_tier) as box:
                commands = [
                    f"cat {secret}",
                    f"echo robbed > {secret}",
                    f"ln -s {secret} link && cat link",
                    "cat /etc/shadow",
                    "ls /root/.ssh",
                    f'python3 -c "{connect}"',
                    f"kill -9 {os.getpid()}",
                    f"cat /proc/{os.getpid()}/environ",
                    "cat /proc/1/environ",
                    "cat /proc/1/mem",
                    "kill -9 1 && false",
                    "unshare -Ur true",
                    "touch /usr/x",
                ]
                results = [await box.run_command(command, timeout=10) for command in commands]
                succeeded = [c for c, r in zip(commands, results, strict=True) if not r.exit_code]
                assert succeeded == []
                await box.run_command(f"ln -sf {secret} link")
                assert (await box.read_file(f"{box.workdir}/link")).exit_code
                environment = (await box.run_command("env")).stdout
                assert not [k for k in os.environ if k.startswith("PYTEST") and k in environment]

        run(main())
    assert secret.read_text() == "the host's secret"


def test_limits_hold(tier):
    async def main():
        limits = {"memory_mb": 200, "disk_mb": 20, "file_mb": 8, "processes": 40, "cpu_seconds": 1}
        async with sandbox(tier, output_bytes=1000, **limits) as box:
            late = await box.run_command(f"setsid {SLEEP} & {SLEEP}", timeout=0.3)
            assert late.exit_code == 124
            assert late.metrics["timed_out"]
            _wait_for_sleepers(0)
            loud = await box.run_command("yes | head -c 100000")
            assert len(loud.stdout) == 1000
            assert loud.metrics["stdout_truncated"]
            one = await box.run_command("python3 -c 'bytearray(300 << 20)'")
            assert one.exit_code
            assert "MemoryError" in one.stderr
            hungry = "python3 -c 'import time; x = bytearray(90 << 20); time.sleep(60)' &"
            several = await box.run_command(f"{hungry} {hungry} {hungry} wait", timeout=50)
            assert several.metrics["over_limit"] == "memory"
            spin = await box.run_command("while :; do :; done", timeout=60)
            assert spin.exit_code == 128 + signal.SIGKILL
            assert spin.metrics["cpu_seconds"] < 5
            bomb = await box.run_command("for i in $(seq 80); do sleep 1 & done; wait", timeout=3)
            assert "Resource temporarily unavailable" in bomb.stderr
            big = await box.run_command("head -c 10000000 /dev/zero > big")
            assert big.exit_code
            fill = "for i in $(seq 9); do head -c 4000000 /dev/zero > f$i || exit 1; done; sleep 2"
            full = await box.run_command(fill, timeout=10)
            assert full.exit_code, full
            assert (await box.run_command("echo alive")).stdout == "alive\n"

    run(main())


def test_files_in_device_folders_count_as_well(tier):
    async def main():
        async with sandbox(tier, disk_mb=4) as box:
            for folder in ("/dev", "/dev/shm", "/tmp", "/"):
                filled = await box.run_command(f"head -c 9000000 /dev/zero > {folder}/x")
                assert filled.exit_code, folder

    run(main())


def test_folders_count_and_may_be_deep(each_tier):
    landlock = each_tier == "landlock"
    nest = "for _ in range({0}): os.mkdir('{1}'); os.chdir('{1}')"
    # In memory, with bubblewrap, folders need no space and have no path of the host.
    limit = "disk" if landlock else ""

    async def limit_reached_by(box, *lines: str) -> str:
        # A limit ends it before the second sleep has ended.
        lines = ("import os, time", *lines, f"time.sleep({9 if landlock else 0})")
        await box.write_file(f"{box.workdir}/make.py", "\n".join(lines))
        return (await box.run_command("python3 make.py", timeout=20)).metrics["over_limit"]

    async def main():
        async with sandbox(each_tier) as box:
            # Deeper than Python recurses, then longer than a path can be.
            deep = nest.format(1200, "d"), "time.sleep(.2)", "exit()"
            assert await limit_reached_by(box, *deep) == ""
            assert await limit_reached_by(box, nest.format(20, 200 * "d")) == limit
        assert not landlock or not Path(box.workdir).exists()
        async with sandbox(each_tier, disk_mb=1) as box:
            many = "for i in range(400): os.mkdir(str(i))"
            assert await limit_reached_by(box, many) == limit

    run(main())


def test_commands_run_at_once_and_cancelling_one_ends_it(tier):
    async def main():
        async with sandbox(tier) as box:
            # Each command ends when all have started.
            meet = "until [ $(ls | wc -l) = 5 ]; do sleep 0.02; done"
            results = await asyncio.gather(
                *(box.run_command(f"touch {i}; {meet}; echo {i}") for i in range(5))
            )
            assert [r.stdout for r in results] == [f"{i}\n" for i in range(5)]
            task = asyncio.create_task(box.run_command(SLEEP))
            await asyncio.to_thread(_wait_for_sleepers, 1)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await asyncio.to_thread(_wait_for_sleepers, 0)
            assert (await box.run_command("echo alive")).stdout == "alive\n"

    run(main())


def test_a_sandbox_that_is_gone_says_so(tier):
    async def main():
        box = await LocalSandbox.create(60, tier=tier)
        running = asyncio.create_task(box.run_command("sleep 30"))
        await asyncio.sleep(0.2)
        box._inside.process.kill()
        with pytest.raises(SandboxTerminatedError):
            await running
        with pytest.raises(SandboxTerminatedError):
            await box.send_heartbeat()
        await box.cleanup()
        await box.cleanup()
        short = await LocalSandbox.create(0.3, tier=tier)
        # The lifetime does not pass during a command.
        assert (await short.run_command("sleep 0.5; echo done")).stdout == "done\n"
        await asyncio.sleep(0.4)
        with pytest.raises(SandboxTerminatedError, match="lifetime"):
            await short.run_command("true")

    run(main())


_PARENT = """
import asyncio, sys, threading
from tinker_cookbook.sandbox import LocalSandbox
async def main():
    box = await LocalSandbox.create(tier=sys.argv[1])
    print(box.workdir, flush=True)
    await box.run_command(f"setsid {sys.argv[2]} & {sys.argv[2]}")
# The sandbox is made on a thread that ends: it must outlive the thread, but not the program.
thread = threading.Thread(target=lambda: asyncio.run(main()))
thread.start()
thread.join()
"""


# Other runs of these tests on this machine sleep for other times.
SLEEP = f"sleep 9{os.getpid()}"


def _sleepers() -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += path.read_bytes() == SLEEP.replace(" ", "\0").encode() + b"\0"
    return found


def _wait_for_sleepers(number: int) -> None:
    deadline = time.monotonic() + 30
    while _sleepers() != number and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _sleepers() == number


def test_kill_9_of_the_program_leaves_nothing(each_tier):
    program = subprocess.Popen(
        [sys.executable, "-c", _PARENT, each_tier, SLEEP], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    folder = program.stdout.readline().strip()
    _wait_for_sleepers(2)
    program.kill()
    program.wait()
    _wait_for_sleepers(0)
    deadline = time.monotonic() + 30
    while Path(folder).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(folder).exists()


def test_without_any_tier_nothing_runs(monkeypatch):
    launch.tier_problems.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(launch.kernel, "landlock_version", lambda: 3)
    try:
        with pytest.raises(SandboxUnavailableError, match="apt-get install bubblewrap") as error:
            run(LocalSandbox.create())
        assert "bwrap is not installed" in str(error.value)
        assert "Landlock version 3" in str(error.value)
    finally:
        launch.tier_problems.cache_clear()
