"""Questions that the model answers with a search tool, as batches of environments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import chz

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.recipes.search_tool.corpus import squad_articles
from tinker_cookbook.recipes.search_tool.questions import (
    DATASETS,
    EXAMPLE,
    EXAMPLE_DOCUMENTS,
    SEARCH_R1,
    SearchR1Datum,
    download_search_r1_dataset,
    has_splits,
    process_single_row,
    read_questions,
)
from tinker_cookbook.recipes.search_tool.tools import (
    ChromaTool,
    EmbeddingConfig,
    LocalSearchTool,
    RetrievalConfig,
    SearchTool,
    TextAnswerReward,
)
from tinker_cookbook.recipes.start import check_files, check_one_of, renderer_of
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tool_use import build_agent_tool_env
from tinker_cookbook.training.config import at_least, number

__all__ = [
    "SEARCH_TASK_INSTRUCTIONS",
    "SearchEnvGroupBuilder",
    "SearchR1DatasetBuilder",
    "SearchR1Datum",
    "SearchRLDataset",
    "download_search_r1_dataset",
    "initial_messages",
    "process_single_row",
]

SEARCH_TASK_INSTRUCTIONS = (
    "Answer the question. Look facts up with the tool search: call it with one or more queries, "
    "read the documents that it returns, and search again for what is still missing. Do not "
    'answer from memory. When you know the answer, reply with "Answer:" and the answer in one to '
    "five words."
)


def initial_messages(
    question: str, renderer: Renderer, search_tool: SearchTool, instructions: str
) -> list[Message]:
    """Returns the declaration of the tool with the instructions, and the question."""
    prefix = renderer.create_conversation_prefix_with_tools(
        [search_tool.search.to_spec()], instructions
    )
    return [*prefix, Message(role="user", content=question)]


@chz.chz
class SearchSettings:
    """What is searched, and how an episode goes; of the dataset and of the programs."""

    dataset: str = chz.field(
        default=EXAMPLE,
        doc=f"{', '.join(DATASETS)}, or a file: JSON in the layout of SQuAD, or rows with question "
        "and answer; or a folder with train and test files",
    )
    corpus: str | None = chz.field(
        default=None,
        doc="Documents: a file, or a folder of texts; default: the documents of dataset",
    )
    index_path: str | None = chz.field(
        default=None, doc="Index made by recipes.search_tool.index, instead of a corpus"
    )
    max_words: int = number(250, "Longer documents of a corpus are split; 0: never")
    max_turns: int = number(5, "Maximum answers in an episode, including the last one", low=1)
    max_trajectory_tokens: int | None = chz.field(
        default=32 * 1024, doc="Tokens of an episode; a longer one ends"
    )
    instructions: str = chz.field(default=SEARCH_TASK_INSTRUCTIONS, doc="System prompt")
    chroma_host: str | None = chz.field(
        default=None, doc="Host of a Chroma server, which then replaces the local index"
    )
    chroma_port: int = chz.field(default=8000, doc="Port of the Chroma server")
    chroma_collection_name: str = chz.field(default="wiki_embeddings", doc="Chroma collection")

    @property
    def source(self) -> str:
        """The path to search in: the index, the corpus, or the documents of the dataset."""
        if path := self.corpus or self.index_path:
            return path
        if self.dataset == EXAMPLE:
            return str(EXAMPLE_DOCUMENTS)
        # Questions in the layout of SQuAD come with the paragraphs that answer them.
        if squad_articles(Path(self.dataset).expanduser()):
            return self.dataset
        raise ConfigurationError(
            f"corpus: got none, and dataset={self.dataset} has no documents; expected "
            "corpus=FILE_OR_FOLDER or index_path=FOLDER, or chroma_host= of a Chroma server"
        )

    def check_search(self) -> None:
        """Raises for documents that do not exist; opens nothing."""
        names = "corpus", "index_path", "chroma_host"
        check_one_of(**{name: getattr(self, name) for name in names})
        check_files(self, "corpus", "index_path")
        if self.chroma_host is None:
            _ = self.source

    def search_tool(self, retrieval: RetrievalConfig) -> SearchTool:
        """Returns the tool. It opens a local index now, and a Chroma server at its first call."""
        if self.chroma_host is not None:
            where = self.chroma_host, self.chroma_port
            return ChromaTool(None, None, self.chroma_collection_name, retrieval, 10, 1.0, *where)
        return LocalSearchTool(self.source, retrieval, self.max_words)


@chz.chz
class SearchKeys(SearchSettings):
    """The same with the short keys of a command line."""

    n_results: int = chz.field(default=3, doc="Documents for each query")
    embedding_model_name: str = chz.field(
        default="gemini-embedding-001", doc="Chroma: embeddings of the queries"
    )
    embedding_dim: int = chz.field(default=768, doc="Chroma: dimension of the embeddings")

    @property
    def retrieval(self) -> RetrievalConfig:
        """What a search returns."""
        embeddings = EmbeddingConfig(
            model_name=self.embedding_model_name, embedding_dim=self.embedding_dim
        )
        return RetrievalConfig(n_results=self.n_results, embedding_config=embeddings)


@dataclass
class SearchEnvGroupBuilder(EnvGroupBuilder):
    """Episodes of the same question, which share the search tool."""

    datum: SearchR1Datum
    model_name: str
    renderer_name: str | None
    max_turns: int
    group_size: int
    chroma_tool: SearchTool
    """Search tool of any kind; named as in the original cookbook."""
    format_coef: float = 0.1
    max_trajectory_tokens: int | None = 32 * 1024
    max_generation_tokens: int | None = None
    context_overflow_reward: float = -0.1
    instructions: str = SEARCH_TASK_INSTRUCTIONS

    async def make_envs(self) -> Sequence[Env]:
        """Returns an environment for each episode of the group."""
        return [await self.make_env(i) for i in range(self.group_size)]

    async def make_env(self, index: int) -> Env:
        """Returns one environment; all of the group are alike."""
        renderer = renderer_of(self.model_name, self.renderer_name)
        return build_agent_tool_env(
            renderer,
            [self.chroma_tool.search],
            initial_messages(self.datum["question"], renderer, self.chroma_tool, self.instructions),
            TextAnswerReward(self.datum["answer"], self.format_coef),
            max_turns=self.max_turns,
            max_trajectory_tokens=self.max_trajectory_tokens,
            max_generation_tokens=self.max_generation_tokens,
            context_overflow_reward=self.context_overflow_reward,
        )

    def logging_tags(self) -> list[str]:
        """Returns where the question is from."""
        return [self.datum["data_source"]]


class SearchRLDataset(ProblemDataset[SearchEnvGroupBuilder]):
    """Builders of groups in batches of ``batch_size``; the last batch may be smaller."""

    def __init__(self, env_group_builders: list[SearchEnvGroupBuilder], batch_size: int) -> None:
        super().__init__(env_group_builders, lambda builder: builder, batch_size, shuffle=False)


@chz.chz
class SearchR1DatasetBuilder(SearchSettings, RLDatasetBuilder):
    """Questions of Search-R1, of the example data or of the user's files, over a search tool.

    The tool searches a local index, or with ``chroma_host`` a Chroma server.
    """

    model_name_for_tokenizer: str = chz.field(doc="Model of the tokenizer")
    dataset: str = SEARCH_R1
    retrieval_config: RetrievalConfig = chz.field(
        default_factory=RetrievalConfig, doc="What a search returns"
    )
    batch_size: int = chz.field(validator=at_least(1), doc="Questions per step")
    group_size: int = chz.field(validator=at_least(1), doc="Episodes per question")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    format_coef: float = chz.field(default=0.1, doc="Penalty for an answer without 'Answer:'")
    max_generation_tokens: int | None = chz.field(
        default=None, doc="Tokens kept free for the next answer"
    )
    context_overflow_reward: float = chz.field(default=-0.1, doc="Reward of an episode that is cut")
    seed: int = chz.field(default=0, doc="Seed of the order of questions")
    test_path: str | None = chz.field(default=None, doc="Questions to evaluate on")
    num_test: int = number(0, "Questions to evaluate on; 0: no evaluation")

    def check(self) -> None:
        """Raises for documents that do not exist; reads no data."""
        self.check_search()

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Opens the search tool and reads the questions; test questions are not trained on."""
        self.check()
        tool = await asyncio.to_thread(self.search_tool, self.retrieval_config)
        if isinstance(tool, ChromaTool):
            await tool.connect()
        # A chat format without tools is an error now, not in the first episode.
        renderer = renderer_of(self.model_name_for_tokenizer, self.renderer_name)
        initial_messages("", renderer, tool, self.instructions)
        training, test = await asyncio.to_thread(self.questions)
        group = partial(self._group, tool)
        train_set = ProblemDataset(training, partial(group, self.group_size), self.batch_size)
        if not test:
            return train_set, None
        return train_set, ProblemDataset(test, partial(group, 1), len(test), shuffle=False)

    def questions(self) -> tuple[list[SearchR1Datum], list[SearchR1Datum]]:
        """Returns the questions to train on in a random order, and those to evaluate on.

        Without ``test_path`` the test questions are the test split of a dataset that has one, and
        otherwise held out of the questions to train on.
        """
        rng = random.Random(self.seed)
        training = read_questions(self.dataset)
        if self.test_path is None and not has_splits(self.dataset):
            # At most half, or every question of a small file would be held out.
            test = rng.sample(training, min(self.num_test, len(training) // 2))
        elif self.num_test:
            path = self.test_path or self.dataset
            test = read_questions(path, "test" if has_splits(path) else "train")
            test = rng.sample(test, min(self.num_test, len(test)))
        else:
            test = []
        known = {datum["question"] for datum in test}
        training = [datum for datum in training if datum["question"] not in known]
        if not training:
            raise DataValidationError(
                f"dataset={self.dataset}: every question is in the test part too; expected others "
                "to train on"
            )
        rng.shuffle(training)
        return training, test

    def _group(self, search_tool: SearchTool, size: int, datum: SearchR1Datum) -> EnvGroupBuilder:
        return SearchEnvGroupBuilder(
            datum,
            self.model_name_for_tokenizer,
            self.renderer_name,
            self.max_turns,
            size,
            search_tool,
            self.format_coef,
            self.max_trajectory_tokens,
            self.max_generation_tokens,
            self.context_overflow_reward,
            self.instructions,
        )
