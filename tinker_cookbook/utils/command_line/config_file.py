"""Settings from a file: ``config=LOG_PATH``, ``config=config.json`` or ``config=run.yaml``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.config import FOLDER_KEY, TYPE_KEY, load_config
from tinker_cookbook.run.paths import CONFIG_FILE
from tinker_cookbook.utils.command_line.programs import is_program, program_command

CONFIG = "config"
"""The key; a program whose class has a field of this name does not read a file."""


def read_settings(name: str, config_class: type[Any], comma: str = ",") -> Any:
    """Returns the recorded configuration in a file, or its keys as ``key=value`` arguments.

    Args:
        name: A ``config.json`` or the log folder that holds one, or a JSON or YAML file with the
            keys of the program; nested keys as mappings, or with dots.
        config_class: Class of the program.
        comma: How a comma inside a value is written; other commas separate the values of a list.

    Raises:
        ConfigurationError: The file cannot be read, or is the configuration of another program.
    """
    path = Path(name).expanduser()
    path = path / CONFIG_FILE if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{CONFIG}: {path} cannot be read: {error}; expected a config.json, the log folder of "
            "a run, or a JSON or YAML file with lines such as learning_rate: 1e-4"
        ) from error
    if not isinstance(data, dict):
        raise ConfigurationError(f"{CONFIG}: {path} has no keys; expected key: value")
    if TYPE_KEY not in data:
        return [f"{key}={value}" for key, value in _flat(data, "", comma)]
    found = load_config(_with_paths_from(data, data.get(FOLDER_KEY, "")))
    if isinstance(found, config_class):
        return found
    module = program_of(data[TYPE_KEY])
    hint = f"; start it with: {program_command(module, f'{CONFIG}={name}')}" if module else ""
    raise ConfigurationError(
        f"{CONFIG}: {path} was written by a {data[TYPE_KEY]}, expected a {config_class.__name__} "
        f"of this program, or a file with its keys{hint}"
    )


def _with_paths_from(data: Any, folder: str) -> Any:
    """Returns recorded settings in which relative paths that exist only in ``folder`` are absolute.

    A word without a slash or a dot is a name of something else.
    """
    if isinstance(data, dict):
        return {key: _with_paths_from(value, folder) for key, value in data.items()}
    if isinstance(data, list):
        return [_with_paths_from(value, folder) for value in data]
    if not isinstance(data, str) or not ("/" in data or "." in data):
        return data
    path = os.path.join(folder, data)
    return path if os.path.exists(path) and not os.path.exists(data) else data


def values_of(config: Any, given: Iterable[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted names and values of a configuration for a blueprint.

    A nested object is one value, or its class and its fields if ``given`` has a key of it.
    """
    for field in chz.chz_fields(config):
        name, value = f"{prefix}{field}", getattr(config, field)
        if chz.is_chz(value) and any(key.startswith(f"{name}.") for key in given):
            yield name, type(value)
            yield from values_of(value, given, f"{name}.")
        else:
            yield name, value


def program_of(type_name: str) -> str | None:
    """Returns the program that takes a recorded class, ``module:Class``; ``None`` if unknown."""
    module = type_name.partition(":")[0]
    # The class of the RL loop is in a module of its own.
    candidates = (module, f"{module.rpartition('.')[0]}.train")
    return next((one for one in candidates if is_program(one)), None)


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _flat(data: Mapping[str, Any], prefix: str, comma: str) -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.", comma)
        elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            for i, one in enumerate(value):
                yield from _flat(one, f"{prefix}{key}.{i}.", comma)
        elif isinstance(value, list):
            # A list is written with commas, so a comma inside would separate values.
            inside = comma == "," and any("," in str(one) for one in value)
            if inside or any(isinstance(one, dict | list) for one in value):
                raise ConfigurationError(
                    f"{CONFIG}: {prefix}{key}: got {value!r:.80}, expected values without commas"
                )
            yield f"{prefix}{key}", ",".join(str(one).replace(",", comma) for one in value)
        else:
            yield f"{prefix}{key}", str(value).replace(",", comma)
