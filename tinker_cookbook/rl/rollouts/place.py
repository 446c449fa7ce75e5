"""Place of a rollout in its run, for environments that keep something across a resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RolloutPlace:
    """Run folder, and the position in the run: the same when a resumed run repeats a rollout."""

    log_path: str
    position: tuple[str | int, ...]
    """``("train", batch, group)`` or ``("test", step, group)``; in an episode ``member`` and
    ``attempt`` follow."""

    def at_group(self, index: int) -> RolloutPlace:
        """Returns the place of a group."""
        return replace(self, position=(*self.position[:2], index))


_place: ContextVar[RolloutPlace | None] = ContextVar("rollout_place", default=None)


def current_place() -> RolloutPlace | None:
    """Returns the place of the rollout that runs now; ``None`` outside the training loop."""
    return _place.get()


@contextmanager
def at_place(place: RolloutPlace | None) -> Iterator[None]:
    """Sets the place for the code of the block and the tasks that it starts."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def enter_member(member: int, attempt: int) -> None:
    """Adds the member and its attempt to the place of the current task."""
    if (place := _place.get()) is not None:
        # A retry runs in the same task, so what an earlier attempt added is replaced.
        position = (*place.position[:3], member, attempt)
        _place.set(replace(place, position=position))
