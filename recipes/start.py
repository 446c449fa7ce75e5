"""How a recipe starts a run that its settings describe."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.training.config import TrainingConfig

C = TypeVar("C", bound=TrainingConfig)


async def start(
    config: C, behavior: cli_utils.LogdirBehavior, train: Callable[[C], Awaitable[None]]
) -> None:
    """Checks the config, then decides about its log folder, then trains.

    A wrong setting together with behavior_if_log_dir_exists=delete touches nothing; what fails
    later (the data, the backend, a checkpoint) brings the old run back.
    """
    config.check()
    with cli_utils.log_dir_of_run(config.log_path, behavior):
        await train(config)


def blueprint_of(config: C) -> chz.Blueprint[C]:
    """A blueprint with the values of ``config``, for code that changes some of them.

    As in ``blueprint.apply({"max_steps": 2}).make()``, or with ``make_from_argv``.
    """
    kind = type(config)
    return chz.Blueprint(kind).apply({name: getattr(config, name) for name in chz.chz_fields(kind)})
