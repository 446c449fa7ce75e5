"""Runs a recipe at each point of a grid from Python.

``python -m tinker_cookbook.sweep RECIPE key=a,b log_dir=FOLDER`` does the same on the command line,
with one server for all runs, and resumes where it was interrupted.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import chz

from tinker_cookbook.cli_utils import runs_path
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.chat_sl.sweep.grid import default_run_name, grid
from tinker_cookbook.recipes.chat_sl.sweep.results import collect
from tinker_cookbook.utils.command_line.entrypoint import run_to_end

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

T = TypeVar("T")


def run(
    main_fn: Callable[[T], None],
    base_config: T,
    *,
    sweep_dir: str | None = None,
    max_parallel: int = 1,
    executor: Executor | None = None,
    name_fn: Callable[[dict[str, Any]], str] | None = None,
    skip_existing: bool = False,
    **sweep_axes: list[Any],
) -> pd.DataFrame:
    """Runs ``main_fn`` once for each combination of the values of ``sweep_axes``.

    Args:
        main_fn: Takes a config, such as ``cli_main`` of a recipe; may be a coroutine function.
            Importable, if runs are parallel.
        base_config: Settings of all runs; its class has ``log_path``.
        sweep_dir: Folder of the sweep, with a folder for each run; default: a new one.
        max_parallel: Processes; each has an engine. Start them below ``if __name__ == "__main__"``.
        executor: Runs the jobs instead; the caller closes it.
        name_fn: Folder name of a run from its settings.
        skip_existing: Leave out runs that have metrics.
        sweep_axes: Setting -> list of its values.

    Returns:
        The table of ``collect``, also with runs that are not complete. A run that fails is logged
        and does not stop the others.

    Raises:
        ConfigurationError: There is no axis.
        TypeError: A setting does not exist, or has no list of values.
    """
    if not sweep_axes:
        raise ConfigurationError(
            "At least one sweep axis is needed, such as learning_rate=[1e-4, 3e-4]; got none"
        )
    folder = Path(sweep_dir or runs_path("sweeps", time.strftime("%Y%m%d_%H%M%S")))
    # All configs are made before any run starts, so that wrong settings stop the sweep at once.
    configs: list[Any] = []
    for point in grid(sweep_axes):
        log_path = folder / (name_fn or default_run_name)(point)
        config = chz.replace(base_config, log_path=str(log_path), **point)
        if not (skip_existing and (log_path / "metrics.jsonl").exists()):
            configs.append(config)
    with ExitStack() as stack:
        if executor is None and max_parallel > 1:
            # Not "fork": threads of torch and of the SDK do not survive it.
            context = multiprocessing.get_context("spawn")
            executor = stack.enter_context(ProcessPoolExecutor(max_parallel, context))
        apply = map if executor is None else executor.map
        list(apply(partial(run_one, main_fn), configs))
    return collect(folder, require_complete=False)


def run_one(main_fn: Callable[[T], Any], config: T) -> None:
    """Runs one point of the grid in this process; logs its error."""
    try:
        result = main_fn(config)
        if inspect.isawaitable(result):
            run_to_end(result)
    except Exception:
        logger.exception("the run %s failed", getattr(config, "log_path", config))
