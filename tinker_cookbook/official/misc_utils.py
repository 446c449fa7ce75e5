"""Small helpers for training loops of user code: timing, lists, files, session names."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tinker_cookbook import __version__
from tinker_cookbook.utils.imports import lookup_func as lookup_func

logger = logging.getLogger(__name__)

T = TypeVar("T")


@contextmanager
def timed(key: str, metrics: dict[str, Any]) -> Iterator[None]:
    """Sets ``metrics["time/KEY"]`` to the seconds of the block, even if it raises."""
    logger.info("%s begins", key)
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - started
        metrics[f"time/{key}"] = seconds
        logger.info("%s took %.2f s", key, seconds)


def safezip(*iterables: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """``zip`` that raises ``ValueError`` for iterables of different lengths."""
    return zip(*iterables, strict=True)


def dict_mean(list_of_dicts: Sequence[Mapping[str, float | int | None]]) -> dict[str, float]:
    """Returns the mean of each key over the dictionaries in which it is not ``None``."""
    values: dict[str, list[float]] = {}
    for one in list_of_dicts:
        for key, value in one.items():
            if value is not None:
                values.setdefault(key, []).append(float(value))
    return {key: math.fsum(numbers) / len(numbers) for key, numbers in values.items()}


def all_same(xs: Sequence[Any]) -> bool:
    """Returns whether all elements are equal; true for none and for one."""
    return all(x == xs[0] for x in xs)


def split_list(lst: Sequence[T], num_splits: int) -> list[list[T]]:
    """Returns ``num_splits`` contiguous parts, whose lengths differ by at most one.

    Raises:
        ValueError: ``num_splits`` is below 1 or above the number of elements.
    """
    if not 1 <= num_splits <= len(lst):
        raise ValueError(
            f"num_splits: got {num_splits} for {len(lst)} elements, expected 1 to that number"
        )
    # Part i is [i * n / k, (i + 1) * n / k): the longer parts are spread evenly.
    edges = [i * len(lst) // num_splits for i in range(num_splits + 1)]
    return [list(lst[edges[i] : edges[i + 1]]) for i in range(num_splits)]


def concat_lists(list_of_lists: Iterable[Iterable[T]]) -> list[T]:
    """Returns the elements of all lists, in order."""
    return [item for part in list_of_lists for item in part]


def not_none(x: T | None) -> T:
    """Returns ``x``, for the type checker.

    Raises:
        AssertionError: It is ``None``.
    """
    assert x is not None, "got None, expected a value"
    return x


def iteration_dir(log_path: str | Path | None, step: int) -> Path | None:
    """Returns ``log_path/iteration_000012`` for step 12; ``None`` if ``log_path`` is empty."""
    return Path(log_path) / f"iteration_{step:06d}" if log_path else None


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSONL file, one a line; blank lines are skipped.

    Raises:
        OSError: The file cannot be read.
        json.JSONDecodeError: A line is not JSON. (``run.jsonl.read_rows`` accepts a
            torn last line, which a killed run leaves.)
    """
    with Path(path).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def recipe_user_metadata(recipe_name: str) -> dict[str, str]:
    """Returns the ``user_metadata`` of a recipe's ``ServiceClient``.

    It has ``recipe_name``, which listings of runs show, and as ``git_rev`` the package version.
    """
    return {"recipe_name": recipe_name, "git_rev": __version__}


_PREFIX = "cookbook"


def resolve_session_display_name(*, session_name: str | None, wandb_name: str | None) -> str | None:
    """Returns the first name that is not empty, or ``None``."""
    return session_name or wandb_name or None


def slugify(text: str) -> str:
    """Returns the lower-case letters and digits of ``text``, joined by single hyphens."""
    return "-".join(re.findall(r"[a-z0-9]+", text.lower()))


def default_cookbook_session_name(*parts: str | None, wandb_name: str | None = None) -> str:
    """Returns the default session name of a recipe, such as ``"cookbook-math-rl-gsm8k"``.

    Args:
        parts: Name of the recipe, then what distinguishes its runs (dataset, stage). ``None`` and
            parts without a letter or digit are skipped.
        wandb_name: If set, it is returned unchanged, so that both names are the same.
    """
    if wandb_name:
        return wandb_name
    slugs = [slugify(part) for part in parts if part]
    return "-".join([_PREFIX, *filter(None, slugs)])
