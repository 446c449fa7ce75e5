"""Regular expressions of JSON Schema (ECMA 262) in the syntax of the grammar library.

The library reads Rust's syntax. There ``\\d``, ``\\w``, ``\\s`` and ``.`` are other sets of
characters, ``&&`` and ``[`` have a meaning within a class, and ``^`` and ``$`` are not supported
everywhere. So a pattern is parsed and written anew, and has one meaning wherever it is used.

Validators differ too: ECMA 262 takes only ASCII for ``\\d`` and ``\\w``, Python's ``re`` all of
Unicode. The new pattern is the narrower one, so its texts are valid for both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tinker_cookbook.exceptions import ConfigurationError


class GrammarError(ConfigurationError):
    """A grammar or a JSON schema that the library does not support."""


# The letter of a set -> what every syntax takes for it, and what any does (for negations).
_SETS = {
    "d": ("0-9", r"\p{Nd}"),
    # Not ``\w``: in JSON schemas the library takes it for ASCII.
    "w": ("0-9A-Za-z_", r"\p{L}\p{M}\p{N}\p{Pc}"),
    "s": (r"\t\n\x0B\x0C\r\x20", r"\s\x1C-\x1F\x{FEFF}"),
}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_ANY = r"(?s:.*)"

_QUANTIFIER = re.compile(r"([*+?]|\{\d+(?:,\d*)?\})\??")
_ONLY_MOST = re.compile(r"\{,\d+\}")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PROPERTY = re.compile(r"[pP]\{[\w=]+\}")
_NAME = re.compile(r"\?P?<[A-Za-z_]\w*>")


def whole_pattern(pattern: str) -> str:
    """Returns a pattern for the whole of each text in which ``pattern`` matches somewhere.

    Raises GrammarError for a pattern that cannot be expressed.
    """
    return _Reader(pattern).written(unanchored=True)


def full_pattern(pattern: str) -> str:
    """Returns a pattern for the texts that ``pattern`` matches as a whole.

    Raises GrammarError for a pattern that cannot be expressed.
    """
    return _Reader(pattern).written(unanchored=False)


def literal_pattern(text: str) -> str:
    """Returns a pattern, in the library's syntax, for exactly one text."""
    return "".join(_character(ord(character)) for character in text)


@dataclass(frozen=True)
class _Item:
    """Part of a sequence: a text to write as it is, an anchor, or a group of alternatives."""

    kind: Literal["text", "^", "$", "group"]
    text: str = ""
    """Of a group: what opens it."""
    parts: Sequence[Sequence[_Item]] = ()
    quantifier: str = ""

    @property
    def anchored(self) -> bool:
        """Whether it is an anchor or contains one."""
        return self.kind in "^$" or any(item.anchored for part in self.parts for item in part)


class _Reader:
    """Parser and writer of one pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0

    def written(self, *, unanchored: bool) -> str:
        # Python's spelling of a flag that ECMA has for groups.
        opening = "(?i:" if self._take("(?i)") else "(?:"
        parts = self._alternatives()
        if self._at < len(self._pattern):
            raise self._error("a ')' without a '('")
        return f"{opening}{self._join(parts, unanchored, unanchored)})"

    def _join(
        self, parts: Sequence[Sequence[_Item]], before: bool | None, after: bool | None
    ) -> str:
        """Returns alternatives; ``before``: whether any text may precede them, None if they are
        within a match, where an anchor has no place. ``after`` is the same for their end."""
        return "|".join(self._sequence(list(part), before, after) for part in parts)

    def _sequence(self, items: list[_Item], before: bool | None, after: bool | None) -> str:
        while items and items[0].kind == "^" and before is not None:
            items, before = items[1:], False
        while items and items[-1].kind == "$" and after is not None:
            items, after = items[:-1], False
        texts = []
        for i, item in enumerate(items):
            if item.kind == "text":
                texts.append(item.text + item.quantifier)
                continue
            edges: tuple[bool | None, bool | None] = (None, None)
            if item.anchored:
                if item.kind != "group" or item.quantifier:
                    raise self._error("an anchor (^ or $) within a match")
                # Each alternative decides on the text around it.
                edges = before if i == 0 else None, after if i == len(items) - 1 else None
                before, after = before and edges[0] is None, after and edges[1] is None
            texts.append(f"{item.text}{self._join(item.parts, *edges)}){item.quantifier}")
        return (_ANY if before else "") + "".join(texts) + (_ANY if after else "")

    def _alternatives(self) -> list[list[_Item]]:
        parts: list[list[_Item]] = [[]]
        while self._at < len(self._pattern) and self._peek() != ")":
            if self._take("|"):
                parts.append([])
            else:
                parts[-1].append(self._item())
        return parts

    def _item(self) -> _Item:
        if _QUANTIFIER.match(self._pattern, self._at):
            raise self._error(f"{self._peek()!r} with nothing to repeat")
        if found := _ONLY_MOST.match(self._pattern, self._at):
            # In Python 0 to n times, in ECMA 262 these characters.
            raise self._error(f"{found[0]!r}, of which validators differ (write {{0,n}})")
        for kind in ("^", "$"):
            if self._take(kind):
                item = _Item(kind)
                break
        else:
            item = self._group() if self._take("(") else _Item("text", self._atom())
        found = _QUANTIFIER.match(self._pattern, self._at)
        if found is None:
            return item
        if item.kind in "^$":
            raise self._error("a repeated anchor")
        # Whether it is lazy does not change which texts match.
        self._at = found.end()
        return _Item(item.kind, item.text, item.parts, found[1])

    def _group(self) -> _Item:
        opening = "(?:"
        if self._take("?i:"):
            opening = "(?i:"
        elif name := _NAME.match(self._pattern, self._at):
            self._at = name.end()
        elif not self._take("?:") and self._peek() == "?":
            following = self._pattern[self._at : self._at + 3]
            looks = following.startswith(("?=", "?!", "?<=", "?<!"))
            raise self._error("look-around" if looks else f"the group '({following}'")
        parts = self._alternatives()
        if not self._take(")"):
            raise self._error("a '(' without a ')'")
        return _Item("group", opening, parts)

    def _atom(self) -> str:
        if self._take("["):
            return self._class()
        if self._take("."):
            return _DOT
        if self._take("\\"):
            found = self._escaped(negated=False)
        else:
            self._at += 1
            found = ord(self._pattern[self._at - 1])
        if isinstance(found, str):
            return found
        if is_unwritable(chr(found)):
            raise self._error(f"the control character {chr(found)!r}, which is not sampled")
        return _character(found)

    def _class(self) -> str:
        negated, members = self._take("^"), list[str]()
        start: int | None = None  # of a possible range
        while not self._take("]"):
            if self._at >= len(self._pattern):
                raise self._error("a '[' without a ']'")
            if start is not None and self._peek() == "-" and self._peek(1) not in ("]", ""):
                self._at += 1
                end = self._member(negated)
                if isinstance(end, str) or end < start:
                    raise self._error("a range of a class without an order")
                members[-1] += f"-{_character(end)}"
                start = None
                continue
            member = self._member(negated)
            start = None if isinstance(member, str) else member
            members.append(member if isinstance(member, str) else _character(member))
        if not members:
            # Python takes the bracket for the first member.
            raise self._error("a class without members")
        return f"[{'^' if negated else ''}{''.join(members)}]"

    def _member(self, negated: bool) -> str | int:
        if self._take("\\"):
            return 8 if self._take("b") else self._escaped(negated)
        self._at += 1
        return ord(self._pattern[self._at - 1])

    def _escaped(self, negated: bool) -> str | int:
        """Returns a set of characters as text, or the code of one character."""
        pattern = self._pattern
        if found := _PROPERTY.match(pattern, self._at):
            self._at = found.end()
            return f"\\{found[0]}"
        if found := _CODE.match(pattern, self._at):
            self._at = found.end()
            code = int(found[1] or found[2] or found[3], 16)
            if 0xD800 <= code < 0xDC00 and (low := _LOW_SURROGATE.match(pattern, self._at)):
                self._at = low.end()
                code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
            if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
                raise self._error(f"'\\{found[0]}', which is no character")
            return code
        if self._at >= len(pattern):
            raise self._error("a '\\' at its end")
        letter, self._at = pattern[self._at], self._at + 1
        if letter.lower() in _SETS:
            wide = letter.isupper() != negated
            return f"[{'^' if letter.isupper() else ''}{_SETS[letter.lower()][wide]}]"
        if letter in _CONTROLS and not self._peek().isdecimal():
            return _CONTROLS[letter]
        if letter == "c" and re.match("[A-Za-z]", self._peek()):
            self._at += 1
            return ord(pattern[self._at - 1]) % 32
        if letter in "bB":
            raise self._error(f"'\\{letter}', a border of words")
        if letter in "123456789k":
            raise self._error(f"'\\{letter}', a reference to a group")
        if letter.isalnum():
            raise self._error(f"'\\{letter}', which ECMA 262 does not know")
        return ord(letter)

    def _peek(self, ahead: int = 0) -> str:
        return self._pattern[self._at + ahead : self._at + ahead + 1]

    def _take(self, text: str) -> bool:
        taken = self._pattern.startswith(text, self._at)
        self._at += len(text) * taken
        return taken

    def _error(self, got: str) -> GrammarError:
        return GrammarError(
            f"pattern: {self._pattern!r} has {got}; expected a regular expression of ECMA 262 "
            "without look-around, references to groups, borders of words, and anchors within a "
            "match"
        )


def is_unwritable(character: str) -> bool:
    """Whether JSON writes a character only as an escape by number, which masks do not allow."""
    return (character < " " and character not in "\b\t\n\f\r") or character == "\x7f"


def _character(code: int) -> str:
    """Returns a character so that it has no other meaning, also within a class."""
    text = chr(code)
    return text if text.isalnum() or text in " _\"'<>,:;=@%" else f"\\x{{{code:X}}}"
