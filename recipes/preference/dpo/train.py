"""Direct preference optimisation: from pairs of answers, without a reward model.

    python -m recipes.preference.dpo.train
    python -m recipes.preference.dpo.train dataset=my_pairs.jsonl model_name=… dpo_beta=…
    python -m recipes.preference.dpo.train dataset=hhh|helpsteer3|ultrafeedback

Without arguments the demo model (SmolLM2-135M-Instruct) learns from ``recipes/example_data/`` to
answer directly rather than to ramble. Watch ``test/accuracy`` (from 0.5) and ``test/margin`` (from
0), and ``test/nll``: where it rises much, the model moves away from good answers too; take a lower
learning rate. Pairs come from the Hub by name, or from a file: JSON lines with ``prompt``,
``chosen`` and ``rejected``, the files of Anthropic's HH, and others (see
``preference.comparison_file``).
"""

from __future__ import annotations

import asyncio

import chz

from tinker_cookbook import cli_utils, hyperparam_utils, model_info
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons, Ties
from tinker_cookbook.preference.dpo_loss import PairLossName
from tinker_cookbook.recipes.preference.datasets import get_comparison_builder
from tinker_cookbook.recipes.start import start
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.training.config import RunSettings, check_model
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# A pair says less than a text, and the loss pushes as hard: a tenth of the rate for texts.
_FRACTION_OF_SFT_LR = 0.1


@chz.chz
class CLIConfig(RunSettings):
    """Settings of the recipe; what is None is derived from the model and printed."""

    model_name: str = chz.field(default=DEMO_MODEL, doc="Hub name or local folder of the model")
    dataset: str = chz.field(
        default="example", doc="example, hhh, helpsteer3, ultrafeedback, or a file of pairs"
    )
    test_path: str | None = chz.field(default=None, doc="Held-out pairs, beside a file")
    test_size: int | None = chz.field(default=None, doc="Else: pairs to hold out")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    max_length: int | None = chz.field(
        default=None, doc="Tokens after which answers are cut; default: the model's context"
    )
    batch_size: int = chz.field(default=8, doc="Pairs a step")
    ties: Ties = chz.field(default="drop", doc="drop, or half: both ways at half weight")
    learning_rate: float | None = chz.field(
        default=None, doc="Default: a tenth of what is recommended for supervised fine-tuning"
    )
    dpo_beta: float = chz.field(default=0.1, doc="Scale of the rewards: how much to stay close")
    dpo_loss: PairLossName = chz.field(default="dpo", doc="dpo, ipo or simpo")
    label_smoothing: float = chz.field(default=0.0, doc="Share of labels held to be wrong")
    simpo_gamma: float = chz.field(default=0.5, doc="Margin that simpo asks for")
    reference_model_name: str | None = chz.field(
        default=None,
        doc="Model or tinker:// path to measure from; default: what training starts from",
    )
    log_path: str = chz.field(
        default=str(cli_utils.default_log_path("dpo")), doc="Folder of this run"
    )
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = chz.field(
        default="ask", doc="ask, resume, delete or raise"
    )
    eval_every: int = chz.field(default=10, doc="Steps between evaluations on held-out pairs")
    submit_ahead: int = chz.field(default=1, doc="Steps in flight beyond the one awaited")
    show_samples: int = chz.field(default=1, doc="Held-out prompts answered before and after")


def dpo_learning_rate(model_name: str) -> float:
    """A tenth of ``hyperparam_utils.get_lr``: 1.3e-4 for the demo model, 2.9e-5 for Llama 8B."""
    return _FRACTION_OF_SFT_LR * hyperparam_utils.get_lr(model_name)


def build_config(cli: CLIConfig) -> train_dpo.Config:
    """The pairs, and what is derived from the model."""
    comparisons = get_comparison_builder(cli.dataset, cli.test_path, cli.test_size, cli.seed)
    check_model(cli)
    renderer_name, _ = model_info.resolve_renderer_name(
        cli.model_name, cli.renderer_name, cli.log_path
    )
    learning_rate = cli.learning_rate
    if learning_rate is None:
        learning_rate = dpo_learning_rate(cli.model_name)
    pairs = DPODatasetBuilderFromComparisons(
        common_config=ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=cli.model_name,
            renderer_name=renderer_name,
            max_length=model_info.resolve_max_length(cli.model_name, cli.max_length),
            batch_size=cli.batch_size,
        ),
        comparison_builder=comparisons,
        ties=cli.ties,
    )
    own = ("dpo_beta", "dpo_loss", "label_smoothing", "simpo_gamma", "reference_model_name")
    return train_dpo.Config(
        recipe_name="dpo",
        log_path=cli.log_path,
        model_name=cli.model_name,
        dataset_builder=pairs,
        renderer_name=renderer_name,
        learning_rate=learning_rate,
        submit_ahead=cli.submit_ahead,
        show_samples=cli.show_samples,
        **{name: getattr(cli, name) for name in own},
        **cli.shared(),
    )


async def main(config: CLIConfig) -> None:
    """Trains a model on pairs of answers."""
    await start(build_config(config), config.behavior_if_log_dir_exists, train_dpo.main_async)


def cli_main(cli_config: CLIConfig) -> None:
    """As :func:`main`, for code without an event loop."""
    asyncio.run(main(cli_config))


if __name__ == "__main__":
    run_entrypoint(main)
