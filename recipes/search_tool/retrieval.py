"""Search in a local index: BM25, embeddings, or both by reciprocal rank fusion.

An index is a folder: ``documents.jsonl``, ``index.json`` (sources and settings), the arrays of
BM25, and ``embeddings.npy`` if there are embeddings. It is written atomically and never changed, so
the same query always has the same result.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from tinker_cookbook.engine.checkpoints.files import folder_lock, recover, replace_folder
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    DataValidationError,
    nearest,
)
from tinker_cookbook.recipes.search_tool.corpus import Corpus, Document, read_corpus
from tinker_cookbook.recipes.search_tool.minilm import MINILM, check_minilm, minilm
from tinker_cookbook.recipes.search_tool.terms import terms
from tinker_cookbook.utils.imports import missing_extra

Method = Literal["bm25", "embeddings", "fused"]
METHODS: tuple[str, ...] = get_args(Method)

_FORMAT = 1
_INFO, _DOCUMENTS, _EMBEDDINGS = "index.json", "documents.jsonl", "embeddings.npy"
_FUSION_CONSTANT = 60  # of Cormack et al. 2009
_FUSED_RANKS = 100
"""Ranks of each list that are fused; a document below them adds next to nothing."""
_DIGITS = 5
"""Scores are rounded before they are compared, as float32 sums may differ in the last digits."""

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Hit:
    """A document that was found, and its score."""

    document: Document
    score: float


class SearchIndex:
    """Documents, and what finds them. Safe to use from several threads."""

    def __init__(self, documents: Sequence[Document], bm25: Any, embeddings: Any | None) -> None:
        """``bm25`` is a ``bm25s.BM25``, ``embeddings`` has the shape (documents, dimensions)."""
        self.documents = list(documents)
        self._bm25, self._embeddings = bm25, embeddings

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def has_embeddings(self) -> bool:
        """Whether methods with embeddings work."""
        return self._embeddings is not None

    def search(self, query: str, n_results: int, method: Method = "bm25") -> list[Hit]:
        """Returns the best documents for a query, at most ``n_results``, the best first.

        Equal scores are in the order of the corpus. BM25 returns no document without a term of the
        query, so the result may be empty.
        """
        if method == "bm25":
            scores = self._bm25_scores(query)
            return self._hits(scores, _best(scores, n_results, above=0.0))
        if method == "embeddings":
            scores = self._similarities(query)
            return self._hits(scores, _best(scores, n_results))
        scores = np.zeros(len(self), dtype=np.float64)
        for one, above in ((self._bm25_scores(query), 0.0), (self._similarities(query), None)):
            ranked = _best(one, _FUSED_RANKS, above)
            scores[ranked] += 1.0 / (_FUSION_CONSTANT + 1 + np.arange(len(ranked)))
        return self._hits(scores, _best(scores, n_results, above=0.0))

    def check(self, method: str) -> None:
        """Raises ConfigurationError for a method that this index cannot search with."""
        if method not in METHODS:
            raise _unknown(method)
        if method == "bm25":
            return
        if not self.has_embeddings:
            raise ConfigurationError(
                f"method={method}: the index has no embeddings; build it with method={method}, or "
                "search with method=bm25"
            )
        check_minilm()

    def _hits(self, scores: Scores, numbers: npt.NDArray[np.int64]) -> list[Hit]:
        return [Hit(self.documents[i], float(scores[i])) for i in numbers]

    def _bm25_scores(self, query: str) -> Scores:
        known = [term for term in terms(query) if term in self._bm25.vocab_dict]
        if not known:
            return np.zeros(len(self), dtype=np.float64)
        return np.round(np.asarray(self._bm25.get_scores(known), dtype=np.float64), _DIGITS)

    def _similarities(self, query: str) -> Scores:
        # `method` was checked when the tool was made; a missing array here is a programming error.
        assert self._embeddings is not None
        products = self._embeddings @ minilm().embed_query(query)
        return np.round(products.astype(np.float64), _DIGITS)


def _unknown(method: str) -> ConfigurationError:
    return ConfigurationError(
        f"method: got {method!r}, expected one of {', '.join(METHODS)}{nearest(method, METHODS)}"
    )


def _best(scores: Scores, n: int, above: float | None = None) -> npt.NDArray[np.int64]:
    """Returns the numbers of the ``n`` highest scores (only those ``above``), best first."""
    numbers = np.arange(len(scores)) if above is None else np.flatnonzero(scores > above)
    if len(numbers) > n > 0:
        # Everything equal to the n-th score is kept, so that the order of the corpus decides.
        least = np.partition(scores[numbers], len(numbers) - n)[len(numbers) - n]
        numbers = numbers[scores[numbers] >= least]
    return numbers[np.argsort(-scores[numbers], kind="stable")][:n]


def build_index(corpus: Corpus, method: Method = "bm25") -> SearchIndex:
    """Builds an index in memory; with ``method`` embeddings or fused, also the embeddings.

    Raises:
        ConfigurationError: a package is missing.
        DataValidationError: no document has a word in it.
    """
    if method not in METHODS:
        raise _unknown(method)
    embeds = method != "bm25"
    if embeds:
        check_minilm()
    # Titles are searched too: often the text only says "it".
    texts = [f"{d.title}\n{d.text}" if d.title else d.text for d in corpus.documents]
    lists = [terms(text) for text in texts]
    if not any(lists):
        raise DataValidationError("corpus: got documents without a word, expected text to search")
    bm25 = _bm25s().BM25()
    bm25.index(lists, show_progress=False)
    return SearchIndex(corpus.documents, bm25, minilm().embed(texts) if embeds else None)


def save_index(index: SearchIndex, path: Path, origin: dict[str, Any]) -> None:
    """Writes an index to the folder ``path``, which appears whole or not at all.

    ``origin`` records the source of the index. Another index at ``path`` is replaced.

    Raises:
        ConfigurationError: ``path`` is something else than an index.
    """
    check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with folder_lock(path.parent, exclusive=True):
        recover(path.parent)
        replace_folder(path, _files(index, origin))


def check_free(path: Path) -> None:
    """Raises ConfigurationError if ``path`` exists and is not an index, so that nothing is
    overwritten."""
    if path.exists() and not is_index(path):
        raise ConfigurationError(
            f"index_path: got {path}, which exists and is not an index; expected a new folder, or "
            "an index to replace"
        )


def is_index(path: Path) -> bool:
    """Returns whether a folder is an index."""
    return (path / _INFO).is_file()


def _files(index: SearchIndex, origin: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    lines = (json.dumps(asdict(document), ensure_ascii=False) for document in index.documents)
    yield _DOCUMENTS, "".join(f"{line}\n" for line in lines).encode()
    with tempfile.TemporaryDirectory() as folder:
        # Use bm25s's own names, so that bm25s can open the folder without this package.
        index._bm25.save(folder, show_progress=False)
        for file in sorted(Path(folder).iterdir()):
            yield file.name, file.read_bytes()
    embeddings = index._embeddings
    if embeddings is not None:
        buffer = io.BytesIO()
        np.save(buffer, embeddings)
        yield _EMBEDDINGS, buffer.getvalue()
    info = {
        "format": _FORMAT,
        "num_documents": len(index),
        "embedding_model": MINILM if index.has_embeddings else None,
        "bm25s": _bm25s().__version__,
        **origin,
    }
    yield _INFO, (json.dumps(info, indent=1, ensure_ascii=False) + "\n").encode()


def load_index(path: Path) -> SearchIndex:
    """Reads an index from a folder.

    Raises:
        DataValidationError: there is no index at ``path``.
        DataFormatError: the index is damaged, or of another version.
    """
    if not is_index(path):
        raise DataValidationError(
            f"index_path: {path} is not an index; build one with: python -m "
            f"recipes.search_tool.index corpus=FILE_OR_FOLDER index_path={path}"
        )
    bm25s = _bm25s()
    again = "build it again with python -m recipes.search_tool.index"
    try:
        info = json.loads((path / _INFO).read_text(encoding="utf-8"))
        if info.get("format") != _FORMAT:
            raise DataFormatError(
                f"{path}: the index has format {info.get('format')}, expected {_FORMAT}; {again}"
            )
        lines = (path / _DOCUMENTS).read_text(encoding="utf-8").split("\n")
        documents = [Document(**json.loads(line)) for line in lines if line]
        bm25 = bm25s.BM25.load(path, load_corpus=False, show_progress=False)
        with_embeddings = info.get("embedding_model") is not None
        embeddings = np.load(path / _EMBEDDINGS) if with_embeddings else None
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, DataFormatError):
            raise
        raise DataFormatError(f"{path}: the index cannot be read ({error}); {again}") from error
    counts = {len(documents), info["num_documents"]}
    if embeddings is not None:
        counts.add(len(embeddings))
    if len(counts) > 1:
        raise DataFormatError(f"{path}: the index is damaged: its parts differ in length; {again}")
    return SearchIndex(documents, bm25, embeddings)


@lru_cache(maxsize=4)
def open_index(source: str, method: Method = "bm25", max_words: int = 250) -> SearchIndex:
    """Returns the index in a folder, or builds the index of a corpus in memory.

    One for a process: environments of all groups search in the same index.

    Raises:
        ConfigurationError: the index cannot search with ``method``.
        DataError: there is no index and no corpus at ``source``.
    """
    path = Path(source).expanduser()
    index = (
        load_index(path) if is_index(path) else build_index(read_corpus(source, max_words), method)
    )
    index.check(method)
    return index


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise missing_extra("search tools", error, "search") from error
    return bm25s
