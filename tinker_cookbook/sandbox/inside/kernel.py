"""Restricts the current process: namespaces, Landlock, seccomp, rlimits, user id.

The calls go to the C library through ctypes, so that nothing has to be installed. Numbers come
from the kernel's headers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import struct
import time
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
_CLONE_THREAD = 0x00010000
# Any of the namespace flags: mount, cgroup, uts, ipc, user, pid, net, time.
_CLONE_NEW_ANY = 0x7E020080

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_LAST_CAPABILITY = 63

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def _prctl(option: int, *values: int) -> int:
    arguments = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return _libc.prctl(ctypes.c_int(option), *arguments)


def unshare(flags: int) -> None:
    """Moves the process, or its next children, into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def mount_tmpfs(path: str, size: int, files: int) -> None:
    """Mounts an empty folder in memory of at most ``size`` bytes and ``files`` files."""
    options = f"size={size},nr_inodes={files},mode=1777".encode()
    nosuid_nodev = 2 | 4
    _check(_libc.mount(b"tmpfs", path.encode(), b"tmpfs", nosuid_nodev, options), "mount")


def mount_again(path: str, target: str) -> None:
    """Makes a folder appear at a second place."""
    bind = ctypes.c_ulong(4096)
    _check(_libc.mount(path.encode(), target.encode(), None, bind, None), "mount")


def share_heap() -> None:
    """Makes all threads allocate from one heap.

    Otherwise glibc reserves 64 MB of address space for each thread, and the limit of memory allows
    twelve threads.
    """
    with contextlib.suppress(AttributeError):  # another C library
        _libc.mallopt(-8, 1)  # M_ARENA_MAX


def protect_process() -> None:
    """Hides the memory of this process from others of the same user."""
    _check(_prctl(_PR_SET_DUMPABLE, 0), "prctl(PR_SET_DUMPABLE)")


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that forked it ends."""
    _check(_prctl(_PR_SET_PDEATHSIG, 9), "prctl(PR_SET_PDEATHSIG)")


def adopt_orphans() -> None:
    """Makes processes below this one its children when their own parent ends."""
    _check(_prctl(_PR_SET_CHILD_SUBREAPER, 1), "prctl(PR_SET_CHILD_SUBREAPER)")


def limit_resources(limits: dict[str, int]) -> None:
    """Sets rlimits: keys ``memory``, ``file_size`` (bytes), ``cpu_seconds``, ``processes``…"""
    # At the limit, an allocation in the program raises MemoryError; the process is not killed.
    wanted = {
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_FSIZE: limits["file_size"],
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_NOFILE: limits.get("open_files", 256),
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    if "stack" in limits:
        wanted[resource.RLIMIT_STACK] = limits["stack"]
    for name, value in wanted.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def become_user(uid: int) -> None:
    """Changes from root to user ``uid``: rlimits on processes do not apply to root."""
    if os.getuid() == 0 and uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
    """Drops all capabilities, also for programs that are started later."""
    _prctl(_PR_CAP_AMBIENT, 4)  # clear all
    for capability in range(_LAST_CAPABILITY + 1):
        _prctl(_PR_CAPBSET_DROP, capability)  # fails for numbers the kernel does not know
    header = struct.pack("Ii", 0x20080522, 0)
    _check(_libc.capset(header, bytes(24)), "capset")
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "prctl(PR_SET_NO_NEW_PRIVS)")


def restrict_process(
    settings: dict[str, Any],
    limits: dict[str, int],
    uid: int,
    writable: list[str],
    *,
    forks: bool,
    sockets: bool,
) -> None:
    """Takes from this process what ``settings`` of a sandbox and the limits do not allow."""
    limit_resources(limits)
    become_user(uid)
    die_with_parent()
    if settings["landlock"]:
        restrict_files(settings["readable"], writable)
    else:
        drop_capabilities()
    filter_system_calls(forks=forks, sockets=sockets)


def exit_report(code: int, usage: resource.struct_rusage, started: float) -> dict[str, Any]:
    """Returns the exit status and the costs of a process that ``os.wait4`` has found."""
    exit_code = os.waitstatus_to_exitcode(code)
    return {
        "exit_code": exit_code if exit_code >= 0 else 128 - exit_code,
        "seconds": time.monotonic() - started,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "memory_bytes": usage.ru_maxrss * 1024,
    }


def reap_children() -> None:
    """Collects the exit status of children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


# Landlock ---------------------------------------------------------------------------------------

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14


def _syscall(number: int, *values: object) -> int:
    return _libc.syscall(ctypes.c_long(number), *values)


def landlock_version() -> int:
    """Returns Landlock's ABI version; 0 where the kernel has none."""
    return max(0, _syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def restrict_files(readable: list[str], writable: list[str]) -> None:
    """Restricts the process to these folders and files; blocks signals and TCP to the outside.

    Args:
        readable: Paths whose files can be read and executed.
        writable: Paths with all rights, except device files.
    """
    # All rights of version 6 of Landlock; TCP bind and connect; abstract sockets and signals.
    rights = (1 << 16) - 1
    attributes = struct.pack("QQQ", rights, 3, 3)
    ruleset = _check(
        _syscall(_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(24), ctypes.c_uint(0)),
        "landlock_create_ruleset",
    )
    devices = ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/full"]
    read_only = _EXECUTE | _READ_FILE | _READ_DIR
    # Bit 6 makes character devices, bit 11 block devices.
    all_rights = rights & ~(1 << 6 | 1 << 11)
    for paths, access in (
        (readable, read_only),
        (devices, _READ_FILE | _WRITE_FILE),
        (writable, all_rights),
    ):
        for path in paths:
            _add_path(ruleset, path, access)
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "prctl(PR_SET_NO_NEW_PRIVS)")
    _check(
        _syscall(_LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0)),
        "landlock_restrict_self",
    )
    os.close(ruleset)


def _add_path(ruleset: int, path: str, access: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        access &= _FILE_RIGHTS
    rule = struct.pack("=Qi", access, opened)
    _check(
        _syscall(
            _LANDLOCK_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0)
        ),
        f"landlock_add_rule {path}",
    )
    os.close(opened)


# seccomp ----------------------------------------------------------------------------------------

# Name: (number on x86-64, number on arm64); None where the architecture does not have the call.
_DENIED: dict[str, tuple[int | None, int]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "quotactl": (179, 60), "syslog": (103, 116), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "sethostname": (170, 161), "setdomainname": (171, 162), "fanotify_init": (300, 262),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "vhangup": (153, 58),
}  # fmt: skip
# Memory that RLIMIT_AS does not count: shared segments, queues, and files without a name.
_UNCOUNTED_MEMORY = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_SOCKET = (41, 198)
_PRLIMIT = (302, 261)
_FORKS_X86 = (57, 58)  # fork, vfork

_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_ABOVE, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38


def seccomp_supported() -> bool:
    """Whether the filter below supports this processor's system calls."""
    return platform.machine() in _ARCHITECTURES


def filter_system_calls(*, forks: bool, sockets: bool) -> None:
    """Makes dangerous system calls fail with EPERM, for this process and all it starts.

    Args:
        forks: Whether processes may be created. Threads are always allowed.
        sockets: Whether sockets may be created. Socket pairs are always allowed.
    """
    column, architecture = _ARCHITECTURES[platform.machine()]
    denied = {numbers[column] for numbers in (_DENIED | _UNCOUNTED_MEMORY).values()}
    if not sockets:
        denied.add(_SOCKET[column])
    if not forks and column == 0:
        denied.update(_FORKS_X86)
    refuse = (_RETURN, 0, 0, _ERRNO | _EPERM)
    # A jump skips as many instructions as its second field has (if true) or its third (if not).
    program = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        # Numbers from 2^30 are x32 calls, which have another table.
        (_JUMP_ABOVE, 0, 1, 1 << 30),
        refuse,
    ]
    for number in sorted(n for n in denied if n is not None):
        program += [(_JUMP_EQUAL, 0, 1, number), refuse]
    # A process may limit itself only, not others of its user.
    program += [
        (_JUMP_EQUAL, 0, 4, _PRLIMIT[column]),
        (_LOAD, 0, 0, 16),
        (_JUMP_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        refuse,
    ]
    # The C library then falls back to clone, and a filter can check the flags of clone.
    program += [(_JUMP_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    program += [
        (_JUMP_EQUAL, 1, 0, _CLONE[column]),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, 16),
        (_JUMP_SET, 0, 1, _CLONE_NEW_ANY),
        refuse,
    ]
    if not forks:
        program += [(_JUMP_SET, 1, 0, _CLONE_THREAD), refuse]
    program.append((_RETURN, 0, 0, _ALLOW))
    _install_filter(program)


def _install_filter(program: list[tuple[int, int, int, int]]) -> None:
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "prctl(PR_SET_NO_NEW_PRIVS)")
    head = ctypes.create_string_buffer(header, len(header))
    _check(_prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(head)), "prctl(PR_SET_SECCOMP)")
