"""Self-distillation (SDFT): the teacher is the same model with a demonstration in its prompt.

    python -m recipes.distillation.sdft
    python -m recipes.distillation.sdft dataset_path=my.jsonl max_tokens=… reverse=True …
    python -m recipes.distillation.sdft dataset=sciknoweval sciknoweval_domain=Physics …
    python -m recipes.distillation.sdft dataset=toolalpaca toolalpaca_data_path=FOLDER …

The student samples an answer to each question. The teacher has the answer of the file in its
prompt, and its token distributions over the sampled answer are the targets (arXiv 2601.19897).
Answers of the example data have three lines: "In short", "Why", "Try".
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.distillation import sdft
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.sdft.datasets import (
    SciKnowEvalSDFTBuilder,
    SDFTDataset,
    ToolAlpacaSDFTBuilder,
)
from tinker_cookbook.recipes.start import (
    RecipeSettings,
    example_data,
    fill,
    recommended_lr,
    resolve,
    start,
)
from tinker_cookbook.supervised.batch_loop import DataReportOptions
from tinker_cookbook.training.config import check_model, number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(sdft.SDFTSettings, RecipeSettings, DataReportOptions):
    """Settings of the recipe. Options that are None are derived from the model and printed."""

    dataset: Literal["sciknoweval", "toolalpaca"] | None = chz.field(
        default=None, doc="sciknoweval or toolalpaca, of the Hub; default: demonstrations of a file"
    )
    dataset_path: str | None = chz.field(
        default=None,
        doc="JSONL file with your demonstrations; default: the example data. With dataset: a local "
        "copy of it",
    )
    sciknoweval_domain: str = chz.field(
        default="Chemistry", doc="dataset=sciknoweval: Biology, Chemistry, Material or Physics"
    )
    toolalpaca_data_path: str | None = chz.field(
        default=None, doc="dataset=toolalpaca: a local copy, the same as dataset_path"
    )
    test_path: str | None = chz.field(default=None, doc="JSONL file with held-out conversations")
    test_size: int = chz.field(default=0, doc="Without test_path: conversations to hold out")
    groups_per_batch: int = chz.field(default=8, doc="Questions per step")
    max_tokens: int = number(256, "Maximum tokens of an answer", low=1)
    learning_rate: float | None = chz.field(
        default=None, doc="Default: the recommended rate for the model"
    )
    log_path: str = chz.field(default=cli_utils.default_log_path("sdft"), doc="Folder of this run")
    eval_every: int = chz.field(default=15, doc="Steps between evaluations on the held-out part")
    save_every: int = chz.field(default=15, doc="Steps between checkpoints")
    show_samples: int = chz.field(
        default=1, doc="Held-out prompts answered before and after training"
    )


def build_dataset(cli: CLIConfig) -> sdft.DemonstrationBuilder:
    """Builds the dataset of demonstrations."""
    path, test_path = cli.dataset_path, cli.test_path
    for name in ("sciknoweval_domain", "toolalpaca_data_path"):
        if getattr(cli, name) != getattr(type(cli)(), name):
            raise ConfigurationError(
                f"{name}: got {getattr(cli, name)!r} without dataset={name.partition('_')[0]}, "
                "expected it only with this data set"
            )
    if path is None:
        if cli.test_size:
            raise ConfigurationError(
                f"test_size: got {cli.test_size} without dataset_path; expected it only with a "
                "user file, since the example already has a held-out part"
            )
        path = str(example_data("conversations.jsonl"))
        test_path = test_path or str(example_data("conversations_test.jsonl"))
    return sdft.DemonstrationBuilder(
        common_config=cli.chat_data(cli.groups_per_batch, None),
        file_path=path,
        test_file_path=test_path,
        test_size=cli.test_size,
        shuffle_seed=cli.seed,
    )


async def load_provider(cli: CLIConfig) -> tuple[SDFTDataset, SDFTDataset | None]:
    """Returns the questions of ``dataset`` to train on, and the held-out ones."""
    for name in ("test_path", "test_size"):
        if getattr(cli, name):
            raise ConfigurationError(
                f"{name}: got {getattr(cli, name)} with dataset={cli.dataset}, which has its own "
                "held-out part; expected it only with a user file"
            )
    copies = {path for path in (cli.dataset_path, cli.toolalpaca_data_path) if path is not None}
    if len(copies) > 1 or (cli.dataset != "toolalpaca" and cli.toolalpaca_data_path):
        raise ConfigurationError(
            f"dataset_path={cli.dataset_path}, toolalpaca_data_path={cli.toolalpaca_data_path}: "
            f"expected one local copy of dataset={cli.dataset}; dataset_path is that of both"
        )
    kind = SciKnowEvalSDFTBuilder if cli.dataset == "sciknoweval" else ToolAlpacaSDFTBuilder
    domain = {"domain": cli.sciknoweval_domain} if kind is SciKnowEvalSDFTBuilder else {}
    return await fill(kind, cli, data_path=next(iter(copies), None), **domain)()


def build_config(cli: CLIConfig) -> sdft.Config:
    """Builds the dataset and the config of the run."""
    check_model(cli)
    return resolve(
        sdft.Config,
        cli,
        "sdft",
        dataset_builder=build_dataset(cli) if cli.dataset is None else None,
        learning_rate=recommended_lr(cli.model_name, cli.learning_rate),
    )


async def main(config: CLIConfig) -> None:
    """Trains a model on demonstrations that only its teacher sees."""
    built, train = build_config(config), sdft.main
    if config.dataset is not None:
        data, held_out = await load_provider(config)
        train = partial(train, sdft_dataset=data, test_dataset=held_out)
    await start(built, config.behavior_if_log_dir_exists, train)


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
