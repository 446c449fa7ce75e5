"""Builds an index of many documents once, for ``index_path=`` of the search recipe.

    python -m recipes.search_tool.index corpus=wiki.jsonl index_path=my_index

``corpus`` is as in ``recipes.search_tool.train``. Without an index the recipe builds one in memory
each time it starts, which takes seconds for some thousand documents.
"""

from __future__ import annotations

import chz

from tinker_cookbook.recipes.search_tool.corpus import read_corpus
from tinker_cookbook.recipes.search_tool.retrieval import SearchIndex
from tinker_cookbook.recipes.tiny_models.llama import new_folder
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line


@chz.chz
class CLIConfig:
    """Settings of an index."""

    corpus: str = chz.field(doc="File or folder of documents")
    index_path: str = chz.field(doc="New folder of the index")
    max_words: int = chz.field(default=250, doc="Longer documents are split; 0: never")
    query: str = chz.field(default="", doc="A query to try in the new index")


def main(config: CLIConfig) -> None:
    """Builds and writes an index, and prints how many documents it has."""
    with new_folder(config.index_path, "index_path") as folder:
        index = SearchIndex.build(read_corpus(config.corpus, config.max_words))
        index.save(folder)
    print_line(f"{len(index.documents)} parts: {config.index_path}")
    for number, document in enumerate(index.search(config.query, 3), start=1):
        print_line(f"{number}. {document.shown[:200]}")


if __name__ == "__main__":
    run_entrypoint(main)
