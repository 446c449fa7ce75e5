r"""Compares mathematical answers without an event loop, for user code and data preparation.

Environments grade through ``rl.envs.grading``, which is asynchronous. The functions
here compare like the MATH benchmark: after normalisation, answers are equal as text, as
numbers or by ``math_verify``; a fraction must be reduced like the reference, and
the entries of a tuple are compared one by one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from tinker_cookbook.rl.envs import grading
from tinker_cookbook.rl.envs.grading import default_pool, equal_plain_numbers, require_math_verify

logger = logging.getLogger(__name__)

T = TypeVar("T")

_UNBRACED_BOX = re.compile(r"\\boxed\s+([^\s$]+)")
_TEXT = re.compile(r"\\(?:text|mbox|textbf|mathrm)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"-?(?:\\frac\{(-?\d+)\}\{(\d+)\}|(\d+)/(\d+))")
# \frac12 and \frac1{2} mean \frac{1}{2} in LaTeX.
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d|\{[^{}]*\})\s*(\d|\{[^{}]*\})")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def extract_boxed(text: str) -> str:
    r"""Returns the content of the last ``\boxed{…}``, or else the word after ``\boxed``."""
    found = grading.extract_boxed(text)
    if found is not None:
        return found
    # LaTeX also allows \boxed without braces, as in "\boxed 5".
    words = _UNBRACED_BOX.findall(text)
    if not words:
        raise ValueError(f"No boxed answer in {text[-80:]!r}; expected \\boxed{{…}}")
    return words[-1]


def normalize_answer(answer: str | None) -> str | None:
    r"""Returns the answer in a normal form, without spaces, unit signs and wrappers.

    ``\text{…}`` is replaced by its content, ``\frac12`` by ``\frac{1}{2}``; ``\left``, dollar and
    percent signs, degrees and a final full stop are removed.
    """
    if answer is None:
        return None
    text = _TEXT.sub(r"\1", answer.strip())
    # Display and text fractions differ only in size.
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    for gone in ("\\left", "\\right", "\\!", "\\,", "\\;", "\\$", "$", "\\%", "%", "^\\circ"):
        text = text.replace(gone, "")
    text = _SHORT_FRACTION.sub(lambda m: f"\\frac{_braced(m[1])}{_braced(m[2])}", text)
    return text.replace(" ", "").removesuffix(".")


def _braced(part: str) -> str:
    return part if part.startswith("{") else f"{{{part}}}"


def split_tuple(expr: str) -> list[str]:
    """Returns the entries of ``(a, b)`` or ``[a, b]``; anything else is one entry, nothing is none.

    Thousands separators are removed first.
    """
    text = _THOUSANDS.sub("", expr.strip())
    if not text:
        return []
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]":
        # Round and square brackets may be mixed, as in half-open intervals.
        inner = text[1:-1]
        # With nested brackets, splitting at commas would break entries.
        if not any(bracket in inner for bracket in "()[]"):
            return [entry.strip() for entry in inner.split(",")]
    return [text]


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Returns whether two answers are equal; see the module docstring for the rules.

    Can be slow for expressions such as nested powers; :func:`run_with_timeout_signal` limits
    the time.
    """
    given, truth = normalize_answer(given_answer), normalize_answer(ground_truth)
    if not given or not truth:
        return False
    # Cheap comparisons come first: math_verify parses both expressions and can take long.
    if given == truth:
        return True
    given_entries, truth_entries = split_tuple(given), split_tuple(truth)
    if len(given_entries) > 1 or len(truth_entries) > 1:
        # Brackets must agree: (0, 1) and [0, 1] are different intervals.
        same_brackets = (given[0], given[-1]) == (truth[0], truth[-1])
        same_length = len(given_entries) == len(truth_entries)
        pairs = zip(given_entries, truth_entries, strict=False)
        return same_brackets and same_length and all(grade_answer(a, b) for a, b in pairs)
    # None: at least one of the two is not a plain number.
    plain = equal_plain_numbers(given, truth)
    if plain is not None:
        return plain
    if _FRACTION.fullmatch(given) and _FRACTION.fullmatch(truth):
        return _parts(given) == _parts(truth)  # 2/4 is not accepted for 1/2
    return grade_answer_math_verify(given, truth)


def _parts(fraction: str) -> tuple[bool, list[str]]:
    return fraction.startswith("-"), re.findall(r"\d+", fraction)


def grade_answer_math_verify(given_answer: str, ground_truth: str) -> bool:
    """Returns whether ``math_verify`` finds two answers equal; an unreadable answer is wrong."""
    require_math_verify()
    try:
        return grading.verify_expressions(given_answer, ground_truth)
    except Exception as error:
        logger.info("%r and %r cannot be compared: %s", given_answer, ground_truth, error)
        return False


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
        return default_pool().call_blocking(work, timeout_seconds=timeout_seconds)
    except TimeoutError:
        return None


def grade_response(response: str, ground_truth: str) -> tuple[bool, str]:
    r"""Returns whether the final answer of a response is right, and the answer.

    The answer is the content of the last ``\boxed{…}``; without one ``math_verify`` searches the
    response for it. Safe in threads: a comparison that takes too long is stopped and counts as
    wrong.
    """
    found = grading.extract_boxed(response)
    if found is None:
        found = next(iter(_UNBRACED_BOX.findall(response)[-1:]), None)
    if found is None:
        require_math_verify()
        right = run_with_timeout_signal(_verify_response, (response, ground_truth))
        return bool(right), ""
    # Equal texts need no worker process.
    if normalize_answer(found) == normalize_answer(ground_truth):
        return bool(found.strip()), found
    return bool(run_with_timeout_signal(grade_answer, (found, ground_truth))), found


def _verify_response(response: str, ground_truth: str) -> bool:
    """Returns whether an expression in the response equals the truth; runs in a worker."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing timeout
    from math_verify import parse, verify

    expected, got = (
        parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        for text in (f"\\boxed{{{ground_truth}}}", response)
    )
    return bool(got) and bool(verify(expected, got, timeout_seconds=None))
