"""Texts of the tokens of a record, so that it can be read without the tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import DataError
from tinker_cookbook.record.files import read_table, write_file
from tinker_cookbook.record.schema import FOLDER

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

_FILE = "vocabulary.parquet"
_SPACE = "\u2581"
"""Space in the vocabularies of SentencePiece."""


def write_vocabulary(log_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the bytes of each token, unless the file exists; a special token has its name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = log_path / FOLDER / _FILE
    if path.is_file():
        return
    any_kind: Any = tokenizer  # transformers' types do not have all methods
    names = {token: name for name, token in any_kind.get_vocab().items()}
    special = set(any_kind.all_special_ids) | set(any_kind.get_added_vocab().values())
    ids = sorted(names)
    texts = _bytes_of([names[token] for token in ids], [token in special for token in ids])
    table: pa.Table = pa.table(
        {"token": pa.array(ids, pa.int32()), "bytes": texts, "special": [i in special for i in ids]}
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_file(path, memoryview(sink.getvalue()))


def _bytes_of(names: list[Any], special: Iterable[bool]) -> list[bytes]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {ord(letter): byte for byte, letter in bytes_to_unicode().items()}
    # A byte-level vocabulary spells the space as this letter.
    byte_level = any(name[:1] == "\u0120" for name in names if isinstance(name, str))
    found = []
    for name, is_special in zip(names, special, strict=True):
        if isinstance(name, bytes):  # vocabularies of tiktoken
            found.append(name)
        elif byte_level and not is_special:
            codes = [letters.get(ord(letter)) for letter in name]
            whole = all(code is not None for code in codes)
            found.append(bytes(c for c in codes if c is not None) if whole else name.encode())
        elif len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            found.append(bytes([int(name[3:5], 16)]))
        else:
            found.append(name.replace(_SPACE, " ").encode())
    return found


def token_texts(log_path: Path, tokens: Iterable[int]) -> dict[int, str | list[int]]:
    """Returns the text of each token; the bytes of one that is a part of a character.

    Tokens that the record has no text for are left out.
    """
    path = log_path / FOLDER / _FILE
    if not path.is_file():
        return {}
    try:
        known = _read_vocabulary(path, path.stat().st_mtime_ns)
    except (DataError, KeyError):  # damaged; the record is of use without texts
        return {}
    found: dict[int, str | list[int]] = {}
    for token in {*tokens} & known.keys():
        content = known[token]
        try:
            found[token] = content.decode()
        except UnicodeDecodeError:
            found[token] = list(content)
    return found


@functools.lru_cache(maxsize=2)  # the page reads it for each answer
def _read_vocabulary(path: Path, changed: int) -> dict[int, bytes]:
    table = read_table(path, ["token", "bytes"])
    return dict(zip(*(table[name].to_pylist() for name in ("token", "bytes")), strict=True))


def text_of(tokens: Iterable[int], texts: Mapping[int, str | list[int]]) -> str:
    """Returns the text of tokens."""
    content = b""
    for token in tokens:
        piece = texts.get(token, f"[{token}]")
        content += piece.encode() if isinstance(piece, str) else bytes(piece)
    return content.decode("utf-8", "replace")
