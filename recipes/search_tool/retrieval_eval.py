"""Measures a search method on questions whose documents are known: recall and queries per second.

    python -m recipes.search_tool.retrieval_eval
    python -m recipes.search_tool.retrieval_eval dataset=xquad.en.json method=bm25,embeddings,fused

``dataset`` is JSON in the layout of SQuAD, where a question belongs to its paragraph, or
``example``. R@k is the share of questions with their document among the first k results.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import chz

from tinker_cookbook.eval.statistics import wilson_interval
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.recipes.search_tool.corpus import Corpus, read_corpus, squad_articles
from tinker_cookbook.recipes.search_tool.minilm import minilm
from tinker_cookbook.recipes.search_tool.questions import EXAMPLE, EXAMPLE_DOCUMENTS
from tinker_cookbook.recipes.search_tool.retrieval import METHODS, Method, build_index
from tinker_cookbook.recipes.start import example_data
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line

RANKS = (1, 3, 5)


@chz.chz
class CLIConfig:
    """Settings of the measurement."""

    dataset: str = chz.field(default=EXAMPLE, doc="JSON in the layout of SQuAD, or example")
    method: str = chz.field(default="bm25", doc=f"Separated by commas: {', '.join(METHODS)}")
    max_words: int = chz.field(default=250, doc="Longer documents are split; 0: never")
    limit: int | None = chz.field(default=None, doc="First questions only; default: all")


@dataclass(frozen=True)
class Recall:
    """What a method found."""

    method: str
    num_questions: int
    found: dict[int, int]
    """Number of questions with their document among the first k results, by k."""
    queries_per_second: float

    def share(self, k: int) -> float:
        """R@k."""
        return self.found[k] / self.num_questions


def read_pairs(dataset: str, max_words: int) -> tuple[Corpus, list[tuple[str, str]]]:
    """Returns the documents, and each question with the id of its document.

    Raises:
        DataError: the data cannot be read, or have no questions with their documents.
    """
    if dataset == EXAMPLE:
        # Only questions that one document answers: a second search depends on the first one.
        lines = example_data("search_questions_test.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        pairs = [(r["question"], r["documents"][0]) for r in rows if len(r["documents"]) == 1]
        return read_corpus(str(EXAMPLE_DOCUMENTS), max_words), pairs
    path = Path(dataset).expanduser()
    if not path.exists():
        raise DataValidationError(
            f"dataset: there is no file {path} (searched from {Path.cwd()}); expected JSON in the "
            f"layout of SQuAD, or {EXAMPLE}"
        )
    articles = squad_articles(path)
    if not articles:
        raise DataValidationError(
            f"dataset: got {path}, expected JSON in the layout of SQuAD, where questions belong to "
            f"paragraphs, or {EXAMPLE}"
        )
    corpus = read_corpus(dataset, max_words)
    # A paragraph that occurs twice is one document.
    sources = {f"{path.name}-{i}": p["context"].strip() for i, (_, p) in enumerate(articles)}
    first: dict[str, str] = {}
    for source, text in sources.items():
        first.setdefault(text, source)
    pairs = [
        (question["question"], first[paragraph["context"].strip()])
        for _, paragraph in articles
        for question in paragraph.get("qas", ())
    ]
    return corpus, pairs


def measure(corpus: Corpus, pairs: list[tuple[str, str]], methods: list[Method]) -> list[Recall]:
    """Returns the recall of each method over the same index."""
    index = build_index(corpus, "bm25" if methods == ["bm25"] else "fused")
    results = []
    for method in methods:
        # Parts of one document share places, so more results than the highest rank are needed.
        depth = 2 * max(RANKS)
        found: dict[int, int] = dict.fromkeys(RANKS, 0)
        if method != "bm25":
            minilm().embed_query("warm up")  # the weights are loaded before the clock starts
        started = time.monotonic()
        for question, source in pairs:
            hits = index.search(question, depth, method)
            sources = list(dict.fromkeys(hit.document.source for hit in hits))
            for k in RANKS:
                found[k] += source in sources[:k]
        seconds = time.monotonic() - started
        results.append(Recall(method, len(pairs), found, len(pairs) / seconds))
        # The next method must not profit from the queries that this one has embedded.
        minilm.cache_clear()
    return results


def table(results: list[Recall]) -> str:
    """Returns a line for each method, with 95% intervals of R@3."""
    lines = [
        f"{'method':11}" + "".join(f"{f'R@{k}':>8}" for k in RANKS) + "   95% of R@3   queries/s"
    ]
    for result in results:
        low, high = wilson_interval(result.found[3], result.num_questions)
        shares = "".join(f"{result.share(k):8.3f}" for k in RANKS)
        lines.append(
            f"{result.method:11}{shares}   {low:.3f}-{high:.3f}  {result.queries_per_second:9,.0f}"
        )
    return "\n".join(lines)


def main(config: CLIConfig) -> None:
    """Measures each method and prints the table."""
    methods = [name.strip() for name in config.method.split(",")]
    for name in methods:
        if name not in METHODS:
            raise ConfigurationError(
                f"method: got {name!r}, expected one or more of {', '.join(METHODS)}"
            )
    corpus, pairs = read_pairs(config.dataset, config.max_words)
    pairs = pairs[: config.limit]
    print_line(f"{corpus.num_sources} documents, {len(pairs)} questions")
    print_line(table(measure(corpus, pairs, cast("list[Method]", methods))))


if __name__ == "__main__":
    run_entrypoint(main)
