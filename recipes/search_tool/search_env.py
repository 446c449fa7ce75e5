"""Questions that the model answers with a search tool, as batches of environments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import chz

from tinker_cookbook import model_info
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.recipes.search_tool.corpus import squad_articles
from tinker_cookbook.recipes.search_tool.questions import (
    EXAMPLE,
    EXAMPLE_DOCUMENTS,
    SEARCH_R1,
    SearchR1Datum,
    download_search_r1_dataset,
    process_single_row,
    read_questions,
)
from tinker_cookbook.recipes.search_tool.tools import (
    ChromaTool,
    LocalSearchTool,
    RetrievalConfig,
    SearchTool,
    TextAnswerReward,
)
from tinker_cookbook.renderers import Message, Renderer, get_renderer
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import build_agent_tool_env

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

# Chat formats of small models that declare no tools, although their tokenizer has ChatML's tokens.
_WITHOUT_TOOLS = ("smollm2", "chatml")
TOOL_RENDERER = "qwen3_instruct"


def tool_renderer_name(model_name: str, renderer_name: str | None, log_path: str | None) -> str:
    """Returns the chat format of a run: the model's, or ``qwen3_instruct`` if it has no tools."""
    name, _ = model_info.resolve_renderer_name(model_name, renderer_name, log_path)
    return TOOL_RENDERER if renderer_name is None and name in _WITHOUT_TOOLS else name


def initial_messages(
    question: str, renderer: Renderer, search_tool: SearchTool, instructions: str
) -> list[Message]:
    """Returns the declaration of the tool with the instructions, and the question."""
    prefix = renderer.create_conversation_prefix_with_tools(
        [search_tool.search.to_spec()], instructions
    )
    return [*prefix, Message(role="user", content=question)]


def find_source(source: str | None, index_path: str | None, dataset: str) -> str:
    """Returns the path to search in: the index, the corpus, or the documents of the dataset.

    Raises:
        ConfigurationError: both are given, or neither and the dataset has no documents.
        DataValidationError: the path does not exist.
    """
    if source is not None and index_path is not None:
        raise ConfigurationError(
            f"corpus={source} and index_path={index_path} both name documents; leave one out"
        )
    path = index_path if source is None else source
    if path is not None:
        if not Path(path).expanduser().exists():
            key = "corpus" if index_path is None else "index_path"
            raise DataValidationError(
                f"{key}: there is no file or folder {path} (searched from {Path.cwd()})"
            )
        return path
    if dataset == EXAMPLE:
        return str(EXAMPLE_DOCUMENTS)
    # Questions in the layout of SQuAD come with the paragraphs that answer them.
    if dataset != SEARCH_R1 and squad_articles(Path(dataset).expanduser()) is not None:
        return dataset
    raise ConfigurationError(
        f"corpus: got none, and dataset={dataset} has no documents; expected corpus=FILE_OR_FOLDER "
        "or index_path=FOLDER, or chroma_host= of a Chroma server"
    )


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
        name = tool_renderer_name(self.model_name, self.renderer_name, None)
        renderer = get_renderer(name, get_tokenizer(self.model_name))
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
class SearchR1DatasetBuilder(RLDatasetBuilder):
    """Questions of Search-R1, of the example data or of the user's files, over a search tool.

    The tool searches a local index, or with ``chroma_host`` a Chroma server.
    """

    model_name_for_tokenizer: str = chz.field(doc="Model of the tokenizer")
    chroma_host: str | None = chz.field(default=None, doc="Host of a Chroma server; default: none")
    chroma_port: int = chz.field(default=8000, doc="Port of the Chroma server")
    chroma_collection_name: str = chz.field(
        default="wiki_embeddings", doc="Collection of the Chroma server"
    )
    retrieval_config: RetrievalConfig = chz.field(
        default_factory=RetrievalConfig, doc="What a search returns"
    )
    batch_size: int = chz.field(doc="Questions per step")
    group_size: int = chz.field(doc="Episodes per question")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    max_turns: int = chz.field(
        default=5, doc="Maximum answers in an episode, including the last one"
    )
    format_coef: float = chz.field(default=0.1, doc="Penalty for an answer without 'Answer:'")
    max_trajectory_tokens: int | None = chz.field(
        default=32 * 1024, doc="Tokens of an episode; a longer one ends"
    )
    max_generation_tokens: int | None = chz.field(
        default=None, doc="Tokens kept free for the next answer"
    )
    context_overflow_reward: float = chz.field(default=-0.1, doc="Reward of an episode that is cut")
    seed: int = chz.field(default=0, doc="Seed of the order of questions")
    dataset: str = chz.field(default=SEARCH_R1, doc="As in recipes.search_tool.train")
    test_path: str | None = chz.field(default=None, doc="Questions to evaluate on")
    num_test: int = chz.field(default=0, doc="Questions to evaluate on; 0: no evaluation")
    corpus: str | None = chz.field(default=None, doc="Documents; default: those of dataset")
    index_path: str | None = chz.field(default=None, doc="Folder of an index, instead of a corpus")
    max_words: int = chz.field(default=250, doc="Longer documents are split; 0: never")
    instructions: str = chz.field(default=SEARCH_TASK_INSTRUCTIONS, doc="System prompt")

    def check(self) -> None:
        """Raises for settings that cannot work and paths that do not exist; reads no data."""
        for name, low in (("batch_size", 1), ("group_size", 1), ("max_turns", 1), ("num_test", 0)):
            if getattr(self, name) < low:
                raise ConfigurationError(
                    f"{name}: got {getattr(self, name)}, expected at least {low}"
                )
        if self.chroma_host is not None:
            for name in ("corpus", "index_path"):
                if getattr(self, name) is not None:
                    raise ConfigurationError(
                        f"{name}={getattr(self, name)} and chroma_host={self.chroma_host} both "
                        "name documents; leave one out"
                    )
        else:
            find_source(self.corpus, self.index_path, self.dataset)

    async def search_tool(self) -> SearchTool:
        """Returns the tool: connects to Chroma, or opens the index in a thread."""
        if self.chroma_host is not None:
            return await ChromaTool.build(
                self.chroma_host,
                self.chroma_port,
                self.chroma_collection_name,
                self.retrieval_config,
            )
        path = find_source(self.corpus, self.index_path, self.dataset)
        return await asyncio.to_thread(LocalSearchTool, path, self.retrieval_config, self.max_words)

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Opens the search tool and reads the questions; test questions are not trained on."""
        self.check()
        search_tool = await self.search_tool()
        # A chat format without tools is an error now, not in the first episode.
        name = tool_renderer_name(self.model_name_for_tokenizer, self.renderer_name, None)
        renderer = get_renderer(name, get_tokenizer(self.model_name_for_tokenizer))
        initial_messages("", renderer, search_tool, self.instructions)
        training, test = await asyncio.to_thread(self.questions)
        group = partial(self._group, search_tool)
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
        test: list[SearchR1Datum] = []
        if self.num_test:
            one_file = self.dataset not in (EXAMPLE, SEARCH_R1) and Path(self.dataset).is_file()
            if self.test_path is not None:
                local = Path(self.test_path).expanduser()
                test = read_questions(self.test_path, "test" if local.is_dir() else "train")
            elif one_file:
                # Else every question of a small file would be held out.
                test = rng.sample(training, min(self.num_test, len(training) // 2))
            else:
                test = read_questions(self.dataset, "test")
            test = rng.sample(test, min(self.num_test, len(test)))
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
