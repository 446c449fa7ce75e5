"""Which renderer a checkpoint was trained with, as its run's metadata says."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.utils.checkpoints.futures import run_async, run_blocking

if TYPE_CHECKING:
    from tinker_cookbook.backends.protocols import Future, ServiceClient

logger = logging.getLogger(__name__)

RENDERER_NAME_METADATA_KEY = "renderer_name"
"""Key of the renderer's name in the metadata of a run."""


def add_renderer_name_to_user_metadata(
    user_metadata: dict[str, str], renderer_name: str | None
) -> None:
    """Puts the name into metadata of a run, which is changed; nothing where there is no name."""
    if renderer_name:
        user_metadata[RENDERER_NAME_METADATA_KEY] = renderer_name


def get_renderer_name_from_checkpoint(
    service_client: ServiceClient, checkpoint_path: str
) -> str | None:
    """Returns the renderer of the run that saved a checkpoint; ``None`` where it is not known.

    A run that cannot be asked about is logged as a warning, no error.

    Args:
        service_client: Of any backend that has the checkpoint.
        checkpoint_path: ``tinker://RUN/…``.
    """
    return run_blocking(_read(service_client, checkpoint_path))


async def get_renderer_name_from_checkpoint_async(
    service_client: ServiceClient, checkpoint_path: str
) -> str | None:
    """As :func:`get_renderer_name_from_checkpoint`, awaitable."""
    return await run_async(_read(service_client, checkpoint_path))


def _read(service: ServiceClient, path: str) -> Generator[Future[Any], Any, str | None]:
    try:
        run = yield service.create_rest_client().get_training_run_by_tinker_path(path)
    except Exception as error:  # a name that is only a default must not end a run
        logger.warning("the renderer of checkpoint %s could not be looked up: %s", path, error)
        return None
    return (run.user_metadata or {}).get(RENDERER_NAME_METADATA_KEY)


def resolve_renderer_name_from_checkpoint_or_default(
    *,
    model_name: str,
    explicit_renderer_name: str | None,
    load_checkpoint_path: str | None,
    base_url: str | None = None,
) -> str:
    """Returns the first of: the given name, that of the checkpoint's run, the model's
    recommended one.

    Args:
        model_name: Hub name or local folder of the model.
        explicit_renderer_name: A name that the user gave.
        load_checkpoint_path: ``tinker://`` path of weights that a run starts from.
        base_url: Server that has the checkpoint; by default the backend that ``backend=auto``
            chooses.
    """
    if explicit_renderer_name is None and load_checkpoint_path is not None:
        with _connect(base_url) as connection:
            found = get_renderer_name_from_checkpoint(connection.service, load_checkpoint_path)
        return _chosen(model_name, found, load_checkpoint_path)
    return _chosen(model_name, explicit_renderer_name, None)


async def resolve_renderer_name_from_checkpoint_or_default_async(
    *,
    model_name: str,
    explicit_renderer_name: str | None,
    load_checkpoint_path: str | None,
    base_url: str | None = None,
) -> str:
    """As :func:`resolve_renderer_name_from_checkpoint_or_default`, awaitable."""
    if explicit_renderer_name is None and load_checkpoint_path is not None:
        with _connect(base_url) as connection:
            found = await get_renderer_name_from_checkpoint_async(
                connection.service, load_checkpoint_path
            )
        return _chosen(model_name, found, load_checkpoint_path)
    return _chosen(model_name, explicit_renderer_name, None)


def _connect(base_url: str | None) -> Any:
    # Not at the top: backends import training code that imports this package.
    from tinker_cookbook.backends import connect

    return connect(base_url=base_url)


def _chosen(model_name: str, name: str | None, checkpoint_path: str | None) -> str:
    if name is None:
        return get_recommended_renderer_name(model_name)
    if checkpoint_path is not None:
        logger.info("renderer %s, as checkpoint %s was trained with it", name, checkpoint_path)
    return name


def check_renderer_name_for_checkpoint(
    service_client: ServiceClient, checkpoint_path: str, expected_renderer_name: str | None
) -> None:
    """Warns where a checkpoint was trained with another renderer than the expected one.

    Args:
        service_client: Of any backend that has the checkpoint.
        checkpoint_path: ``tinker://RUN/…``.
        expected_renderer_name: ``None`` checks nothing.
    """
    if expected_renderer_name is not None:
        found = get_renderer_name_from_checkpoint(service_client, checkpoint_path)
        _compare(checkpoint_path, expected_renderer_name, found)


async def check_renderer_name_for_checkpoint_async(
    service_client: ServiceClient, checkpoint_path: str, expected_renderer_name: str | None
) -> None:
    """As :func:`check_renderer_name_for_checkpoint`, awaitable."""
    if expected_renderer_name is not None:
        found = await get_renderer_name_from_checkpoint_async(service_client, checkpoint_path)
        _compare(checkpoint_path, expected_renderer_name, found)


def _compare(path: str, expected: str, found: str | None) -> None:
    if found is None:
        logger.info("checkpoint %s does not say which renderer it was trained with", path)
    elif found != expected:
        logger.warning(
            "checkpoint %s was trained with the renderer %s, but %s is used: the model may not "
            "understand the prompts",
            path,
            found,
            expected,
        )
