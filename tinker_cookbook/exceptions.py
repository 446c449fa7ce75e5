"""Exceptions. Each message has the field, the value, the expected value, and the next step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = [
    "AllTrajectoriesFailedError",
    "BackendError",
    "BenchmarkNotFoundError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigurationError",
    "DataError",
    "DataFormatError",
    "DataValidationError",
    "EvalError",
    "EvalGradingError",
    "EvalTimeoutError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "RendererError",
    "SandboxError",
    "TinkerCookbookError",
    "TrainingError",
    "WeightsAdapterError",
    "WeightsDownloadError",
    "WeightsError",
    "WeightsMergeError",
]

_NAMES_IN_MESSAGES = 8


class TinkerCookbookError(Exception):
    """Base class of all errors that this package raises intentionally."""


class ConfigurationError(TinkerCookbookError, ValueError):
    """A setting is invalid, or two settings conflict."""


class DataError(TinkerCookbookError, ValueError):
    """Training or evaluation data cannot be used."""


class DataFormatError(DataError):
    """A file or row does not have the expected format."""


class DataValidationError(DataError):
    """Values have the right format but are out of range (token ids, lengths, NaN)."""


class RendererError(TinkerCookbookError, ValueError):
    """Messages cannot be converted to tokens, or tokens to messages."""


class TrainingError(TinkerCookbookError, RuntimeError):
    """A training run cannot continue."""


class CheckpointError(TrainingError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class CheckpointNotFoundError(CheckpointError):
    """A checkpoint does not exist, or has expired."""


class AllTrajectoriesFailedError(TrainingError):
    """Every rollout of a group failed."""


class BackendError(TinkerCookbookError, RuntimeError):
    """A backend cannot be reached, or does not support a request."""


class ModelNotFoundError(ConfigurationError):
    """A model name resolves to no local folder, no cached copy and no reachable hub."""


class OutOfMemoryError(TrainingError):
    """One sequence does not fit into memory."""


class WeightsError(TinkerCookbookError):
    """Weights cannot be downloaded, merged or exported."""


class WeightsDownloadError(WeightsError, RuntimeError):
    """Weights cannot be fetched."""


class WeightsMergeError(WeightsError, ValueError):
    """An adapter cannot be merged into its base model."""


class WeightsAdapterError(WeightsError, ValueError):
    """An adapter cannot be converted."""


class SandboxError(TinkerCookbookError, RuntimeError):
    """Code could not be executed, for a reason outside the code."""


class EvalError(TinkerCookbookError, RuntimeError):
    """An evaluation cannot be run."""


class EvalTimeoutError(EvalError, TimeoutError):
    """One example of an evaluation exceeded its time limit."""


class EvalGradingError(EvalError):
    """The grader returned no score for an example."""


class BenchmarkNotFoundError(EvalError, KeyError):
    """There is no benchmark with this name."""

    # KeyError shows the repr of its argument, which puts quotes around a sentence.
    __str__ = Exception.__str__


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the known name closest to ``name``, or ``""``."""
    matches = get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def nearest_sentence(name: str, known: Iterable[str]) -> str:
    """Like :func:`nearest`, but ends with a full stop if there is no match."""
    return nearest(name, known) or "."


def some_of(label: str, names: list[str]) -> str:
    """Returns ``"LABEL: 'a', 'b' and 3 more."``: at most eight, the last ones."""
    if not names:
        return f"{label}: none."
    shown = ", ".join(repr(name) for name in names[-_NAMES_IN_MESSAGES:])
    more = len(names) - _NAMES_IN_MESSAGES
    return f"{label}: {shown}{f' and {more} more' if more > 0 else ''}."


def install_command(extra: str) -> str:
    """Returns the ``pip`` command that adds the optional dependencies ``extra`` of this package.

    PyPI has another project under the name ``tinker_cookbook``, so the command names the checkout,
    or where the wheel came from, which pip notes (PEP 610).
    """
    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}[{extra}]'"
    try:
        noted = metadata.distribution("tinker_cookbook").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        noted = None
    source: dict[str, Any] = json.loads(noted) if noted else {"url": "ADDRESS_OF_THE_WHEEL"}
    address = source["url"]
    if commit := source.get("vcs_info"):
        address = f"{commit['vcs']}+{address}@{commit['commit_id']}"
    return f"pip install 'tinker_cookbook[{extra}] @ {address}'"
