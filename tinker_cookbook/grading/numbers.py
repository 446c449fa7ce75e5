r"""Reads the number of an answer: the one grader of numbers, for rewards and evaluations.

The number is what stands behind the mark, with its sign, thousands separators, fraction or
exponent. Units and explanations behind it do not matter. An answer with two numbers (``18 or 20``)
or with an expression that is no number (``6\sqrt{2}``, ``2*9``) has none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

from tinker_cookbook.grading.texts import (
    ANSWER,
    IS,
    boxed_answer,
    braced_fractions,
    comparable_text,
    extract_final_answer,
    plain_characters,
    split_thinking,
    without_text_commands,
)

TOLERANCE = Fraction(1, 10**6)
"""Largest relative difference of a rounded decimal number from a value that it cannot write."""

_MAX_LENGTH = 10_000  # characters; comparing longer numbers takes too long
_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d{1,3}(?:['’_]\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d+)?|\.\d+)"
_POWER = r"10\s*(?:\^|\*\*)\s*(?:\{\s*[-+]?\d{1,3}\s*\}|[-+]?\d{1,3})"
_TIMES = r"\s*(?:×|\*|·|⋅|[xX]|\\times|\\cdot)\s*"
_FRACTION = rf"\\frac\{{\s*[-+]?\s*{_DECIMAL}\s*\}}\{{\s*[-+]?\s*{_DECIMAL}\s*\}}"
_UNSIGNED = (
    rf"(?:\d+(?:\s+and)?\s+\d+\s*/\s*\d+(?![\d.])|\d+\s*\\frac\{{\d+\}}\{{\d+\}}"
    rf"|{_FRACTION}|{_DECIMAL}\s*/\s*{_DECIMAL}"
    rf"|{_DECIMAL}[eE][-+]?\d{{1,3}}(?![^\W_])|{_DECIMAL}{_TIMES}{_POWER}|{_POWER}|{_DECIMAL})"
)
_NUMBER = re.compile(rf"(?:(?P<sign>[-+])\s*)?(?P<number>{_UNSIGNED})")
# A minus is a sign unless a number or letter precedes it: "5-3" ends in 3, "= -3" in -3.
_IN_TEXT = re.compile(rf"(?:(?<![\w.)\]}}])(?P<sign>-)\$?)?(?P<number>{_UNSIGNED})")
_SCALES = {
    "hundred": 100,
    "thousand": 1000,
    "k": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_SCALE = re.compile(rf"\s*(?:\\?%|per ?cent\b|pct\b)|\s*({'|'.join(_SCALES)})\b", re.IGNORECASE)

# --- what may stand around a number ------------------------------------------------------------

# Words that make the number another one, or part of something else.
_BAD_PREFIX = re.compile(
    r"(?:\b(?:not|between|than|either|option|question|problem|example|log|ln|sin|cos|tan|sqrt|exp|"
    r"minus|plus|times)|[^\W\d_]\()\s*$",
    re.IGNORECASE,
)
# Possessive (++, *+): otherwise each way to split a word is tried, for hours with a few words.
_PREFIX = re.compile(r"(?:[^\W\d_]++(?:[-'’/][^\W\d_]++)*+|[\s.,#\"“‘'>()\[:~{]|\*\*)*+")
_GLUED = re.compile(r"(?<![^\W\d_])(?:USD?|EUR|GBP|CAD|AUD|RM|Rs|HK|NT|[CAR])$|[^\x00-\u024f]$")
_OPERATION = (
    r"(?:times|plus|minus|divided|multiplied|over|out of|choose|mod|factorial|squared|cubed)\b"
)
_UNITS = r"(?:[^\W\d_]++(?:\^\{?-?\d\}?)?+|[\s/·.,)\]}\"”'’°*-])*"
_LINK = r"\b(?:per|in|of|each|every|on|at|from|than|not|rather|instead|after|before|within|for)\b"
_TAIL = re.compile(
    rf"(?![-*/.,]\s*[\d.\\(])(?!\s*[-*/]\s*[\d\\(])(?!\s*(?:[xyzn]\b|{_OPERATION}))"
    rf"{_UNITS}(?:{_LINK}[^=]*)?",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"\W*(?:or|and|to|maybe|perhaps|possibly|oder|und|ou|et)\b[^=]*\d", re.IGNORECASE
)
_CLAUSE = re.compile(
    r"(?P<stop>[.?;](?=\s|$)|,(?=\s+[^\W\d_])|\s[-–—]+(?=\s*[^\W\d_])|—"
    r"|\b(?:as|because|but|if|since|so|that|when|where|which|with)\b)(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
# In "72 clips (48 + 24)" the parentheses explain; in "5(3 + 4)" and "5 x (3 + 4) = 35" they do not.
_REMARK = re.compile(
    r"(?:(?<=[^\W\d_][^\W\d_])\s*|(?:(?<=[\d%}.])|(?<=[\d°] [^\W\d_xyzn])|(?<=°[CF]))\s+)"
    r"\((?!\s*(?:or|and|to)\b)[^()]*\)(?!\s*[=+*/^-])",
    re.IGNORECASE,
)
_EQUALS = re.compile(r"=>|=|≈|≃|→|⇒|\\(?:approx|simeq|to|(?:R|r)ightarrow|implies)\b|:(?!\d)")
_UNKNOWN = re.compile(r"\s*(?:and\s+)?[^\W\d_]\w?\s*=")
_OTHER_UNKNOWN = re.compile(r"(?:[,;]|\b(?:and|or)\b)\s*\\?[^\W\d_]\w*\s*$")


@dataclass(frozen=True)
class ReadNumber:
    """A number that was read."""

    value: Fraction
    text: str
    """In decimal notation without separators, or ``N/M`` if that is impossible."""
    scale: Fraction = Fraction(1)
    """What a percent sign or a word such as "million" behind it multiplies it with."""
    is_decimal: bool = False
    """Whether it was written with a decimal point or exponent, so it may be rounded."""

    def equals(self, other: ReadNumber) -> bool:
        """Returns whether both are the same number.

        ``50%`` equals ``50`` and ``0.5``: whether a question asks for percent is not known here.
        """
        if self.scale != 1 and other.scale != 1:
            return self._same(self.value * self.scale, other, other.value * other.scale)
        mine = {self.value, self.value * self.scale}
        return any(
            self._same(a, other, b) for a in mine for b in {other.value, other.value * other.scale}
        )

    def _same(self, mine: Fraction, other: ReadNumber, its: Fraction) -> bool:
        if mine == its:
            return True
        # 0.333333 is a way to write 1/3, but 0.10000001 is none to write 0.1.
        rounded = (self.is_decimal and not _is_finite(its)) or (
            other.is_decimal and not _is_finite(mine)
        )
        return rounded and abs(mine - its) <= TOLERANCE * max(abs(mine), abs(its))


def _is_finite(value: Fraction) -> bool:
    """Returns whether decimal notation can write the value exactly."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def clean(text: str) -> str:
    """Returns a short answer with plain characters, without markup and currency signs."""
    text = _single_spaces(plain_characters(text)).replace("{,}", ",")
    # Before the text commands: in "^\circ\text{C}" the command ends where \text begins.
    text = re.sub(r"\^? ?\{? ?\\circ\b ?\}?", "°", text)
    text = re.sub(r",\s*\\[!,]\s*", ",", text).replace("\\!", "")
    text = re.sub(r"\\[,:;> ]|\\q?quad\b|~", " ", text)
    text = braced_fractions(without_text_commands(re.sub(r"\\[dtc]frac", r"\\frac", text)))
    text = re.sub(r"\\(?:left|right|displaystyle|textstyle)(?![a-zA-Z])|\\[()\[\]]", "", text)
    # Bold, unless ** is an operator behind a number.
    text = re.sub(r"(?<![\d)])(?<![\d)] )\*\*([^*\n]+?)\*\*", r"\1", text)
    # Two amounts are two numbers, not one with spaces as separators.
    text = re.sub(r"(?<=\d)\s*(?:\\?\$\s*)+(?=\.?\d)", " ; ", text)
    return re.sub(r"\\?[$€£¥₹₩₽]|\\(?:pounds|euro)\b", " ", text).replace("\\%", "%").strip()


def _single_spaces(text: str) -> str:
    # Long runs of spaces would make the patterns slow.
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"[^\S\n]+", " ", text))


def _digits(text: str) -> Fraction:
    # Decimal has no limit on digits, which int has.
    return Fraction(Decimal(re.sub(r"[ ,'’_]", "", text)))


def _value(number: str) -> Fraction | None:
    """Returns the value of a text that ``_UNSIGNED`` matches; None for a division by 0."""
    if len(number) > _MAX_LENGTH:
        return None
    if found := re.fullmatch(rf"(.*?)(?:{_TIMES})?({_POWER})", number):
        exponent = int(re.sub(r"[\s{}]", "", re.split(r"\^|\*\*", found[2])[1]))
        return (_digits(found[1]) if found[1] else Fraction(1)) * Fraction(10) ** exponent
    if found := re.fullmatch(r"(.*?)[eE]([-+]?\d+)", number):
        return _digits(found[1]) * Fraction(10) ** int(found[2])
    whole = 0
    if found := re.fullmatch(r"(\d+)(?:\s+and)?\s+(\d+\s*/\s*\d+)|(\d+)\s*(\\frac.*)", number):
        whole, number = int(found[1] or found[3]), found[2] or found[4]
    if "/" not in number and "frac" not in number:
        return _digits(number)
    parts = re.findall(r"\{([^{}]*)\}", number) or number.split("/")
    top, bottom = (_digits(part.replace(" ", "")) for part in parts)
    return whole + top / bottom if bottom else None


def _read(match: re.Match[str]) -> ReadNumber | None:
    value = _value(match["number"])
    if value is None:
        return None
    negative = match["sign"] == "-"
    value = -value if negative else value
    if re.fullmatch(_DECIMAL, match["number"]):
        text = ("-" if negative else "") + re.sub(r"[ ,'’_]", "", match["number"])
        return ReadNumber(value, text, is_decimal="." in text)
    written = re.search(r"[.eE^]|\*\*", match["number"]) is not None
    return ReadNumber(value, _text_of(value), is_decimal=written)


def _text_of(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator) if abs(value) < 10**4000 else f"{Decimal(value.numerator)}"
    if not _is_finite(value) or value.denominator > 10**12:
        return f"{value.numerator}/{value.denominator}"
    return f"{Decimal(value.numerator) / Decimal(value.denominator):f}"


# --- readers -------------------------------------------------------------------------------------


def plain_number(text: str) -> ReadNumber | None:
    """Returns the number if the whole text is one, with a currency or percent sign at most."""
    text = clean(text)
    match = _NUMBER.match(text)
    if match is None or (number := _read(match)) is None:
        return None
    return _scaled(number, text, match.end(), lambda tail: tail.strip() in ("", "."))


def _scaled(
    number: ReadNumber, text: str, end: int, good: Callable[[str], object]
) -> ReadNumber | None:
    """Returns the number with the scale that stands behind it, if the tail is good."""
    scale = _SCALE.match(text, end)
    if scale is not None and (scale[1] is None or scale[1].lower() != "k" or scale.start(1) == end):
        factor = Fraction(_SCALES[scale[1].lower()]) if scale[1] else Fraction(1, 100)
        tail = text[scale.end() :]
        # "50% of 120" is a different number.
        if re.match(r"\s*of\b", tail) or not good(tail):
            return None
        return replace(number, scale=factor)
    return number if good(text[end:]) else None


def read_number(text: str, prose: bool = False) -> ReadNumber | None:
    r"""Returns the number of a short answer, or None.

    Words may stand before it, units and explanations behind it; after an equals sign the last
    number counts. ``prose``: an exclamation mark ends a sentence and is no factorial.
    """
    text = _REMARK.sub(" ", clean(text))
    if prose:
        text = re.sub(r"!(?=\s|$)", ".", text)
    first = re.search(r"\d", text)
    if first is None:
        return None
    clause = _CLAUSE.search(text, first.start())
    if clause is not None:
        rest = clause["rest"]
        other = {"?": r".*\d", ";": r"\s*[-+.\d]"}.get(clause["stop"])
        # "x = 5, y = 7" has two answers.
        if re.search(r"[A-Za-z]\s*=", text[: clause.start()]) and _UNKNOWN.match(rest):
            return None
        if _HEDGE.match(rest) or (other and re.match(other, rest, re.DOTALL)):
            return None
        text = text[: clause.start()]
    parts = _EQUALS.split(text)
    if any(_OTHER_UNKNOWN.search(part) and re.search(r"\d", part) for part in parts[1:-1]):
        return None
    # In "18 = 24 - 6", the number stands on the left.
    found = (_read_part(part) for part in reversed(parts))
    return next((number for number in found if number is not None), None)


def _read_part(text: str) -> ReadNumber | None:
    match = _NUMBER.search(text)
    if match is None or (number := _read(match)) is None:
        return None
    prefix = text[: match.start()]
    if not _PREFIX.fullmatch(prefix) or _BAD_PREFIX.search(prefix):
        return None
    if prefix[-1:].isalpha() and not _GLUED.search(prefix):
        return None
    # In "n - 3" the minus is an operator.
    before = prefix.rstrip()
    if match["sign"] and before[-1:].isalnum():
        is_word = len(re.split(r"\W", before)[-1]) > 1
        if not is_word or text[match.start() + 1 : match.start() + 2].isspace():
            return None
    return _scaled(number, text, match.end(), _TAIL.fullmatch)


def last_number(text: str) -> str | None:
    """Returns the last number in a text in decimal notation without separators, or None."""
    number = _last(text)
    return number.text if number else None


def _last(text: str) -> ReadNumber | None:
    # An exponent of a unit is no number: "4 cm^2".
    plain = re.sub(r"(?<=[^\W\d_])\^\{?\d\}?", "", clean(text))
    *_, match = [None, *_IN_TEXT.finditer(plain)]
    # The last number of x^{2} or 52_8 is not the value.
    if match is None or re.search(r"[\^_{]\s*$", plain[: match.start()]):
        return None
    return _read(match)


_STEP = re.compile(r"\d{1,2}[.)]\s+\S|(?:step|part|case|section|method)\s+\d", re.IGNORECASE)
_STARTS = r"(?:[-+(]|\\?[$€£¥₹]|[A-Z]{2,3}\$|\\[dt]?frac|\.?\d|[A-Za-z]\s*=)"
_STATED = re.compile(
    rf"{ANSWER}(?:\s+\w+){{0,4}}?(?:\s*+(?:{IS}|\*\*)|[^\S\n]*+\n)[\s*:：]*+"
    rf"(?:about|approximately|exactly|roughly|around|only|just|now|therefore|thus|either|between)?"
    rf"(?:[\s*_]|\\[(\[]|\$\$?)*(?={_STARTS})",
    re.IGNORECASE,
)
_BOLD = re.compile(r"\*\*([^*\n]{1,60})\*\*")


def marked_number(text: str) -> ReadNumber | None:
    """Returns the number on the line of the last ``####``, or None."""
    line, _ = _marked_line(text)
    return None if line is None else read_number(line)


def _marked_line(text: str) -> tuple[str | None, int]:
    """Returns the rest of the line after the last ``####`` with such a rest, and its position."""
    text, _ = split_thinking(text)
    *_, found = [None, *re.finditer(r"####+[ \t:*]*(\S[^\n]*)", text)]
    if found is None:
        return None, -1
    return found[1], found.start(1)


def final_number(text: str) -> ReadNumber | None:
    r"""Returns the final number of a response, or None.

    It is the number in the last ``\boxed{…}``, or on a line of ``####`` behind it; else in the last
    ``<answer>…</answer>``, else after the last "answer is", else in bold on the last line, else the
    last number. A mark with something that is no number has no answer. Thinking does not count.
    """
    text, _ = split_thinking(text)
    boxed, (line, position) = boxed_answer(text), _marked_line(text)
    is_boxed = boxed is not None and re.search(r"\d", plain_characters(boxed[1]))
    if line is not None and (boxed is None or not is_boxed or position >= boxed[0]):
        number = None if _STEP.match(line) else read_number(line)
        # #### is also a heading in Markdown, and then the answer may stand below it.
        if number is not None or not (_STEP.match(line) or line[0].isalpha()):
            return number
        if not is_boxed:
            return _unmarked_number(text[position + len(line) :])
    if boxed is not None and is_boxed:
        return read_number(boxed[1])
    return _unmarked_number(text)


def _unmarked_number(text: str) -> ReadNumber | None:
    text = _single_spaces(text)
    before, closed, _ = text.rpartition("</answer>")
    _, opened, tagged = before.rpartition("<answer>")
    if opened and closed:
        return read_number(tagged, prose=True)
    stated = [*_STATED.finditer(text)]
    if stated:
        return read_number(text[stated[-1].end() :].partition("\n")[0], prose=True)
    # Bold numbers in earlier lines are usually steps, not the result.
    bold = _BOLD.findall(text.strip().rpartition("\n")[2])
    read = [read_number(x, prose=True) for x in bold if not _STEP.match(x)]
    if read and read[-1] is not None:
        return read[-1]
    return _last(text)


def reference_number(text: str) -> ReadNumber | None:
    """Returns the number of a reference answer; None if it has none, or several.

    So a solution without a marked answer has none: its first number is as good as its last.
    """
    number, last = read_number(text), _last(text)
    return number if number and last and number.value in (last.value, -last.value) else None


def extract_number(text: str) -> str:
    r"""Returns the number of a short answer without commas, units and LaTeX: ``\$1{,}000`` is 1000.

    After an equals sign, it is the number after the last one. A fraction becomes a decimal
    number. An answer without a number, or with several, is returned unchanged.
    """
    number = read_number(text)
    return number.text if number else text.strip()


def extract_gsm8k_answer(text: str) -> str:
    r"""Returns the final number of a response without commas, or ``""``; see ``final_number``."""
    number = final_number(text)
    return number.text if number else ""


def check_gsm8k(response: str, expected: str) -> bool:
    """Returns whether the final number of a response is ``expected``.

    Decimal numbers are compared exactly, and with a fraction such as 1/3 to six digits.
    """
    wanted = read_number(expected)
    if wanted is None:  # the reference is a text
        said = _marked_line(response)[0] or extract_final_answer(response)
        return comparable_text(said) == comparable_text(expected) != ""
    given = final_number(response)
    return given is not None and given.equals(wanted)


def equal_numbers(answer: str, reference: str) -> bool | None:
    """Returns whether two numbers are equal; None if one of the texts is not only a number."""
    a, b = plain_number(answer), plain_number(reference)
    return None if a is None or b is None else a.equals(b)
