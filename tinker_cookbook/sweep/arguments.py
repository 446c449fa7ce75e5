"""The sweep's command line: a recipe, its settings, some with several values, and sweep keys."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.exceptions import ConfigurationError, nearest, nearest_sentence
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments
from tinker_cookbook.utils.command_line.keys import keys_of
from tinker_cookbook.utils.run_folder.paths import local_path

OWN_KEYS = ("log_dir", "jobs", "server", "metric")
SERVER_KEYS = ("device", "dtype", "base_dtype")
RESERVED_KEYS = {
    "log_path": " (log_dir=FOLDER)",
    "backend": " (server=URL names a server)",
    "base_url": "",
    "behavior_if_log_dir_exists": "",
}
"""Keys of recipes that the sweep sets for each run, with a hint for those who type one."""

HELP = """python -m tinker_cookbook.sweep RECIPE key=value key=a,b,c log_dir=FOLDER [key=value ...]

Runs a recipe once for each combination of the comma-separated values. Each run is a separate
process, and all runs train on one server. The same command again resumes an interrupted sweep.

  RECIPE   module of the recipe, such as recipes.sl_loop; its own keys follow. Write \\, for a comma
           inside a value ('key=a\\,b' in a shell). device, dtype and
           base_dtype go to the server.
  log_dir  folder of the sweep: a folder for each run, its output in NAME.log, results.jsonl,
           sweep.png [required]
  jobs     number of parallel runs [default: all, on a CPU at most 4]
  server   URL of a running server, with its key in TINKER_API_KEY [default: starts a server]
  metric   metric to compare at the end [default: the first of test/dpo_loss, test/nll,
           test/env/all/reward/total, train_mean_nll, reward/total that the runs log]
"""


@dataclass(frozen=True)
class Point:
    """A point of the grid: all settings of a run as text, those that are swept, a folder name."""

    name: str
    settings: Mapping[str, str]
    swept: Mapping[str, str]


@dataclass(frozen=True)
class Sweep:
    """A parsed command line; ``None`` is a default."""

    recipe: str
    log_dir: Path
    points: tuple[Point, ...]
    jobs: int | None
    server: str | None
    server_settings: dict[str, str]
    """``device`` and ``dtype`` for the server that the sweep starts."""
    metric: str | None
    models: tuple[str, ...]
    """Base models of all runs, without duplicates."""


def parse_sweep(argv: Sequence[str]) -> Sweep:
    """Parses the command line and checks the settings of every run against the recipe's config.

    Raises:
        ConfigurationError: With the key, the value, what was expected, and the next step.
    """
    recipe, settings = _split(argv)
    single: dict[str, str | None] = dict.fromkeys((*OWN_KEYS, *SERVER_KEYS))
    # The sweep's own keys are removed here; the rest belongs to the recipe.
    for key in single.keys() & settings.keys():
        single[key], *others = settings.pop(key)
        if others:
            raise ConfigurationError(
                f"{key}: got {', '.join([single[key] or '', *others])}, expected one value for the "
                "whole sweep; write a comma inside a value as \\,"
            )
    folder, jobs, server = single["log_dir"], single["jobs"], single["server"]
    if folder is None:
        raise ConfigurationError(
            "log_dir: got none, expected the folder of the sweep; add log_dir=FOLDER"
        )
    # Absolute, since the results contain the paths of the runs.
    log_dir = Path(os.path.abspath(local_path(folder, "log_dir")))
    for_server = {key: value for key in SERVER_KEYS if (value := single[key]) is not None}
    if server is not None:
        _check_server(server, for_server)
    if jobs is not None and (not jobs.isdecimal() or int(jobs) < 1):
        raise ConfigurationError(f"jobs: got {jobs!r}, expected a whole number from 1")
    config_class = _config_class(recipe)
    _check_keys(recipe, config_class, settings)
    points = make_points(settings)
    # The recipe's own parser checks the settings of each run, before anything starts.
    models: dict[str, None] = {}
    for point in points:
        words = [f"{key}={value}" for key, value in point.settings.items()]
        words += [f"log_path={log_dir / point.name}", "behavior_if_log_dir_exists=resume"]
        models.update(dict.fromkeys(_models_of(parse_arguments(config_class, words))))
    num_jobs = None if jobs is None else int(jobs)
    metric = single["metric"]
    return Sweep(recipe, log_dir, points, num_jobs, server, for_server, metric, tuple(models))


def _split(argv: Sequence[str]) -> tuple[str, dict[str, list[str]]]:
    """Returns the recipe and its settings, each with all its values."""
    recipes = [word for word in argv if "=" not in word]
    if len(recipes) != 1 or argv[0] != recipes[0]:
        raise ConfigurationError(
            f"command line: got {' '.join(recipes[:3]) or 'no recipe'}, expected one recipe first, "
            "then key=value, as in: python -m tinker_cookbook.sweep recipes.sl_loop "
            "learning_rate=1e-4,1e-3 log_dir=FOLDER (see --help)"
        )
    settings: dict[str, list[str]] = {}
    for word in argv[1:]:
        key, _, text = word.partition("=")
        # The recipe accepts --key-name=value as well.
        key = key.removeprefix("--").replace("-", "_")
        if key in settings:
            raise ConfigurationError(
                f"{key}: got it twice, expected it once; put its values together: {key}=a,b"
            )
        settings[key] = values = split_values(text)
        if len(values) > 1 and "" in values:
            raise ConfigurationError(
                f"{key}: got {text!r}, expected values between the commas; remove a comma, or "
                "write a comma inside a value as \\,"
            )
        # Two equal values would be two runs of the same name.
        if len(set(values)) < len(values):
            raise ConfigurationError(f"{key}: got {text!r}, expected each value once")
    return recipes[0], settings


def split_values(text: str) -> list[str]:
    r"""Returns the values in ``a,b,c``; ``\,`` is a comma inside a value."""
    return [part.replace("\\,", ",") for part in re.split(r"(?<!\\),", text)]


def make_points(settings: Mapping[str, Sequence[str]]) -> tuple[Point, ...]:
    """Returns the product of all values; the last key changes fastest.

    Raises:
        ConfigurationError: Two points have names that differ only in upper and lower case, which
            are one folder on some file systems.
    """
    # Only keys with several values name a run.
    swept = [key for key, values in settings.items() if len(values) > 1]
    points: dict[str, Point] = {}
    for values in itertools.product(*settings.values()):
        chosen = dict(zip(settings, values, strict=True))
        swept_values = {key: chosen[key] for key in swept}
        point = Point(run_name(swept_values), chosen, swept_values)
        if point.name.lower() in points:
            raise ConfigurationError(
                f"{', '.join(swept)}: got two runs of the name {point.name}, expected values that "
                "differ in more than upper and lower case"
            )
        points[point.name.lower()] = point
    return tuple(points.values())


def run_name(swept: Mapping[str, str]) -> str:
    """Returns ``learning_rate=1e-4,lora_rank=8``, with characters that every file system allows.

    The name depends only on the run's own values, so that a larger grid finds finished runs again.
    """
    wanted = ",".join(f"{key}={value}" for key, value in swept.items()) or "run"
    # Of a path the last part is enough; the hash below keeps two such paths apart.
    last_part = {key: Path(value).name or value for key, value in swept.items()}
    name = ",".join(f"{key}={value}" for key, value in last_part.items()) or "run"
    name = re.sub(r"[^A-Za-z0-9_.=+,-]+", "-", name.strip("."))
    # A file name has at most 255 bytes, and suffixes such as ".metrics" are added.
    if name == wanted and len(name) <= 120:
        return name
    return f"{name[:120]}-{hashlib.sha256(wanted.encode()).hexdigest()[:6]}"


def _check_server(server: str, for_server: dict[str, str]) -> None:
    """Checks the settings of a sweep on a running server."""
    if not server.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"server: got {server!r}, expected a URL that starts with http:// or https://; leave "
            "it out to start a server"
        )
    for key, value in for_server.items():
        raise ConfigurationError(
            f"{key}={value}: the server at {server} has its own setting; leave {key} out"
        )
    if not os.environ.get("TINKER_API_KEY"):
        raise ConfigurationError(
            f"TINKER_API_KEY: got none, expected a key of the server at {server}; export it (the "
            "server prints the path of its key file at its start)"
        )


def _config_class(recipe: str) -> type[Any]:
    """Returns the type of the one parameter of the recipe's ``main``."""
    try:
        main = getattr(importlib.import_module(recipe), "main", None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{recipe}.".startswith(f"{error.name}."):
            raise  # the recipe exists, but a package that it imports does not
        package = recipe.rpartition(".")[0]
        spec = importlib.util.find_spec(package) if package and "." not in package else None
        folders = (spec.submodule_search_locations if spec is not None else None) or ()
        known = [f"{package}.{file.stem}" for folder in folders for file in Path(folder).glob("*")]
        raise ConfigurationError(
            f"recipe: got {recipe!r}, but there is no module {error.name}"
            f"{nearest_sentence(recipe, known)} Expected a module that `python -m` finds, such as "
            "recipes.sl_loop; start the sweep in the folder where you start the recipe"
        ) from error
    parameters = list(inspect.signature(main).parameters) if callable(main) else []
    if main is None or len(parameters) != 1:
        raise ConfigurationError(
            f"recipe: got {recipe!r}, which has no main(config); expected a module such as "
            "recipes.sl_loop that `python -m` runs with key=value"
        )
    return inspect.get_annotations(main, eval_str=True)[parameters[0]]


def _check_keys(recipe: str, config_class: type[Any], settings: dict[str, list[str]]) -> None:
    known = [key.name for key in keys_of(config_class)]
    # The sweep sets these keys, so a recipe without them cannot run in one.
    for key in ("log_path", "backend", "behavior_if_log_dir_exists"):
        if key not in known:
            raise ConfigurationError(
                f"recipe: got {recipe}, which has no key {key}; expected one that trains on any "
                "backend and resumes from log_path, as the recipes of this package do"
            )
    for key in settings:
        if key in RESERVED_KEYS:
            raise ConfigurationError(
                f"{key}: got it, but the sweep sets it for each run; leave it out"
                f"{RESERVED_KEYS[key]}"
            )
        # Only likely misspellings of the sweep's keys: the recipe's parser reports all others.
        if key not in known and (meant := nearest(key, OWN_KEYS)):
            raise ConfigurationError(f"{key}: there is no such key{meant} (--help lists the keys)")


def _models_of(config: Any) -> list[str]:
    """Returns the base models in a run's settings; the first is the trained one."""
    names = [name for name in chz.chz_fields(config) if name.endswith(("_model", "_model_name"))]
    # Teachers and reference models are on the same server. A path with "://" is a checkpoint.
    values = [getattr(config, name, None) for name in ("model_name", *names)]
    models = [value for value in values if isinstance(value, str) and value and "://" not in value]
    if not models:
        raise ConfigurationError(
            "model_name: got none, expected the base model, which the server loads; add "
            "model_name=NAME"
        )
    for model in models:
        if "," in model:
            raise ConfigurationError(
                f"model_name: got {model!r}, expected a name without commas, because the server "
                "splits the list of models at commas; rename the folder"
            )
    return models
