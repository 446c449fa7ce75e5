"""Roles of a grader's process: run a program, serve its functions, or run the tests."""

from __future__ import annotations

import ast
import atexit
import builtins
import importlib
import os
import socket
import sys
import threading
import time
import traceback
import types
from typing import Any

from tinker_cookbook.sandbox.inside import channel, remote, values
from tinker_cookbook.sandbox.inside.remote import (
    Connection,
    ProgramLostError,
    Remote,
    UnsupportedValueError,
)

_MESSAGE_CHARACTERS = 500


def _describe(error: BaseException) -> str:
    """Describes an exception in one line; its text may come from a program."""
    try:
        text = str(error)
    except BaseException:
        text = ""
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:_MESSAGE_CHARACTERS]


def _load(code: str, name: str) -> types.ModuleType:
    """Runs the program as module ``name`` and registers it in ``sys.modules``."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(code, "solution.py", "exec"), module.__dict__)
    return module


class StdioProgram:
    """Runs a program with a text as its input; descriptors are its stdout and its stderr."""

    def __init__(self, job: dict[str, Any], descriptors: list[int]) -> None:
        self._code = job["code"]
        stdin = os.memfd_create("stdin")
        data = memoryview(job["stdin"].encode())
        while data:
            data = data[os.write(stdin, data) :]
        os.lseek(stdin, 0, os.SEEK_SET)
        for number, descriptor in enumerate((stdin, *descriptors)):
            os.dup2(descriptor, number)
        self.kept: list[int] = []

    def run(self) -> int:
        """Returns the exit status that the interpreter would have."""
        status = 0
        try:
            _load(self._code, "__main__")
        except SystemExit as error:
            status = _exit_status(error)
        except BaseException as error:
            # The traceback leaves out the frames of this file.
            frames = error.__traceback__.tb_next if error.__traceback__ else None
            frames = frames.tb_next if frames else None
            traceback.print_exception(type(error), error, frames, limit=-20)
            status = 1
        # Only these steps of the interpreter's exit; the others take longer than the program.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        return status


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


class CalledProgram:
    """Loads a program and serves calls of its functions over the descriptor."""

    def __init__(self, job: dict[str, Any], descriptors: list[int]) -> None:
        self._job = job
        self._peer = socket.socket(fileno=descriptors[0])
        self.kept = descriptors

    def run(self) -> int:
        """Returns 0 when the tests have ended."""
        seconds = self._job["call_seconds"]
        try:
            with remote._Timer(seconds):
                module = _load(self._job["code"], "solution")
        except remote._Interrupt:
            channel.send(self._peer, {"failed": "it did not load in time"})
            return 0
        except BaseException as error:
            channel.send(self._peer, {"failed": _describe(error)})
            return 0
        channel.send(self._peer, {"names": [n for n in module.__dict__ if type(n) is str]})
        Connection(self._peer, names=module.__dict__, call_seconds=seconds).serve()
        return 0


class Tests:
    """Runs tests against a program in another process.

    Descriptors: the socket to that process, and the private one on which results are reported.
    Each report carries the token of the job, which exists in this process and in the host only.
    """

    def __init__(self, job: dict[str, Any], descriptors: list[int]) -> None:
        self._job = job
        self._peer = socket.socket(fileno=descriptors[0])
        self._host = socket.socket(fileno=descriptors[1])
        self.kept = descriptors
        self._program_error = ""
        self._known: set[str] = set()  # globals of the program
        self._namespace: dict[str, Any] = {"__name__": "tests"}

    def _report(self, **fields: Any) -> None:
        channel.send(self._host, {"token": self._job["token"], **fields})

    def run(self) -> int:
        """Reports the result of each test, then that all are done."""
        job = self._job
        self._known = self._wait_for_program()
        self._program = Connection(self._peer, names=None, call_seconds=job["call_seconds"])
        failed = self._program_error or self._run_setup()
        for index, test in enumerate(job["tests"]):
            started = time.monotonic()
            message = failed or self._program_error or self._run_test(test)
            if message and job["stop_at_failure"]:
                failed = failed or "not run: an earlier test failed"
            self._report(index=index, message=message, seconds=time.monotonic() - started)
        self._program.close()
        self._report(done=True, lost=self._program_error)
        return 0

    def _run_setup(self) -> str:
        """Runs ``setup``; returns why it failed, empty if it did not."""
        tree = ast.parse(self._job["setup"])
        try:
            self._execute(tree)
        except BaseException as error:
            if not _free_names(tree):
                # ``setup`` does not use the program, so the program did not cause the error.
                self._report(setup_error=_describe(error))
            return f"setup: {_describe(error)}"
        # ``setup`` may define functions of the same names, as the prompts of HumanEval do.
        for name in self._job["entry_points"] or []:
            self._namespace[name] = Remote(self._program, name)
        return ""

    def _wait_for_program(self) -> set[str]:
        """Returns the globals of the program, once it is loaded."""
        self._peer.settimeout(remote.answer_seconds(self._job["call_seconds"]))
        try:
            loaded, _ = channel.receive(self._peer, remote.MAX_VALUE_BYTES)
            if "failed" in loaded:
                self._program_error = str(loaded["failed"])[:_MESSAGE_CHARACTERS]
                return set()
            return {str(name) for name in loaded["names"]}
        except TimeoutError:
            self._program_error = "it did not load in time"
        except (OSError, EOFError):
            self._program_error = "the program ended while it was loaded"
        except (ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
            self._program_error = f"the program sent no valid message: {type(error).__name__}"
        return set()

    def _run_test(self, test: dict[str, Any]) -> str:
        """Returns why the test failed; empty if it passed."""
        try:
            if "function" in test:
                return self._call_and_compare(test)
            self._execute(ast.parse(test["code"]))
        except ProgramLostError as error:
            self._program_error = str(error)
            return self._program_error
        except UnsupportedValueError as error:
            if not self._program.answered:
                # The value cannot come from the program, so the test is at fault.
                self._report(test_error=str(error))
            return str(error)
        except BaseException as error:
            return _describe(error)
        return ""

    def _execute(self, tree: ast.Module) -> None:
        """Runs code of the tests; names that it does not define become those of the program."""
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        called = {function.id for function in calls if isinstance(function, ast.Name)}
        for name in _free_names(tree) - self._namespace.keys():
            bound = self._bind(name, name in called)
            if bound is not None:
                self._namespace[name] = bound
        exec(compile(tree, "test.py", "exec"), self._namespace)

    def _bind(self, name: str, called: bool) -> Any:
        """Returns the object that a free name refers to."""
        entry_points = self._job["entry_points"]
        if name in (entry_points or ()):
            return Remote(self._program, name)
        # If a test forgot an import, the name refers to the library, not to the program. But a
        # module cannot be called.
        if name in sys.stdlib_module_names and not (called and name in self._known):
            return importlib.import_module(name)
        if entry_points is None and (name in self._known or "Solution" in self._known):
            return Remote(self._program, name)
        return None

    def _call_and_compare(self, test: dict[str, Any]) -> str:
        def refuse(content: Any) -> Any:
            raise ValueError("the host sends plain values only")

        arguments = values.decode(test["arguments"], refuse)
        expected = values.decode(test["expected"], refuse)
        got = self._program.request("call", test["function"], *arguments)
        if _as_lists(got) == _as_lists(expected):
            return ""
        return f"wrong result {got!r}"[:_MESSAGE_CHARACTERS]


def _as_lists(value: Any) -> Any:
    """Converts tuples to lists: data sets store expected results as JSON, without tuples."""
    if isinstance(value, (list, tuple)):
        return [_as_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_lists(item) for key, item in value.items()}
    return value


def _free_names(tree: ast.Module) -> set[str]:
    """Names that the code reads and that neither it nor Python defines."""
    read, bound = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    return read - bound - set(dir(builtins))
