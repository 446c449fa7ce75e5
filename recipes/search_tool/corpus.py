"""Documents to search: from a file of rows, a folder of texts, or data in the layout of SQuAD."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import DataFormatError, DataValidationError
from tinker_cookbook.supervised.json_files import SUFFIXES, file_rows

TEXT_SUFFIXES = (".txt", ".md")
_TEXT_FIELDS = ("text", "contents", "content", "document", "passage", "context")
EXPECTED = 'objects like {"text": "...", "title": "...", "id": "..."}; only text is required'
# Search-R1 writes the title as a quoted first line.
_QUOTED_TITLE = re.compile(r'"(?P<title>[^\n]*)"\n(?P<text>.+)', re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s*(?=\S)")


@dataclass(frozen=True)
class Document:
    """What a search returns: a whole document, or a part of a long one."""

    id: str
    title: str
    text: str
    source: str
    """Id of the whole document."""


@dataclass(frozen=True)
class Corpus:
    """The documents of a path, and what was left out."""

    documents: list[Document]
    num_sources: int
    """Whole documents; long ones were split into parts."""
    num_duplicates: int
    """Skipped documents with the same text as an earlier one."""


def read_corpus(path: str, max_words: int = 250) -> Corpus:
    """Returns the documents of a file or folder, each of at most ``max_words`` words.

    ``path`` is a file of rows (jsonl, json, csv, tsv, parquet), a JSON file in the layout of SQuAD,
    whose contexts are the documents, a text file, or a folder with files of these kinds. Longer
    documents are split between paragraphs, or else between sentences; 0 splits none.

    Raises:
        DataValidationError: there is no such path, or no document in it.
        DataFormatError: a row has no text, a file is not UTF-8, or two texts have the same id.
    """
    if max_words < 0:
        raise DataValidationError(f"max_words: got {max_words}, expected at least 0 (0: no limit)")
    documents: list[Document] = []
    texts: set[tuple[str, str]] = set()
    ids: dict[str, str] = {}
    num_sources = num_duplicates = 0
    for where, whole in _whole_documents(Path(path).expanduser()):
        # The same text twice would take two places of each result.
        if (whole.title, whole.text) in texts:
            num_duplicates += 1
            continue
        if whole.id in ids:
            raise DataFormatError(
                f"{where}: id: got {whole.id!r}, which {ids[whole.id]} has too; expected another "
                "id for each document"
            )
        texts.add((whole.title, whole.text))
        ids[whole.id] = where
        num_sources += 1
        parts = split_text(whole.text, max_words)
        for i, part in enumerate(parts):
            part_id = whole.id if len(parts) == 1 else f"{whole.id}#{i + 1}"
            documents.append(Document(part_id, whole.title, part, whole.source))
    if not documents:
        raise DataValidationError(f"corpus: got {path}, which has no document; expected {EXPECTED}")
    return Corpus(documents, num_sources, num_duplicates)


def _whole_documents(path: Path) -> Iterator[tuple[str, Document]]:
    if not path.exists():
        raise DataValidationError(
            f"corpus: there is no file or folder {path} (searched from {Path.cwd()}); expected a "
            f"folder of {' and '.join(TEXT_SUFFIXES)} files, or a file of {EXPECTED}"
        )
    if path.is_file():
        yield from _documents_of_file(path, path.name)
        return
    # Sorted, so that the order does not depend on the file system: it decides between equal scores.
    files = sorted(file for file in path.rglob("*") if file.name.endswith(_ENDINGS))
    files = [file for file in files if file.is_file()]
    if not files:
        raise DataValidationError(
            f"corpus: {path} has no file that ends in {', '.join(_ENDINGS)}; expected documents"
        )
    for file in files:
        yield from _documents_of_file(file, file.relative_to(path).as_posix())


_ENDINGS = (*TEXT_SUFFIXES, *SUFFIXES)


def _documents_of_file(file: Path, name: str) -> Iterator[tuple[str, Document]]:
    if file.suffix in TEXT_SUFFIXES:
        text = read_text(file).strip()
        # An empty file among others is not worth an error.
        if text:
            yield str(file), Document(name, file.stem, text, name)
        return
    squad = squad_articles(file)
    if squad is not None:
        for i, (title, paragraph) in enumerate(squad):
            identifier = f"{name}-{i}"
            yield f"{file}, paragraph {i}", _document(identifier, title, paragraph["context"])
        return
    for i, (where, row) in enumerate(file_rows(file, EXPECTED)):
        yield where, _document_of_row(row, f"{name}-{i}", where)


def _document_of_row(row: Any, default_id: str, where: str) -> Document:
    if not isinstance(row, Mapping):
        raise DataFormatError(f"{where}: got {type(row).__name__}, expected {EXPECTED}")
    field = next((name for name in _TEXT_FIELDS if row.get(name) is not None), None)
    text = None if field is None else row[field]
    if not isinstance(text, str) or not text.strip():
        fields = ", ".join(map(str, row)) or "no field"
        raise DataFormatError(
            f"{where}: {field or 'text'}: got {text!r}, expected a text that is not empty, under "
            f"one of {', '.join(_TEXT_FIELDS)}; the row has {fields}"
        )
    title = str(row.get("title") or "")
    quoted = _QUOTED_TITLE.fullmatch(text.strip()) if not title else None
    if quoted is not None:
        title, text = quoted["title"], quoted["text"]
    identifier = row.get("id", row.get("_id"))
    return _document(default_id if identifier is None else str(identifier), title, text)


def _document(identifier: str, title: str, text: str) -> Document:
    return Document(identifier, title.strip(), text.strip(), identifier)


def squad_articles(file: Path) -> list[tuple[str, Mapping[str, Any]]] | None:
    """Returns title and paragraph of a file in the layout of SQuAD; None for another layout.

    Raises:
        DataFormatError: the file has this layout, but a paragraph has no context or questions.
    """
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        value = json.loads(read_text(file))
    except ValueError:
        return None  # the reader of rows reports the problem
    if not isinstance(value, dict) or not isinstance(value.get("data"), list):
        return None
    found: list[tuple[str, Mapping[str, Any]]] = []
    for i, article in enumerate(value["data"]):
        paragraphs = article.get("paragraphs") if isinstance(article, dict) else None
        for j, paragraph in enumerate(paragraphs if isinstance(paragraphs, list) else [None]):
            if not isinstance(paragraph, dict) or not isinstance(paragraph.get("context"), str):
                raise DataFormatError(
                    f"{file}: data[{i}].paragraphs[{j}]: got no text under 'context'; expected "
                    'the layout of SQuAD: {"data": [{"paragraphs": [{"context": "...", "qas": '
                    "[...]}]}]}"
                )
            found.append((str(article.get("title") or "").replace("_", " "), paragraph))
    return found


def read_text(file: Path) -> str:
    """Returns the text of a UTF-8 file; raises DataFormatError for another encoding."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"{file}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
        ) from error
    except OSError as error:
        raise DataValidationError(f"{file}: the file cannot be read: {error}") from error


def split_text(text: str, max_words: int) -> list[str]:
    """Splits a text into parts of at most ``max_words`` words; 0: one part.

    Whole paragraphs go into a part while they fit. A paragraph that is too long by itself is split
    between sentences, and a sentence between words.
    """
    if not max_words or len(text.split()) <= max_words:
        return [text]
    paragraphs = [piece.strip() for piece in re.split(r"\n\s*\n", text) if piece.strip()]
    pieces = _fitting(paragraphs, "\n\n", max_words)
    return list(_joined(pieces, max_words))


def _fitting(paragraphs: Iterable[str], border: str, max_words: int) -> Iterator[tuple[str, str]]:
    """Yields what separates a piece from the one before it, and the piece, which fits."""
    for paragraph in paragraphs:
        if len(paragraph.split()) <= max_words:
            yield border, paragraph
            continue
        for i, sentence in enumerate(_SENTENCE_END.split(paragraph)):
            words = sentence.split()
            for start in range(0, len(words), max_words):
                before = " " if i or start else border
                yield before, " ".join(words[start : start + max_words])


def _joined(pieces: Iterable[tuple[str, str]], max_words: int) -> Iterator[str]:
    part, count = "", 0
    for border, piece in pieces:
        words = len(piece.split())
        if part and count + words > max_words:
            yield part
            part, count = "", 0
        part, count = f"{part}{border}{piece}" if part else piece, count + words
    if part:
        yield part
