"""Code that recipes share.

A recipe is a subclass of a loop's ``Config``, usually called ``CLIConfig``, which is its command
line: it adds settings of the data, gives other defaults, and ``build_dataset`` returns the data.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import chz

from tinker_cookbook import model_info
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, nearest_sentence
from tinker_cookbook.renderers import Renderer, TrainOnWhat, get_renderer
from tinker_cookbook.supervised.hf_datasets import ChatDataBuilder
from tinker_cookbook.supervised.json_files import SUFFIXES, json_lines, load_local_rows
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    ChatDatasetBuilderCommonConfig,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import TrainingConfig
from tinker_cookbook.utils.command_line.entrypoint import run_to_end

C = TypeVar("C", bound=TrainingConfig)
S = TypeVar("S")

DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def renderer_of(model_name: str, renderer_name: str | None) -> Renderer:
    """Returns the named chat format, or the model's own."""
    name, _ = model_info.resolve_renderer_name(model_name, renderer_name)
    return get_renderer(name, get_tokenizer(model_name))


def chat_data(
    config: TrainingConfig,
    batch_size: int,
    max_length: int | None,
    train_on_what: TrainOnWhat | None = None,
) -> ChatDatasetBuilderCommonConfig:
    """Returns common settings of dataset builders; ``max_length`` None: the model's context."""
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=config.model_name,
        renderer_name=config.renderer,
        max_length=model_info.resolve_max_length(config.model_name, max_length),
        batch_size=batch_size,
        train_on_what=train_on_what,
    )


def conversations(
    dataset: str,
    named: Mapping[str, Callable[..., ChatDatasetBuilder]],
    common: ChatDatasetBuilderCommonConfig,
    test_path: str | None = None,
    test_size: int = 0,
    seed: int = 0,
) -> ChatDatasetBuilder:
    """Returns the conversations of a dataset that has a name here, of the Hub, or of a path.

    Raises ConfigurationError for a name that is none of these, and for a held-out part of a named
    dataset, which has its own.
    """
    check_dataset_name(dataset, tuple(named))
    if dataset not in named:
        return ChatDataBuilder(
            common_config=common,
            file_path=dataset,
            test_file_path=test_path,
            test_size=test_size,
            shuffle_seed=seed,
        )
    if test_path is not None or test_size:
        name = "test_size" if test_size else "test_path"
        raise ConfigurationError(
            f"{name}: got {test_size or test_path} with dataset={dataset}, which has a held-out "
            f"part; leave {name} out, or give your own data"
        )
    return named[dataset](common_config=common)


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


def check_one_of(**settings: Any) -> None:
    """Raises ConfigurationError if more than one of these settings is given (not None or 0)."""
    given = [f"{name}={value}" for name, value in settings.items() if value]
    if len(given) > 1:
        raise ConfigurationError(f"{' and '.join(given)} contradict each other; leave one out")


def check_files(settings: Any, *names: str, hint: str = "") -> None:
    """Raises DataValidationError for a setting that names a file or folder that does not exist."""
    for name in names:
        path = getattr(settings, name)
        if path is not None and not Path(path).expanduser().exists():
            raise DataValidationError(
                f"{name}: there is no file or folder {path} (searched from {Path.cwd()}){hint}"
            )


def read_text(path: str | Path, name: str) -> str:
    """Returns the text of a file; raises DataValidationError, which begins with the name of the
    setting, if it cannot be read or is not UTF-8."""
    file = Path(path).expanduser()
    try:
        return file.read_text(encoding="utf-8-sig")  # without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataValidationError(
            f"{name}: {file} cannot be read ({error}); expected a text file in UTF-8"
        ) from error


def local_rows(path: str, split: str, expected: str) -> Iterator[tuple[str, Any]]:
    """Yields the rows of a local file, or of a split of a local folder, each with where it is.

    Raises DataValidationError if there is none; ``expected`` describes a row for it.
    """
    local = Path(path).expanduser()
    if not local.exists():
        raise DataValidationError(
            f"dataset: there is no file or folder {local} (searched from {Path.cwd()}); expected "
            f"JSON lines, each {expected}"
        )
    if local.is_file() and local.name.endswith((".jsonl", ".jsonl.gz")):
        # Line by line, so that errors name the line.
        yield from json_lines(local, expected)
    else:
        rows = load_local_rows(local, split)
        yield from ((f"{local} ({split}), row {i}", rows[i]) for i in range(len(rows)))


def blocking(main: Callable[[S], Coroutine[Any, Any, None]]) -> Callable[[S], None]:
    """Returns ``main`` as a plain function."""
    return lambda config: run_to_end(main(config))


def blueprint_of(config: C) -> chz.Blueprint[C]:
    """Returns a blueprint with the values of ``config``, for code that changes some of them.

    As in ``blueprint.apply({"max_steps": 2}).make()``, or with ``make_from_argv``.
    """
    kind = type(config)
    return chz.Blueprint(kind).apply({name: getattr(config, name) for name in chz.chz_fields(kind)})


def example_data(name: str) -> Path:
    """Returns the path of a file in ``recipes/example_data``, also in an installed package."""
    return Path(__file__).resolve().parent / "example_data" / name
