"""The renderer that a checkpoint was trained with, from the metadata of its run."""

from __future__ import annotations

import logging

from tinker_cookbook.backends.protocols import ServiceClient

logger = logging.getLogger(__name__)

RENDERER_NAME_METADATA_KEY = "renderer_name"
"""Key of the renderer's name in the metadata of a run."""
NO_LOOKUP = "the renderer of checkpoint %s could not be looked up: %s"


async def get_renderer_name_from_checkpoint_async(
    service_client: ServiceClient, checkpoint_path: str
) -> str | None:
    """Returns the renderer of the run that saved a checkpoint; ``None`` if it is unknown.

    A lookup that fails is logged as a warning.

    Args:
        service_client: Of any backend that has the checkpoint.
        checkpoint_path: ``tinker://RUN/…``.
    """
    try:
        run = await service_client.create_rest_client().get_training_run_by_tinker_path(
            checkpoint_path
        )
    except Exception as error:  # a name that is only a default must not end a run
        logger.warning(NO_LOOKUP, checkpoint_path, error)
        return None
    return (run.user_metadata or {}).get(RENDERER_NAME_METADATA_KEY)
