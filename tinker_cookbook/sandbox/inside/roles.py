"""Roles of a grader's process: run a program, serve its functions, or run the tests."""

from __future__ import annotations

import ast
import builtins
import importlib
import linecache
import os
import resource
import socket
import sys
import threading
import time
import traceback
import types
from typing import Any

from tinker_cookbook.sandbox.inside import channel, remote, standard_files, values
from tinker_cookbook.sandbox.inside.budget import Budget, Interrupt
from tinker_cookbook.sandbox.inside.remote import (
    Connection,
    ProgramLostError,
    Remote,
    UnsupportedValueError,
)

_MESSAGE_CHARACTERS = 500
_MOST_DIGITS = 50_000
_FILE = "solution.py"  # the program in tracebacks


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
    # Only the process of the program converts integers of any length.
    sys.set_int_max_str_digits(0)
    _bound_stacks()
    code = code.removeprefix("\ufeff")
    # For ``inspect.getsource``.
    linecache.cache[_FILE] = (len(code), None, code.splitlines(keepends=True), _FILE)
    sys.argv[:] = [_FILE]
    module = types.ModuleType(name)
    module.__file__ = os.path.abspath(_FILE)
    sys.modules[name] = module
    exec(compile(code, _FILE, "exec", dont_inherit=True), module.__dict__)
    return module


def _bound_stacks() -> None:
    """Makes the stacks of threads fit into the memory.

    Programs ask for 512 MB to recurse deeply. Calls of Python functions need none of it.
    """
    most = resource.getrlimit(resource.RLIMIT_AS)[0] // 4
    set_size = threading.stack_size
    set_size(max(most // 32, 1 << 18))
    threading.stack_size = lambda size=0: set_size(min(size, most))


class StdioProgram:
    """Runs a program with a text as its input; descriptors are its stdout and its stderr."""

    def __init__(self, job: dict[str, Any], descriptors: list[int]) -> None:
        self._code = job["code"]
        standard_files.connect(job["stdin"], *descriptors)
        self.kept: list[int] = []

    def run(self) -> int:
        """Returns the exit status that the interpreter would have."""
        standard_files.open_outputs()
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
        standard_files.finish()
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
            with Budget(seconds):
                module = _load(self._job["code"], "solution")
        except Interrupt:
            channel.send(self._peer, {"failed": "it did not load in time"})
            return 0
        except BaseException as error:
            channel.send(self._peer, {"failed": _describe(error)})
            return 0
        names = {
            name: callable(item) for name, item in module.__dict__.items() if type(name) is str
        }
        channel.send(self._peer, {"names": names})
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
        # Globals of the program, and whether they can be called.
        self._known: dict[str, bool] = {}
        # Names in the tests that can only be values of the program: no built-in function is one.
        self._values: set[str] = set()
        self._namespace: dict[str, Any] = _Namespace(self)

    def _report(self, **fields: Any) -> None:
        channel.send(self._host, {"token": self._job["token"], **fields})

    def run(self) -> int:
        """Reports the result of each test, then that all are done."""
        job = self._job
        # More than the default, but a message with a result must not take long.
        sys.set_int_max_str_digits(_MOST_DIGITS)
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

    def value_of(self, name: str) -> Any:
        """Returns the value that a global of the program has now.

        Raises:
            KeyError: The name is not one of a value of the program.
        """
        if name not in self._values:
            raise KeyError(name)
        return self._program.request("value", name)

    def _wait_for_program(self) -> dict[str, bool]:
        """Returns the globals of the program, once it is loaded."""
        self._peer.settimeout(remote.answer_seconds(self._job["call_seconds"]))
        try:
            loaded, _ = channel.receive(self._peer, remote.MAX_VALUE_BYTES)
            if "failed" in loaded:
                self._program_error = str(loaded["failed"])[:_MESSAGE_CHARACTERS]
                return {}
            return {str(name): called is True for name, called in loaded["names"].items()}
        except TimeoutError:
            self._program_error = "it did not load in time"
        except (OSError, EOFError):
            self._program_error = "the program ended while it was loaded"
        except (
            ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError,
        ) as error:  # fmt: skip
            self._program_error = f"the program sent no valid message: {type(error).__name__}"
        return {}

    def _run_test(self, test: dict[str, Any]) -> str:
        """Returns why the test failed; empty if it passed."""
        self._program.start_test()
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
            elif name in self._known and self._job["entry_points"] is None:
                self._values.add(name)
        exec(compile(tree, "test.py", "exec", dont_inherit=True), self._namespace)

    def _bind(self, name: str, called: bool) -> Any:
        """Returns the function or class that a free name refers to; None for a value."""
        entry_points = self._job["entry_points"]
        if name in (entry_points or ()):
            return Remote(self._program, name)
        # If a test forgot an import, the name refers to the library, not to the program. But a
        # module cannot be called.
        if name in sys.stdlib_module_names and not (called and name in self._known):
            return importlib.import_module(name)
        if entry_points is None and self._known.get(name, "Solution" in self._known):
            return Remote(self._program, name)
        return None

    def _call_and_compare(self, test: dict[str, Any]) -> str:
        def refuse(content: Any) -> Any:
            raise ValueError("the host sends plain values only")

        arguments = values.decode(test["arguments"], refuse)
        expected = values.decode(test["expected"], refuse)
        got = self._program.request("__call__", test["function"], *arguments)
        if values.same_value(got, expected):
            return ""
        return f"wrong result {got!r}"[:_MESSAGE_CHARACTERS]


class _Namespace(dict[str, Any]):
    """Globals of the tests. A value of the program is looked up each time: it may have changed."""

    def __init__(self, tests: Tests) -> None:
        super().__init__(__name__="tests")
        self._tests = tests

    def __missing__(self, name: str) -> Any:
        return self._tests.value_of(name)


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
