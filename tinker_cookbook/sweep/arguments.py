"""The sweep's command line: a recipe, its settings, some with several values, and sweep keys."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.backends.connect import check_backend
from tinker_cookbook.backends.sampler_options import SamplerOptions
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.paths import local_path
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.config_file import CONFIG, read_settings
from tinker_cookbook.utils.command_line.entrypoint import config_class_of, parse_arguments
from tinker_cookbook.utils.command_line.programs import module_of

_SET_BY_SWEEP = ("log_path", "backend", "behavior_if_log_dir_exists", "base_url")
_SERVER_KEYS = ("device", "dtype", "base_dtype", *chz.chz_fields(SamplerOptions))
"""Keys of the server that the sweep starts."""


@chz.chz
class SweepKeys(SamplerOptions):
    """All other keys are keys of the recipe, each with one value or several. Write \\, for a comma
    inside a value ('key=a\\,b' in a shell). The same command again resumes an interrupted sweep."""

    log_dir: str = chz.field(
        doc="Folder of the sweep; it gets a folder and a log file for each run, "
        "results.jsonl and sweep.png"
    )
    jobs: int | None = number(None, "Concurrent runs; default: all, but at most 4 on a CPU", low=1)
    server: str | None = chz.field(
        default=None,
        doc="URL of a running server, with its key in TINKER_API_KEY; default: starts one",
    )
    metric: str | None = chz.field(
        default=None,
        doc="Metric to compare at the end; default: the first of test/dpo_loss, test/nll, "
        "test/env/all/reward/total, train_mean_nll, reward/total that the runs log",
    )
    device: str = chz.field(default="auto", doc="auto, cuda, mps or cpu (of the server)")
    dtype: str = chz.field(default="auto", doc="auto, float32 or bfloat16 (of the server)")
    base_dtype: str = chz.field(
        default="auto", doc="auto, nf4 or int8: quantise the base models (of the server)"
    )


@dataclass(frozen=True)
class Point:
    """A point of the grid: all settings of a run as text, those that are swept, a folder name."""

    name: str
    settings: Mapping[str, str]
    swept: Mapping[str, str]


@dataclass(frozen=True)
class Sweep:
    """A parsed command line."""

    recipe: str
    keys: SweepKeys
    log_dir: Path
    """Absolute path of ``keys.log_dir``."""
    points: tuple[Point, ...]
    server_settings: dict[str, str]
    """Settings of the server that the sweep starts, such as ``device``."""
    models: tuple[str, ...]
    """Base models of all runs, without duplicates."""


def parse_sweep(argv: Sequence[str]) -> Sweep:
    """Parses the command line and checks the settings of every run against the recipe's config.

    Raises:
        ConfigurationError: With the key, the value, what was expected, and the next step.
    """
    recipes = [word for word in argv if "=" not in word]
    if len(recipes) != 1 or argv[0] != recipes[0]:
        raise ConfigurationError(
            f"command line: got {' '.join(recipes[:3]) or 'no recipe'}, expected one recipe first, "
            "then key=value, as in: python -m tinker_cookbook.sweep recipes.sl_loop "
            "learning_rate=1e-4,1e-3 log_dir=FOLDER (see --help)"
        )
    recipe = _module(recipes[0])
    config_class = _config_class(recipe)
    own, values = _split(_with_keys_of_file(argv[1:], config_class))
    points = make_points(values)

    # One class of both, so that the error for a misspelt key suggests keys of both.
    @chz.chz
    class Keys(SweepKeys, config_class): ...

    # All runs are checked before anything starts.
    for_run = {"log_path": "RUN", "backend": "auto", "behavior_if_log_dir_exists": "resume"}
    recorded = CONFIG in values  # by a run, so of the program's own class
    settings = [{**point.settings, **for_run, **({} if recorded else own)} for point in points]
    kind = config_class if recorded else Keys
    configs = [parse_arguments(kind, [f"{k}={v}" for k, v in one.items()]) for one in settings]
    words = [f"{k}={v}" for k, v in own.items()]
    keys: SweepKeys = parse_arguments(SweepKeys, words) if recorded else configs[0]
    for_server = {key: own[key] for key in _SERVER_KEYS if key in own}
    _check_server(keys, for_server)
    # Absolute, since the results contain the paths of the runs.
    log_dir = Path(os.path.abspath(local_path(keys.log_dir, "log_dir")))
    models = tuple(dict.fromkeys(name for config in configs for name in _models_of(config)))
    return Sweep(recipe, keys, log_dir, points, for_server, models)


def _with_keys_of_file(words: Sequence[str], config_class: type[Any]) -> list[str]:
    """Replaces ``config=FILE`` by the keys of the file; a list in it has values to sweep over.

    Keys of the command line come first. A file that a run has recorded stays, for each run to read.
    """
    given = [word.partition("=")[0] for word in words]
    if CONFIG not in given:
        return list(words)
    file = words[given.index(CONFIG)].partition("=")[2]
    found = read_settings(file, config_class, comma="\\,")
    if not isinstance(found, list):
        return list(words)
    return [
        *(word for word in found if word.partition("=")[0] not in given),
        *(word for word, key in zip(words, given, strict=True) if key != CONFIG),
    ]


def _split(words: Sequence[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Returns the keys of the sweep, and those of the recipe, each with all its values."""
    own: dict[str, str] = {}
    settings: dict[str, list[str]] = {}
    for word in words:
        key, _, text = word.partition("=")
        # The recipe accepts --key-name=value as well.
        key = key.removeprefix("--").replace("-", "_")
        if key in own or key in settings:
            raise ConfigurationError(
                f"{key}: got it twice, expected it once; put its values together: {key}=a,b"
            )
        if key in _SET_BY_SWEEP:
            raise ConfigurationError(
                f"{key}: got it, but the sweep sets it for each run; leave it out (log_dir=FOLDER "
                "is the folder of all runs, server=URL their server)"
            )
        if key in chz.chz_fields(SweepKeys):
            own[key] = text
            continue
        settings[key] = values = split_values(text)
        if len(values) > 1 and "" in values:
            raise ConfigurationError(
                f"{key}: got {text!r}, expected values between the commas; remove a comma, or "
                "write a comma inside a value as \\,"
            )
    return own, settings


def split_values(text: str) -> list[str]:
    r"""Returns the values in ``a,b,c``; ``\,`` is a comma inside a value."""
    return [part.replace("\\,", ",") for part in re.split(r"(?<!\\),", text)]


def make_points(settings: Mapping[str, Sequence[str]]) -> tuple[Point, ...]:
    """Returns the product of all values; the last key changes fastest.

    Raises:
        ConfigurationError: Two points have the same name, or names that differ only in upper and
            lower case, which are one folder on some file systems.
    """
    # Only keys with several values name a run.
    swept = [key for key, values in settings.items() if len(values) > 1]
    points: dict[str, Point] = {}
    for values in itertools.product(*settings.values()):
        chosen = dict(zip(settings, values, strict=True))
        swept_values = {key: chosen[key] for key in swept}
        point = Point(run_name(swept_values), chosen, swept_values)
        if points.setdefault(point.name.lower(), point) is not point:
            raise ConfigurationError(
                f"{', '.join(swept)}: got two runs of the name {point.name}, expected each value "
                "once, and values that differ in more than upper and lower case"
            )
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


def _check_server(keys: SweepKeys, given: Mapping[str, str]) -> None:
    """Checks the settings of the server, which are ``given`` on the command line."""
    if keys.server is None:
        check_backend("local", None, keys.device, keys.dtype)
        return
    if given:
        raise ConfigurationError(
            f"{', '.join(given)}: the server at {keys.server} has its own settings; leave it out"
        )
    if not os.environ.get("TINKER_API_KEY"):
        raise ConfigurationError(
            f"TINKER_API_KEY: got none, expected a key of the server at {keys.server}; export it "
            "(the server prints the path of its key file at its start)"
        )


def _module(recipe: str) -> str:
    """Returns the module of a recipe: a program of this package, or a module of the user."""
    try:
        return module_of(recipe)
    except ConfigurationError:
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(recipe) is not None:
                return recipe
        raise


def _config_class(recipe: str) -> type[Any]:
    """Returns the type of the one parameter of the recipe's ``main``."""
    config_class = config_class_of(getattr(importlib.import_module(recipe), "main", None))
    if config_class is None:
        raise ConfigurationError(
            f"recipe: got {recipe!r}, which has no main(config); expected a module such as "
            "recipes.sl_loop that `python -m` runs with key=value"
        )
    return config_class


def _models_of(config: Any) -> list[str]:
    """Returns the base models in a run's settings; the first is the trained one."""
    names = [name for name in chz.chz_fields(config) if name.endswith(("_model", "_model_name"))]
    # Teachers and reference models are on the same server. A path with "://" is a checkpoint.
    values = [getattr(config, name, None) for name in ("model_name", *names)]
    return [value for value in values if isinstance(value, str) and value and "://" not in value]
