"""Copies the weights of a training checkpoint to a new run, of another account or project too.

    python -m tinker_cookbook.scripts.copy_checkpoint --source-path tinker://RUN/weights/NAME
    python -m tinker_cookbook.scripts.copy_checkpoint --source-path LOG_PATH@STEP \
        --output-kind training

The copy belongs to the account of ``TINKER_API_KEY``; without a key, it is on this machine. To
copy from another account, set ``SRC_TINKER_ACCESS_TOKEN`` to a token that may read the source
(see ``get_access_token``). The optimizer's state is not copied. On the hosted service, for a
checkpoint of your own, ``ServiceClient.copy_weights()`` of the SDK copies without loading it.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any

from tinker_cookbook.backends.connect import check_backend, connect
from tinker_cookbook.backends.hosted import connect_hosted
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.weights_paths import FORMS, check_tinker_path, resolve_weights
from tinker_cookbook.utils.command_line.entrypoint import run_program

CHECKPOINT_NAME_RE = re.compile(r"/weights/([^/]+)$")
TRAINING_WEIGHTS_PATH_RE = re.compile(r"/weights/[^/]+$")
_OUTPUT_KINDS = ("sampler", "training")


def copy_checkpoint(
    source_path: str,
    source_access_token: str | None,
    destination_project_id: str | None,
    output_name: str | None,
    output_kind: str,
) -> None:
    """Copies a checkpoint and prints the path of the copy.

    Args:
        source_path: ``tinker://RUN/weights/NAME``, a log folder, or ``LOG_PATH@STEP``.
        source_access_token: Token of the source's account; ``None``: the own account.
        destination_project_id: Project of the new run; ``None``: the default project.
        output_name: Name of the copy; ``None``: that of the source.
        output_kind: ``sampler`` or ``training``.

    Raises:
        ConfigurationError: A value is wrong; nothing has been copied.
    """
    if output_kind not in _OUTPUT_KINDS:
        raise ConfigurationError(
            f"output_kind: got {output_kind!r}, expected {' or '.join(_OUTPUT_KINDS)}"
        )
    path = resolve_weights(source_path, "weights", "source_path")
    check_tinker_path("source_path", path, "weights", "the run")
    assert path is not None
    if not TRAINING_WEIGHTS_PATH_RE.search(path):
        raise ConfigurationError(
            f"source_path: got {path}, expected tinker://RUN/weights/NAME; weights for sampling "
            "cannot be loaded for a copy, so give the training checkpoint of the same step"
        )
    kind, url, _ = check_backend()
    if kind == "tinker":
        service: Any = connect_hosted(url, project_id=destination_project_id)
    elif destination_project_id is not None:
        raise ConfigurationError(
            f"destination_project_id: got {destination_project_id!r}, but this machine has no "
            "projects; leave it out, or set TINKER_API_KEY"
        )
    else:
        service = connect("local").service
    with service:
        training = service.create_training_client_from_state(
            path,
            user_metadata={"copied_from_path": path},
            weights_access_token=source_access_token,
        ).result()
        name = output_name or checkpoint_name_from_path(path)
        if output_kind == "training":
            print(f"training_path: {training.save_state(name).result().path}")
        else:
            print(f"sampler_path:  {training.save_weights_for_sampler(name).result().path}")


def checkpoint_name_from_path(source_path: str) -> str:
    """Returns the last part of a training checkpoint's path; ConfigurationError for others."""
    match = CHECKPOINT_NAME_RE.search(source_path)
    if match is None:
        raise ConfigurationError(
            f"source_path: got {source_path!r}, which has no name after /weights/; give "
            "--output-name"
        )
    return match.group(1)


def main(argv: Sequence[str] | None = None) -> None:
    """Copies what the command line names; ``argv``: default ``sys.argv``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source-path", required=True, help=f"training checkpoint: {FORMS}")
    parser.add_argument(
        "--source-access-token",
        default=os.environ.get("SRC_TINKER_ACCESS_TOKEN"),
        help="token of the source's account; default: SRC_TINKER_ACCESS_TOKEN",
    )
    parser.add_argument(
        *("--destination-project-id", "--target-project-id"),
        dest="destination_project_id",
        help="project of the copy; default: TINKER_PROJECT_ID, else the default project",
    )
    parser.add_argument("--output-name", help="name of the copy; default: that of the source")
    parser.add_argument("--output-kind", choices=_OUTPUT_KINDS, default="sampler")
    copy_checkpoint(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    run_program(main)
