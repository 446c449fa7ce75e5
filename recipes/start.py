"""Code that all recipes share: common settings, and the conversion of settings to a config.

A recipe has a ``CLIConfig`` (its command line), ``build_config`` (which builds the dataset and the
``Config`` of the training loop) and ``main``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import chz

from tinker_cookbook import cli_utils, hyperparam_utils, model_info
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, nearest_sentence
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised.json_files import SUFFIXES
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.training.config import RunSettings, TrainingConfig

C = TypeVar("C", bound=TrainingConfig)
S = TypeVar("S")
T = TypeVar("T")

DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@chz.chz
class RecipeSettings(RunSettings):
    """Settings of a recipe. Options that are None are derived from the model and printed."""

    model_name: str = chz.field(default=DEMO_MODEL, doc="Hub name or local folder of the model")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    log_path: str | None = chz.field(
        default=None, doc="Folder of this run; default: /tmp/tinker-examples/RECIPE"
    )
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = chz.field(
        default="ask", doc="ask, resume, delete or raise"
    )

    @property
    def renderer(self) -> str:
        """The chat format that was set, or the model's own."""
        name, _ = model_info.resolve_renderer_name(
            self.model_name, self.renderer_name, self.log_path
        )
        return name

    def chat_data(
        self, batch_size: int, max_length: int | None, train_on_what: TrainOnWhat | None = None
    ) -> ChatDatasetBuilderCommonConfig:
        """Returns common settings of dataset builders; ``max_length`` None: the model's context."""
        return ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=self.model_name,
            renderer_name=self.renderer,
            max_length=model_info.resolve_max_length(self.model_name, max_length),
            batch_size=batch_size,
            train_on_what=train_on_what,
        )


def recommended_lr(model_name: str, learning_rate: float | None, fraction: float = 1.0) -> float:
    """Returns ``learning_rate``, or ``fraction`` of what is recommended for supervised training."""
    if learning_rate is not None:
        return learning_rate
    return fraction * hyperparam_utils.get_lr(model_name)


def fill(kind: type[T], cli: Any, **derived: Any) -> T:
    """Builds a config or a dataset builder from the settings of a recipe.

    A field of ``kind`` that ``cli`` has too takes its value, a dataset builder gets the model and
    its chat format, and ``derived`` holds the fields that the recipe computes.
    """
    fields = chz.chz_fields(kind).keys()
    # Settings with the same name in a recipe and a config mean the same, so they are copied.
    settings = {name: getattr(cli, name) for name in fields & chz.chz_fields(type(cli)).keys()}
    if "model_name_for_tokenizer" in fields:
        settings |= {"model_name_for_tokenizer": cli.model_name, "renderer_name": cli.renderer}
    return kind(**(settings | derived))


def resolve(kind: type[C], cli: RecipeSettings, recipe_name: str, **derived: Any) -> C:
    """Builds the config of a training loop from the settings of a recipe (see :func:`fill`)."""
    settings = {
        "recipe_name": recipe_name,
        "log_path": cli.log_path or cli_utils.default_log_path(recipe_name),
        "renderer_name": cli.renderer,
        "behavior_if_log_dir_exists": None,  # :func:`start` has applied it
    }
    return fill(kind, cli, **(settings | derived))


async def start(
    config: C, behavior: cli_utils.LogdirBehavior, train: Callable[[C], Awaitable[None]]
) -> None:
    """Checks the config, then decides about its log folder, then trains.

    A wrong setting together with behavior_if_log_dir_exists=delete touches nothing; what fails
    later (the data, the backend, a checkpoint) brings the old run back.
    """
    # Before the folder, because delete must not remove a run for settings that cannot work.
    config.check()
    with cli_utils.log_dir_of_run(config.log_path, behavior):
        await train(config)


def check_dataset_name(dataset: str, known: Sequence[str]) -> None:
    """Raises ConfigurationError for a dataset that is not a known name, path or Hub name."""
    # A Hub name has an owner; a single word is a misspelt name or a file that does not exist.
    if dataset in known or "/" in dataset or Path(dataset).expanduser().exists():
        return
    if dataset.endswith(SUFFIXES):
        raise DataValidationError(f"dataset: there is no file {dataset} in {Path.cwd()}")
    raise ConfigurationError(
        f"dataset: got {dataset!r}, expected one of {', '.join(known)}"
        f"{nearest_sentence(dataset, known)} Your own data go into dataset=FILE, FOLDER or "
        "OWNER/NAME of the Hub"
    )


def blocking(main: Callable[[S], Coroutine[Any, Any, None]]) -> Callable[[S], None]:
    """Returns ``main`` as a plain function, for code without an event loop."""
    return lambda config: asyncio.run(main(config))


def blueprint_of(config: C) -> chz.Blueprint[C]:
    """Returns a blueprint with the values of ``config``, for code that changes some of them.

    As in ``blueprint.apply({"max_steps": 2}).make()``, or with ``make_from_argv``.
    """
    kind = type(config)
    return chz.Blueprint(kind).apply({name: getattr(config, name) for name in chz.chz_fields(kind)})


def example_data(name: str) -> Path:
    """Returns the path of a file in ``recipes/example_data``, also in an installed package."""
    return Path(__file__).resolve().parent / "example_data" / name
