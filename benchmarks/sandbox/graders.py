"""Graders that are attacked: ours, and two that the field uses.

The other two run inside a sandbox, so that the attacks on them do no harm here.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from benchmarks.sandbox.attacks import CALL_TESTS, STDIN, STDOUT, Attack
from tinker_cookbook.sandbox import (
    LocalSandbox,
    PythonGrader,
    SandboxLimits,
    SandboxResult,
    StdioTest,
)

Scorer = Callable[[Attack], Awaitable[bool | None]]
"""Returns whether the grader gives an attack any score; None if it has no such problems."""

_SECONDS = 3

# The tests stand under the program, the exit status is the verdict.
_PLAIN = "{code}\n\n" + "\n".join(CALL_TESTS) + "\n"

# After the description of OpenAI's human-eval: the program and its tests run by exec in a child
# process in which some functions of the operating system are set to None; the child appends
# "passed" to a list of the parent if exec returns.
_REFERENCE = """
import builtins, contextlib, io, multiprocessing, os, shutil, signal, subprocess, sys

SECRET = sys.stdin.readline().strip()
PROGRAM = open("program.txt").read()
os.remove("program.txt")

def guard():
    import faulthandler
    faulthandler.disable()
    builtins.exit = builtins.quit = builtins.help = None
    for name in (
        "kill", "system", "putenv", "remove", "removedirs", "rmdir", "fchdir", "setuid", "fork",
        "forkpty", "killpg", "rename", "renames", "truncate", "replace", "unlink", "fchmod",
        "fchown", "chmod", "chown", "chroot", "lchown", "getcwd", "chdir",
    ):
        setattr(os, name, None)
    shutil.rmtree = shutil.move = shutil.chown = subprocess.Popen = None
    for name in ("ipdb", "joblib", "resource", "psutil", "tkinter"):
        sys.modules[name] = None

def child(result):
    def late(*_):
        raise TimeoutError
    guard()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            signal.signal(signal.SIGALRM, late)
            signal.setitimer(signal.ITIMER_REAL, 1)
            exec(PROGRAM, {})
            signal.setitimer(signal.ITIMER_REAL, 0)
        result.append("passed")
    except TimeoutError:
        result.append("timed out")
    except BaseException as error:
        result.append(f"failed: {error}")

if __name__ == "__main__":
    result = multiprocessing.Manager().list()
    process = multiprocessing.Process(target=child, args=(result,))
    process.start()
    process.join(2)
    if process.is_alive():
        process.kill()
    print(SECRET, result[0] if result else "timed out", flush=True)
    os._exit(0)
"""


def ours(grader: PythonGrader) -> Scorer:
    """The grader of this package."""

    async def score(attack: Attack) -> bool:
        tests = [StdioTest(STDIN, STDOUT)] if attack.stdio else list(CALL_TESTS)
        return (await grader.grade(attack.code, tests)).score > 0

    return score


def plain_exec() -> Scorer:
    """A file with the program and its tests, or input and expected output nearby."""

    async def score(attack: Attack) -> bool:
        if attack.stdio:
            files = {"program.py": attack.code, "input.txt": STDIN, "expected.txt": STDOUT}
            result = await _run(files, "python3 program.py < input.txt", _SECONDS)
            return result.stdout.split() == STDOUT.split()
        files = {"program.py": _PLAIN.format(code=attack.code)}
        result = await _run(files, "python3 program.py", _SECONDS)
        return result.exit_code == 0

    return score


def humaneval_reference() -> Scorer:
    """The reference grader of HumanEval, written after its description."""

    async def score(attack: Attack) -> bool | None:
        if attack.stdio:
            return None
        secret = secrets.token_hex(8)
        files = {"grader.py": _REFERENCE, "program.txt": _PLAIN.format(code=attack.code)}
        result = await _run(files, f"echo {secret} | python3 grader.py", 2 * _SECONDS)
        return f"{secret} passed" in result.stdout

    return score


async def _run(files: dict[str, str], command: str, seconds: int) -> SandboxResult:
    """Runs a command in a fresh sandbox with these files."""
    limits = SandboxLimits(memory_mb=512, disk_mb=32, file_mb=8, processes=64, cpu_seconds=10)
    box = await LocalSandbox.create(60, limits=limits)
    try:
        for name, text in files.items():
            await box.write_file(f"{box.workdir}/{name}", text)
        return await box.run_command(command, timeout=seconds)
    finally:
        await box.cleanup()
