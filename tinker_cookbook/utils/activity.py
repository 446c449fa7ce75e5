"""What a run does and waits for at this moment, for its live lines and its heartbeat.

The loop names its phases, and each episode names the call that it awaits. Both only store a name
and a time; the text is made by the thread that shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Wait = tuple[str, float]
"""Name of what is awaited, and the time since when."""

_WITH_EPISODES = ("sampling", "evaluating")


class Activity:
    """Phases, episodes and calls of a run that are not finished; ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.step = ""
        """The step in progress, such as ``step 3/10``."""
        self.place = ""
        """Where the model runs, such as ``at http://host:8000``; empty in this process."""
        self.details: dict[str, str] = {}
        """More about a phase, by its name."""
        self.episode_hint = ""
        """What ends episodes whose environment hangs."""
        self.shown = 0
        """Displays that show the activity at this moment, so that no heartbeat is needed."""
        self.episodes: dict[int, Wait] = {}
        """Running episodes by their ``id``, and the call that each awaits; may have no name."""
        self.finished = 0
        """Episodes of the current phase that are finished."""
        self.blocked_seconds = 0.0
        """Time for which code of the user blocked the event loop."""
        self._phases: list[Wait] = []
        self._calls: dict[object, Wait] = {}

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        """Names what the loop does in the block; within it, an inner phase is shown instead."""
        entry = (name, self.clock())
        self.details[name] = detail
        if name in _WITH_EPISODES:
            self.finished = 0
        self._phases.append(entry)
        try:
            yield
        finally:
            self._phases.remove(entry)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Names a call of the block that may take long, such as that of a tool or a grader."""
        key = object()
        self._calls[key] = (name, self.clock())
        try:
            yield
        finally:
            del self._calls[key]

    def line(self) -> str:
        """Returns the phase with its time, and what most episodes wait for, for a display."""
        text, since = self._phase()
        if not text:
            return ""
        longest = self._longest()
        if longest is None:
            return f"{text}: {short_time(self.clock() - since)}"
        name, _, waited, _ = longest
        return f"{text}; waiting for {name} {short_time(waited)}"

    def sentence(self) -> str:
        """Returns step, phase and what most episodes wait for, as a line of a log."""
        text, since = self._phase()
        if not text:
            return ""
        head = f"{self.step}: {text}" if self.step else text
        if self.place:
            head += f" {self.place}"
        parts = [f"{head} for {short_time(self.clock() - since)}"]
        longest = self._longest()
        if longest is not None:
            name, count, waited, is_call = longest
            running = len(self.episodes)
            who = f"{count} calls of {name} run" if is_call else ""
            who = who or f"{count} of {running} episodes wait for {name}"
            hint = f" ({self.episode_hint})" if self.episode_hint and "." in name else ""
            parts.append(f"{who}, the longest for {short_time(waited)}{hint}")
        return "; ".join(parts)

    def has_episodes(self) -> bool:
        """Returns whether the current phase waits for episodes."""
        return bool(self._phases) and self._phases[-1][0] in _WITH_EPISODES

    def _phase(self) -> Wait:
        if not self._phases:
            return "", 0.0
        name, since = self._phases[-1]
        text = " ".join(filter(None, [name, self.details.get(name, "")]))
        running = len(self.episodes)
        if name in _WITH_EPISODES and running + self.finished:
            comma = "," if self.details.get(name) else ""
            text += f"{comma} {self.finished}/{self.finished + running} episodes"
        return text, since

    def _longest(self) -> tuple[str, int, float, bool] | None:
        """Returns the most frequent name, its count, its longest time, whether it is a call."""
        if not self.has_episodes():
            return None
        found: dict[str, tuple[int, bool, float]] = {}
        # Copies, because the loop changes both meanwhile.
        for waits, is_call in ((self.episodes, False), (self._calls, True)):
            for name, since in list(waits.values()):
                if name:
                    count, _, first = found.get(name, (0, is_call, since))
                    found[name] = count + 1, is_call, min(first, since)
        if not found:
            return None
        # A call within a step of an environment says more than the step.
        name = max(found, key=lambda name: found[name][:2])
        count, is_call, first = found[name]
        return name, count, self.clock() - first, is_call


_current: ContextVar[Activity | None] = ContextVar("run_activity", default=None)
_outside = Activity()


def activity() -> Activity:
    """Returns the activity of this run; code outside of a run has one too, which is not shown."""
    return _current.get() or _outside


@contextmanager
def new_activity() -> Iterator[Activity]:
    """Makes a new activity the one of the block and the tasks that it starts."""
    token = _current.set(new := Activity())
    try:
        yield new
    finally:
        _current.reset(token)


def short_time(seconds: float) -> str:
    """Returns ``4.2 s``, or ``2:03`` from a minute on."""
    return f"{seconds:.1f} s" if seconds < 60 else format_seconds(seconds)


def format_seconds(seconds: float) -> str:
    """Returns ``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
