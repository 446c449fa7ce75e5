"""Errors of rollouts; each message names the environment, the group member and the turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tinker_cookbook.exceptions import (
    BackendError,
    ConfigurationError,
    DataError,
    DataValidationError,
    TinkerCookbookError,
    TrainingError,
)
from tinker_cookbook.rl.advantages import LARGEST_REWARD
from tinker_cookbook.rl.rollouts.async_utils import EscapedError, as_exception, ends_task
from tinker_cookbook.rl.types import RolloutError
from tinker_cookbook.utils.error_logs import where_raised

_CODE_ERRORS = (TypeError, AttributeError, NameError, LookupError)


class RolloutFailedError(TrainingError):
    """Raised if an environment or the policy raised an error, which is the cause."""


class SamplerFailedError(BackendError):
    """Raised if the backend that samples the policy failed; no strategy skips this."""


class RolloutExecutorError(ConfigurationError, TrainingError):
    """Raised if the ``rollout_executor`` cannot run a group; no strategy skips this."""


class SamplingTurnTimeoutError(TrainingError, TimeoutError):
    """Raised if a response takes longer than ``RolloutLimits.sampling_turn_timeout_seconds``."""


class RolloutTimeoutError(TrainingError, TimeoutError):
    """Raised if a rollout takes longer than the strategy's ``per_rollout_timeout``."""


class GraderTimeoutError(TrainingError, TimeoutError):
    """Raised if grading takes longer than ``TerminationRewardPolicy.grader_timeout_seconds``."""


def located(error: BaseException, location: str) -> Exception:
    """Returns the error with its location in front of the message; raise it ``from error``.

    An error of this package keeps its type. Any other error, such as a bug in an environment or
    ``sys.exit()``, becomes a ``RolloutFailedError`` that also names the line that raised it.
    """
    error = as_exception(error)
    # Only the innermost location is added: it names the turn.
    if getattr(error, "_located", False):
        return error
    text = str(error)
    if isinstance(error, EscapedError) and error.__cause__ is not None:
        error = error.__cause__
    name = type(error).__name__
    description = f"{location}: {name}" + (f": {text}" if text not in ("", name) else "")
    result: Exception
    # Only an error that is created from just a message can be recreated with a longer one.
    if isinstance(error, TinkerCookbookError) and error.args == (str(error),):
        try:
            result = type(error)(f"{location}: {error}")
        except TypeError:  # a subclass whose constructor needs other arguments
            result = RolloutFailedError(description)
    else:
        # The message may be all that a log shows, so it has the line of the user's code.
        result = RolloutFailedError(f"{description}{where_raised(error)}")
    result._located = True  # type: ignore[attr-defined]
    result.__cause__ = error
    return result


@contextmanager
def located_at(location: Callable[[], str]) -> Iterator[None]:
    """Adds the location, evaluated when an error is raised, to errors of the block."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and ends_task(error):
            raise
        result = located(error, location())
        if result is error:
            raise
        raise result from result.__cause__


def original(error: BaseException) -> BaseException:
    """Returns the error as it was raised, before its location was added."""
    return error.__cause__ if getattr(error, "_located", False) and error.__cause__ else error


def add_group(error: Exception, place: str, fails_fast: bool) -> None:
    """Adds the group to the message of a rollout's error, and the setting that would skip it."""
    if not fails_fast or original(error) is error or error.args != (str(error),):
        return
    hint = "; rollout_error_tolerance=true retries rollouts and skips groups that keep failing"
    # An invalid result or an error in the code would come again, so a retry cannot help.
    repeats = isinstance(original(error), (DataError, ConfigurationError, *_CODE_ERRORS))
    error.args = (f"{place}: {error}" + ("" if repeats else hint),)


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
