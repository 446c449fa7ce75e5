"""The sweep's command line: a recipe, its settings (some with several values), and own keys."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.exceptions import ConfigurationError, nearest, nearest_sentence
from tinker_cookbook.sweep.grid import Run, make_runs
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments
from tinker_cookbook.utils.command_line.keys import keys_of
from tinker_cookbook.utils.run_folder.paths import local_path

OWN_KEYS = ("log_dir", "jobs", "server", "metric")
SERVER_KEYS = ("device", "dtype")
"""Keys of recipes that a run leaves to its server, and so the sweep to the one it starts."""
GIVEN_KEYS = ("log_path", "backend", "base_url", "behavior_if_log_dir_exists")
"""Keys of recipes that the sweep sets itself."""

HELP = """python -m tinker_cookbook.sweep RECIPE key=value key=a,b,c log_dir=FOLDER [key=value ...]

Runs a recipe once for each combination of the values that are given with commas between them, each
in a process of its own, all on one server. The same command again goes on where it was stopped.

  RECIPE   module of the recipe, such as recipes.sl_loop; its own keys follow. A comma that belongs
           to a value is written \\, ('key=a\\,b' in a shell). device and dtype go to the server.
  log_dir  folder of the sweep: a folder a run, its output in NAME.log, results.jsonl, sweep.png
           [required]
  jobs     runs at a time [default: all, on a CPU at most 4]
  server   URL of a running server to use, with its key in TINKER_API_KEY [default: one is started]
  metric   what to compare at the end [default: the first that the runs log of test/dpo_loss,
           test/nll, test/env/all/reward/total, train_mean_nll, reward/total]
"""


@dataclass(frozen=True)
class Sweep:
    """What was asked for.

    Attributes:
        recipe: Module that ``python -m`` runs.
        log_dir: Folder of the sweep, absolute.
        runs: The grid.
        swept: Keys with several values, in the order of the command line.
        jobs: Runs at a time; ``None`` is the default.
        server: URL of a server that runs already, or ``None`` to start one.
        server_settings: ``device`` and ``dtype`` where they were given.
        metric: What to compare, or ``None`` for the default.
        models: Base models that the runs name, each once.
    """

    recipe: str
    log_dir: Path
    runs: tuple[Run, ...]
    swept: tuple[str, ...]
    jobs: int | None
    server: str | None
    server_settings: dict[str, str]
    metric: str | None
    models: tuple[str, ...]


def parse_sweep(argv: Sequence[str]) -> Sweep:
    """Reads the command line and checks every run's settings against the recipe's config.

    Raises:
        ConfigurationError: Names the key, what came, what was expected, and what to do.
    """
    recipe, settings = _split(argv)
    own = {key: _one_value(key, settings.pop(key)) for key in OWN_KEYS if key in settings}
    if "log_dir" not in own:
        raise ConfigurationError(
            "log_dir: got none, expected the folder of the sweep; add log_dir=FOLDER"
        )
    log_dir = Path(os.path.abspath(local_path(own["log_dir"], "log_dir")))
    for_server = {key: _one_value(key, settings.pop(key)) for key in SERVER_KEYS if key in settings}
    server = own.get("server")
    _check_server(server, for_server)
    config_class = _config_class(recipe)
    _check_keys(recipe, config_class, settings)
    runs = make_runs(settings)
    models: dict[str, None] = {}
    for run in runs:
        words = [f"{key}={value}" for key, value in run.settings.items()]
        words += [f"log_path={log_dir / run.name}", "behavior_if_log_dir_exists=resume"]
        models.update(dict.fromkeys(_models_of(parse_arguments(config_class, words))))
    return Sweep(
        recipe=recipe,
        log_dir=log_dir,
        runs=runs,
        swept=tuple(key for key, values in settings.items() if len(values) > 1),
        jobs=_jobs(own.get("jobs")),
        server=server,
        server_settings=for_server,
        metric=own.get("metric"),
        models=tuple(models),
    )


def split_values(text: str) -> list[str]:
    r"""Returns the values in ``a,b,c``; ``\,`` is a comma within a value."""
    return [part.replace("\\,", ",") for part in re.split(r"(?<!\\),", text)]


def _split(argv: Sequence[str]) -> tuple[str, dict[str, list[str]]]:
    """Returns the recipe and its settings, each with all its values."""
    recipes = [word for word in argv if "=" not in word]
    if len(recipes) != 1 or argv[0] != recipes[0]:
        raise ConfigurationError(
            f"command line: got {' '.join(recipes[:3]) or 'no recipe'}, expected one recipe first, "
            "then key=value, as in: python -m tinker_cookbook.sweep recipes.sl_loop "
            "learning_rate=1e-4,1e-3 log_dir=FOLDER (--help says more)"
        )
    settings: dict[str, list[str]] = {}
    for word in argv[1:]:
        key, _, text = word.partition("=")
        key = key.removeprefix("--").replace("-", "_")
        if key in settings:
            raise ConfigurationError(
                f"{key}: got it twice, expected it once; put its values together: {key}=a,b"
            )
        values = split_values(text)
        if len(values) > 1 and "" in values:
            raise ConfigurationError(
                f"{key}: got {text!r}, expected values between the commas; take out the one too "
                f"many, or write a comma of the value itself as \\,"
            )
        if len(set(values)) < len(values):
            raise ConfigurationError(f"{key}: got {text!r}, expected each value once")
        settings[key] = values
    return recipes[0], settings


def _one_value(key: str, values: list[str]) -> str:
    if len(values) > 1:
        reason = "one server runs them all" if key in SERVER_KEYS else "it is of the whole sweep"
        raise ConfigurationError(
            f"{key}: got {', '.join(values)}, expected one value, since {reason}; write a comma "
            "of the value itself as \\,"
        )
    return values[0]


def _jobs(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"jobs: got {text!r}, expected a whole number from 1")
    return int(text)


def _check_server(server: str | None, for_server: dict[str, str]) -> None:
    if server is None:
        return
    if not server.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"server: got {server!r}, expected a URL that starts with http:// or https://; leave "
            "it out and the sweep starts a server itself"
        )
    for key, value in for_server.items():
        raise ConfigurationError(
            f"{key}={value}: the server at {server} decides that itself; leave {key} out"
        )
    if not os.environ.get("TINKER_API_KEY"):
        raise ConfigurationError(
            f"TINKER_API_KEY: got none, expected a key of the server at {server}; export it (a "
            "server of this package says when it starts where its keys are kept)"
        )


def _config_class(recipe: str) -> type[Any]:
    """Returns the type of the one parameter of the recipe's ``main``."""
    main = getattr(_import(recipe), "main", None)
    parameters = list(inspect.signature(main).parameters) if callable(main) else []
    if main is None or len(parameters) != 1:
        raise ConfigurationError(
            f"recipe: got {recipe!r}, which has no main(config); expected a module such as "
            "recipes.sl_loop that `python -m` runs with key=value"
        )
    return inspect.get_annotations(main, eval_str=True)[parameters[0]]


def _import(recipe: str) -> Any:
    try:
        return importlib.import_module(recipe)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{recipe}.".startswith(f"{error.name}."):
            raise  # it is there, and something that it needs is not
        raise ConfigurationError(
            f"recipe: got {recipe!r}, but there is no module {error.name}"
            f"{nearest_sentence(recipe, _siblings(recipe))} Expected one that `python -m` finds, "
            "such as recipes.sl_loop; start the sweep where the recipe itself starts"
        ) from error


def _siblings(recipe: str) -> list[str]:
    package = recipe.rpartition(".")[0]
    spec = importlib.util.find_spec(package) if package and "." not in package else None
    folders = spec.submodule_search_locations if spec is not None else None
    return [f"{package}.{file.stem}" for folder in folders or () for file in Path(folder).glob("*")]


def _check_keys(recipe: str, config_class: type[Any], settings: dict[str, list[str]]) -> None:
    known = [key.name for key in keys_of(config_class)]
    for key in ("log_path", "backend", "behavior_if_log_dir_exists"):
        if key not in known:
            raise ConfigurationError(
                f"recipe: got {recipe}, which has no key {key}; expected one that trains on any "
                "backend and resumes from log_path, as the recipes of this package do"
            )
    for key in settings:
        if key in GIVEN_KEYS:
            raise ConfigurationError(
                f"{key}: got it, but the sweep sets it for each run itself; leave it out"
                + {"backend": " (server=URL names a server)", "log_path": " (log_dir=FOLDER)"}.get(
                    key, ""
                )
            )
        if key not in known and (meant := nearest(key, OWN_KEYS)):
            raise ConfigurationError(f"{key}: there is no such key{meant} (--help lists the keys)")


def _models_of(config: Any) -> list[str]:
    """Returns the base models that a run's settings name; the first is the one that it trains."""
    names = [name for name in chz.chz_fields(config) if _names_a_model(name)]
    found = [getattr(config, name) for name in sorted(names, key=lambda name: name != "model_name")]
    models = [name for name in found if isinstance(name, str) and name and "://" not in name]
    if not models:
        raise ConfigurationError(
            "model_name: got none, expected the base model, which the server has to load; add "
            "model_name=NAME"
        )
    for model in models:
        if "," in model:
            raise ConfigurationError(
                f"model_name: got {model!r}, expected a name without commas, which a server takes "
                "for several models; rename the folder"
            )
    return models


def _names_a_model(key: str) -> bool:
    return key == "model_name" or key.endswith(("_model", "_model_name"))
