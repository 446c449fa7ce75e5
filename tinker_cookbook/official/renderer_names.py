"""The renderer of a checkpoint, for loops of user code (``checkpoint_utils``)."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

from tinker_cookbook import backends
from tinker_cookbook.backends.protocols import Future, ServiceClient
from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.official.steps import run_async, run_blocking
from tinker_cookbook.run.renderer_names import NO_LOOKUP, RENDERER_NAME_METADATA_KEY

logger = logging.getLogger(__name__)


def add_renderer_name_to_user_metadata(
    user_metadata: dict[str, str], renderer_name: str | None
) -> None:
    """Adds the name, if there is one, to the metadata of a run, in place."""
    if renderer_name:
        user_metadata[RENDERER_NAME_METADATA_KEY] = renderer_name


def get_renderer_name_from_checkpoint(
    service_client: ServiceClient, checkpoint_path: str
) -> str | None:
    """As ``get_renderer_name_from_checkpoint_async``, without an event loop."""
    return run_blocking(_read(service_client, checkpoint_path))


def resolve_renderer_name_from_checkpoint_or_default(
    *,
    model_name: str,
    explicit_renderer_name: str | None,
    load_checkpoint_path: str | None,
    base_url: str | None = None,
) -> str:
    """Returns the given name, or the name recorded by the checkpoint's run, or the recommended one.

    Args:
        model_name: Hub name or local folder of the model.
        explicit_renderer_name: The user's choice.
        load_checkpoint_path: ``tinker://`` path of weights that a run starts from.
        base_url: Server that has the checkpoint; by default the backend that ``backend=auto``
            chooses.
    """
    arguments = (model_name, explicit_renderer_name, load_checkpoint_path, base_url)
    return run_blocking(_resolve(*arguments))


async def resolve_renderer_name_from_checkpoint_or_default_async(**arguments: Any) -> str:
    """As :func:`resolve_renderer_name_from_checkpoint_or_default`, awaitable."""
    return await run_async(_resolve(**arguments))


def _resolve(
    model_name: str,
    explicit_renderer_name: str | None,
    load_checkpoint_path: str | None,
    base_url: str | None = None,
) -> Generator[Future[Any], Any, str]:
    name, path = explicit_renderer_name, load_checkpoint_path
    if name is None and path is not None:
        # Only for this lookup, and closed after it: the run connects itself later.
        with backends.connect(base_url=base_url) as connection:
            name = yield from _read(connection.service, path)
        if name is not None:
            logger.info("renderer %s, which checkpoint %s was trained with", name, path)
    return get_recommended_renderer_name(model_name) if name is None else name


def check_renderer_name_for_checkpoint(
    service_client: ServiceClient, checkpoint_path: str, expected_renderer_name: str | None
) -> None:
    """Warns if a checkpoint was trained with another renderer than the expected one.

    Args:
        service_client: Of any backend that has the checkpoint.
        checkpoint_path: ``tinker://RUN/…``.
        expected_renderer_name: ``None`` checks nothing.
    """
    run_blocking(_check(service_client, checkpoint_path, expected_renderer_name))


async def check_renderer_name_for_checkpoint_async(
    service_client: ServiceClient, checkpoint_path: str, expected_renderer_name: str | None
) -> None:
    """As :func:`check_renderer_name_for_checkpoint`, awaitable."""
    await run_async(_check(service_client, checkpoint_path, expected_renderer_name))


def _read(service: ServiceClient, path: str) -> Generator[Future[Any], Any, str | None]:
    """As ``get_renderer_name_from_checkpoint_async``."""
    try:
        run = yield service.create_rest_client().get_training_run_by_tinker_path(path)
    except Exception as error:
        logger.warning(NO_LOOKUP, path, error)
        return None
    return (run.user_metadata or {}).get(RENDERER_NAME_METADATA_KEY)


def _check(
    service: ServiceClient, path: str, expected: str | None
) -> Generator[Future[Any], Any, None]:
    if expected is None:
        return
    found = yield from _read(service, path)
    if found is None:
        logger.info("checkpoint %s does not state which renderer it was trained with", path)
    elif found != expected:
        message = "checkpoint %s was trained with the renderer %s, but %s is used: the model may "
        logger.warning(message + "not understand the prompts", path, found, expected)
