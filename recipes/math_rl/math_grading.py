r"""Compares mathematical answers without an event loop, for user code.

Environments grade through ``grading.mathematics.grade_math``, which is asynchronous; the rules are
the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from tinker_cookbook.grading import mathematics, texts
from tinker_cookbook.grading.mathematics import (
    compare_quickly,
    default_pool,
    normal_form,
    require_math_verify,
    verify_expressions,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


def extract_boxed(text: str) -> str:
    r"""Returns the content of the last ``\boxed{…}``, or else the word after ``\boxed``."""
    found = texts.extract_boxed(text)
    if found is None:
        raise ValueError(f"No boxed answer in {text[-80:]!r}; expected \\boxed{{…}}")
    return found


def normalize_answer(answer: str | None) -> str | None:
    r"""Returns the answer in a normal form, without spaces that separate nothing, units and signs.

    ``\text{…}`` is replaced by its content, ``\frac12`` by ``\frac{1}{2}``; ``\left``, currency
    signs, degrees and a final full stop are removed.
    """
    return None if answer is None else normal_form(answer)


def split_tuple(expr: str) -> list[str]:
    """Returns the entries of ``(a, b)`` or ``[a, b]``; anything else is one entry, nothing is none.

    Thousands separators are removed.
    """
    return mathematics.split_tuple(expr)


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Returns whether two answers are equal; an answer that cannot be read is wrong.

    Can be slow for expressions such as nested powers; :func:`run_with_timeout_signal` limits
    the time.
    """
    if not given_answer:
        return False
    quick = compare_quickly(given_answer, ground_truth)
    if quick is not None:
        return quick
    require_math_verify()
    try:
        return verify_expressions(given_answer, ground_truth)
    except Exception as error:
        logger.info("%r and %r cannot be compared: %s", given_answer, ground_truth, error)
        return False


def grade_answer_math_verify(given_answer: str, ground_truth: str) -> bool:
    """Returns :func:`grade_answer`; the name stays for programs that choose between two graders."""
    return grade_answer(given_answer, ground_truth)


def run_with_timeout_signal(
    func: Callable[..., T],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    timeout_seconds: float = 5,
) -> T | None:
    """Returns ``func(*args, **kwargs)`` from a worker process, or ``None`` after the time limit.

    Works in any thread; the worker is killed. Function and arguments must be picklable.
    """
    try:
        work = partial(func, *args, **(kwargs or {}))
        return default_pool.call_blocking(work, timeout_seconds=timeout_seconds)
    except TimeoutError:
        return None
