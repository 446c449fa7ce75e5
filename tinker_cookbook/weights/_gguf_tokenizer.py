"""Converts a tokenizer to llama.cpp's format.

llama.cpp implements the pre-tokenizer (the splitting before byte-pair merges), and a file only
names the implementation (``tokenizer.ggml.pre``). The name is found by comparing the tokenizer's
steps with those that llama.cpp implements; unknown combinations are refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import WeightsMergeError
from tinker_cookbook.tokenizer_utils import Tokenizer, special_id

if TYPE_CHECKING:
    import gguf

    from tinker_cookbook.weights._chat_files import Chat

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\u2581"

# A word with one leading other character, groups of digits, punctuation, line breaks, spaces.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ONE_DIGIT = _WORDS.replace("DIGITS", r"\p{N}")
_THREE_DIGITS = _WORDS.replace("DIGITS", r"\p{N}{1,3}")

# Steps of a byte-level tokenizer, and whether whole words skip the merges -> llama.cpp's name.
_PRE_TOKENIZERS: dict[tuple[tuple[str, ...], bool], str] = {
    (("bytes and GPT-2 words",), False): "gpt-2",
    (("each digit", "bytes and GPT-2 words"), False): "smollm",
    ((f"split {_ONE_DIGIT}", "bytes"), False): "qwen2",
    ((f"split {_THREE_DIGITS}", "bytes"), True): "llama-bpe",
    ((f"split {_THREE_DIGITS}", "bytes"), False): "smaug-bpe",
}


@dataclass(frozen=True)
class Vocabulary:
    """Content of the metadata keys ``tokenizer.*``."""

    model: str
    """``gpt2`` for byte-level merges, ``llama`` for SentencePiece."""
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    """For SentencePiece: the pair with the higher score of its result is merged first."""
    merges: list[str] | None
    ids: dict[str, int]
    """Role (bos, eos, eot, eom, unk, pad) -> token id."""
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool | None
    chat_template: str | None

    def write(self, writer: gguf.GGUFWriter) -> None:
        """Adds the vocabulary to the metadata."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        for role, index in self.ids.items():
            getattr(writer, f"add_{role}_token_id")(index)
        # Always written: without them llama.cpp uses its own defaults.
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        if self.add_space_prefix is not None:
            writer.add_add_space_prefix(self.add_space_prefix)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def vocabulary_of(tokenizer: Tokenizer, rows: int, chat: Chat) -> Vocabulary:
    """Returns the vocabulary of a tokenizer for a model with ``rows`` embeddings, which answers in
    the format ``chat``.

    Raises:
        WeightsMergeError: llama.cpp does not implement this tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise WeightsMergeError(
            f"{type(tokenizer).__name__}: only tokenizers of the library 'tokenizers' "
            "(tokenizer.json) can be exported as GGUF"
        )
    # Read the loaded tokenizer, which may differ from its file.
    spec = json.loads(backend.to_str())
    model = spec["model"]
    if model["type"] != "BPE":
        raise WeightsMergeError(
            f"tokenizer model {model['type']} cannot be exported as GGUF; expected BPE"
        )
    pieces = bool(model.get("byte_fallback"))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    if not merges:
        raise WeightsMergeError(
            "the tokenizer has no merges, which llama.cpp requires of a BPE vocabulary"
        )
    tokens, types = _tokens(spec, rows, pieces)
    ids = _role_ids(tokenizer, chat)
    empty, bos, eos = tokenizer.encode(""), ids.get("bos"), ids.get("eos")
    return Vocabulary(
        model="llama" if pieces else "gpt2",
        pre="default" if pieces else _pre_tokenizer(spec),
        tokens=tokens,
        types=types,
        scores=_scores(tokens, model["merges"]) if pieces else None,
        merges=None if pieces else merges,
        ids={role: index for role, index in ids.items() if index < rows},
        add_bos=bos is not None and empty[:1] == [bos],
        add_eos=eos is not None and len(empty) > (empty[:1] == [bos]) and empty[-1] == eos,
        add_space_prefix=_space_prefix(spec) if pieces else None,
        chat_template=chat.template,
    )


def _tokens(spec: dict[str, Any], rows: int, pieces: bool) -> tuple[list[str], list[int]]:
    """Returns texts and types [rows]; rows without a token get a placeholder that no text
    contains."""
    tokens = [f"[PAD{index}]" for index in range(rows)]
    types = [_UNUSED] * rows
    for token, index in spec["model"]["vocab"].items():
        # An id without an embedding can never have been used.
        if index < rows:
            tokens[index] = token
            types[index] = _BYTE if pieces and _BYTE_TOKEN.fullmatch(token) else _NORMAL
    for added in spec["added_tokens"]:
        if added["id"] < rows:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    unknown = spec["model"].get("unk_token")
    if pieces and unknown in tokens:
        types[tokens.index(unknown)] = _UNKNOWN
    return tokens, types


def _scores(tokens: list[str], merges: list[Any]) -> list[float]:
    """Returns scores that reproduce the order of the merges."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        text = "".join(pair.split(" ") if isinstance(pair, str) else pair)
        # The first of several pairs with the same result counts; they are consecutive.
        ranks.setdefault(text, rank)
    # Tokens that are not the result of a merge come last.
    return [-float(ranks.get(token, len(merges) + index)) for index, token in enumerate(tokens)]


def _steps(part: dict[str, Any] | None) -> list[str]:
    """Describes a pre-tokenizer, or a normalizer, as a flat list of steps."""
    if part is None:
        return []
    kind = part["type"]
    if kind == "Sequence":
        children = part.get("pretokenizers") or part.get("normalizers") or []
        return [step for child in children for step in _steps(child)]
    if kind == "Digits" and part["individual_digits"]:
        return ["each digit"]
    if kind == "ByteLevel" and not part["add_prefix_space"]:
        return ["bytes and GPT-2 words" if part.get("use_regex", True) else "bytes"]
    if kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
        pattern: dict[str, str] = part["pattern"]
        if "Regex" in pattern:
            return [f"split {pattern['Regex']}"]
    return [json.dumps(part, ensure_ascii=False)]


def _pre_tokenizer(spec: dict[str, Any]) -> str:
    steps = tuple(_steps(spec["pre_tokenizer"]))
    whole_words = bool(spec["model"].get("ignore_merges"))
    name = _PRE_TOKENIZERS.get((steps, whole_words))
    normal = [step for step in _steps(spec["normalizer"]) if step != '{"type": "NFC"}']
    if name is None or normal:
        raise WeightsMergeError(
            f"llama.cpp has no name for the tokenizer's way to split texts: normalizer {normal}, "
            f"pre-tokenizer {list(steps)}, ignore_merges={whole_words}; known are those for "
            f"{', '.join(_PRE_TOKENIZERS.values())}"
        )
    return name


def _space_prefix(spec: dict[str, Any]) -> bool:
    """Whether a space is put before the text; refuses other normalizers than SentencePiece's."""
    prefix = False
    parts = [spec["normalizer"], spec["pre_tokenizer"]]
    while parts:
        part = parts.pop(0)
        if part is None:
            continue
        kind = part["type"]
        if kind == "Sequence":
            parts += part.get("normalizers") or part.get("pretokenizers") or []
        elif (kind == "Prepend" and part["prepend"] == _SPACE) or kind == "Metaspace":
            prefix |= kind == "Prepend" or part.get("prepend_scheme") != "never"
        # Spaces are replaced by the mark first, so nothing is split at spaces or at the mark.
        elif kind not in ("Replace", "Split") or part["pattern"].get("String") != " ":
            raise WeightsMergeError(
                f"the tokenizer changes texts by {json.dumps(part, ensure_ascii=False)}, which "
                "llama.cpp does not do for SentencePiece vocabularies"
            )
    return prefix


def _role_ids(tokenizer: Tokenizer, chat: Chat) -> dict[str, int]:
    ids: dict[str, Any] = {
        "bos": special_id(tokenizer, "bos"),
        "eos": special_id(tokenizer, "eos"),
        "unk": tokenizer.unk_token_id,
        "pad": tokenizer.pad_token_id,
    }
    # llama.cpp also stops at these two tokens. It finds further ends of a turn by their names.
    others = [stop for stop in chat.stop_ids if stop != ids["eos"]] or chat.stop_ids
    ids |= zip(("eot", "eom"), others, strict=False)
    return {role: index for role, index in ids.items() if index is not None}
