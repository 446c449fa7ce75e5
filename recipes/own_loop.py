"""Helpers for recipes that contain their own training loop: folder, resume, connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tinker_cookbook import checkpoint_utils, cli_utils
from tinker_cookbook.backends import connect
from tinker_cookbook.engine.vllm.settings import SamplerSettings
from tinker_cookbook.training.changes import check_same_settings
from tinker_cookbook.training.server_needs import Need, ServerCheck
from tinker_cookbook.training.weights import check_weights
from tinker_cookbook.utils import ml_log
from tinker_cookbook.utils.run_folder.lock import RunLock

if TYPE_CHECKING:
    from tinker_cookbook.backends import ServiceClient, TrainingClient

C = TypeVar("C")
D = TypeVar("D")

logger = logging.getLogger(__name__)


def make_client(config: Any, service: ServiceClient, state_path: str | None) -> TrainingClient:
    """Returns a fresh adapter, or the one saved at ``state_path`` with its optimizer."""
    if state_path is not None:
        # A checkpoint of another model or rank fails here, with a clear error.
        asyncio.run(check_weights(service, state_path, config))
        return service.create_training_client_from_state_with_optimizer(state_path).result()
    return service.create_lora_training_client(
        config.model_name, rank=config.lora_rank, seed=config.seed
    ).result()


def run_own_loop(
    config: C,
    load: Callable[[C], D],
    train: Callable[[C, TrainingClient, D, ml_log.Logger, int], None],
    needs: Sequence[Need],
) -> None:
    """Starts or resumes a run and calls ``train`` with a client, the data, a logger and the step.

    Args:
        config: Settings of the recipe, such as ``recipes.sl_loop`` or ``recipes.rl_loop``.
        load: Returns the data.
        train: Runs the training loop.
        needs: Server features that the loop needs.

    Raises:
        BackendError: The server lacks a feature in ``needs``; nothing was trained.
    """
    settings: Any = config
    behavior = settings.behavior_if_log_dir_exists
    with cli_utils.log_dir_of_run(settings.log_path, behavior), RunLock(settings.log_path):
        last = checkpoint_utils.get_last_checkpoint(settings.log_path)
        start = last.batch if last is not None and last.batch is not None else 0
        if last is not None:
            # A resumed run with other settings would mix two kinds of steps in its metrics.
            allowed = settings.allow_config_change
            for line in check_same_settings(settings.log_path, settings, allowed):
                print(line)
        ml_logger = ml_log.setup_logging(
            settings.log_path,
            wandb_project=settings.wandb_project,
            wandb_name=settings.wandb_name,
            config=settings,
            resume_step=start if last is not None else -1,
        )
        if last is not None and last.final:
            logger.info("the run in %s is complete: nothing is left to do", settings.log_path)
        else:
            data = load(config)
            name = settings.session_name
            with connect(
                settings.backend,
                base_url=settings.base_url,
                device=settings.device,
                dtype=settings.dtype,
                sampler=SamplerSettings.of(settings),
                user_metadata={} if name is None else {"session_name": name},
            ) as connection:
                logger.info(connection.describe())
                state_path = last.state_path if last is not None else None
                # Check before the first step; otherwise a missing feature could fail a later one.
                check = ServerCheck(connection, settings.model_name)
                asyncio.run(check.check_model())
                client = make_client(settings, connection.service, state_path)
                asyncio.run(check.check_needs(client, needs))
                for line in check.lines:
                    logger.info(line)
                train(config, client, data, ml_logger, start)
        ml_logger.close()
