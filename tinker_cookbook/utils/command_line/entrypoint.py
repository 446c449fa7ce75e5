"""Starts a program: parses ``key=value`` arguments into a config and prints errors as sentences."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import chz

from tinker_cookbook.exceptions import ConfigurationError, TinkerCookbookError
from tinker_cookbook.utils.command_line.arguments import parse_arguments
from tinker_cookbook.utils.command_line.programs import (
    alias_recipes,
    stdout_is_closed,
    with_recipes_of_folder,
)
from tinker_cookbook.utils.error_logs import where_raised
from tinker_cookbook.utils.notebooks import thread_class

__all__ = [
    "config_class_of",
    "parse_arguments",
    "program_takes",
    "run_entrypoint",
    "run_program",
    "run_to_end",
    "server_error_message",
]

T = TypeVar("T")

# What the SDK wraps around the message of a request that failed later.
_WRAPPED = re.compile(r"^Request failed: (.*) for self\.request_id=.*$", re.DOTALL)
# The SDK's errors for a server that does not answer.
UNREACHABLE = ("APIConnectionError", "APITimeoutError")
_INTERRUPTED, _TERMINATED = 130, 143  # the exit statuses that shells use
_signals: set[int] = set()


def server_error_message(error: BaseException) -> str | None:
    """Returns the message of a server's refusal, or the whole error if there is none.

    Errors of other kinds give ``None``. The SDK's errors are recognised by their attributes, since
    the SDK may not be imported.
    """
    # The SDK wraps the 404 of a result that is gone, as after a restart of the server.
    while error.__cause__ is not None and str(error).startswith("Error retrieving result"):
        error = error.__cause__
    if type(error).__module__.partition(".")[0] != "tinker":
        return None
    if type(error).__name__ in UNREACHABLE:
        return "the server does not answer, after retries for minutes"
    # Statuses 4xx are refusals whose message is for the user; others keep their traceback.
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and 400 <= status < 500:
        body = getattr(error, "body", None)
        detail = body.get("detail") if isinstance(body, dict) else None
        return detail if isinstance(detail, str) else str(error)
    if str(getattr(error, "category", None)) == "user":
        return _WRAPPED.sub(r"\1", str(error))
    return None


def run_entrypoint(main: Callable[[Any], Any]) -> None:
    """Parses the command line into the config of ``main``, and runs ``main``.

    ``--help`` lists the keys; the error for a misspelt key names the nearest valid one. Errors of
    this package, and requests that a Tinker server refuses, end the program with their message and
    exit code 1, Ctrl-C with 130, SIGTERM with 143; other errors keep their traceback.
    """

    def program() -> Any:
        # `python -m NAME` runs the module as __main__. Its config must be of the class that other
        # programs import, so the module is imported again under its own name.
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        run = main
        if main.__module__ == "__main__" and spec and not spec.name.endswith("__main__"):
            run = getattr(importlib.import_module(spec.name), main.__name__)
        config_class = config_class_of(run)
        assert config_class is not None, f"{run.__module__}.{run.__name__} takes no config"
        return run(parse_arguments(config_class, sys.argv[1:]))

    run_program(program)


def run_program(program: Callable[[], Any]) -> None:
    """Calls ``program``, awaits its result, and exits like ``run_entrypoint``.

    With torchrun, only rank 0 calls it; the other ranks serve its engine.
    """
    try:
        _end_by_sigterm_as_by_ctrl_c()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            from tinker_cookbook.engine.processes import join

            join()
        alias_recipes()
        # Called outside of an event loop: ``--help`` and parse errors need none.
        result = program()
        if inspect.isawaitable(result):
            run_to_end(result)
        _flush()
    except SystemExit:
        _flush()
        raise
    except KeyboardInterrupt:
        # A normal exit would wait for the engine's thread, which may be in a long step. Its work is
        # lost; files are as safe as when the process is killed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_TERMINATED if terminated() else _INTERRUPTED)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and stdout_is_closed():
            sys.exit(1)  # the reader of a pipe has gone, as with `… | head`
        ours = isinstance(error, TinkerCookbookError) or _is_of_given_path(error)
        message = str(error) if ours else server_error_message(error)
        if message is None:
            raise
        said = with_recipes_of_folder(f"{type(error).__name__}: {message}")
        print(f"\n{said}", file=sys.stderr)
        sys.exit(1)


def _is_of_given_path(error: Exception) -> bool:
    """Returns whether a file error is about a path of the command line, or has its own sentence.

    Errors of other files keep their traceback: only it says which part of the program needs them.
    """
    if not isinstance(error, OSError) or error.filename is None:
        return isinstance(error, FileNotFoundError)
    path = Path(os.fsdecode(error.filename)).absolute()
    words = [word.partition("=")[2] or word for word in sys.argv[1:]]
    given = [Path(word).expanduser().absolute() for word in words]
    # Also a folder above a given path, which cannot be made, if it is not above the working folder.
    above = path not in (Path.cwd(), *Path.cwd().parents)
    return any(
        one == path or one in path.parents or (above and path in one.parents) for one in given
    )


def _flush() -> None:
    # Now, since an error at the exit of Python could not be handled.
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        stdout_is_closed()


def _end_by_sigterm_as_by_ctrl_c() -> None:
    """Lets schedulers, which send SIGTERM, end a run in an orderly way."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python sets handlers of signals only there

    process = os.getpid()

    def handle(*_: object) -> None:
        if os.getpid() != process:  # a forked child ends as every process does
            os._exit(_TERMINATED)
        _signals.add(signal.SIGTERM)
        # asyncio handles SIGINT by cancelling the main task.
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, handle)
    # A shell script starts background programs with SIGINT ignored: asyncio would not handle it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def terminated() -> bool:
    """Returns whether this program got SIGTERM."""
    return signal.SIGTERM in _signals


def program_takes(key: str) -> bool:
    """Returns whether the running program has this key; true if that is unknown."""
    main: Any = getattr(sys.modules["__main__"], "main", None)
    try:
        config_class = config_class_of(main)
    except (TypeError, ValueError, NameError):  # a script of another form
        return True
    return config_class is None or key in chz.chz_fields(config_class)


def config_class_of(main: object) -> type[Any] | None:
    """Returns the config class of ``main``'s first parameter, ``None`` if there is none."""
    if not callable(main):
        return None
    name = next(iter(inspect.signature(main).parameters), "")
    kind = inspect.get_annotations(main, eval_str=True).get(name)
    return kind if chz.is_chz(kind) else None


def run_to_end(work: Awaitable[T]) -> T:
    """Runs ``work`` in an event loop, also in a notebook, whose kernel has one that is running.

    A task that calls ``sys.exit(0)`` is an error. An invalid setting and Ctrl-C have a traceback
    that ends at the caller: the frames of the event loop would hide the message.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        run = _run_in_new_loop
    else:
        # A loop cannot run inside another one of the same thread.
        run = _run_in_thread
    try:
        return run(work)
    except (ConfigurationError, KeyboardInterrupt) as error:
        raise error.with_traceback(None) from None


def _run_in_thread(work: Awaitable[T]) -> T:
    task: Future[Callable[[], object]] = Future()
    done: Future[T] = Future()

    async def cancellable() -> T:
        current, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert current is not None
        task.set_result(lambda: loop.call_soon_threadsafe(current.cancel))
        return await work

    def run() -> None:
        try:
            done.set_result(_run_in_new_loop(cancellable()))
        except BaseException as error:
            done.set_exception(error)

    # The context has the cell of the notebook that gets the output.
    thread = thread_class()(target=contextvars.copy_context().run, args=(run,))
    thread.start()
    try:
        return done.result()
    except KeyboardInterrupt:
        with contextlib.suppress(RuntimeError):  # its loop has just ended
            task.result()()
        thread.join()
        raise


def _run_in_new_loop(work: Awaitable[T]) -> T:
    try:
        return asyncio.run(_finish(work))
    except SystemExit as error:
        # asyncio stops the loop for any task, and status 0 would look like the end of the work.
        if error.code:
            raise
        raise TinkerCookbookError(
            f"a task called sys.exit({error.code}){where_raised(error)}, which ended the program "
            "before its work was done"
        ) from error


async def _finish(result: Awaitable[T]) -> T:
    return await result
