"""Text to tokens and back, piece by piece, so that the pieces join up."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

from tinker_cookbook.tokenizer_utils import decode_exactly, encode_without_special_tokens

if TYPE_CHECKING:
    from tinker_cookbook.tokenizer_utils import Tokenizer

# A line break is a token border in every vocabulary met so far.
_ANCHOR = "\n"
# White space, and what SentencePiece vocabularies spell a space as.
_WHITE = string.whitespace + "\u2581"
# Stands in text where no token may span: code points that Unicode keeps free of characters. One
# that stands in the text itself is escaped.
_SPLIT, _ESCAPED, _MARK = "\ufdd0\ufdd2", "\ufdd0\ufdd1", "\ufdd0"
_REMEMBERED = 512  # texts


class TextCodec:
    """Encodes text as the continuation of what precedes it.

    SentencePiece-style tokenizers put a space before every text they encode and drop it when they
    decode. For those, pieces are encoded and decoded behind an anchor that is cut off again;
    byte-level tokenizers need no such care.
    """

    splits_control_tokens: bool = False
    """Whether :meth:`encode` heeds what :meth:`split_control_tokens` took apart."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._constants: dict[str, list[int]] = {}
        # A turn's prompt has the texts of the turn before it: history is encoded once.
        self._remembered = lru_cache(maxsize=_REMEMBERED)(self._encode)
        twice = [*encode_without_special_tokens(tokenizer, "x")] * 2
        self._anchor: list[int] = []
        if decode_exactly(tokenizer, twice) != "xx":
            self._anchor = encode_without_special_tokens(tokenizer, _ANCHOR)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of ``text``; names of control tokens in it become those tokens,
        but for names that :meth:`split_control_tokens` took apart. Not to be changed: shared."""
        return self._remembered(text) if text else []

    def _encode(self, text: str) -> list[int]:
        if self.splits_control_tokens and _MARK in text:
            pieces = (piece.replace(_ESCAPED, _MARK) for piece in text.split(_SPLIT))
            return [token for piece in pieces for token in self._encode_piece(piece)]
        return self._encode_piece(text)

    def _encode_piece(self, text: str) -> list[int]:
        if not self._anchor:
            return encode_without_special_tokens(self.tokenizer, text)
        return encode_without_special_tokens(self.tokenizer, _ANCHOR + text)[len(self._anchor) :]

    def encode_behind(self, block: str, text: str) -> list[list[int]]:
        """Returns the tokens of ``block + text`` in pieces.

        Where the border is certain they are encoded apart: the same text in history, without its
        block, is then remembered.
        """
        if not block:
            return [self.encode(text)]
        if block.endswith(_ANCHOR) and text[:1].isalnum():
            return [self.encode(block), self.encode(text)]
        return [self.encode(block + text)]

    def constant(self, text: str) -> list[int]:
        """As :meth:`encode`, remembered: for headers and other text that the format repeats."""
        tokens = self._constants.get(text)
        if tokens is None:
            tokens = self._constants[text] = self.encode(text)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of ``tokens``, special tokens by their names."""
        text = decode_exactly(self.tokenizer, [*self._anchor, *tokens])
        return text[len(decode_exactly(self.tokenizer, self._anchor)) :] if self._anchor else text

    def control_token_in(self, text: str) -> str | None:
        """Returns the first name of a control token that stands in ``text``, None without one."""
        found = self._control_tokens.search(text) if self._control_tokens else None
        return found[0] if found else None

    def split_control_tokens(self, text: str) -> str:
        """Returns ``text`` marked so that :meth:`encode` reads names of control tokens as text."""
        text = text.replace(_MARK, _ESCAPED)
        if self._control_tokens is None:
            return text
        return self._control_tokens.sub(lambda name: f"{name[0][0]}{_SPLIT}{name[0][1:]}", text)

    def trailing_bytes(self, tokens: Sequence[int]) -> int:
        """Returns how many tokens at the end are single bytes (``<0x0A>``) of a byte fallback."""
        return sum(1 for _ in takewhile(self._byte_tokens.__contains__, reversed(tokens)))

    @cached_property
    def _control_tokens(self) -> re.Pattern[str] | None:
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        # Of one character, or white space (Gemma adds runs of it), nothing can be taken apart.
        names = {name for token in added if len((name := str(token)).strip(_WHITE)) > 1}
        longest_first = sorted(names, key=lambda name: -len(name))
        return re.compile("|".join(map(re.escape, longest_first))) if names else None

    @cached_property
    def _byte_tokens(self) -> frozenset[int]:
        tokenizer = self.tokenizer
        ids = {f"<0x{byte:02X}>": None for byte in range(256)}
        found = (tokenizer.convert_tokens_to_ids(name) for name in ids)
        unknown = getattr(tokenizer, "unk_token_id", None)
        return frozenset(i for i in found if isinstance(i, int) and i != unknown)
