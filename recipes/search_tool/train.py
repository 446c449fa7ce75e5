"""Reinforcement learning of question answering with a search tool (Search-R1).

    python -m recipes.search_tool.train
    python -m recipes.search_tool.train dataset=my.jsonl corpus=my_documents model_name=…
    python -m recipes.search_tool.train dataset=search_r1 index_path=wiki_index model_name=…
    python -m recipes.search_tool.train dataset=search_r1 chroma_host=localhost model_name=…

The model calls ``search`` as often as it needs, up to ``max_turns`` answers, and ends with
``Answer:``. The reward is 1 for the right answer, 0 for a wrong one, and ``-format_coef`` without
``Answer:``. The search is local: BM25 over a file or folder of documents, without a key or a
server.

Without ``model_name`` the command first creates a small model for the example data (see
``recipes.search_tool.small_model``), in about four minutes, and keeps it for later runs.
"""

from __future__ import annotations

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_info import resolve_max_length
from tinker_cookbook.recipes.search_tool.questions import DATASETS, EXAMPLE
from tinker_cookbook.recipes.search_tool.retrieval import METHODS, Method
from tinker_cookbook.recipes.search_tool.search_env import (
    SEARCH_TASK_INSTRUCTIONS,
    SearchR1DatasetBuilder,
    tool_renderer_name,
)
from tinker_cookbook.recipes.search_tool.small_model import N_RESULTS, SMALL, small_model_path
from tinker_cookbook.recipes.search_tool.tools import EmbeddingConfig, RetrievalConfig
from tinker_cookbook.recipes.start import check_dataset_name
from tinker_cookbook.rl import train
from tinker_cookbook.training.config import check_model
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(train.Config):
    """Settings of the recipe, in addition to those of the loop."""

    recipe_name: str = "search_tool"
    model_name: str = chz.field(
        default=SMALL,
        doc="Hub name or local folder; small: a model made on this machine for the example data",
    )
    dataset: str = chz.field(
        default=EXAMPLE,
        doc=f"{', '.join(DATASETS)}, or a file: JSON in the layout of SQuAD, or rows with question "
        "and answer; or a folder with train and test files",
    )
    test_path: str | None = chz.field(
        default=None, doc="Questions to evaluate on; default: the split test, else held out"
    )
    num_test: int = chz.field(default=40, doc="Questions to evaluate on; 0: no evaluation")
    corpus: str | None = chz.field(
        default=None,
        doc="Documents: a file, or a folder of texts; default: the documents of dataset",
    )
    index_path: str | None = chz.field(
        default=None, doc="Index made by recipes.search_tool.index, instead of a corpus"
    )
    method: Method = chz.field(default="bm25", doc=f"One of {', '.join(METHODS)}")
    n_results: int | None = chz.field(
        default=None, doc=f"Documents for each query; default: 3, for model_name=small {N_RESULTS}"
    )
    max_words: int = chz.field(default=250, doc="Longer documents of a corpus are split; 0: never")
    max_turns: int = chz.field(
        default=5, doc="Maximum answers in an episode, including the last one"
    )
    format_coef: float = chz.field(default=0.1, doc="Penalty for an answer without 'Answer:'")
    groups_per_batch: int = 8
    group_size: int = 8
    max_tokens: int = chz.field(
        default=0, doc="Maximum tokens of one answer; 0: 1024, for model_name=small 48"
    )
    max_trajectory_tokens: int | None = chz.field(
        default=32 * 1024, doc="Tokens of an episode; a longer one ends"
    )
    instructions: str = chz.field(default=SEARCH_TASK_INSTRUCTIONS, doc="System prompt")
    chroma_host: str | None = chz.field(
        default=None, doc="Host of a Chroma server, which then replaces the local index"
    )
    chroma_port: int = chz.field(default=8000, doc="Port of the Chroma server")
    chroma_collection_name: str = chz.field(default="wiki_embeddings", doc="Chroma collection")
    embedding_model_name: str = chz.field(
        default="gemini-embedding-001", doc="Chroma: embeddings of the queries"
    )
    embedding_dim: int = chz.field(default=768, doc="Chroma: dimension of Gemini's embeddings")
    stream_minibatch: bool | None = chz.field(
        default=None,
        doc="Whether to train on parts of a batch early; default: if num_minibatches",
    )
    learning_rate: float | None = chz.field(
        default=None, doc="Default: 4e-5, for model_name=small 2e-3"
    )
    seed: int = 2

    def build_dataset(self) -> SearchR1DatasetBuilder:
        """Returns the questions and the index of the documents."""
        embeddings = EmbeddingConfig(
            model_name=self.embedding_model_name, embedding_dim=self.embedding_dim
        )
        return SearchR1DatasetBuilder(
            model_name_for_tokenizer=self.model_name,
            renderer_name=self.renderer,
            batch_size=self.groups_per_batch,
            group_size=self.group_size,
            max_generation_tokens=self.max_tokens,
            max_trajectory_tokens=self.max_trajectory_tokens,
            max_turns=self.max_turns,
            format_coef=self.format_coef,
            dataset=self.dataset,
            test_path=self.test_path,
            num_test=self.num_test,
            corpus=self.corpus,
            index_path=self.index_path,
            max_words=self.max_words,
            instructions=self.instructions,
            retrieval_config=RetrievalConfig(
                n_results=self.n_results or 3, method=self.method, embedding_config=embeddings
            ),
            chroma_host=self.chroma_host,
            chroma_port=self.chroma_port,
            chroma_collection_name=self.chroma_collection_name,
            seed=self.seed,
        )

    def resolved(self) -> train.Config:
        """Returns the config of the loop; makes the small model if it is not there yet."""
        return super(CLIConfig, with_model(self)).resolved()


def with_model(cli: CLIConfig) -> CLIConfig:
    """Returns the settings with those that depend on the model filled in.

    Makes the small model if ``model_name=small`` and it is not there yet.
    """
    check_dataset_name(cli.dataset, DATASETS)
    small = cli.model_name == SMALL
    if small and cli.dataset != EXAMPLE:
        raise ConfigurationError(
            f"model_name: got {SMALL}, which only knows the words of dataset={EXAMPLE}; expected a "
            f"model for dataset={cli.dataset}, such as model_name=Qwen/Qwen3.5-4B"
        )
    defaults = {
        "n_results": N_RESULTS if small else 3,
        "max_tokens": 48 if small else 1024,
        "learning_rate": 2e-3 if small else 4e-5,
    }
    changes = {key: value for key, value in defaults.items() if not getattr(cli, key)}
    # The original switches streaming with one setting and counts parts with another.
    if cli.stream_minibatch is True and cli.num_minibatches is None:
        changes["num_minibatches"] = 4
    if cli.stream_minibatch is False:
        changes["num_minibatches"] = None
    cli = chz.replace(cli, **changes)
    if small:
        cli = chz.replace(cli, model_name=str(small_model_path()))
    check_model(cli)
    name = tool_renderer_name(cli.model_name, cli.renderer_name, cli.log_path)
    # The default is longer than the context of small models.
    limits = (cli.max_trajectory_tokens, resolve_max_length(cli.model_name, None))
    tokens = min((limit for limit in limits if limit is not None), default=None)
    return chz.replace(cli, renderer_name=name, max_trajectory_tokens=tokens)


async def main(config: CLIConfig) -> None:
    """Trains a model to answer with searches."""
    await train.main(config)


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
