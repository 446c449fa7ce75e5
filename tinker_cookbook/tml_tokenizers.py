"""Tokenizers of the package tml-renderers with the methods of transformers' that are used here.

``tokenizer_utils.get_tokenizer`` makes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol, cast, runtime_checkable


class TmlTokenizer(Protocol):
    """The methods of tml-renderers' tokenizers that are used here."""

    @property
    def bos_token(self) -> str:
        """Name of the BOS token, without markup; empty if there is none."""
        ...

    @property
    def eos_token(self) -> str:
        """Name of the EOS token, without markup."""
        ...

    def encode_ordinary(self, text: str) -> Sequence[int]:
        """Returns the tokens of ``text``; names of special tokens are plain text."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Returns the text of tokens, special ones by their names."""
        ...

    def encode_special(self, text: str) -> int:
        """Returns the id of the special token with this name."""
        ...


@runtime_checkable
class SupportsTmlTokenizer(Protocol):
    """A tokenizer that wraps one of tml-renderers."""

    tml_tokenizer: TmlTokenizer


class TmlRenderersTokenizerAdapter:
    """A tokenizer of tml-renderers, whose own object is ``tml_tokenizer``.

    Names of special tokens in text are encoded as text. There is no chat template.
    """

    def __init__(self, name_or_path: str, tml_tokenizer: TmlTokenizer) -> None:
        self.name_or_path = name_or_path
        self.tml_tokenizer = tml_tokenizer
        self.bos_token = tml_tokenizer.bos_token
        self.eos_token = tml_tokenizer.eos_token
        self.bos_token_id = self._special_id(self.bos_token)
        self.eos_token_id = self._special_id(self.eos_token)

    def __len__(self) -> int:
        return len(self._spelled)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Returns the tokens of ``text``; raises ValueError where special ones should be added."""
        if add_special_tokens:
            raise ValueError(
                "add_special_tokens: got True, expected False: the tokenizers of tml-renderers add "
                "no special tokens"
            )
        return list(self.tml_tokenizer.encode_ordinary(text))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Returns the text of ``token_ids``."""
        if skip_special_tokens:
            token_ids = [i for i in token_ids if i not in self.added_tokens_decoder]
        return str(self.tml_tokenizer.decode(list(token_ids)))

    def get_vocab(self) -> dict[str, int]:
        """Returns the id of each token, in the spelling of byte-level vocabularies."""
        return dict(self._ids)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        """Returns the spelling of a token."""
        return self._spelled[token_id]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Returns the id of a token by its spelling, None if there is none."""
        found = self._special_ids.get(token)
        return self._ids.get(token) if found is None else found

    @cached_property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The special tokens by their ids."""
        from tokenizers import AddedToken

        return {i: AddedToken(text, special=True) for text, i in self._special_ids.items()}

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        tokenizer = cast(Any, self.tml_tokenizer)
        ids = (tokenizer.encode_special(name) for name in tokenizer.special_tokens())
        return {tokenizer.decode([i]): i for i in ids}

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self._spelled)}

    @cached_property
    def _spelled(self) -> list[str]:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        letters, decode = bytes_to_unicode(), cast(Any, self.tml_tokenizer).decode_bytes
        special = {i: text for text, i in self._special_ids.items()}
        spelled: list[str] = []
        # The wheel does not tell the size of the vocabulary; ids have no gaps.
        while True:
            try:
                piece = decode([len(spelled)])
            except ValueError:
                return spelled
            plain = "".join(letters[byte] for byte in piece)
            spelled.append(special.get(len(spelled), plain))

    def _special_id(self, name: str) -> int | None:
        return int(self.tml_tokenizer.encode_special(name)) if name else None


class TmlHubTokenizer(TmlRenderersTokenizerAdapter):
    """A tokenizer of tml-renderers for a model of the Hub: names of special tokens are encoded as
    these tokens, as transformers does.

    Args:
        eos: Name of the token that ends an answer, if it is another one than the wheel's EOS token.
    """

    def __init__(self, name_or_path: str, tml_tokenizer: TmlTokenizer, eos: str = "") -> None:
        super().__init__(name_or_path, tml_tokenizer)
        if eos:
            self.eos_token_id = self._special_id(eos)
        # As they are spelled in text, since code joins them to text.
        spell = tml_tokenizer.decode
        self.bos_token = "" if self.bos_token_id is None else spell([self.bos_token_id])
        self.eos_token = "" if self.eos_token_id is None else spell([self.eos_token_id])

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Returns the tokens of ``text``."""
        tokens: list[int] = []
        for i, run in enumerate(self._names.split(text)):
            # The pattern has one group: every second piece is a name.
            tokens += [self._special_ids[run]] if i % 2 else super().encode(run, add_special_tokens)
        return tokens

    @cached_property
    def _names(self) -> re.Pattern[str]:
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")
