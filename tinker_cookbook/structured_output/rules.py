"""Building blocks of grammars: constants with control tokens, and texts up to a marker."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

from tinker_cookbook.structured_output.patterns import literal_pattern
from tinker_cookbook.tokenizer_utils import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

ANY_TEXT = r"/(.|\n)*/"


class RuleWriter:
    """Collects the rules of a grammar."""

    def __init__(self, tokenizer: Tokenizer, tokens: LLTokenizer) -> None:
        # The library does not treat control tokens as text: a grammar refers to them by id.
        vocabulary: dict[str, int] = cast(Any, tokenizer).get_added_vocab()
        self._special = {
            name: token for name, token in vocabulary.items() if tokens.is_special_token(token)
        }
        self.rules: list[str] = []

    @property
    def control_tokens(self) -> Collection[str]:
        """The texts of the vocabulary's control tokens."""
        return self._special.keys()

    def add(self, name: str, right: str) -> str:
        """Adds a rule once and returns its name. An upper-case name makes it a terminal."""
        rule = f"{name}: {right}"
        if rule not in self.rules:
            self.rules.append(rule)
        return name

    def constant(self, text: str) -> str:
        """Returns the expression for a constant text, with control tokens by id."""
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece)
            for piece in self._pieces(text)
        )

    def white(self, characters: str) -> str:
        """Returns the expression for up to two of these white-space characters."""
        return f"/[{re.escape(characters).replace(chr(10), 'n')}]{{0,2}}/" if characters else ""

    def until(self, name: str, mark: str) -> str:
        """Returns a rule for any text without ``mark``, followed by ``mark``."""
        special = next((n for n in self._special if mark.startswith(n)), None)
        if special:
            return f"{self.without(name, [special])} {self.constant(mark)}"
        return self.closed(name, [ANY_TEXT], [mark], mark)

    def without(self, name: str, marks: Sequence[str], *conditions: str) -> str:
        """Returns a terminal for text without ``marks``, also if they are spelled by other
        tokens, that satisfies all ``conditions``."""
        containing = (f"/(.|\\n)*{literal_pattern(mark)}(.|\\n)*/" for mark in marks)
        right = " & ".join([*(conditions or [ANY_TEXT]), *(f"~{one}" for one in containing)])
        return self.add(name, right)

    def closed(
        self, name: str, conditions: Sequence[str], marks: Sequence[str], closing: str
    ) -> str:
        """Returns a rule for text without ``marks`` that satisfies all ``conditions``, and
        ``closing``."""
        text = self.without(f"{name}_TEXT", marks, *conditions)
        # One terminal up to the first control token: a terminal for the text alone would not end
        # where more text follows.
        pieces = self._pieces(closing)
        plain = pieces.pop(0) if pieces and pieces[0] not in self._special else ""
        ended = self.add(name, f"{text} {json.dumps(plain)}") if plain else text
        return f"{ended} {self.constant(''.join(pieces))}"

    def _pieces(self, text: str) -> list[str]:
        names = sorted(self._special, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        return [piece for piece in pieces if piece]
