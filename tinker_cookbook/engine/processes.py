"""The processes that train together: this one, or those of torchrun (``extensions.parallel``).

Imports no torch: with torchrun, programs call ``join`` at their start.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from tinker_cookbook.engine.model.resolve import ResolvedModel
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.leaves import load_leaf

if TYPE_CHECKING:
    from tinker_cookbook.engine.model.base_model import BaseModel
    from tinker_cookbook.engine.training.run import TrainingRun

_joining = threading.RLock()  # a process that serves stays inside, and makes its engine there


def join() -> None:
    """Joins the processes of torchrun, once; does nothing without torchrun.

    In all processes but the first it serves the first one and ends the process then
    (``SystemExit``). Call it early, and before an engine is made: what a script does before, every
    process does.
    """
    with _joining:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            load_leaf("engine.extensions.parallel.join", "torchrun").join()


class Processes:
    """The processes of one engine: this one alone."""

    count = 1
    """Number of processes that train."""
    shards = 1
    """Number of processes among which a base model is sharded."""
    several = False
    """Whether torchrun has started more than this one."""

    def device(self, requested: str) -> str:
        """Returns the device of this process."""
        return requested

    def open(
        self, device: str, dtype: str, base_dtype: str, replay_router: bool, shard_base: bool
    ) -> None:
        """Starts the engines of the other processes with these settings."""
        if shard_base:
            raise ConfigurationError(
                "shard_base=true: the base model is divided among several processes, and this is "
                "one; start the command by torchrun --nproc-per-node N -m, or leave shard_base out"
            )

    def load_base(
        self, name: str, resolved: ResolvedModel, make: Callable[..., BaseModel]
    ) -> BaseModel:
        """Returns the base model that ``make`` loads."""
        return make()

    def loading(self, name: str, resolved: ResolvedModel) -> AbstractContextManager[None]:
        """Context in which this process loads a base model to train, as the others do."""
        return nullcontext()

    def new_run(self, *arguments: Any) -> TrainingRun:
        """Returns a run; the arguments are those of ``TrainingRun``."""
        # Loads torch.
        from tinker_cookbook.engine.training.run import TrainingRun

        return TrainingRun(*arguments)

    def close(self, wait: bool = True) -> None:
        """Ends the engines of the other processes."""


class _Factory:
    make: Callable[[], Processes] = Processes


factory = _Factory()
"""Makes the processes of an engine; ``extensions.parallel`` sets it where torchrun has started
several."""
