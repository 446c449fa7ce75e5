"""Starts the process inside a sandbox, with the strongest isolation that this machine supports.

Tiers, strongest first:

* ``bubblewrap``: namespaces. The program sees a read-only runtime, an empty file system in memory,
  no network and no other process.
* ``landlock``: the kernel's Landlock, seccomp and rlimits. The program sees the same files as
  read-only, one folder to write into, and cannot make a socket or signal another program.

Without either, ``SandboxUnavailableError`` names what to install. Nothing ever runs unisolated.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, SandboxError, nearest
from tinker_cookbook.sandbox.inside import channel, folders, kernel
from tinker_cookbook.sandbox.sandbox_interface import SandboxUnavailableError

TIER_VARIABLE = "TINKER_COOKBOOK_SANDBOX_TIER"
WORKSPACE = "/workspace"
INSTALL = (
    "Install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install "
    "bubblewrap), or use a Linux kernel from 6.12 on with Landlock"
)
_START_SECONDS = 20.0
_INSIDE = Path(__file__).parent / "inside"
# Modules that run in a sandbox, each after those that it imports.
_MODULES = {
    "agent": "channel kernel folders agent",
    "zygote": "channel kernel folders values budget remote standard_files roles zygote",
}
# Host folders of the system's programs and libraries.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
_SETTINGS = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "mime.types", "localtime")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Capabilities that process 1 of a sandbox keeps if root started it: setuid, kill, mount.
_CAPABILITIES = ("SETUID", "SETGID", "KILL", "SYS_ADMIN", "DAC_READ_SEARCH")

_BOOT = """
import json, os, socket, sys, types
with os.fdopen(int(sys.argv[1]), "rb") as file:
    boot = json.load(file)
control = socket.socket(fileno=int(sys.argv[2]))
sys.argv[1:] = []
package = "tinker_cookbook.sandbox.inside"
for name in ("tinker_cookbook", "tinker_cookbook.sandbox", package):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, text in boot["sources"]:
    module = sys.modules[package + "." + name] = types.ModuleType(package + "." + name)
    setattr(sys.modules[package], name, module)
    exec(compile(text, "<" + name + ">", "exec"), module.__dict__)
module.main(control, boot["settings"])
"""


class SandboxTier(StrEnum):
    """How programs are isolated."""

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of the programs in a sandbox."""

    memory_mb: int = 1024
    """Address space of each process, and memory of all processes together."""
    disk_mb: int = 512
    """Size of all files together. With tier bubblewrap they are in memory and count there too."""
    file_mb: int = 256
    """Size of one file."""
    processes: int = 128
    """Processes and threads that exist at once."""
    cpu_seconds: int = 600
    """CPU time of each process."""
    output_bytes: int = 128 * 1024
    """Maximum bytes that are kept of stdout, and of stderr."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigurationError(f"{name}: {value!r} is not at least 1")


@dataclass
class SandboxProcess:
    """The process inside a sandbox, with the socket for its requests."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    tier: SandboxTier
    work_folder: str
    """Where programs may write."""
    python: str
    """Python interpreter that programs find."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: Any, descriptors: list[int]) -> None:
        """Sends a request and closes this process's copies of the descriptors.

        Raises:
            OSError: The sandbox has ended.
        """
        try:
            with self.lock:
                channel.send(self.control, message, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def stop(self) -> None:
        """Ends the sandbox with everything in it; safe to call twice."""
        # The process inside cleans up and ends when this socket closes.
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.tier is SandboxTier.LANDLOCK:
            # The process inside does this too, unless it was killed.
            folders.remove_folder(self.work_folder)


def start(
    module: str,
    limits: SandboxLimits,
    tier: SandboxTier | str | None = None,
    *,
    settings: dict[str, Any] | None = None,
    read_only: tuple[str, ...] = (),
    writable_root: bool = True,
) -> SandboxProcess:
    """Starts ``inside/<module>.py`` in a new sandbox and waits until it takes requests.

    Args:
        module: ``agent`` or ``zygote``.
        limits: Its limits.
        tier: None: the strongest that works on this machine.
        settings: Further settings for the module.
        read_only: Further host paths that programs can read, at the same place.
        writable_root: Whether files can be written anywhere, or only where the module allows it.

    Raises:
        SandboxUnavailableError: No tier, or not the requested one, works on this machine.
        SandboxError: The sandbox did not start.
    """
    chosen = parse_tier(tier)
    if sys.platform != "linux":
        raise SandboxUnavailableError(_refusal({SandboxTier.BUBBLEWRAP: "needs Linux"}))
    python = _interpreter(chosen)
    # A different user for each sandbox, so that process limits and signals do not mix.
    uid = random.SystemRandom().randrange(70_000, 2_000_000_000) if os.getuid() == 0 else 0
    landlock = chosen is SandboxTier.LANDLOCK
    folder = tempfile.mkdtemp(prefix="tinker-sandbox-") if landlock else WORKSPACE
    if landlock and uid:
        os.chown(folder, uid, uid)
    boot = {
        "uid": uid,
        "landlock": landlock,
        "limits": {
            "memory": limits.memory_mb << 20,
            "file_size": limits.file_mb << 20,
            "cpu_seconds": limits.cpu_seconds,
            "processes": limits.processes,
        },
        "memory": limits.memory_mb << 20,
        "disk": limits.disk_mb << 20,
        "readable": [*_runtime_paths(python), *read_only],
        "writable": [folder],
        **(settings or {}),
    }
    ours, theirs = socket.socketpair()
    sources = memory_file(json.dumps({"sources": _sources(module), "settings": boot}).encode())
    command = [python, "-s", "-B", "-c", _BOOT, str(sources), str(theirs.fileno())]
    accounts: list[int] = []
    if not landlock:
        accounts = _accounts(uid)
        command = _bubblewrap(python, limits, accounts, read_only, writable_root) + command
    errors = os.memfd_create("errors")
    try:
        process = _spawn(command, [sources, theirs.fileno(), *accounts], errors)
    except OSError as error:
        ours.close()
        os.close(errors)
        raise SandboxError(f"sandbox: {command[0]} did not start: {error}") from error
    finally:
        theirs.close()
        for descriptor in (sources, *accounts):
            os.close(descriptor)
    started = SandboxProcess(process, ours, chosen, folder, python)
    try:
        _wait_until_ready(started, errors)
    finally:
        os.close(errors)
    return started


def _wait_until_ready(started: SandboxProcess, errors: int) -> None:
    started.control.settimeout(_START_SECONDS)
    try:
        channel.receive(started.control)
    except (EOFError, OSError, ValueError) as error:
        started.stop()
        output = os.pread(errors, 4000, 0).decode(errors="replace").strip()
        raise SandboxError(
            f"sandbox: the process in it did not start: {output or error}"
        ) from error
    started.control.settimeout(None)


def _bubblewrap(
    python: str,
    limits: SandboxLimits,
    accounts: list[int],
    read_only: tuple[str, ...],
    writable_root: bool,
) -> list[str]:
    command = ["bwrap", "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"]
    for namespace in ("ipc", "pid", "net", "uts", "cgroup-try"):
        command += [f"--unshare-{namespace}"]
    if os.getuid() == 0:
        # Process 1 changes to another user itself; a user namespace has only one.
        command += ["--cap-drop", "ALL"]
    else:
        command += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    kept = _CAPABILITIES if os.getuid() == 0 else ("SYS_ADMIN",)
    for name in kept:
        command += ["--cap-add", f"CAP_{name}"]
    size = str(limits.disk_mb << 20)
    command += ["--perms", "1777" if writable_root else "0755", "--size", size, "--tmpfs", "/"]
    for path in _SYSTEM:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    folders = [Path(path) for path in (*_runtime_paths(python), *read_only)]
    for path in (p for p in folders if not str(p).startswith(_SYSTEM)):
        # bubblewrap would make the folders above readable by root only.
        for parent in reversed(path.parents[:-1]):
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", str(path), str(path)]
    command += ["--perms", "0755", "--dir", "/etc"]
    for name in _SETTINGS:
        command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name, descriptor in zip(("passwd", "group"), accounts, strict=True):
        command += ["--perms", "0444", "--ro-bind-data", str(descriptor), f"/etc/{name}"]
    command += ["--dev", "/dev"]
    if writable_root:
        command += ["--size", size, "--perms", "1777", "--tmpfs", "/dev/shm"]
    # Otherwise a program could fill /dev, which has no size limit.
    command += ["--remount-ro", "/dev"]
    for folder in ("/tmp", WORKSPACE, "/home", "/home/sandbox"):
        command += ["--perms", "1777", "--dir", folder]
    command += ["--proc", "/proc"] if writable_root else ["--remount-ro", "/"]
    command += ["--clearenv", "--chdir", "/"]
    for name, value in environment(python, WORKSPACE).items():
        command += ["--setenv", name, value]
    return [*command, "--"]


def environment(python: str | None, folder: str, home: str = "/home/sandbox") -> dict[str, str]:
    """Returns the environment variables of programs in a sandbox."""
    folders = [str(Path(python).parent)] if python else []
    path = [*folders, *(f"{p}/{k}" for p in ("/usr/local", "/usr") for k in ("bin", "sbin"))]
    return {
        "PATH": ":".join([*path, "/bin", "/sbin"]),
        "HOME": home,
        "TMPDIR": "/tmp" if folder == WORKSPACE else folder,
        "LANG": "C.UTF-8",
        "USER": "sandbox",
        "PYTHONDONTWRITEBYTECODE": "1",
        # A fixed hash seed: the order of sets is the same in every run.
        "PYTHONHASHSEED": "0",
        **_ONE_THREAD,
    }


def _sources(module: str) -> list[tuple[str, str]]:
    names = _MODULES[module].split()
    return [(name, (_INSIDE / f"{name}.py").read_text(encoding="utf-8")) for name in names]


def memory_file(data: bytes) -> int:
    """Returns the descriptor of a file in memory with ``data``, which nobody can change."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _accounts(uid: int) -> list[int]:
    number = uid or 1000
    user = f"sandbox:x:{number}:{number}::/home/sandbox:/bin/bash\n"
    return [
        memory_file(f"root:x:0:0::/root:/bin/sh\n{user}".encode()),
        memory_file(f"root:x:0:\nsandbox:x:{number}:\n".encode()),
    ]


# Python inside ----------------------------------------------------------------------------------


@functools.cache
def _interpreter(tier: SandboxTier) -> str:
    """Returns the interpreter behind the virtual environment, or the system's Python."""
    own = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    # Root drops its privileges, and with Landlock the paths stay: other users must be able to read.
    hidden = tier is SandboxTier.LANDLOCK and os.getuid() == 0
    if not hidden or all(
        p.stat().st_mode & 0o005 == 0o005 for p in (Path(own), *Path(own).parents)
    ):
        return own
    system = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin")
    if system is None:
        raise SandboxUnavailableError(
            f"sandbox: only root can read {own}, and there is no /usr/bin/python3. Install "
            "bubblewrap (apt-get install bubblewrap) or the system's python3"
        )
    return os.path.realpath(system)


def _runtime_paths(python: str) -> list[str]:
    own = str(Path(python).parents[1])
    paths = [path for path in _SYSTEM if os.path.exists(path)]
    paths += [] if own.startswith(_SYSTEM) else [own]
    return paths + [f"/etc/{name}" for name in _SETTINGS if os.path.exists(f"/etc/{name}")]


# Starting processes -----------------------------------------------------------------------------


def _new_spawner() -> None:
    # The kernel ends ``--die-with-parent`` processes with the *thread* that started them, so one
    # thread, which lives as long as the program, starts all of them.
    global _spawner
    _spawner = ThreadPoolExecutor(1, "sandbox-spawner")


_spawner: ThreadPoolExecutor
_new_spawner()
os.register_at_fork(after_in_child=_new_spawner)  # a child process does not have the thread


def _spawn(command: list[str], descriptors: list[int], errors: int) -> subprocess.Popen[bytes]:
    return _spawner.submit(
        subprocess.Popen,
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=descriptors,
        env={
            "LANG": "C.UTF-8",
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "PYTHONHASHSEED": "0",
            **_ONE_THREAD,
        },
        start_new_session=True,
    ).result()


# Which tier -------------------------------------------------------------------------------------


def parse_tier(tier: SandboxTier | str | None) -> SandboxTier:
    """Returns the tier of the given name; None: the strongest that works here.

    Raises:
        ConfigurationError: There is no such tier.
    """
    if tier is None:
        return available_tier()
    try:
        return SandboxTier(tier)
    except ValueError:
        known = [str(name) for name in SandboxTier]
        raise ConfigurationError(
            f"tier: got {tier!r}, expected one of {', '.join(known)}{nearest(tier, known)}"
        ) from None


def available_tier() -> SandboxTier:
    """Returns the strongest tier that works here, tried once in each process.

    The environment variable TINKER_COOKBOOK_SANDBOX_TIER overrides the choice.

    Raises:
        SandboxUnavailableError: No tier works. The message explains why and what to install.
    """
    if wanted := os.environ.get(TIER_VARIABLE):
        tier = parse_tier(wanted)
        if problem := tier_problems()[tier]:
            raise SandboxUnavailableError(_refusal({tier: problem}))
        return tier
    problems = tier_problems()
    for tier, problem in problems.items():
        if not problem:
            return tier
    raise SandboxUnavailableError(_refusal(problems))


def _refusal(problems: dict[SandboxTier, str]) -> str:
    reasons = "; ".join(f"{tier}: {problem}" for tier, problem in problems.items())
    return f"sandbox: this machine cannot isolate programs ({reasons}). {INSTALL}"


@functools.cache
def tier_problems() -> dict[SandboxTier, str]:
    """Returns why each tier does not work here; an empty text where it works."""
    return {tier: _problem(tier) for tier in SandboxTier}


def _problem(tier: SandboxTier) -> str:
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    if not kernel.seccomp_supported():
        return "needs an x86-64 or arm64 processor"
    if tier is SandboxTier.BUBBLEWRAP and shutil.which("bwrap") is None:
        return "the program bwrap is not installed"
    # Before version 6, a program could signal the other processes of its user.
    if tier is SandboxTier.LANDLOCK and kernel.landlock_version() < 6:
        return f"the kernel has Landlock version {kernel.landlock_version()}, version 6 is needed"
    try:
        start("agent", SandboxLimits(memory_mb=256, disk_mb=8), tier).stop()
    except (SandboxError, OSError) as error:
        return str(error)
    return ""
