"""Builds an index of documents for the search tool.

    python -m recipes.search_tool.index corpus=FOLDER index_path=my_index
    python -m recipes.search_tool.index corpus=wiki.jsonl index_path=my_index method=fused

``corpus`` is a file of rows with ``text`` and, if they have them, ``title`` and ``id`` (jsonl,
json, csv, parquet), JSON in the layout of SQuAD, or a folder of .txt and .md files. The index
is written atomically. Without an index, a recipe builds one in memory each time it starts, which
takes seconds for some thousand documents.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.search_tool.corpus import read_corpus
from tinker_cookbook.recipes.search_tool.questions import EXAMPLE_DOCUMENTS
from tinker_cookbook.recipes.search_tool.retrieval import (
    METHODS,
    Method,
    build_index,
    check_free,
    load_index,
    save_index,
)
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line


@chz.chz
class CLIConfig:
    """Settings of an index."""

    corpus: str = chz.field(
        default=str(EXAMPLE_DOCUMENTS), doc="File or folder of documents; default: the example data"
    )
    index_path: str = chz.field(
        default="/tmp/tinker-examples/search_index",
        doc="Folder of the index; an older one is replaced",
    )
    method: Method = chz.field(
        default="bm25", doc=f"One of {', '.join(METHODS)}; the last two also make embeddings"
    )
    max_words: int = chz.field(default=250, doc="Longer documents are split; 0: never")
    query: str | None = chz.field(default=None, doc="A query to try in the new index")


def main(config: CLIConfig) -> None:
    """Builds and writes an index, and prints what is in it."""
    path = Path(config.index_path).expanduser()
    corpus_path = Path(config.corpus).expanduser()
    if path.resolve() == corpus_path.resolve() or path.resolve() in corpus_path.resolve().parents:
        raise ConfigurationError(
            f"index_path={path} contains the corpus {corpus_path}; expected another folder"
        )
    check_free(path)
    started = time.monotonic()
    corpus = read_corpus(config.corpus, config.max_words)
    index = build_index(corpus, config.method)
    text = "\n".join(document.text for document in corpus.documents)
    origin = {
        "corpus": str(corpus_path.resolve()),
        "corpus_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "method": config.method,
        "max_words": config.max_words,
    }
    save_index(index, path, origin)
    # Read again, so that success means that a run can open it.
    index = load_index(path)
    parts = f" in {len(index)} parts" if len(index) > corpus.num_sources else ""
    left_out = f", {corpus.num_duplicates} duplicates left out" if corpus.num_duplicates else ""
    print_line(
        f"{corpus.num_sources} documents{parts}{left_out}; "
        f"{'BM25 and embeddings' if index.has_embeddings else 'BM25'}, "
        f"{time.monotonic() - started:.1f} s\nwritten to {path}"
    )
    if config.query is not None:
        for i, hit in enumerate(index.search(config.query, 3, config.method), start=1):
            print_line(f"{i}. {hit.document.id} ({hit.score:.3f}): {hit.document.text[:200]}")


if __name__ == "__main__":
    run_entrypoint(main)
