"""Errors of rollouts; each message names the environment, the group member and the turn."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tinker_cookbook.exceptions import DataValidationError, TinkerCookbookError, TrainingError
from tinker_cookbook.rl.advantages import LARGEST_REWARD
from tinker_cookbook.rl.types import RolloutError


class RolloutFailedError(TrainingError):
    """Raised if an environment or the policy raised an error, which is the cause."""


class SamplingTurnTimeoutError(TrainingError, TimeoutError):
    """Raised if a response takes longer than ``RolloutLimits.sampling_turn_timeout_seconds``."""


class RolloutTimeoutError(TrainingError, TimeoutError):
    """Raised if a rollout takes longer than the strategy's ``per_rollout_timeout``."""


class GraderTimeoutError(TrainingError, TimeoutError):
    """Raised if grading takes longer than ``TerminationRewardPolicy.grader_timeout_seconds``."""


def located(error: Exception, location: str) -> Exception:
    """Returns the error with its location in front of the message; raise it ``from error``.

    An error of this package keeps its type. Any other error, such as a bug in an environment,
    becomes a ``RolloutFailedError`` that also names the line that raised it.
    """
    # Only the innermost location is added: it names the turn.
    if getattr(error, "_located", False):
        return error
    message = f": {error}" if str(error) else ""
    description = f"{location}: {type(error).__name__}{message}"
    result: Exception
    # Only an error that is created from just a message can be recreated with a longer one.
    if isinstance(error, TinkerCookbookError) and error.args == (str(error),):
        try:
            result = type(error)(f"{location}: {error}")
        except TypeError:  # a subclass whose constructor needs other arguments
            result = RolloutFailedError(description)
    else:
        # The message may be all that a log shows, so it has the line of the user's code.
        frames = traceback.extract_tb(error.__traceback__)
        line = f" (raised at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        result = RolloutFailedError(f"{description}{line}")
    result._located = True  # type: ignore[attr-defined]
    result.__cause__ = error
    return result


@contextmanager
def located_at(location: Callable[[], str]) -> Iterator[None]:
    """Adds the location, evaluated when an error is raised, to errors of the block."""
    try:
        yield
    except Exception as error:
        result = located(error, location())
        if result is error:
            raise
        raise result from error


def original(error: BaseException) -> BaseException:
    """Returns the error as it was raised, before its location was added."""
    return error.__cause__ if getattr(error, "_located", False) and error.__cause__ else error


def error_record(error: BaseException) -> RolloutError:
    """Returns an entry of ``TrajectoryGroup.rollout_errors``: original type and one-line message.

    A rollout timeout is recorded as ``TimeoutError``, as in the official cookbook.
    """
    kind = type(original(error))
    name = "TimeoutError" if issubclass(kind, RolloutTimeoutError) else kind.__name__
    return RolloutError(name, " ".join(str(error).split()))


def checked_reward(value: Any, location: str) -> float:
    """Returns the reward as a float; raises ``DataValidationError`` unless training can use it."""
    try:
        reward = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if not abs(reward) <= LARGEST_REWARD:
        error = DataValidationError(
            f"{location}: reward is {value!r}, expected a finite number of at most "
            f"{LARGEST_REWARD:g}; look for a division by zero or a missing return in the code that "
            "computes it"
        )
        error._located = True  # type: ignore[attr-defined]
        raise error
    return reward
