"""Documents to search: from a file of rows, a folder of texts, or data in the layout of SQuAD."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import DataFormatError, DataValidationError
from tinker_cookbook.recipes.start import read_text
from tinker_cookbook.supervised.json_files import SUFFIXES, file_rows

TEXT_SUFFIXES = (".txt", ".md")
_TEXT_FIELDS = ("text", "contents", "content", "document", "passage", "context")
EXPECTED = (
    'objects like {"text": "...", "title": "..."}; title is optional, and the text may be under '
    f"{', '.join(_TEXT_FIELDS[1:])}"
)
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
        DataError: a file cannot be read, a row has no text, or there is no document.
    """
    source = Path(path).expanduser()
    files, endings = [source], (*TEXT_SUFFIXES, *SUFFIXES)
    if source.is_dir():
        # Sorted, because the order of documents decides between equal scores.
        files = sorted(f for f in source.rglob("*") if f.name.endswith(endings) and f.is_file())
    # Without repetitions: the same text twice would take two places of each result.
    whole = dict.fromkeys(document for file in files for document in _documents(file))
    documents = [Document(d.title, part) for d in whole for part in split_text(d.text, max_words)]
    if not documents:
        raise DataValidationError(
            f"corpus: got {path}, which has no document; expected texts "
            f"({', '.join(TEXT_SUFFIXES)}), or rows ({', '.join(SUFFIXES)}) of {EXPECTED}"
        )
    return documents


def _documents(file: Path) -> Iterator[Document]:
    if file.suffix in TEXT_SUFFIXES:
        if text := read_text(file, "corpus").strip():
            yield Document(file.stem, text)
    elif (squad := squad_articles(file)) is not None:
        for title, paragraph in squad:
            yield Document(title.strip(), paragraph["context"].strip())
    else:
        for where, row in file_rows(file, EXPECTED):
            yield _document_of_row(row, where)


def _document_of_row(row: Any, where: str) -> Document:
    fields = row if isinstance(row, Mapping) else {}
    text = next((fields[name] for name in _TEXT_FIELDS if fields.get(name)), None)
    if not isinstance(text, str) or not text.strip():
        raise DataFormatError(f"{where}: text: got {text!r}, expected {EXPECTED}")
    title = str(fields.get("title") or "")
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
        value = json.loads(file.read_bytes())
    except ValueError:
        return None  # the reader of rows reports the problem
    if not isinstance(value, dict) or "data" not in value:
        return None
    found = [
        (str(article.get("title") or "").replace("_", " "), paragraph)
        for article in value["data"]
        for paragraph in article.get("paragraphs", ())
    ]
    if not all(isinstance(paragraph.get("context"), str) for _, paragraph in found):
        raise DataFormatError(
            f"{file}: a paragraph has no context; expected the layout of SQuAD: "
            '{"data": [{"paragraphs": [{"context": "...", "qas": [...]}]}]}'
        )
    return found


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
