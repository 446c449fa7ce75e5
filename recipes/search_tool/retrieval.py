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

from tinker_cookbook.recipes.search_tool.corpus import Document, read_corpus
from tinker_cookbook.supervised.json_files import json_lines
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
        """Indexes documents in memory."""
        # Titles are searched too: often the text only says "it".
        lists = [terms(f"{document.title}\n{document.text}") for document in documents]
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

    def save(self, folder: Path) -> None:
        """Writes the index to an existing folder."""
        lines = (json.dumps(asdict(d), ensure_ascii=False) + "\n" for d in self.documents)
        (folder / _DOCUMENTS).write_text("".join(lines), encoding="utf-8")
        self._bm25.save(folder, show_progress=False)

    @classmethod
    def load(cls, folder: Path) -> SearchIndex:
        """Reads an index that ``save`` has written."""
        documents = [Document(**row) for _, row in json_lines(folder / _DOCUMENTS)]
        return cls(documents, _bm25s().BM25.load(folder, load_corpus=False, show_progress=False))


@lru_cache(maxsize=4)
def open_index(source: str, max_words: int = 250) -> SearchIndex:
    """Returns the index in a folder, or builds the index of a corpus in memory.

    One for a process: environments of all groups search in the same index.

    Raises:
        ConfigurationError: bm25s is not installed.
        DataError: there is no index and no corpus at ``source``.
    """
    path = Path(source).expanduser()
    # Of bm25s; a folder of documents may have a file documents.jsonl, too.
    if (path / "params.index.json").is_file():
        return SearchIndex.load(path)
    return SearchIndex.build(read_corpus(source, max_words))


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise missing_extra("search tools", error, "search") from error
    return bm25s
