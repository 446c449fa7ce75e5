"""Search in a local index: BM25 by bm25s, over documents in memory or a folder made once.

The same query always has the same result, so a run that was killed and resumed gets the same
documents.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError, DataValidationError
from tinker_cookbook.recipes.search_tool.corpus import Document, read_corpus
from tinker_cookbook.recipes.tiny_models.llama import new_folder
from tinker_cookbook.utils.imports import missing_extra

_DOCUMENTS = "documents.jsonl"
_DIGITS = 5
"""Scores are rounded before they are compared, as float32 sums may differ in the last digits."""
# Scripts that do not separate words with spaces.
_UNSPACED = r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
_TERM = re.compile(rf"{_UNSPACED}+|(?:(?!{_UNSPACED})\w)+")


def terms(text: str) -> list[str]:
    """Returns the terms of a text in order: words without case and plural endings.

    Text in a script without spaces (Chinese, Japanese, Thai) becomes pairs of characters. There is
    no list of stop words, so that every language works; BM25 gives frequent terms little weight.
    """
    found: list[str] = []
    for word in _TERM.findall(unicodedata.normalize("NFKC", text).casefold()):
        if re.match(_UNSPACED, word) and len(word) > 1:
            found += [word[i : i + 2] for i in range(len(word) - 1)]
        else:
            found.append(_singular(word))
    return found


def _singular(word: str) -> str:
    """Removes a plural ending by the three rules of Harman's S stemmer (1991)."""
    if len(word) <= 3:
        return word
    if word.endswith("ies") and word[-4] not in "ae":
        return f"{word[:-3]}y"
    if word.endswith("es") and word[-3] not in "aeo":
        return word[:-1]
    if word.endswith("s") and not word.endswith(("us", "ss")):
        return word[:-1]
    return word


class SearchIndex:
    """Documents, and what finds them. Safe to use from several threads."""

    def __init__(self, documents: Sequence[Document], bm25: Any) -> None:
        """``bm25`` is a ``bm25s.BM25`` over the terms of the documents."""
        self.documents, self._bm25 = list(documents), bm25

    @classmethod
    def build(cls, documents: Sequence[Document]) -> SearchIndex:
        """Indexes documents in memory; raises ``DataValidationError`` if they have no word."""
        # Titles are searched too: often the text only says "it".
        lists = [terms(f"{document.title}\n{document.text}") for document in documents]
        if not any(lists):
            raise DataValidationError(
                "corpus: got documents without a word, expected text to search"
            )
        bm25 = _bm25s().BM25()
        bm25.index(lists, show_progress=False)
        return cls(documents, bm25)

    def search(self, query: str, n_results: int) -> list[Document]:
        """Returns the best documents for a query, at most ``n_results``, the best first.

        Equal scores are in the order of the corpus. Documents without a term of the query are not
        returned, so the result may be empty.
        """
        scores = self.scores(query)
        found = np.flatnonzero(scores > 0)
        if len(found) > n_results > 0:
            # Everything equal to the n-th score is kept, so that the order of the corpus decides.
            found = found[scores[found] >= np.partition(scores[found], -n_results)[-n_results]]
        best = found[np.argsort(-scores[found], kind="stable")][:n_results]
        return [self.documents[i] for i in best]

    def scores(self, query: str) -> npt.NDArray[np.float64]:
        """Returns the BM25 score of each document; 0: it has no term of the query."""
        known = [term for term in terms(query) if term in self._bm25.vocab_dict]
        if not known:
            return np.zeros(len(self.documents))
        return np.round(np.asarray(self._bm25.get_scores(known), dtype=np.float64), _DIGITS)

    def save(self, path: Path) -> None:
        """Writes the index to the new folder ``path``, which appears whole or not at all."""
        with new_folder(str(path)) as folder:
            lines = (json.dumps(asdict(d), ensure_ascii=False) + "\n" for d in self.documents)
            (folder / _DOCUMENTS).write_text("".join(lines), encoding="utf-8")
            self._bm25.save(folder, show_progress=False)

    @classmethod
    def load(cls, path: Path) -> SearchIndex:
        """Reads an index; raises ``DataFormatError`` if it is damaged or of another version."""
        try:
            lines = (path / _DOCUMENTS).read_text(encoding="utf-8").split("\n")
            documents = [Document(**json.loads(line)) for line in lines if line]
            bm25 = _bm25s().BM25.load(path, load_corpus=False, show_progress=False)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataFormatError(
                f"{path}: the index cannot be read ({error}); build it again with python -m "
                f"recipes.search_tool.index corpus=FILE_OR_FOLDER index_path={path}"
            ) from error
        return cls(documents, bm25)


@lru_cache(maxsize=4)
def open_index(source: str, max_words: int = 250) -> SearchIndex:
    """Returns the index in a folder, or builds the index of a corpus in memory.

    One for a process: environments of all groups search in the same index.

    Raises:
        ConfigurationError: bm25s is not installed.
        DataError: there is no index and no corpus at ``source``.
    """
    path = Path(source).expanduser()
    if (path / _DOCUMENTS).is_file() and any(path.glob("*.index.json")):
        return SearchIndex.load(path)
    return SearchIndex.build(read_corpus(source, max_words))


def check_new(path: Path) -> None:
    """Raises ``ConfigurationError`` if ``path`` exists, so that nothing is overwritten."""
    if path.exists():
        raise ConfigurationError(
            f"index_path: {path} exists; expected a new folder. Delete an older index first"
        )


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise missing_extra("search tools", error, "search") from error
    return bm25s
