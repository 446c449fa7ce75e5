"""The renderer that a checkpoint was trained with, from the metadata of its run."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

from tinker_cookbook.backends.protocols import Future, ServiceClient
from tinker_cookbook.run.checkpoints import run_async

logger = logging.getLogger(__name__)

RENDERER_NAME_METADATA_KEY = "renderer_name"
"""Key of the renderer's name in the metadata of a run."""


async def get_renderer_name_from_checkpoint_async(
    service_client: ServiceClient, checkpoint_path: str
) -> str | None:
    """Returns the renderer of the run that saved a checkpoint; ``None`` if it is unknown.

    A lookup that fails is logged as a warning.

    Args:
        service_client: Of any backend that has the checkpoint.
        checkpoint_path: ``tinker://RUN/…``.
    """
    return await run_async(read_renderer_name(service_client, checkpoint_path))


def read_renderer_name(
    service: ServiceClient, path: str
) -> Generator[Future[Any], Any, str | None]:
    """The steps of :func:`get_renderer_name_from_checkpoint_async`."""
    try:
        run = yield service.create_rest_client().get_training_run_by_tinker_path(path)
    except Exception as error:  # a name that is only a default must not end a run
        logger.warning("the renderer of checkpoint %s could not be looked up: %s", path, error)
        return None
    return (run.user_metadata or {}).get(RENDERER_NAME_METADATA_KEY)
