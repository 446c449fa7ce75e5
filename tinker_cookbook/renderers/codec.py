"""Text to tokens and back, piece by piece, so that the pieces join up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinker_cookbook.tokenizer_utils import decode_exactly, encode_without_special_tokens

if TYPE_CHECKING:
    from tinker_cookbook.tokenizer_utils import Tokenizer

# A line break is a token border in every vocabulary met so far.
_ANCHOR = "\n"


class TextCodec:
    """Encodes text as the continuation of what precedes it.

    SentencePiece-style tokenizers put a space before every text they encode and drop it when they
    decode. For those, pieces are encoded and decoded behind an anchor that is cut off again;
    byte-level tokenizers need no such care.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._constants: dict[str, list[int]] = {}
        twice = [*encode_without_special_tokens(tokenizer, "x")] * 2
        self._anchor: list[int] = []
        if decode_exactly(tokenizer, twice) != "xx":
            self._anchor = encode_without_special_tokens(tokenizer, _ANCHOR)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of ``text``; names of special tokens in it become those tokens."""
        if not text:
            return []
        if not self._anchor:
            return encode_without_special_tokens(self.tokenizer, text)
        return encode_without_special_tokens(self.tokenizer, _ANCHOR + text)[len(self._anchor) :]

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
