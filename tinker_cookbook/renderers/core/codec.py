"""Text to tokens and back, piece by piece, and control-token names as plain text."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise, takewhile
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.messages import Message, TextPart, ToolCall
from tinker_cookbook.tokenizer_utils import (
    Tokenizer,
    decode_exactly,
    encode_without_added_tokens,
    encode_without_special_tokens,
)

# A line break is a token border in every known vocabulary.
_ANCHOR = "\n"
# Unicode noncharacters mark positions that no token may span. Those in the text are escaped.
_SPLIT, _ESCAPED, _MARK = "\ufdd0\ufdd2", "\ufdd0\ufdd1", "\ufdd0"
BORDER = "\ufdd0\ufdd3"
"""Separates texts that :meth:`TextCodec.encode` encodes apart (``encodes_apart``)."""
# Added tokens that chat formats write inside a message stay tokens in text, as in the model's chat
# template: they cannot begin or end a turn, and formats parse them from plain strings.
_MARKUP = re.compile(r"</?(?:think|tool_call|tool_response|tools|arg_key|arg_value)>")
# What a decoder writes for a part of a character.
_REPLACEMENT = "\ufffd"
_PIPES = re.compile(r"<[|\uff5c].*[|\uff5c]>|\uff5c.*\uff5c")


class TextCodec:
    """Codec of text that continues what precedes it.

    SentencePiece tokenizers put a space before every text that they encode and drop it when they
    decode. For those, a piece is encoded and decoded after an anchor, which is cut off again.
    """

    # Whether ``encode`` reads the marks of ``split_control_tokens``, and whether it encodes the
    # texts around a ``BORDER`` apart.
    splits_control_tokens = encodes_apart = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._constants: dict[str, list[int]] = {}
        # The prompt of a turn repeats the history: each text is encoded once.
        self._encode_cached = lru_cache(maxsize=512)(self._encode)
        # A decoder that drops the leading space of a text returns other than "xx".
        twice = [*encode_without_special_tokens(tokenizer, "x")] * 2
        self._anchor: list[int] = []
        if decode_exactly(tokenizer, twice) != "xx":
            self._anchor = encode_without_special_tokens(tokenizer, _ANCHOR)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of ``text``, a shared list that must not be changed.

        Names of control tokens become those tokens, unless marked by :meth:`split_control_tokens`.
        """
        return self._encode_cached(text) if text else []

    def _encode(self, text: str) -> list[int]:
        if self.encodes_apart and BORDER in text:
            return [token for run in text.split(BORDER) if run for token in self._encode(run)]
        if not self.is_marked(text):
            return self._encode_piece(text)
        # Marked names are encoded as text; unmarked ones, which the format writes, are tokens.
        tokens: list[int] = []
        names = self._added_tokens
        for i, piece in enumerate(names.split(text) if names else [text]):
            if i % 2:  # the pattern has one group: every second piece is a name
                tokens += self._encode_piece(piece)
                continue
            plain = piece.replace(_SPLIT, "").replace(_ESCAPED, _MARK)
            found = None
            if plain != piece and not self._anchor:
                found = encode_without_added_tokens(self.tokenizer, plain)
            if found is None:  # split each name in two instead: no token spans the cut
                runs = (run.replace(_ESCAPED, _MARK) for run in piece.split(_SPLIT))
                found = [token for run in runs if run for token in self._encode_piece(run)]
            tokens += found
        return tokens

    def is_marked(self, text: str) -> bool:
        """Returns whether ``text`` has marks that :meth:`encode` reads."""
        return self.splits_control_tokens and _MARK in text

    def _encode_piece(self, text: str) -> list[int]:
        if not self._anchor:
            return encode_without_special_tokens(self.tokenizer, text)
        return encode_without_special_tokens(self.tokenizer, _ANCHOR + text)[len(self._anchor) :]

    def encode_after(self, block: str, text: str) -> list[list[int]]:
        """Returns the tokens of ``block + text``, as two pieces where the border is certain."""
        if not block:
            return [self.encode(text)]
        if block.endswith(_ANCHOR) and text[:1].isalnum():
            # The cached tokens of the text also serve history, where it has no block.
            return [self.encode(block), self.encode(text)]
        return [self.encode(block + text)]

    def constant(self, text: str) -> list[int]:
        """Returns the tokens of text that the format repeats, such as headers, from a cache."""
        # A plain dictionary: constants must not be evicted by long conversations.
        if text not in self._constants:
            self._constants[text] = self.encode(text)
        return self._constants[text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of ``tokens``, special tokens by their names."""
        # Decode after the anchor, which keeps the leading space of SentencePiece tokens.
        text = decode_exactly(self.tokenizer, [*self._anchor, *tokens])
        return text[len(decode_exactly(self.tokenizer, self._anchor)) :] if self._anchor else text

    def control_token_in(self, text: str) -> str | None:
        """Returns the first name of a control token in ``text``, None if there is none."""
        found = self._control_tokens.search(text) if self._control_tokens else None
        return found[0] if found else None

    def split_control_tokens(self, text: str, keep: frozenset[str] = frozenset()) -> str:
        """Returns ``text`` marked so that :meth:`encode` reads names of control tokens as text,
        except those in ``keep``."""
        return self.split_control_tokens_in([text], keep)[0]

    def split_control_tokens_in(
        self, texts: Sequence[str], keep: frozenset[str] = frozenset()
    ) -> list[str]:
        """Marks ``texts`` that a format may join: also a name that spans two of them is marked."""
        # A format may write the texts without a gap, so names are searched in the joined text.
        joined = "".join(texts)
        names = self._control_tokens.finditer(joined) if self._control_tokens else ()
        # Names are cut after their first character.
        cuts = [name.start() + 1 for name in names if name[0] not in keep]
        # Nothing to mark or to escape.
        if not cuts and _MARK not in joined:
            return list(texts)
        marked: list[str] = []
        begin = 0
        for text in texts:
            end = begin + len(text)
            borders = [begin, *(cut for cut in cuts if begin < cut <= end), end]
            runs = (joined[a:b] for a, b in pairwise(borders))
            marked.append(_SPLIT.join(run.replace(_MARK, _ESCAPED) for run in runs))
            begin = end
        return marked

    def trailing_bytes(self, tokens: Sequence[int]) -> int:
        """Returns how many tokens at the end are single bytes (``<0x0A>``) of a byte fallback."""
        return sum(1 for _ in takewhile(self._byte_tokens.__contains__, reversed(tokens)))

    @cached_property
    def _control_tokens(self) -> re.Pattern[str] | None:
        """Names of special tokens, and of others in the form of one (``<|…|>``)."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        # A single character or white space (Gemma adds runs of it) cannot be split. U+2581 is a
        # space in SentencePiece vocabularies.
        white = string.whitespace + "\u2581"
        return _any_of(
            name
            for token in added
            if len((name := str(token)).strip(white)) > 1
            and not _MARKUP.fullmatch(name)
            and (getattr(token, "special", True) or _PIPES.fullmatch(name))
        )

    @cached_property
    def _added_tokens(self) -> re.Pattern[str] | None:
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        return _any_of(str(token) for token in added)

    @cached_property
    def _byte_tokens(self) -> frozenset[int]:
        convert = self.tokenizer.convert_tokens_to_ids
        found = (convert(f"<0x{byte:02X}>") for byte in range(256))
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        return frozenset(i for i in found if isinstance(i, int) and i != unknown)


def _any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    """Returns a pattern with one group that matches any of ``names``, the longest first."""
    longest_first = sorted({name for name in names if name}, key=lambda name: -len(name))
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def token_name(codec: TextCodec, token: int) -> str:
    """Returns the text of one token, or ``bytes:\\x…`` if it is part of a character."""
    text = codec.decode([token])
    if _REPLACEMENT not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes(codec, token))


def token_bytes(codec: TextCodec, token: int) -> list[int]:
    """Returns the UTF-8 bytes of one token, also of parts of characters."""
    text = codec.decode([token])
    if _REPLACEMENT not in text:
        return list(text.encode())
    # Part of a character: the vocabulary's own spelling of the token gives the bytes.
    name = str(codec.tokenizer.convert_ids_to_tokens(token))
    if codec.trailing_bytes([token]):
        return [int(name[3:5], 16)]
    # A byte-level vocabulary spells each byte as a letter.
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    if all(letter in letters for letter in name):
        return [letters[letter] for letter in name]
    return list(text.encode())


def split_control_tokens(
    message: Message, codec: TextCodec, idx: int, keep: frozenset[str] = frozenset()
) -> Message:
    """Returns the message with names of control tokens marked for ``codec``, except ``keep``.

    Covers text, thinking, names and arguments of tool calls. The raw text of unparsed calls is
    unchanged: the model sampled it, and it must render to the same tokens. Returns ``message``
    itself where it has no such name; raises RendererError for one in the role.
    """
    if name := codec.control_token_in(message["role"]):
        raise RendererError(
            f"messages[{idx}].role: got {message['role']!r}, which contains the control token "
            f"{name!r}; expected a plain role such as 'user' or 'assistant'"
        )
    split = codec.split_control_tokens
    content = message["content"]
    changed: dict[str, Any] = {}
    if isinstance(content, str):
        changed["content"] = split(content, keep)
    else:
        # A format may join the parts, so texts are marked together, and thinking together.
        marked: dict[str, Iterator[str]] = {}
        for kind in ("text", "thinking"):
            texts = [str(part.get(kind)) for part in content if part["type"] == kind]
            marked[kind] = iter(codec.split_control_tokens_in(texts, keep))
        changed["content"] = [
            {**part, part["type"]: next(marked[part["type"]])} if part["type"] in marked else part
            for part in content
        ]
    if "tool_calls" in message:
        changed["tool_calls"] = [_split_call(call, codec) for call in message["tool_calls"]]
    for field in ("name", "tool_call_id"):
        if isinstance(value := message.get(field), str):
            changed[field] = split(value)
    if all(message.get(field) == value for field, value in changed.items()):
        return message
    return Message(**{**message, **changed})


def _split_call(call: ToolCall, codec: TextCodec) -> ToolCall:
    split = codec.split_control_tokens
    body = call.function
    arguments = split(body.arguments)
    if "\\" in body.arguments:
        # Formats that write arguments one by one decode escapes such as \u003c, which may be part
        # of a name.
        try:
            decoded = json.dumps(json.loads(body.arguments), ensure_ascii=False)
        except (ValueError, RecursionError):
            decoded = ""
        if split(decoded) != decoded:
            arguments = split(decoded)
    name, call_id = split(body.name), call.id and split(call.id)
    if (name, arguments, call_id) == (body.name, body.arguments, call.id):
        return call
    return ToolCall(function=ToolCall.FunctionBody(name=name, arguments=arguments), id=call_id)


def part_texts_apart(message: Message) -> Message:
    """Returns the message with a ``BORDER`` between the texts of neighbouring parts."""
    content = message["content"]
    if isinstance(content, str):
        return message
    parts = content[:1]
    for before, part in pairwise(content):
        if before["type"] == "text" and part["type"] == "text":
            part = TextPart(type="text", text=BORDER + part["text"])
        parts.append(part)
    return Message(**{**message, "content": parts})
