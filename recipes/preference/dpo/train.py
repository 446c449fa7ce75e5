"""Direct preference optimization on pairs of answers, without a reward model.

    python -m recipes.preference.dpo.train
    python -m recipes.preference.dpo.train dataset=my_pairs.jsonl model_name=… dpo_beta=…
    python -m recipes.preference.dpo.train dataset=hhh|helpsteer3|ultrafeedback

Without arguments the demo model (SmolLM2-135M-Instruct) learns from ``recipes/example_data/`` to
prefer direct answers. Watch ``test/accuracy`` (from 0.5) and ``test/margin`` (from
0), and ``test/nll``: if it rises much, chosen answers become less likely too; lower the learning
rate. Pairs come from the Hub by name, or from a file: JSON lines with ``prompt``,
``chosen`` and ``rejected``, the files of Anthropic's HH, and others (see
``preference.comparison_file``).
"""

from __future__ import annotations

import chz

from tinker_cookbook import cli_utils, hyperparam_utils
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons, Ties
from tinker_cookbook.recipes.preference.datasets import get_comparison_builder
from tinker_cookbook.recipes.start import RecipeSettings, blocking, resolve, start
from tinker_cookbook.training.config import check_model
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

# Gradients of pairs are noisier, so use a tenth of the rate for supervised training.
_FRACTION_OF_SFT_LR = 0.1


@chz.chz
class CLIConfig(train_dpo.DPOSettings, RecipeSettings):
    """Settings of the recipe. Options that are None are derived from the model and printed."""

    dataset: str = chz.field(
        default="example", doc="example, hhh, helpsteer3, ultrafeedback, or a file of pairs"
    )
    test_path: str | None = chz.field(default=None, doc="Held-out pairs, with a file")
    test_size: int | None = chz.field(default=None, doc="Without test_path: pairs to hold out")
    max_length: int | None = chz.field(
        default=None, doc="Tokens after which answers are cut; default: the model's context"
    )
    batch_size: int = chz.field(default=8, doc="Pairs per step")
    ties: Ties = chz.field(default="drop", doc="drop, or half: both ways at half weight")
    learning_rate: float | None = chz.field(
        default=None, doc="Default: a tenth of the recommended rate for supervised fine-tuning"
    )
    log_path: str = chz.field(
        default=str(cli_utils.default_log_path("dpo")), doc="Folder of this run"
    )
    eval_every: int = chz.field(default=10, doc="Steps between evaluations on held-out pairs")
    submit_ahead: int = chz.field(default=1, doc="Number of steps that are submitted ahead")
    show_samples: int = chz.field(
        default=1, doc="Held-out prompts answered before and after training"
    )


def dpo_learning_rate(model_name: str) -> float:
    """Returns a tenth of ``get_lr``: 1.3e-4 for the demo model, 2.9e-5 for Llama 8B."""
    return _FRACTION_OF_SFT_LR * hyperparam_utils.get_lr(model_name)


def build_config(cli: CLIConfig) -> train_dpo.Config:
    """Builds the dataset of pairs and the config of the run."""
    # Dataset names are checked first: that needs no model.
    comparisons = get_comparison_builder(cli.dataset, cli.test_path, cli.test_size, cli.seed)
    check_model(cli)
    learning_rate = cli.learning_rate
    if learning_rate is None:
        learning_rate = dpo_learning_rate(cli.model_name)
    pairs = DPODatasetBuilderFromComparisons(
        common_config=cli.chat_data(cli.batch_size, cli.max_length),
        comparison_builder=comparisons,
        ties=cli.ties,
    )
    return resolve(train_dpo.Config, cli, "dpo", dataset_builder=pairs, learning_rate=learning_rate)


async def main(config: CLIConfig) -> None:
    """Trains a model on pairs of answers."""
    await start(build_config(config), config.behavior_if_log_dir_exists, train_dpo.main_async)


cli_main = blocking(main)


if __name__ == "__main__":
    run_entrypoint(main)
