"""Gives mathematical answers one way of writing, without a unit."""

from __future__ import annotations

import re

from tinker_cookbook.grading.texts import (
    braced_fractions,
    plain_characters,
    without_text_commands,
)

_SPACE = re.compile(r"(?<!\\)\\[,:;> ]|\\q?quad(?![a-zA-Z])|~|\s+")
_GONE = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![a-zA-Z])|\\!|\\?[$€£¥]|(?<!\\)\\[()\[\]]"
    r"|\^\s*\{?\s*\\circ\s*\}?|\\(?:degree|circ)(?![a-zA-Z])|°"
)
_SYMBOLS = {
    "π": r"\pi ",
    "∞": r"\infty ",
    "×": r"\times ",
    "÷": r"\div ",
    "·": r"\cdot ",
    "≤": r"\le ",
    "<=": r"\le ",
    r"\leq": r"\le ",
    "≥": r"\ge ",
    ">=": r"\ge ",
    r"\geq": r"\ge ",
    "≠": r"\ne ",
    "!=": r"\ne ",
    r"\neq": r"\ne ",
    "∪": r"\cup ",
    "±": r"\pm ",
    "√": r"\sqrt ",
    "…": r"\ldots ",
    "...": r"\ldots ",
    r"\cdots": r"\ldots ",
    r"\dots": r"\ldots ",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\tfrac": r"\frac",
    r"\dfrac": r"\frac",
    r"\cfrac": r"\frac",
    "{,}": ",",
}
_MIXED = re.compile(
    r"(?<![\d.}^_/])(\d{1,9}) *\\frac\{(\d{1,9})\}\{(\d{1,9})\}"
    r"|(?<![\d.^/])(\d{1,9}) (\d{1,9})/(\d{1,9})(?!\d)"
)
# Abbreviations, and compounds of them; longer words are units if a space separates them.
_SHORT_UNIT = (
    r"(?:[kcm]?m|mi|in|ft|yds?|sq|cu|kg|mg|gm|lbs?|oz|hrs?|mins?|secs?|ml|deg|mph|kmh|kph|rpm|cents?"
    r"|feet|foot|inch|units?|days?|hours?|ways?|m/s|km/h|ft/s|miles?)"
)
_UNIT_WORD = rf"(?:{_SHORT_UNIT}(?![a-zA-Z])|(?<= )[a-zA-Z]{{4,}}+|(?<= )per(?![a-zA-Z]))"
_POWER = r"(?:\s*\^\s*\{?\s*\d\s*\}?)?+"
_PLAIN_UNIT = re.compile(rf"(?<=[\d}})i])(?:[ /.]*+{_UNIT_WORD}\.?+{_POWER})+$")
_TEXT_UNIT = re.compile(
    r"(?:\\(?:text|mbox|mathrm|textrm|textbf|textit|rm)\s*\{(?P<unit>[^{}\d]*)\}[\s/·]*+"
    rf"{_POWER}\s*+)+$"
)
_NO_UNIT = re.compile(r"\s*(?:and|or|[ap]\.?\s?m\.?|base .*|to|mod.*|i|e)\s*", re.IGNORECASE)


def without_unit(text: str) -> str:
    r"""Removes a unit at the end: ``\text{ cm}^2``, ``square units``, ``km/h``."""
    found = _TEXT_UNIT.search(text)
    if found is not None:
        rest = text[: found.start()].strip()
        if re.search(r"\d|\\(?:pi|sqrt)|[a-z]$", rest) and not _NO_UNIT.fullmatch(found["unit"]):
            text = rest.rstrip("-")
    return _PLAIN_UNIT.sub("", text)


def tidy(text: str) -> str:
    r"""Returns an answer with one way to write brackets, fractions, spaces, dots and symbols.

    Spaces stay, since they may separate: ``1 1/2``, ``1, 200``. A unit at the end is removed.
    """
    text = re.sub(r",\s*\\!\s*", ",", plain_characters(text).strip())
    for old, new in _SYMBOLS.items():
        text = text.replace(old, new)
    text = _SPACE.sub(" ", re.sub(r"\\,(?=\d{3}(?!\d))", ",", text))
    text = _GONE.sub("", text).replace("\\%", "%").replace("**", "").strip(" ")
    text = without_unit(re.sub(r"(?<!\\ldots)(?<!\.)[.;,]$", "", text).strip())
    text = braced_fractions(without_text_commands(text))
    # 3\frac{1}{2} is the mixed number, as in "3 1/2".
    return _MIXED.sub(_sum, re.sub(r" +", " ", text)).strip()


def _sum(match: re.Match[str]) -> str:
    whole, top, bottom = (part for part in match.groups() if part is not None)
    return f"\\frac{{{int(whole) * int(bottom) + int(top)}}}{{{bottom}}}"
