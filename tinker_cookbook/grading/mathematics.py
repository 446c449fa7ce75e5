r"""Compares mathematical answers: the one grader of expressions, for rewards and evaluations.

Both texts are final answers without explanation, in LaTeX or plain text. Lists, tuples, intervals
and sets are compared entry by entry, numbers exactly, other expressions by ``math_verify``. Units,
currency and percent signs do not matter. A decimal number equals a value that it cannot write if it
has six correct digits. ``grade_math`` and ``grade_response`` limit the time of a comparison.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, TypeAlias

from tinker_cookbook.exceptions import ConfigurationError, install_command
from tinker_cookbook.grading.latex import tidy
from tinker_cookbook.grading.numbers import TOLERANCE, plain_number
from tinker_cookbook.grading.texts import boxed_answer, split_thinking, stated_answers
from tinker_cookbook.grading.worker_pool import DEFAULT_TIMEOUT_SECONDS, TimedPool
from tinker_cookbook.utils.imports import pebble

logger = logging.getLogger(__name__)

Compare: TypeAlias = Callable[[str, str], "bool | None"]

_MAX_ENTRIES = 100
_MAX_STATED = 200  # characters of an answer without a mark around it
_MAX_LENGTH = 6_000  # characters of an answer; longer ones are compared as texts


def _key(text: str) -> str:
    """Returns the text without spaces that separate nothing."""
    return re.sub(r"(?<![\d,]) | (?!\d)", "", text)


# --- lists, tuples, sets -----------------------------------------------------------------------

_OPEN, _CLOSE = "([{", ")]}"


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Splits a text at the separators that are in no brackets."""
    parts, depth, start = [], 0, 0
    i = 0
    while i < len(text):
        depth += (text[i] in _OPEN) - (text[i] in _CLOSE)
        found = separator.match(text, i) if depth == 0 else None
        if found is not None and found.end() > i:
            parts.append(text[start:i].strip())
            start = i = found.end()
        else:
            i += 1
    return [*parts, text[start:].strip()]


def _brackets(text: str) -> tuple[str, str, str] | None:
    """Returns the opening and closing bracket around a whole text, and its content."""
    opening = re.match(r"\\?[(\[{]", text)
    closing = re.search(r"\\?[)\]}]$", text)
    if opening is None or closing is None:
        return None
    depth = 0
    for i, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0 and i >= opening.end() - 1:
            inside = text[opening.end() : closing.start()].strip()
            # Braces without a backslash only group.
            left, right = ("", "") if opening[0] == "{" else (opening[0], closing[0])
            return (left, right, inside) if i == len(text) - 1 else None
    return None


_OR = r"\s*(?:and\b|or\b)?|(?<![a-zA-Z])\s*(?:and|or)(?![a-zA-Z])"
_COMMA = re.compile(rf"[,;]{_OR}")
_WIDE_COMMA = re.compile(rf"[,;](?!\d{{3}}(?!\d)){_OR}|\s(?:and|or)\b")
_CUP = re.compile(r"\\cup(?![a-zA-Z])")


def _entries(text: str, inside: bool) -> tuple[list[str], list[str]]:
    """Returns the entries of a list in both readings of ``1,200``: one number, two entries.

    With a space after a comma, only the first is possible; in brackets without any space, the
    second.
    """
    every = [part for part in _split(text, _COMMA) if part]
    wide = [part for part in _split(text, _WIDE_COMMA) if part]
    if re.search(r"[,;]\s", text):
        return wide, wide
    return (every, every) if inside else (wide, every)


def _compare_entries(
    mine: Sequence[str], its: Sequence[str], ordered: bool, scalar: Compare
) -> bool | None:
    if len(mine) != len(its) or len(mine) > _MAX_ENTRIES:
        return False
    dots = [["\\ldots" in entry for entry in entries] for entries in (mine, its)]
    if dots[0] != dots[1]:
        return False
    verdicts = [_compare(a, b, scalar) for a, b in zip(mine, its, strict=True)]
    if ordered or any(dots[0]) or all(verdicts):
        return _all(verdicts)
    left, unknown = list(its), False
    for entry in mine:
        found = [_compare(entry, other, scalar) for other in left]
        if True in found:
            del left[found.index(True)]
        elif None in found:
            unknown = True
        else:
            return False
    return None if unknown else True


def _all(verdicts: Sequence[bool | None]) -> bool | None:
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _compare(answer: str, reference: str, scalar: Compare) -> bool | None:
    """Compares two tidy texts; None if ``scalar`` does not know."""
    answer, reference = answer.strip(), reference.strip()
    if not answer or not reference:
        return False
    if _key(answer) == _key(reference):
        return True
    a, b = plain_number(answer), plain_number(reference)
    if a is not None and b is not None:
        return a.equals(b)
    answer, reference = _without_names(answer, reference)
    # The library compares 0 < x < 1 with (0, 1).
    if (_RELATION.search(answer) is None) != (_RELATION.search(reference) is None):
        return scalar(answer, reference)
    unions = [_split(text, _CUP) for text in (answer, reference)]
    if max(map(len, unions)) > 1:
        return _compare_entries(*unions, ordered=False, scalar=scalar)
    mine, its = _brackets(answer), _brackets(reference)
    readings = [
        _entries(text if found is None else found[2], found is not None)
        for text, found in ((answer, mine), (reference, its))
    ]
    (mine_first, mine_other), (its_first, its_other) = readings
    if len(mine_first) != len(its_first):
        mine_first = mine_other if len(mine_other) == len(its_first) else mine_first
        its_first = its_other if len(its_other) == len(mine_first) else its_first
    if max(len(mine_first), len(its_first)) < 2:
        # Brackets around one entry change nothing: (C), {5}.
        inner = [found[2] if found else text for text, found in ((answer, mine), (reference, its))]
        if mine or its:
            return _compare(inner[0], inner[1], scalar)
        return _compare_signs(answer, reference, scalar)
    if mine is None and its is None and len(_signs(its_first)) == 1:
        # Several ways to write one value, as in "0.5, or 1/2", are an answer; several values not.
        few = mine_first[:_MAX_ENTRIES]
        return len(few) == len(mine_first) and _all([_compare(x, reference, scalar) for x in few])
    kinds = [(found and found[0] + found[1]) or None for found in (mine, its)]
    # A point may be written without parentheses, a set without braces.
    if None not in kinds and kinds[0] != kinds[1]:
        return False
    if None in kinds and any(kind not in (None, "()", "\\{\\}") for kind in kinds):
        return False
    ordered = any(kind not in (None, "\\{\\}") for kind in kinds)
    return _compare_entries(_signs(mine_first), _signs(its_first), ordered, scalar)


def _signs(entries: Sequence[str]) -> list[str]:
    r"""Replaces entries with one ``\pm`` by two entries."""
    split: list[str] = []
    for entry in entries:
        both = entry.count("\\pm") == 1
        split += [entry.replace("\\pm", sign) for sign in "+-"] if both else [entry]
    return split


def _compare_signs(answer: str, reference: str, scalar: Compare) -> bool | None:
    mine, its = _signs([answer]), _signs([reference])
    if len(mine) != len(its):
        return False
    if len(mine) > 1:
        return _compare_entries(mine, its, ordered=False, scalar=scalar)
    return _compare_scalars(answer, reference, scalar)


# What may stand before "=" as the name of a value: x, f(x), (p, q), |AB|, V_1 : V_2.
_NAME = re.compile(r"(?:[a-zA-Z(){}|,:'_ \\]|(?<=[_{])\d)+?(?:=|\\in(?![a-zA-Z]))\s*")
_EQUALS = re.compile(r"=|\\in(?![a-zA-Z])")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne)(?![a-zA-Z])")


def _without_names(answer: str, reference: str) -> tuple[str, str]:
    """Removes ``x =`` from one text if the other one names nothing."""
    texts = [answer, reference]
    has_equals = [_EQUALS.search(text) is not None for text in texts]
    for i in (0, 1):
        if has_equals[1 - i] or not has_equals[i]:
            continue
        name = _NAME.match(texts[i])
        rest = texts[i][name.end() :] if name else texts[i]
        # In "x = 12/4 = 3" and "12/4 = 3", the value is the last one.
        if "," not in rest and not re.search(r"[a-zA-Z]", rest.replace("\\frac", "")):
            rest = rest.rpartition("=")[2]
        texts[i] = rest.strip()
    return texts[0], texts[1]


# --- single expressions ------------------------------------------------------------------------

_BASE = re.compile(
    r"\(?(?P<digits>-?[0-9A-F][0-9A-Fa-f.]{0,99})\)?"
    r"(?:\s*_\s*\{?\s*(?P<base>\d+|[a-z]+)\s*\}?| (?:in )?base[ -]?(?P<word>\d+|[a-z]+))"
)
_BASES = dict(
    zip(
        ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"],
        range(2, 11),
        strict=True,
    )
)
_TWO_NUMBERS = re.compile(r"(?<![\w^{.])\d[\d.]* \d")
_WORDS = re.compile(r"[^\W\d_][^\W\d_'’.-]*(?:[ -][^\W\d_'’.-]+)*\.?")


def _compare_scalars(answer: str, reference: str, scalar: Compare) -> bool | None:
    if _key(answer) == _key(reference):
        return True
    bases = _BASE.fullmatch(answer), _BASE.fullmatch(reference)
    if any(bases):
        return _equal_in_bases(answer, bases[0], reference, bases[1])
    words = _WORDS.fullmatch(answer), _WORDS.fullmatch(reference)
    if all(words):
        mine, its = (re.sub(r"[\s.-]", "", text) for text in (answer, reference))
        if min(len(mine), len(its)) > 1 and mine.casefold() == its.casefold():
            return True
        # Other letters are a word, of which the order counts, unless they may be a product.
        if not all(re.fullmatch(r"[a-df-hj-np-z]{1,3}", text) for text in (mine, its)):
            return False
    if ":" in answer or ":" in reference or "\\ldots" in answer + reference:
        mine, its = (re.sub(r"[\s.]", "", text).casefold() for text in (answer, reference))
        return mine == its
    # Two numbers one after the other are no product: 5 5 is neither 55 nor 25. An equation such as
    # 2x = 6 is no value.
    if any(_TWO_NUMBERS.search(text) for text in (answer, reference)):
        return False
    if (_EQUALS.search(answer) is None) != (_EQUALS.search(reference) is None):
        return False
    return scalar(answer, reference)


def _equal_in_bases(
    answer: str, mine: re.Match[str] | None, reference: str, its: re.Match[str] | None
) -> bool:
    """Compares digits and bases: ``52_8`` and ``52_{10}`` differ, ``1010`` may mean ``1010_2``."""
    digits = [
        re.sub(r"[\s,]", "", found["digits"] if found else text).lower()
        for text, found in ((answer, mine), (reference, its))
    ]
    named = [found and (found["base"] or found["word"]) for found in (mine, its)]
    bases = [_BASES.get(name, name) if name else None for name in named]
    if digits[0] != digits[1]:
        return False
    if None not in bases:
        return str(bases[0]) == str(bases[1])
    # Without a base the reference is a decimal number, or a letter of the question is its base.
    return bases[0] is None or str(bases[0]) == "10" or not str(bases[0]).isdecimal()


# --- math_verify -------------------------------------------------------------------------------


def require_math_verify() -> None:
    """Raises ``ConfigurationError`` if the packages that compare expressions are missing."""
    missing = [name for name in ("math_verify", "pebble") if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"grading: comparing mathematical expressions needs {' and '.join(missing)}, which is "
            f"not installed; expected: {install_command('math')}"
        )


def _library() -> Any:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing timeout
    return math_verify


def _read_expression(text: str) -> list[Any]:
    # In a box, the whole text is one answer, LaTeX or plain.
    return _library().parse(f"\\boxed{{{text}}}", parsing_timeout=None)


def _by_library(answer: str, reference: str) -> bool:
    return _equal_parsed(_read_expression(answer), _read_expression(reference))


def _equal_parsed(answer: list[Any], reference: list[Any]) -> bool:
    """Returns whether ``math_verify`` finds expressions equal that it parsed, without its rounding.

    It rounds to six decimals, so that all small numbers are equal; values of numbers, and of
    expressions at some points, are compared relatively instead.
    """
    if answer and reference:
        same = _same_values(answer[0], reference[0])
        if same is not None:
            return same
    # The order matters: verify(gold, target) is not symmetric.
    return bool(
        _library().verify(reference, answer, allow_set_relation_comp=True, timeout_seconds=None)
    )


def _same_values(mine: Any, its: Any) -> bool | None:
    """Returns whether two numbers are equal, and False if expressions differ; None is unknown."""
    import sympy

    if isinstance(mine, sympy.MatrixBase) and isinstance(its, sympy.MatrixBase):
        if mine.shape != its.shape:
            return False
        return _all([_same_values(a, b) for a, b in zip(mine.flat(), its.flat(), strict=True)])
    if not (isinstance(mine, sympy.Expr) and isinstance(its, sympy.Expr)):
        return None
    symbols = sorted(mine.free_symbols | its.free_symbols, key=str)
    tolerance = float(TOLERANCE) if mine.atoms(sympy.Float) | its.atoms(sympy.Float) else 1e-40
    verdicts: list[bool] = []
    # At several points, since a single one may be outside the domain.
    for start in (13, 29, 47) if symbols else (0,):
        point = [(s, sympy.Rational(start + 6 * i, 10 + i)) for i, s in enumerate(symbols)]
        try:
            a, b = (sympy.N(x.doit().subs(point), 60) for x in (mine, its))
            size = max(abs(a), abs(b))
            # Rounding makes a zero a tiny number, of which no digit is right.
            if a != b and size < 1e-50 and (a == 0 or b == 0):
                continue
            verdicts.append(bool(abs(a - b) <= tolerance * size))
        except Exception:
            continue
    if not verdicts or (symbols and all(verdicts)):
        return None
    return all(verdicts)


def normal_form(text: str) -> str:
    """Returns an answer in the form in which equal texts are compared."""
    return _key(tidy(text))


def split_tuple(text: str) -> list[str]:
    """Returns the entries of a tuple or interval, without thousands separators; else the text."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.strip())
    found = _brackets(text)
    if found is None or re.search(r"[()\[\]]", found[2]):
        return [text] if text else []
    return _split(found[2], _COMMA)


def compare_quickly(answer: str, reference: str) -> bool | None:
    """Compares two answers without ``math_verify``; None if that is not enough."""
    return _compare_texts(answer, reference, lambda _a, _b: None)


def verify_expressions(answer: str, reference: str) -> bool:
    """Returns whether two answers are equal, without a timeout.

    The timeouts of ``math_verify`` use signals, so a caller in a thread limits the time with a
    worker process, as ``grade_math`` does.
    """
    return bool(_compare_texts(answer, reference, _by_library))


def verify_response(response: str, reference: str) -> bool:
    """Returns whether a response without a box states the reference, without a timeout.

    The rest of the line after "answer is" is compared; if that is no single expression,
    ``math_verify`` searches the response.
    """
    response, _ = split_thinking(response)
    stated = stated_answers(response)
    if stated:
        said = re.split(r"\.\s|\n|,\s+(?:since|because|so|as)\b", stated[-1].strip(" *:\n"))[0]
        if len(said) <= _MAX_STATED and verify_expressions(said, reference):
            return True
        # The search would take one of several answers.
        if len(_entries(tidy(said), inside=False)[0]) > 1:
            return False
    found = _library().parse(response, parsing_timeout=None)
    return bool(found) and _equal_parsed(found, _read_expression(reference))


def _compare_texts(answer: str, reference: str, scalar: Compare) -> bool | None:
    if max(len(answer), len(reference)) > _MAX_LENGTH:
        return answer.strip() == reference.strip()
    # The letters of a reference in \text{…} are a word, of which the order counts.
    if re.fullmatch(r"\\(?:text|mbox|mathrm)\s*\{\s*\(?[A-Za-z]+\)?\s*\}", reference.strip()):
        mine, its = (re.sub(r"[\s().]", "", tidy(text)) for text in (answer, reference))
        return mine == its or (len(its) > 1 and mine.casefold() == its.casefold())
    return _compare(tidy(answer), tidy(reference), scalar)


# --- with a time limit -------------------------------------------------------------------------

default_pool = TimedPool(preload=["math_verify"])
"""Pool that all comparisons of this process share."""


async def grade_math(
    answer: str,
    reference: str,
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    pool: TimedPool | None = None,
) -> bool:
    """Returns whether ``answer`` is mathematically equal to ``reference``.

    Both are final answers without explanation. Only expressions that need ``math_verify`` go to a
    worker. An answer that exceeds the timeout counts
    as wrong, with a warning.
    """
    quick = compare_quickly(answer, reference)
    if quick is not None:
        return quick
    require_math_verify()
    try:
        return await (pool or default_pool).call(
            verify_expressions, answer, reference, timeout_seconds=timeout_seconds
        )
    # The answer determines how long a comparison takes, so a timeout is not an error of the run.
    except TimeoutError:
        reason = f"grading took more than {timeout_seconds:g} s and was stopped"
    except pebble.ProcessExpired as error:
        reason = f"the grading process died ({error})"
    logger.warning("%s; counted as wrong: %.80r (reference %.80r)", reason, answer, reference)
    return False


def grade_response(response: str, reference: str) -> tuple[bool, str]:
    r"""Returns whether the final answer of a response is right, and the answer; safe in threads.

    The answer is the content of the last ``\boxed{…}``; without one ``math_verify`` searches the
    response for it. A comparison that takes too long counts as wrong.
    """
    found = boxed_answer(response)
    if found is None:
        return _in_worker(verify_response, response, reference), ""
    # Most answers need no worker process.
    quick = compare_quickly(found[1], reference)
    if quick is None:
        quick = _in_worker(verify_expressions, found[1], reference)
    return quick, found[1]


def _in_worker(verify: Callable[[str, str], bool], answer: str, reference: str) -> bool:
    require_math_verify()
    try:
        return default_pool.call_blocking(verify, answer, reference)
    except (TimeoutError, pebble.ProcessExpired):
        return False
