"""Builds an index of many documents once, for ``index_path=`` of the search recipe.

    python -m recipes.search_tool.index corpus=wiki.jsonl index_path=my_index

``corpus`` is as in ``recipes.search_tool.train``. Without an index the recipe builds one in memory
each time it starts, which takes seconds for some thousand documents.
"""

from __future__ import annotations

import time
from pathlib import Path

import chz

from tinker_cookbook.recipes.search_tool.corpus import read_corpus
from tinker_cookbook.recipes.search_tool.retrieval import SearchIndex, check_new
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line


@chz.chz
class CLIConfig:
    """Settings of an index."""

    corpus: str = chz.field(doc="File or folder of documents")
    index_path: str = chz.field(doc="New folder of the index")
    max_words: int = chz.field(default=250, doc="Longer documents are split; 0: never")
    query: str | None = chz.field(default=None, doc="A query to try in the new index")


def main(config: CLIConfig) -> None:
    """Builds and writes an index, and prints what is in it."""
    path, started = Path(config.index_path).expanduser(), time.monotonic()
    check_new(path)
    SearchIndex.build(read_corpus(config.corpus, config.max_words)).save(path)
    # Read again, so that success means that a run can open it.
    index = SearchIndex.load(path)
    print_line(f"{len(index.documents)} parts, {time.monotonic() - started:.1f} s: {path}")
    for number, document in enumerate(index.search(config.query or "", 3), start=1):
        print_line(f"{number}. {document.shown[:200]}")


if __name__ == "__main__":
    run_entrypoint(main)
