"""Names of weights in settings: ``tinker://RUN/KIND/NAME``, ``LOG_PATH`` or ``LOG_PATH@STEP``.

A run's log folder names its weights on every backend, because ``checkpoints.jsonl`` in it lists
their paths. ``LOG_PATH`` is the newest checkpoint; ``STEP`` is a number of updates (``120`` or
``000120``), or a name (``final``, ``best``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import chz
from chz.mungers import Munger
from chz.util import MISSING

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.checkpoints import CheckpointRecord, load_checkpoints_file
from tinker_cookbook.run.paths import CHECKPOINTS_FILE

SCHEME = "tinker://"
FORMS = f"log_path of a run, LOG_PATH@STEP, or a {SCHEME} path"
WeightsKind = Literal["weights", "sampler_weights"]

_FIELD_OF = {"weights": "state_path", "sampler_weights": "sampler_path"}


class _Resolve(Munger):
    def __init__(self, kind: WeightsKind) -> None:
        self.kind: WeightsKind = kind

    def __call__(self, value: Any, *, chzself: Any = None, field: Any = None) -> str | None:
        return resolve_weights(value, self.kind, field.logical_name)


def weights_field(kind: WeightsKind, doc: str, *, required: bool = False) -> Any:
    """Returns a chz field for a path of weights; the default is None unless it is ``required``.

    The object has the ``tinker://`` path, so ``config.json`` records it even if the run in the log
    folder continues. A value that names no log folder stays as it is, for ``check_tinker_path``.

    Args:
        kind: ``weights`` to continue training, ``sampler_weights`` to sample.
        doc: Help text such as ``Teacher's weights; default: …``; the forms of a path are added
            before the semicolon.
        required: Whether there is no default.
    """
    what, semicolon, rest = doc.partition(";")
    doc = f"{what}: {FORMS}{semicolon}{rest}"
    return chz.field(munger=_Resolve(kind), doc=doc, default=MISSING if required else None)


def resolve_weights(value: str | None, kind: WeightsKind, field: str) -> str | None:
    """Returns the ``tinker://`` path that ``LOG_PATH`` or ``LOG_PATH@STEP`` names.

    Without a sampler checkpoint at that step the training state is returned, which has the same
    adapter. A value that names no log folder is returned as it is.

    Raises:
        ConfigurationError: ``value`` is empty, or the run has no checkpoint, or none of this step;
            names those it has.
    """
    if value is None or value.startswith(SCHEME):
        return value
    if not value.strip():  # pathlib takes it as the current folder
        raise ConfigurationError(f"{field}: got {value!r}, expected the {FORMS}")
    folder, step = Path(value).expanduser(), ""
    if not folder.is_dir() and "@" in value:
        text, _, step = value.rpartition("@")
        folder = Path(text).expanduser()
        if not step and folder.is_dir():  # such as an empty variable of a shell script
            raise ConfigurationError(
                f"{field}: got {value!r} without a step, expected LOG_PATH@STEP, or LOG_PATH for "
                "the newest checkpoint"
            )
    if not (folder / CHECKPOINTS_FILE).is_file():
        return value
    listed = [one for one in load_checkpoints_file(folder) if _path_of(one, kind)]
    # The best checkpoint is an older one, so it must be asked for.
    found = [one for one in listed if not one.extra.get("best")] or listed
    if step:
        found = [one for one in listed if _is_step(one, step)]
        # A save for sampling and a training state of one step may be in separate lines. The best
        # checkpoint of a run is replaced by the next better one, so a lasting one is preferred.
        found.sort(key=lambda one: (one.get(_FIELD_OF[kind]) is not None, not _is_replaced(one)))
    if not found:
        what = "weights to continue training" if kind == "weights" else "checkpoint"
        steps = ", ".join(dict.fromkeys(_label(one) for one in listed))
        had = f"expected a step of {steps}" if listed else "it has no such checkpoint yet"
        wanted = f" of step {step!r}" if step else ""
        raise ConfigurationError(f"{field}: got {value!r}, no {what}{wanted}; {had}")
    return _path_of(found[-1], kind)


def check_tinker_path(field: str, path: str | None, kind: WeightsKind, run: str) -> None:
    """Raises ``ConfigurationError`` for a path that is no ``tinker://`` path; ``None`` is valid.

    ``kind`` and ``run`` ("the teacher's run") are for the error. Either kind of weights is
    accepted, since a server may name its kinds differently.
    """
    parts = (path or "").removeprefix(SCHEME).split("/")
    if path is None or (path.startswith(SCHEME) and len(parts) == 3 and all(parts)):
        return
    why = ""
    if not path.startswith(SCHEME):
        # The text before @ is the folder, unless there is a folder of the whole name.
        whole = Path(path).expanduser()
        folder = whole if whole.exists() else Path(path.rpartition("@")[0] or path).expanduser()
        there = folder.is_dir()
        why = f"; {folder} has no {CHECKPOINTS_FILE}" if there else f"; no such folder: {folder}"
    raise ConfigurationError(
        f"{field}: got {path!r}, expected {SCHEME}RUN/{kind}/NAME, as the {_FIELD_OF[kind]} in "
        f"{CHECKPOINTS_FILE} of {run}, or the log_path of {run} for its newest checkpoint and "
        f"LOG_PATH@STEP for another one{why}"
    )


def _path_of(record: CheckpointRecord, kind: WeightsKind) -> str | None:
    if kind == "weights":
        return record.state_path
    return record.sampler_path or record.state_path


def _is_replaced(record: CheckpointRecord) -> bool:
    return bool(record.extra.get("best") or record.extra.get("rolling"))


def _is_step(record: CheckpointRecord, step: str) -> bool:
    return step == record.name or (step.isdigit() and int(step) == record.batch)


def _label(record: CheckpointRecord) -> str:
    if record.batch is None:
        return record.name
    return str(record.batch) + ("" if record.name.isdigit() else f" ({record.name})")
