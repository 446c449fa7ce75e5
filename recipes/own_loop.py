"""Helpers for recipes that contain their own training loop: folder, resume, connection."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import chz

from tinker_cookbook import checkpoint_utils, cli_utils
from tinker_cookbook.backends import ServiceClient, TrainingClient
from tinker_cookbook.backends.connect import connect_with
from tinker_cookbook.engine.sampler_settings import SamplerSettings
from tinker_cookbook.recipes.start import DEMO_MODEL
from tinker_cookbook.run import ml_log
from tinker_cookbook.run.changes import check_same_settings
from tinker_cookbook.run.config import dump_config
from tinker_cookbook.run.data_record import data_record, write_data_record
from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.run.resume import check_not_passed, newest_saved
from tinker_cookbook.run.weights import check_weights
from tinker_cookbook.training.commands import repeat_line
from tinker_cookbook.training.config import DEFAULT_TTL_SECONDS, BackendSettings, number
from tinker_cookbook.training.server_needs import Need, ServerCheck
from tinker_cookbook.utils.command_line.entrypoint import run_to_end

C = TypeVar("C")
D = TypeVar("D")

logger = logging.getLogger(__name__)


@chz.chz
class LoopSettings(BackendSettings):
    """Settings that every own loop has."""

    model_name: str = chz.field(default=DEMO_MODEL, doc="Hub name or local folder of the model")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    lora_rank: int = number(32, "Rank of the LoRA adapter; 0: train all weights (local)")
    seed: int = chz.field(
        default=0, doc="Seed of the adapter's initialization, of the data and of the samples"
    )
    save_every: int = number(20, "Steps between checkpoints; 0: never")
    allow_config_change: bool = chz.field(
        default=False, doc="Resume even if settings that affect training have changed"
    )
    ttl_seconds: int | None = number(
        DEFAULT_TTL_SECONDS, "Lifetime of periodic checkpoints; the final one stays", low=1
    )
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = chz.field(
        default="ask", doc="ask, resume, delete or raise"
    )
    wandb_project: str | None = chz.field(default=None, doc="Also log to Weights & Biases")
    wandb_name: str | None = chz.field(default=None, doc="Name of the run in Weights & Biases")
    session_name: str | None = chz.field(default=None, doc="Name of the run in the backend")


def save_step(client: TrainingClient, config: Any, done: int, total: int, **state: Any) -> None:
    """Saves a checkpoint after every ``save_every`` steps, and after the last one.

    The final checkpoint can also be sampled from, and does not expire.
    """
    final = done == total
    if final or (config.save_every and done % config.save_every == 0):
        checkpoint_utils.save_checkpoint(
            client,
            "final" if final else f"{done:06d}",
            config.log_path,
            {"batch": done, "final": final, **state},
            kind="both" if final else "state",
            ttl_seconds=None if final else config.ttl_seconds,
        )


def make_client(config: Any, service: ServiceClient, state_path: str | None) -> TrainingClient:
    """Returns a fresh adapter, or the one saved at ``state_path`` with its optimizer."""
    if state_path is None:
        return service.create_lora_training_client(
            config.model_name, rank=config.lora_rank, seed=config.seed
        ).result()
    # A checkpoint of another model or rank fails here, with a clear error.
    run_to_end(check_weights(service, state_path, config))
    return service.create_training_client_from_state_with_optimizer(state_path).result()


def run_own_loop(
    config: C,
    load: Callable[[C], D],
    count_steps: Callable[[C, D], int],
    train: Callable[[C, TrainingClient, D, ml_log.Logger, range], None],
    needs: Sequence[Need],
) -> None:
    """Starts or resumes a run: calls ``train`` with a client, the data, a logger and the steps.

    Args:
        config: Settings of the recipe, such as ``recipes.sl_loop`` or ``recipes.rl_loop``.
        load: Returns the data, which the run's folder records.
        count_steps: Returns the number of steps of the whole run.
        train: Runs the steps of the range, from the first one after the checkpoint.
        needs: Server features that the loop needs.

    Raises:
        BackendError: The server lacks a feature in ``needs``; nothing was trained.
    """
    settings: Any = config
    behavior = settings.behavior_if_log_dir_exists
    with cli_utils.log_dir_of_run(settings.log_path, behavior), RunLock(settings.log_path):
        data = load(config)
        total = count_steps(config, data)
        record = data_record(data)
        last = checkpoint_utils.get_last_checkpoint(settings.log_path)
        if last is not None:
            # A resumed run with other settings would mix two kinds of steps in its metrics.
            allowed = settings.allow_config_change
            for line in check_same_settings(settings.log_path, settings, allowed, record):
                print(line)
            check_not_passed(last, total)
        ml_logger = ml_log.start_logging(
            settings.log_path,
            wandb_project=settings.wandb_project,
            wandb_name=settings.wandb_name,
            config=settings,
            resume_step=-1 if last is None else last.batch or 0,
        )
        write_data_record(settings.log_path, record)
        if last is not None and last.final and (last.batch or 0) >= total:
            logger.info("the run in %s is complete (%d steps)", settings.log_path, total)
        else:
            name = settings.session_name
            metadata = {} if name is None else {"session_name": name}
            sampler = SamplerSettings.of(settings)
            with connect_with(settings, sampler=sampler, user_metadata=metadata) as connection:
                logger.info(connection.describe())
                # Check before the first step; otherwise a missing feature could fail a later one.
                check = ServerCheck(connection, settings.model_name)
                run_to_end(check.check_model())
                if last is not None:
                    last, lines = run_to_end(newest_saved(connection.service, settings.log_path))
                    check.lines += lines
                state_path = None if last is None else last.state_path
                client = make_client(settings, connection.service, state_path)
                run_to_end(check.check_needs(client, needs))
                for line in check.lines:
                    logger.info(line)
                done = 0 if last is None else last.batch or 0
                train(config, client, data, ml_logger, range(done, total))
                if last is not None and done == total:
                    # The run was shortened to this checkpoint, so no step saves a final one.
                    save_step(client, settings, done, total)
        if line := repeat_line(settings.log_path, dump_config(settings)):
            logger.info(line)
        ml_logger.close()
