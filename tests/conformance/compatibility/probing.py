"""What a probe is, how one runs, and what comes of it."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import tinker

from tests.conformance.compatibility.world import World
from tinker_cookbook.utils.command_line.entrypoint import server_error_message

MOST_SECONDS = 5.0
"""A refusal that takes longer is none: the client repeated its request."""

RESULT_SECONDS = 60.0

Outcome = Literal["works", "refused", "broken"]


@dataclass(frozen=True)
class Row:
    """What came of one probe."""

    name: str
    outcome: Outcome
    said: str
    """What was checked, or the error."""
    twin: Outcome | None = None
    """What came of the ``_async`` spelling."""


@dataclass(frozen=True)
class Probe:
    """How to see whether something works."""

    name: str
    checks: str
    run: Callable[..., None]


class Refusal(Exception):
    """The server's own words, from a probe that read them itself."""


class Probes(dict[str, Probe]):
    """Probes by what they probe; ``@probes("forward", "what it checks")`` adds one."""

    def __call__(self, name: str, checks: str) -> Callable[[Callable[..., None]], Callable]:
        """Adds the decorated function."""

        def add(run: Callable[..., None]) -> Callable[..., None]:
            assert name not in self, name
            self[name] = Probe(name, checks, run)
            return run

        return add


class Call:
    """Calls the method ``name`` of a target and waits for what it promises.

    Args:
        name: Of the method.
        of: The class whose method is probed.
    """

    def __init__(self, name: str, of: type | None = None) -> None:
        self.name, self.of = name, of

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of the method."""
        return settled(getattr(target, self.name)(*args, **kwargs))


def settled(value: Any) -> Any:
    """What a coroutine or future gives in the end."""
    if inspect.iscoroutine(value):
        value = asyncio.run(_awaited(value))
    if isinstance(value, tinker.APIFuture):
        value = value.result(RESULT_SECONDS)
    return value


def expect(holds: Any, what: str) -> None:
    """Raises where an answer does not mean what it should."""
    if not holds:
        raise AssertionError(what)


def run(probe: Probe, world: World, *args: Any, name: str | None = None) -> Row:
    """Runs a probe and judges what happened."""
    name = name or probe.name
    begun = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            probe.run(world, *args)
    except Exception as error:
        said, took = _refusal(error), time.monotonic() - begun
        if said is None:
            return Row(name, "broken", f"{type(error).__name__}: {error}")
        if took > MOST_SECONDS:
            return Row(name, "broken", f"refused after {took:.0f} s: {said}")
        return Row(name, "refused", _general(said, world))
    return Row(name, "works", probe.checks)


def _refusal(error: Exception) -> str | None:
    """The server's words, where the error is one of its refusals."""
    if isinstance(error, Refusal):
        return str(error)
    said = server_error_message(error)
    return None if said in ("Not Found", str(error)) else said  # no word about what was asked


def _general(said: str, world: World) -> str:
    """A refusal without what is of this run alone."""
    said = said.replace(world.model, "MODEL").replace(str(world.folder), "FOLDER")
    return re.sub(r"\d{8}-\d{6}-[0-9a-f]{8}:train:\d+", "RUN", said)


async def _awaited(value: Any) -> Any:
    return await value
