"""Environments driven by a program that calls the model, such as an agent framework.

The RL loop samples a response and passes it to ``step``; such a program waits for the response to a
call in the middle of its code. ``DrivenEnv`` runs the program as a task. Each call becomes an
observation, and the sampled tokens become the call's result. So tokens, masks and log-probabilities
of the trajectory come from the loop, with its seeds, limits, retries and transcripts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.rollouts.async_utils import contained
from tinker_cookbook.rl.types import (
    PARSE_ERROR_MASKED_METRIC_KEY,
    Action,
    ActionExtra,
    Env,
    InitialObservationOverflow,
    Logs,
    Metrics,
    Observation,
    StepResult,
    StopReason,
)

WITHOUT_REWARD = (
    "A failed rollout has no reward; rollout_max_retries= repeats it, rollout_error_tolerance=true "
    "leaves it out"
)


class ModelCall(Protocol):
    """Call of the model by a program; calls of one episode run sequentially."""

    async def __call__(
        self, ob: Observation, stop: StopCondition, *, trained: bool = True
    ) -> TokensWithLogprobs:
        """Returns the response to a prompt; ``trained=False`` excludes it from training."""
        ...


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program: the episode's reward, metrics and stop reason."""

    reward: float
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    stop_reason: StopReason | str | None = None


Program: TypeAlias = Callable[[ModelCall], Awaitable[ProgramResult]]


@dataclass
class _PendingCall:
    ob: Observation
    stop: StopCondition
    trained: bool
    response: asyncio.Future[TokensWithLogprobs]


class DrivenEnv(Env):
    """Environment of a program that calls the model itself.

    An error of the program is raised by ``initial_observation`` or ``step``. A program that ends
    without a call yields an episode without turns, with its reward. ``close`` cancels a program
    that has not ended, for example at a limit of the loop; builders call it in ``cleanup``.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._calls: asyncio.Queue[_PendingCall] = asyncio.Queue()
        self._task: asyncio.Task[ProgramResult] | None = None
        self._pending: _PendingCall | None = None

    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """Starts the program and waits for its first call."""
        self._task = asyncio.create_task(contained(self._program(self._call)))
        following = await self._following()
        if isinstance(following, ProgramResult):
            reason = following.stop_reason or StopReason.COMPLETED
            metrics = {**following.metrics, f"stop/{reason}": 1.0}
            return InitialObservationOverflow(following.reward, metrics, following.logs)
        return following.ob, following.stop

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Passes the response to the waiting call, and waits for the next call or the end."""
        call = self._pending
        if call is None:
            raise DataValidationError(
                "step was called before initial_observation, or after the end"
            )
        extra = extra or {}
        response = TokensWithLogprobs(
            list(action), extra.get("logprobs"), extra.get("stop_reason", "stop")
        )
        # The caller may have been cancelled, for example by a timeout in the program.
        if not call.response.done():
            call.response.set_result(response)
        masked: Metrics = {} if call.trained else {PARSE_ERROR_MASKED_METRIC_KEY: 1.0}
        following = await self._following()
        if isinstance(following, ProgramResult):
            return StepResult.final(
                following.reward,
                call.stop,
                metrics={**following.metrics, **masked},
                logs=following.logs,
                stop_reason=following.stop_reason,
            )
        return StepResult(0.0, False, following.ob, following.stop, metrics=masked)

    async def close(self) -> None:
        """Cancels the program if it has not ended, and waits for its end."""
        task = self._task
        if task is not None and not task.done():
            task.cancel()
            # Ignore errors during the cancellation, because no code reads them.
            with suppress(asyncio.CancelledError, Exception):
                await task

    async def _call(
        self, ob: Observation, stop: StopCondition, *, trained: bool = True
    ) -> TokensWithLogprobs:
        loop = asyncio.get_running_loop()
        call = _PendingCall(ob, stop, trained, loop.create_future())
        self._calls.put_nowait(call)
        return await call.response

    async def _following(self) -> _PendingCall | ProgramResult:
        """Waits for the next call or the end of the program; raises the program's error."""
        assert self._task is not None
        self._pending = None
        while True:
            waiting = asyncio.ensure_future(self._calls.get())
            try:
                await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    return self._task.result()
                # A caller that was cancelled no longer waits, so the response would be lost.
                if not waiting.result().response.cancelled():
                    self._pending = waiting.result()
                    return self._pending
            finally:
                waiting.cancel()
