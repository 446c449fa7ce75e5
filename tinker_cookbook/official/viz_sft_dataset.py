"""Prints the training examples of a dataset, with trained tokens in colour.

    python -m tinker_cookbook.supervised.viz_sft_dataset model_name=MODEL
    python -m tinker_cookbook.supervised.viz_sft_dataset model_name=MODEL \\
        dataset_path=my.module:MyBuilder renderer_name=qwen3 train_on_what=last_assistant_message
    python -m tinker_cookbook.supervised.viz_sft_dataset dataset_builder=module:Class \\
        dataset_builder.KEY=VALUE …

On a terminal the program waits for Enter after each example.
"""

from __future__ import annotations

import sys

import chz

from tinker_cookbook import model_info
from tinker_cookbook.display import print_example
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised.row_datasets import trained_batch
from tinker_cookbook.supervised.types import ChatDatasetBuilder, ChatDatasetBuilderCommonConfig
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import lookup_func

_BUILDERS = "tinker_cookbook.supervised.hf_datasets"


@chz.chz
class Config:
    """Dataset to show: the path of a builder class, or a complete ``dataset_builder``."""

    model_name: str | None = chz.field(
        default=None, doc="Model that has the tokenizer and chat format for dataset_path"
    )
    dataset_path: str = chz.field(
        default="NoRobotsBuilder",
        doc=f"module:Class of a builder without required settings; default module: {_BUILDERS}",
    )
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    max_length: int | None = chz.field(default=None, doc="Maximum tokens of an example")
    train_on_what: TrainOnWhat | None = chz.field(
        default=None, doc="Messages to train on; None: all assistant messages"
    )
    dataset_builder: ChatDatasetBuilder | None = chz.field(
        default=None, doc="A builder with all its settings, instead of the options above"
    )
    num_examples: int = number(100, "Maximum number of examples", low=1)


def run(cfg: Config) -> None:
    """Prints the first examples of the training data, each in a panel."""
    builder = cfg.dataset_builder or _builder_of(cfg)
    train_set, _ = builder()
    # The order of the first epoch of a run with seed=0.
    train_set.set_epoch(0)
    shown = 0
    for index in range(len(train_set)):
        for datum in trained_batch(train_set, index)[: cfg.num_examples - shown]:
            shown += 1
            print_example(datum, builder.tokenizer, title=f"example {shown}")
            # Without a terminal, input() would raise EOFError.
            if sys.stdin.isatty() and shown < cfg.num_examples:
                input("Enter shows the next example, Ctrl-C stops. ")
        if shown == cfg.num_examples:
            return
    if not shown:
        raise DataValidationError(
            f"none of the examples in {len(train_set)} batches has a token to train on; raise "
            "max_length, or check train_on_what and the data"
        )


def _builder_of(cfg: Config) -> ChatDatasetBuilder:
    if cfg.model_name is None:
        raise ConfigurationError(
            "model_name: got none, expected the model that has the tokenizer; or set "
            "dataset_builder=module:Class with its settings"
        )
    renderer_name, _ = model_info.resolve_renderer_name(cfg.model_name, cfg.renderer_name)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=cfg.model_name,
        renderer_name=renderer_name,
        max_length=cfg.max_length,
        batch_size=1,  # the data may have fewer rows than any larger batch
        train_on_what=cfg.train_on_what,
    )
    try:
        # A name without a module refers to a bundled dataset.
        make = lookup_func(cfg.dataset_path, default_module=_BUILDERS)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"dataset_path: got {cfg.dataset_path!r}, expected module:Class of a "
            f"ChatDatasetBuilder, or the name of one in {_BUILDERS}: {error}"
        ) from error
    try:
        return make(common_config=common)
    # chz raises TypeError for a missing required setting.
    except TypeError as error:
        raise ConfigurationError(
            f"dataset_path: {cfg.dataset_path} has required settings ({error}); give them with "
            f"dataset_builder={cfg.dataset_path} dataset_builder.KEY=VALUE"
        ) from error


if __name__ == "__main__":
    run_entrypoint(run)
