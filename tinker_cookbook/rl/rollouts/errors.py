"""What goes wrong in a rollout, said with its place: which environment, member, turn."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.exceptions import DataValidationError, TinkerCookbookError, TrainingError
from tinker_cookbook.rl.types import RolloutError


class RolloutFailedError(TrainingError):
    """An environment, or the policy that played it, raised; the original error is the cause."""


class SamplingTurnTimeoutError(TrainingError, TimeoutError):
    """One answer took longer than ``RolloutLimits.sampling_turn_timeout_seconds``."""


class RolloutTimeoutError(TrainingError, TimeoutError):
    """A rollout took longer than the strategy's ``per_rollout_timeout``."""


class GraderTimeoutError(TrainingError, TimeoutError):
    """Grading a group took longer than ``TerminationRewardPolicy.grader_timeout_seconds``."""


@dataclass(frozen=True)
class Place:
    """Where in a group something happened. Turns count from 0; ``None`` is before the first."""

    env_name: str
    member: int
    turn: int | None = None

    def __str__(self) -> str:
        turn = "before its first turn" if self.turn is None else f"turn {self.turn}"
        return f"{self.env_name}, member {self.member}, {turn}"


def located(error: Exception, place: Place | str) -> Exception:
    """The error again, with its place in front of its message; raise it ``from error``.

    An error of this package keeps its type. Any other, say a bug in an environment, becomes a
    ``RolloutFailedError`` that also names the line which raised it. One that was located stays.
    """
    if getattr(error, "_located", False):
        return error
    result: Exception
    if isinstance(error, TinkerCookbookError) and error.args == (str(error),):
        try:
            result = type(error)(f"{place}: {error}")
        except TypeError:  # a subclass that is made of something else than its message
            result = RolloutFailedError(f"{place}: {describe(error)}")
    else:
        result = RolloutFailedError(f"{place}: {describe(error)}{_raised_at(error)}")
    result._located = True  # type: ignore[attr-defined]
    result.__cause__ = error
    return result


@contextmanager
def located_at(place: Callable[[], Place | str]) -> Iterator[None]:
    """Adds the place, as it is when the error is raised, to errors of the block."""
    try:
        yield
    except Exception as error:
        result = located(error, place())
        if result is error:
            raise
        raise result from error


def describe(error: BaseException) -> str:
    """``Type: message``, or the type alone where there is no message."""
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def original(error: BaseException) -> BaseException:
    """The error as it was raised, before its place was added."""
    return error.__cause__ if getattr(error, "_located", False) and error.__cause__ else error


def error_record(error: BaseException) -> RolloutError:
    """Returns an entry of ``TrajectoryGroup.rollout_errors``: the original type, the message with
    its place, on one line.

    A rollout that took too long is a ``TimeoutError``, as in the official cookbook.
    """
    kind = type(original(error))
    name = "TimeoutError" if issubclass(kind, RolloutTimeoutError) else kind.__name__
    return RolloutError(name, " ".join(str(error).split()))


def checked_reward(value: Any, place: Place | str) -> float:
    """The reward as a float.

    Raises:
        DataValidationError: It is NaN, infinite or no number.
    """
    try:
        reward = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if not math.isfinite(reward):
        error = DataValidationError(
            f"{place}: reward is {value!r}, expected a finite number; look for a division by zero "
            "or a missing return in the code that computes it"
        )
        error._located = True  # type: ignore[attr-defined]
        raise error
    return reward


def _raised_at(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" (raised at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
