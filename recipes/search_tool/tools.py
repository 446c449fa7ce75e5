"""The search tool that a model calls, and the reward of its answer."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import chz

from tinker_cookbook.exceptions import BackendError, ConfigurationError
from tinker_cookbook.recipes.search_tool.embedding import (
    get_gemini_client,
    get_gemini_embedding,
    retried,
)
from tinker_cookbook.recipes.search_tool.retrieval import SearchIndex, open_index
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.tool_use import (
    ToolResult,
    error_tool_result,
    simple_tool_result,
    tool,
)
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.imports import missing_extra

MAX_QUERIES = 8
"""Queries of one call; more are an error, which the model sees."""
_MAX_CONCURRENCY = 8  # searches in threads; they are short, and more would only share the cores
_MAX_REQUESTS = 128  # calls that wait for a Chroma server at the same time

QueryList = Annotated[
    list[str], "One or more queries; the result has the best documents for each of them."
]


@chz.chz
class EmbeddingConfig:
    """Embeds queries to a Chroma collection in the same way as its documents."""

    model_name: str = chz.field(default="gemini-embedding-001", doc="A model of the Gemini API")
    embedding_dim: int = chz.field(default=768, doc="Dimension of the embeddings")
    task_type: str = chz.field(default="RETRIEVAL_QUERY", doc="Task type of the embeddings")


@chz.chz
class RetrievalConfig:
    """What a search returns."""

    n_results: int = number(3, "Documents for each query", low=1)
    embedding_config: EmbeddingConfig = chz.field(
        default_factory=EmbeddingConfig, doc="Chroma only: embeddings of the queries"
    )
    max_chars: int = number(4000, "Characters of a document; the rest is left out", low=1)


class LocalSearchTool:
    """Search in an index on this machine; deterministic, so a resumed run has the same results.

    Pickles as its constructor arguments; each process opens the index once.
    """

    def __init__(
        self, source: str, retrieval_config: RetrievalConfig | None = None, max_words: int = 250
    ) -> None:
        """``source`` is an index, or documents that are indexed in memory; they are opened now, so
        that a mistake is an error before the run, not in its first call."""
        self.source, self.max_words = source, max_words
        self.retrieval_config = retrieval_config or RetrievalConfig()
        open_index(source, max_words)

    @property
    def index(self) -> SearchIndex:
        """The index, shared by all tools of this process with the same source."""
        return open_index(self.source, self.max_words)

    @tool(max_concurrency=_MAX_CONCURRENCY)
    def search(self, query_list: QueryList) -> ToolResult:
        """Searches the documents and returns the best ones for each query."""
        problem = _problem_of(query_list)
        if problem is not None:
            return error_tool_result(problem, error_type="validation_failed")
        config = self.retrieval_config
        texts = [
            [document.shown for document in self.index.search(query, config.n_results)]
            for query in query_list
        ]
        return _result(query_list, texts, config.max_chars)


def _problem_of(query_list: Sequence[str]) -> str | None:
    if not query_list or not all(query.strip() for query in query_list):
        return "query_list: expected at least one query, none of them empty"
    if len(query_list) > MAX_QUERIES:
        return f"query_list: got {len(query_list)} queries, expected at most {MAX_QUERIES}"
    return None


def _result(
    query_list: Sequence[str], texts: Sequence[Sequence[str]], max_chars: int
) -> ToolResult:
    """Returns the documents of each query as the model sees them, numbered from 1."""
    lines: list[str] = []
    for query, documents in zip(query_list, texts, strict=True):
        lines.append(f"Query: {query}")
        for i, text in enumerate(documents, start=1):
            cut = text if len(text) <= max_chars else f"{text[:max_chars]} […]"
            lines += [f"Document {i}:", cut]
        if not documents:
            lines.append("No document was found.")
    metrics: dict[str, float] = {"queries": len(query_list), "documents": sum(map(len, texts))}
    return simple_tool_result("\n".join(lines), metrics=metrics)


class ChromaTool:
    """Search in a collection of a Chroma server.

    Pickles without its connections, which are opened again where it is used, at the host and port
    that ``build`` sets.
    """

    def __init__(
        self,
        chroma_client: Any,
        gemini_client: Any,
        collection_name: str,
        retrieval_config: RetrievalConfig,
        max_retries: int,
        initial_retry_delay: float,
        chroma_host: str | None = None,
        chroma_port: int | None = None,
    ) -> None:
        self._chroma_client, self._gemini_client = chroma_client, gemini_client
        self._collection_name, self._retrieval_config = collection_name, retrieval_config
        self._max_retries, self._initial_retry_delay = max_retries, initial_retry_delay
        self._chroma_host, self._chroma_port = chroma_host, chroma_port

    @staticmethod
    async def build(
        chroma_host: str,
        chroma_port: int,
        chroma_collection_name: str,
        retrieval_config: RetrievalConfig | None = None,
        max_retries: int = 10,
        initial_retry_delay: float = 1,
        chroma_client: Any | None = None,
        gemini_client: Any | None = None,
    ) -> ChromaTool:
        """Connects to a server; ``chroma_client`` and ``gemini_client`` are existing clients to
        use, if given.

        Raises:
            ConfigurationError: a package or a setting of the embeddings is missing.
            BackendError: the server cannot be reached, or has no such collection.
        """
        made = ChromaTool(
            chroma_client,
            gemini_client,
            chroma_collection_name,
            retrieval_config or RetrievalConfig(),
            max_retries,
            initial_retry_delay,
            chroma_host,
            chroma_port,
        )
        await made.connect()
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Returns the settings without the connections, which cannot be pickled."""
        return {**self.__dict__, "_chroma_client": None, "_gemini_client": None}

    async def connect(self) -> Any:
        """Opens the connections and returns the collection."""
        if self._gemini_client is None:
            self._gemini_client = get_gemini_client()
        try:
            if self._chroma_client is None:
                self._chroma_client = await _chroma(self._chroma_host, self._chroma_port)
            return await self._chroma_client.get_collection(self._collection_name)
        except ConfigurationError:
            raise
        except Exception as error:  # chromadb raises errors of several libraries
            where = f"{self._chroma_host}:{self._chroma_port}"
            raise BackendError(
                f"chroma_host, chroma_port: the collection {self._collection_name!r} of a Chroma "
                f"server at {where} cannot be opened: {error}. Start a server with chroma run "
                f"--path FOLDER --port {self._chroma_port}; corpus=FILE_OR_FOLDER needs none"
            ) from error

    async def _query(self, vectors: list[list[float]]) -> list[list[str]]:
        collection = await self.connect()
        found = await collection.query(
            query_embeddings=vectors, n_results=self._retrieval_config.n_results
        )
        return [[text or "" for text in row] for row in found["documents"] or []]

    @tool(max_concurrency=_MAX_REQUESTS)
    async def search(self, query_list: QueryList) -> ToolResult:
        """Searches the documents and returns the best ones for each query."""
        problem = _problem_of(query_list)
        if problem is not None:
            return error_tool_result(problem, error_type="validation_failed")
        if self._gemini_client is None:
            self._gemini_client = get_gemini_client()
        config = self._retrieval_config.embedding_config
        vectors = await get_gemini_embedding(
            self._gemini_client,
            query_list,
            config.model_name,
            config.embedding_dim,
            config.task_type,
        )
        texts = await retried(
            lambda: self._query(vectors),
            self._max_retries,
            self._initial_retry_delay,
            f"Chroma at {self._chroma_host}:{self._chroma_port}",
        )
        return _result(query_list, texts, self._retrieval_config.max_chars)


async def _chroma(host: str | None, port: int | None) -> Any:
    try:
        import chromadb  # pyright: ignore[reportMissingImports]
        from chromadb.config import Settings  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise missing_extra("searches in Chroma", error, "vector-search") from error
    settings = Settings(anonymized_telemetry=False)
    return await chromadb.AsyncHttpClient(host=host, port=port, settings=settings)


SearchTool = LocalSearchTool | ChromaTool


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(s: str) -> str:
    """Returns a text without case, punctuation, articles and extra spaces, as SQuAD compares it."""
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_NO_PUNCTUATION)).split())


def extract_answer(text: str) -> str | None:
    """Returns what follows ``Answer:``; None unless it occurs exactly once."""
    parts = text.split("Answer:")
    return parts[1].strip() if len(parts) == 2 else None


@dataclass
class TextAnswerReward:
    """Reward of an answer in the last message: exact match after normalisation (Search-R1).

    ``format_coef * (format - 1) + correct``: 1 for a right answer, 0 for a wrong one, and
    ``-format_coef`` without ``Answer:``. The metrics are ``format`` and ``correct``.
    """

    gold_answers: list[str]
    """Each of them is right."""
    format_coef: float = 0.1

    async def __call__(self, history: list[Message]) -> tuple[float, dict[str, float]]:
        """Returns the reward of a conversation, and the metrics."""
        answers = [message for message in history if message["role"] == "assistant"]
        answer = extract_answer(get_text_content(answers[-1])) if answers else None
        right = map(normalize_answer, self.gold_answers)
        correct = float(answer is not None and normalize_answer(answer) in right)
        has_format = float(answer is not None)
        # An episode without an answer was cut, which is no mistake of its format.
        penalty = self.format_coef * (has_format - 1) if answers else 0.0
        return penalty + correct, {"format": has_format, "correct": correct}
