"""Is this answer right? Mathematical answers are compared in a process that a timeout can kill.

``math_verify`` reads LaTeX and asks sympy whether two expressions are equal, which for an answer
such as ``9^{9^{9^9}}`` may take for ever or all memory. A thread that computes it cannot be
stopped, a signal works in the main thread only and there blocks the event loop. So it runs in
worker processes: the event loop goes on meanwhile, a worker that takes too long is killed, and the
next answer gets a new one. Answers that are plain numbers are compared here and now.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.imports import lazy_module

if TYPE_CHECKING:
    import pebble
else:
    pebble = lazy_module("pebble")

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 5.0
_WORKER_MEMORY_BYTES = 2 << 30
_MOST_WORKERS = 4
_ORPHAN_SECONDS = 2.0
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
_PLAIN = re.compile(rf"[+-]?(?:{_NUMBER})")
# A minus is a sign where no number or letter stands before it: "5-3" ends in 3, "= -3" in -3.
_IN_TEXT = re.compile(rf"(?:(?<![\w.)])-)?(?:{_NUMBER})")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")

T = TypeVar("T")


class TimedPool:
    """Worker processes for calls that may never end.

    Nothing starts before the first call. Workers are spawned, not forked, since the engine's
    threads do not survive a fork; so functions and arguments must pickle. They end with the
    program.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        preload: Sequence[str] = (),
    ) -> None:
        """``max_workers`` of None is a worker a core, at most four.

        ``preload`` names modules that a worker imports, where they are installed, before it takes
        a call, so that a slow import on a busy machine is not taken for a slow answer.
        """
        workers = min(_MOST_WORKERS, os.cpu_count() or 1) if max_workers is None else max_workers
        if workers < 1:
            raise ConfigurationError(f"max_workers: got {max_workers}, expected at least 1")
        _check_timeout(timeout_seconds)
        self._max_workers = workers
        self._timeout_seconds = timeout_seconds
        self._preload = tuple(preload)
        self._lock = threading.Lock()
        self._pool: pebble.ProcessPool | None = None

    async def call(
        self, function: Callable[..., T], *args: Any, timeout_seconds: float | None = None
    ) -> T:
        """Returns ``function(*args)``, computed in a worker.

        Time counts from when a worker takes the call up, so that waiting for a free one costs a
        call nothing. Cancelling the caller ends the call too.

        Raises:
            TimeoutError: It took longer than ``timeout_seconds``, by default the pool's; its worker
                has been killed.
            pebble.ProcessExpired: Its worker died, of memory, say.
        """
        if self._pool is None:  # starting processes takes a while, scheduling does not
            await asyncio.to_thread(self._start)
        return await asyncio.wrap_future(self._schedule(function, args, timeout_seconds))

    def call_blocking(
        self, function: Callable[..., T], *args: Any, timeout_seconds: float | None = None
    ) -> T:
        """As :meth:`call`, for code without an event loop."""
        return self._schedule(function, args, timeout_seconds).result()

    def _schedule(
        self, function: Callable[..., T], args: tuple[Any, ...], timeout_seconds: float | None
    ) -> pebble.ProcessFuture:
        limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        _check_timeout(limit)
        return self._start().schedule(_run, args=(function, args, limit), timeout=limit)

    def close(self) -> None:
        """Ends the workers; a later call starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            atexit.unregister(self.close)
            pool.stop()
            pool.join()

    def _start(self) -> pebble.ProcessPool:
        with self._lock:
            if self._pool is None:
                self._pool = pebble.ProcessPool(
                    max_workers=self._max_workers,
                    initializer=_prepare_worker,
                    initargs=(self._preload,),
                    context=multiprocessing.get_context("spawn"),  # pyright: ignore[reportArgumentType]
                )
                self._pool.schedule(int)  # the first call is what makes pebble start processes
                atexit.register(self.close)
            return self._pool


def _check_timeout(seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise ConfigurationError(
            f"timeout_seconds: got {seconds}, expected a finite number above 0, since a call that "
            "never ends would hold its worker for ever"
        )


def _prepare_worker(preload: Sequence[str]) -> None:
    # Ctrl-C is the main process's affair, which then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in preload:
        if find_spec(module) is not None:
            import_module(module)
    if find_spec("resource") is not None:  # Windows has no such limit
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _WORKER_MEMORY_BYTES if hard < 0 else min(hard, _WORKER_MEMORY_BYTES)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _run(function: Callable[..., T], args: tuple[Any, ...], limit: float) -> T:
    # If the main process is killed, nobody is left to end a call that hangs: the kernel then does.
    if not hasattr(signal, "setitimer"):
        return function(*args)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit + _ORPHAN_SECONDS)
    try:
        return function(*args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


_default_pool = TimedPool(preload=["math_verify"])


def default_pool() -> TimedPool:
    """Returns the pool that all environments of this process share."""
    return _default_pool


async def grade_math(
    answer: str,
    reference: str,
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    pool: TimedPool | None = None,
) -> bool:
    """Returns whether ``answer`` is mathematically equal to ``reference``.

    Both are bare answers, LaTeX or plain (``\\frac{1}{2}``, ``1/2``, ``0.5``), not the texts that
    lead to them. Numbers in decimal notation are equal when their values are, exactly; the rest
    is compared by ``math_verify``, to six digits. An answer that cannot be compared in time is
    wrong, and a warning says so.
    """
    answer, reference = answer.strip(), reference.strip()
    if not answer or not reference:
        return False
    if answer == reference:
        return True
    plain = equal_plain_numbers(answer, reference)
    if plain is not None:
        return plain
    require_math_verify()
    try:
        return await (pool or _default_pool).call(
            verify_expressions, answer, reference, timeout_seconds=timeout_seconds
        )
    except TimeoutError:
        logger.warning(
            "grading took more than %g s and was stopped; counted as wrong: %.80r (reference "
            "%.80r)",
            timeout_seconds,
            answer,
            reference,
        )
    except pebble.ProcessExpired as error:
        logger.warning(
            "the grading process died (%s); counted as wrong: %.80r (reference %.80r)",
            error,
            answer,
            reference,
        )
    return False


def equal_plain_numbers(answer: str, reference: str) -> bool | None:
    """Returns whether two numbers in decimal notation are equal, or None where one is none.

    A leading ``$`` (or ``\\$``), commas between thousands and a final full stop are allowed.
    """
    left, right = _plain_number(answer), _plain_number(reference)
    return None if left is None or right is None else left == right


def _plain_number(text: str) -> Decimal | None:
    text = text.strip().removesuffix(".").removeprefix("\\").removeprefix("$").strip()
    return Decimal(text.replace(",", "")) if _PLAIN.fullmatch(text) else None


def last_number(text: str) -> str | None:
    """Returns the last number in decimal notation that ``text`` contains, without commas; None
    for none."""
    found = _IN_TEXT.findall(text)
    return found[-1].replace(",", "") if found else None


def extract_boxed(text: str) -> str | None:
    r"""Returns what the last ``\boxed{…}`` holds, braces within counted; None without a
    complete one."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 0
        for place in range(match.end(), len(text)):
            # An escaped brace (a set, \{1, 2\}) does not nest.
            if text[place] in "{}" and text[place - 1] != "\\":
                depth += 1 if text[place] == "{" else -1
                if depth == 0:
                    return text[match.end() + 1 : place].strip()
    return None


def extract_gsm8k_answer(text: str) -> str | None:
    """Returns the number after the last ``####``; else the boxed one; else the last in the text."""
    _, marked, after = text.rpartition("####")
    if marked:
        return last_number(after.strip().split("\n")[0])
    boxed = extract_boxed(text)
    return last_number(text if boxed is None else boxed)


def require_math_verify() -> None:
    """Raises ``ConfigurationError`` where the packages that compare expressions are missing."""
    missing = [name for name in ("math_verify", "pebble") if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"grading: comparing mathematical expressions needs {' and '.join(missing)}, which is "
            "not installed; expected: pip install 'tinker_cookbook[math]'"
        )


def verify_expressions(answer: str, reference: str) -> bool:
    """Returns what ``math_verify`` says of two expressions, however long that takes.

    ``grade_math`` runs it in a worker, whose end is the timeout; the library's own timeouts work by
    signals.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing timeout
    from math_verify import parse, verify

    expected, got = (
        parse(f"\\boxed{{{text}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        for text in (reference, answer)
    )
    return bool(verify(expected, got, timeout_seconds=None))
