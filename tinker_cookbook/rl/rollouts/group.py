"""Runs a group and computes its rewards, on the event loop or in a pool of threads or processes.

The result depends only on the policy's seed and on each member's index in the group, never on the
order in which rollouts finish. A pool helps if environments compute much themselves.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import pickle
import sys
import uuid
from collections.abc import Awaitable
from concurrent.futures import BrokenExecutor, Executor
from contextlib import suppress
from contextvars import ContextVar, Token
from typing import Any

import chz

from tinker_cookbook.backends.hosted import accept_samples_without_ids
from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.rollouts.async_utils import bounded, finished
from tinker_cookbook.rl.rollouts.errors import (
    GraderTimeoutError,
    RolloutExecutorError,
    checked_reward,
    error_record,
    located,
    located_at,
)
from tinker_cookbook.rl.rollouts.executors import check_executor, runs_here
from tinker_cookbook.rl.rollouts.hooks import RolloutHooks
from tinker_cookbook.rl.rollouts.limits import RolloutConfig, TerminationRewardPolicy
from tinker_cookbook.rl.rollouts.place import RolloutPlace, at_place, current_place
from tinker_cookbook.rl.rollouts.strategy import (
    FailFast,
    MemberStrategy,
    RolloutResult,
    RolloutStrategy,
)
from tinker_cookbook.rl.types import EnvGroupBuilder, Metrics, TrajectoryGroup
from tinker_cookbook.utils.activity import activity
from tinker_cookbook.utils.user_classes import overrides

logger = logging.getLogger(__name__)


async def do_group_rollout(
    env_group_builder: EnvGroupBuilder,
    policy: TokenCompleter,
    strategy: RolloutStrategy | None = None,
    termination: TerminationRewardPolicy | None = None,
    *,
    config: RolloutConfig | None = None,
    hooks: RolloutHooks | None = None,
) -> TrajectoryGroup:
    """Runs the rollouts of a group and computes their rewards.

    Turns are sampled by ``policy.derived(member, turn)``, retries by ``policy.derived(member, turn,
    attempt)``. Members whose first prompts are equal share one request ``policy.sample_many(prompt,
    stop, n)``. A strategy of user code with another ``execute`` runs the rollouts itself, without
    ``config.limits`` and ``hooks``.

    ``cleanup`` of the builder is called once, also if the group fails or is cancelled; a
    cancellation waits for its end. ``termination`` replaces ``config.termination``.

    Raises:
        AllTrajectoriesFailedError: Too few rollouts succeeded for the strategy.
        RolloutFailedError: A rollout failed; the message names environment, member and turn.
    """
    strategy, config = strategy or FailFast(), config or RolloutConfig()
    if termination is not None:
        config = chz.replace(config, termination=termination)
    name, cleanup_errors = type(env_group_builder).__name__, []
    try:
        # 1. Run the rollouts. Another execute of user code takes neither config nor hooks.
        own = overrides(strategy, MemberStrategy, "execute")
        if isinstance(strategy, MemberStrategy) and not own:
            result = await strategy.execute(env_group_builder, policy, config, hooks)
        else:
            result = await strategy.execute(env_group_builder, policy)
        # 2. Compute the rewards of the successful members together.
        with located_at(lambda: f"compute_group_rewards of {name}"):
            rewards_G, metrics_G = await _group_rewards(env_group_builder, result, config)
    finally:
        # 3. Release the builder's resources. An error here must neither hide another one nor fail
        # the group.
        try:
            await finished(env_group_builder.cleanup())
        except Exception as error:
            logger.exception("cleanup of %s failed", name)
            cleanup_errors.append(error_record(located(error, f"cleanup of {name}")))
    return TrajectoryGroup(
        result.trajectories, rewards_G, metrics_G, result.errors + cleanup_errors
    )


async def _group_rewards(
    builder: EnvGroupBuilder, result: RolloutResult, config: RolloutConfig
) -> tuple[list[float], list[Metrics]]:
    """Returns the final rewards, and the metrics of the episodes and of the group."""
    trajectories_G, termination = result.trajectories, config.termination_policy
    # Members are graded together, so grading can only be skipped for all of them.
    if all(termination.skips_grading(t.stop_reason) for t in trajectories_G):
        return [0.0] * len(trajectories_G), [dict(t.metrics) for t in trajectories_G]
    seconds = termination.grader_timeout_seconds
    with activity().waiting(f"{type(builder).__name__}.compute_group_rewards"):
        graded_G = await bounded(
            builder.compute_group_rewards(trajectories_G, result.envs),
            seconds,
            lambda: GraderTimeoutError(
                f"grading took longer than grader_timeout_seconds={seconds:g}; raise it, or check "
                "whether the grader still responds"
            ),
        )
    # Builders are user code: a missing reward would shift the rewards of the other members.
    if len(graded_G) != len(trajectories_G):
        raise DataValidationError(
            f"got {len(graded_G)} rewards, expected {len(trajectories_G)}, one for each trajectory"
        )
    rewards_G: list[float] = []
    metrics_G: list[Metrics] = []
    for i, trajectory in enumerate(trajectories_G):
        value, metrics = graded_G[i]
        location = f"compute_group_rewards of {type(builder).__name__}, member {i}"
        reward = checked_reward(value, location)
        # Metrics of the group replace those of the episode with the same name.
        metrics = {**trajectory.metrics, **metrics}
        if termination.clamps(trajectory.stop_reason) and trajectory.reward + reward > 0:
            # The final reward cancels the rewards of the steps, so that the total is 0.
            reward = -trajectory.reward
            metrics["zero_reward_on_limit"] = 1.0
        rewards_G.append(reward)
        metrics_G.append(metrics)
    return rewards_G, metrics_G


_executor: ContextVar[Executor | None] = ContextVar("rollout_executor", default=None)


def set_rollout_executor(executor: Executor | None) -> Token[Executor | None]:
    """Sets the executor of this context's group rollouts; ``None`` runs them on the event loop.

    A ``ThreadPoolExecutor`` runs them in threads of this process. Every other executor
    (``ProcessPoolExecutor``, ``RayExecutor``, Dask's) gets pickled builders and policies.

    Raises:
        ConfigurationError: The executor is a process pool whose start method is not "spawn".
    """
    check_executor(executor)
    return _executor.set(executor)


def get_rollout_executor() -> Executor | None:
    """Returns the executor of this context, or ``None`` if groups run on the event loop."""
    return _executor.get()


def run_group(
    builder: EnvGroupBuilder,
    policy: TokenCompleter,
    *,
    strategy: RolloutStrategy | None = None,
    config: RolloutConfig | None = None,
    hooks: RolloutHooks | None = None,
) -> Awaitable[TrajectoryGroup]:
    """Returns an awaitable of ``do_group_rollout`` in the context's executor.

    Cancelling it cancels the rollout, unless another process has begun it. Raises
    ``ConfigurationError`` if the arguments cannot be pickled for another process.
    """
    # Programs for the official cookbook replace this function of the package by one of their own.
    replacement = sys.modules["tinker_cookbook.rl.rollouts"].do_group_rollout
    if replacement is not do_group_rollout:
        return replacement(builder, policy, strategy)
    settings: dict[str, Any] = {"strategy": strategy, "config": config, "hooks": hooks}
    executor = get_rollout_executor()
    # Without an executor there is nothing to add, not even a frame in the traceback.
    if executor is None:
        return do_group_rollout(builder, policy, **settings)
    return _run_in_executor(executor, builder, policy, settings)


async def _run_in_executor(
    executor: Executor, builder: EnvGroupBuilder, policy: TokenCompleter, settings: dict[str, Any]
) -> TrajectoryGroup:
    if not runs_here(executor):
        # Pickled here rather than by the pool, so that the error can name the object that fails.
        parts = (
            _pickled(builder, "the group's builder"),
            _pickled(policy, "the policy"),
            _pickled(settings, "strategy, config and hooks"),
            current_place(),
            # Dask runs calls with equal arguments once, but each group is to be sampled.
            uuid.uuid4().hex,
        )
        try:
            return await asyncio.wrap_future(executor.submit(_run_pickled, *parts))
        except BrokenExecutor as error:
            raise RolloutExecutorError(
                f"rollout_executor: a process of {type(executor).__name__} died (killed, or out of "
                "memory), and such a pool cannot go on; RayExecutor and Dask's executor run the "
                "groups of a dead process again"
            ) from error
    # The thread runs the group on its own event loop, and stores loop and task for cancellation.
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
    cancelled = False

    async def run() -> TrajectoryGroup:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        # The caller was cancelled before this thread began, when there was no task to cancel.
        if cancelled:
            raise asyncio.CancelledError
        return await do_group_rollout(builder, policy, **settings)

    # The thread sees the context variables of the caller, such as the logtree report.
    context = contextvars.copy_context()
    future = executor.submit(context.run, lambda: asyncio.run(run()))
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        cancelled = True
        for loop, task in running:
            with suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(task.cancel)
        raise


def _run_pickled(
    builder: bytes, policy: bytes, settings: bytes, place: RolloutPlace | None, call: str
) -> TrajectoryGroup:
    """Runs a group in another process; ``call`` only tells equal calls apart."""
    sampled_by = pickle.loads(policy)
    # Nothing connects in this process: the policy brings its client along.
    if "tinker" in sys.modules:
        accept_samples_without_ids()
    with at_place(place):
        return asyncio.run(
            do_group_rollout(pickle.loads(builder), sampled_by, **pickle.loads(settings))
        )


def _pickled(value: Any, what: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise RolloutExecutorError(
            f"rollout_executor: {what} ({type(value).__name__}) cannot be pickled for another "
            f"process: {error}; use classes and functions defined at the top of a module, or a "
            "ThreadPoolExecutor (also for the local engine, which runs in this process)"
        ) from error
