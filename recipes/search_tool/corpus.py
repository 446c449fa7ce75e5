"""Documents to search: from a file of rows, a folder of texts, or data in the layout of SQuAD."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import DataFormatError, DataValidationError
from tinker_cookbook.supervised.json_files import SUFFIXES, file_rows

TEXT_SUFFIXES = (".txt", ".md")
_TEXT_FIELDS = ("text", "contents", "content", "document", "passage", "context")
EXPECTED = 'objects like {"text": "...", "title": "..."}; only text is required'
# Search-R1 writes the title as a quoted first line.
_QUOTED_TITLE = re.compile(r'"(?P<title>[^\n]*)"\n(?P<text>.+)', re.DOTALL)
_BORDER = re.compile(r"\n\s*\n|(?<=[.!?])\s+|(?<=[。！？])")


@dataclass(frozen=True)
class Document:
    """What a search returns: a whole document, or a part of a long one."""

    title: str
    text: str

    @property
    def shown(self) -> str:
        """Title and text; only the text if it contains the title."""
        return self.text if self.title in self.text else f"{self.title}\n{self.text}"


def read_corpus(path: str, max_words: int = 250) -> list[Document]:
    """Returns the documents of a file or folder, each of at most ``max_words`` words.

    ``path`` is a file of rows (jsonl, json, csv, tsv, parquet), a JSON file in the layout of SQuAD,
    whose contexts are the documents, a text file, or a folder with files of these kinds. Longer
    documents are split at the ends of sentences; 0 splits none.

    Raises:
        DataValidationError: there is no such path, or no document in it.
        DataFormatError: a row has no text, or a file is not UTF-8.
    """
    if max_words < 0:
        raise DataValidationError(f"max_words: got {max_words}, expected at least 0 (0: no limit)")
    # Without repetitions: the same text twice would take two places of each result.
    whole = dict.fromkeys(_whole_documents(Path(path).expanduser()))
    documents = [
        Document(document.title, part)
        for document in whole
        for part in split_text(document.text, max_words)
    ]
    if not documents:
        raise DataValidationError(f"corpus: got {path}, which has no document; expected {EXPECTED}")
    return documents


def _whole_documents(path: Path) -> Iterator[Document]:
    if not path.exists():
        raise DataValidationError(
            f"corpus: there is no file or folder {path} (searched from {Path.cwd()}); expected a "
            f"folder of {' and '.join(TEXT_SUFFIXES)} files, or a file of {EXPECTED}"
        )
    if path.is_file():
        yield from _documents_of_file(path)
        return
    endings = (*TEXT_SUFFIXES, *SUFFIXES)
    # Sorted, so that the order does not depend on the file system: it decides between equal scores.
    files = sorted(f for f in path.rglob("*") if f.name.endswith(endings) and f.is_file())
    if not files:
        raise DataValidationError(
            f"corpus: {path} has no file that ends in {', '.join(endings)}; expected documents"
        )
    for file in files:
        yield from _documents_of_file(file)


def _documents_of_file(file: Path) -> Iterator[Document]:
    if file.suffix in TEXT_SUFFIXES:
        text = _read_text(file).strip()
        # An empty file among others is not worth an error.
        if text:
            yield Document(file.stem, text)
        return
    squad = squad_articles(file)
    if squad is not None:
        for title, paragraph in squad:
            yield Document(title.strip(), paragraph["context"].strip())
        return
    for where, row in file_rows(file, EXPECTED):
        yield _document_of_row(row, where)


def _document_of_row(row: Any, where: str) -> Document:
    if not isinstance(row, Mapping):
        raise DataFormatError(f"{where}: got {type(row).__name__}, expected {EXPECTED}")
    field = next((name for name in _TEXT_FIELDS if row.get(name) is not None), "text")
    text = row.get(field)
    if not isinstance(text, str) or not text.strip():
        raise DataFormatError(
            f"{where}: {field}: got {text!r}, expected a text that is not empty, under one of "
            f"{', '.join(_TEXT_FIELDS)}; the row has {', '.join(map(str, row)) or 'no field'}"
        )
    title = str(row.get("title") or "")
    quoted = None if title else _QUOTED_TITLE.fullmatch(text.strip())
    if quoted is not None:
        title, text = quoted["title"], quoted["text"]
    return Document(title.strip(), text.strip())


def squad_articles(file: Path) -> list[tuple[str, Mapping[str, Any]]] | None:
    """Returns title and paragraph of a file in the layout of SQuAD; None for another layout.

    Raises:
        DataFormatError: the file has this layout, but a paragraph has no context.
    """
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        value = json.loads(_read_text(file))
    except ValueError:
        return None  # the reader of rows reports the problem
    if not isinstance(value, dict) or not isinstance(value.get("data"), list):
        return None
    try:
        return [
            (str(article.get("title") or "").replace("_", " "), {**p, "context": "" + p["context"]})
            for article in value["data"]
            for p in article["paragraphs"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataFormatError(
            f"{file}: got 'data' without a text ({error!r}); expected the layout of SQuAD: "
            '{"data": [{"paragraphs": [{"context": "...", "qas": [...]}]}]}'
        ) from error


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"{file}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
        ) from error


def split_text(text: str, max_words: int) -> list[str]:
    """Splits a text into parts of at most ``max_words`` words; 0: one part.

    Parts end where sentences end; only a sentence that is too long by itself is split inside.
    """
    if not max_words or len(text.split()) <= max_words:
        return [text]
    parts: list[str] = []
    part: list[str] = []
    for words in map(str.split, _BORDER.split(text)):
        if part and len(part) + len(words) > max_words:
            parts.append(" ".join(part))
            part = []
        part += words
        while len(part) > max_words:
            parts.append(" ".join(part[:max_words]))
            part = part[max_words:]
    return [*parts, " ".join(part)] if part else parts
