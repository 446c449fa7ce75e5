"""``config.json``: a configuration written so that an equal object can be built from it again.

Plain fields are written under their own names, so a script reads
``json.load(f)["learning_rate"]``. Two keys carry what JSON cannot express:

* ``"_type": "module:Class"`` in each object that represents a chz class or a dataclass, so that
  the choice of a builder is kept;
* ``"_kinds": {"train_on_what": "enum module:TrainOnWhat"}`` next to the fields of such an object,
  for values that are written in a readable form but are not plain JSON: enums (by value), tuples,
  sets, paths (as strings), functions and classes (as ``"module:name"``), ``functools.partial``,
  dicts with keys other than strings (as pairs), and numbers that are not finite (as strings). A
  key is the path to the value below the object, ``/`` between its parts.

What cannot be found again by name (a lambda, a closure, a live object) is written as
``{"_not_rebuildable": "<its repr>"}``: the run continues and the file shows what is missing;
:func:`load_config` refuses such a file and names the field. ``"_digest"`` is added where the value
has content (``digests.value_digest``), so that a resumed run notices another one.
``"_working_folder"`` is where the program started, for relative paths.

The values are those in force, after chz mungers; a munger must therefore accept its own result.
If a munger makes something that has no JSON form, its input is written instead.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import chz

from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.run.digests import value_digest
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.run.paths import CONFIG_FILE, CONFIG_HISTORY_FILE, write_atomically

TYPE_KEY = "_type"
KINDS_KEY = "_kinds"
LOST_KEY = "_not_rebuildable"
DIGEST_KEY = "_digest"
FOLDER_KEY = "_working_folder"

_Kinds = dict[str, str]


def dump_config(config: Any) -> Any:
    """Returns ``config`` as JSON data from which :func:`load_config` builds an equal object.

    Args:
        config: A chz object, a dataclass object, or a dict, list or plain value. A top-level dict
            keeps its plain form; only inside of chz objects is every kind of value rebuilt.
    """
    if _is_record(config):
        return _dump_record(config)
    kinds: _Kinds = {}
    data = _dump(config, "", kinds)
    return {**data, KINDS_KEY: kinds} if kinds and isinstance(data, dict) else data


def load_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> Any:
    """Builds the configuration that :func:`dump_config` wrote.

    It imports the modules and calls the classes that the file names, so load only trusted files.

    Args:
        source: A ``config.json``, the log folder that holds one, or its parsed content.

    Raises:
        ConfigurationError: No such file, not JSON, a missing class, a field that the class does
            not have, or a value that cannot be rebuilt.
    """
    data: Any = source
    if not isinstance(source, Mapping):
        path = Path(source)
        path = path / CONFIG_FILE if path.is_dir() else path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error
    kinds: _Kinds = {}
    if isinstance(data, Mapping) and TYPE_KEY not in data:
        kinds = data.get(KINDS_KEY, {})
        data = {key: value for key, value in data.items() if key != KINDS_KEY}
    try:
        return _load(data, "", kinds, "")
    except ConfigurationError as error:
        # Raised by the innermost of many recursive calls, whose traceback explains nothing.
        raise ConfigurationError(str(error)) from None


def load_config_of_step(log_path: Path, step: int) -> Any:
    """Returns the configuration of a run when it did ``step``; see :func:`load_config`.

    A fork, or a run that was resumed with other settings, has several. Its folder and backend are
    always the present ones.
    """
    rows = [row for row in read_rows(log_path / CONFIG_HISTORY_FILE) if row["after"] < step]
    if not rows:
        return load_config(log_path)
    now = json.loads((log_path / CONFIG_FILE).read_bytes())
    present = {key: now[key] for key in ("log_path", "backend", "base_url") if key in now}
    return load_config(rows[-1]["config"] | present)


def write_config(path: Path, config: Any) -> list[str]:
    """Writes ``config`` to ``path`` and returns the fields that cannot be rebuilt from it.

    Data that a script passes (they have ``data_sources``) are not among them: they do not belong in
    a file of settings, and a resumed run compares their content.

    Raises:
        OSError: The file cannot be written.
    """
    data = dump_config(config)
    if _is_record(config):
        data[FOLDER_KEY] = os.getcwd()
    # allow_nan=False: numbers that are not finite were written as strings, for strict readers.
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, text.encode("utf-8", "backslashreplace"))
    return [name for name in lost_fields(data) if not _is_data(config, name)]


def _is_data(config: Any, name: str) -> bool:
    value = config
    for part in name.split("."):
        value = getattr(value, part, None)
    return hasattr(value, "data_sources")


def lost_fields(data: Any, where: str = "") -> list[str]:
    """Returns the dotted names of the values in dumped data that cannot be rebuilt."""
    if isinstance(data, dict):
        if LOST_KEY in data:
            return [where]
        pairs = [(key, value) for key, value in data.items() if key != KINDS_KEY]
    elif isinstance(data, list):
        pairs = [(str(index), value) for index, value in enumerate(data)]
    else:
        return []
    return [
        name
        for key, value in pairs
        for name in lost_fields(value, f"{where}.{key}" if where else key)
    ]


# --- writing ---------------------------------------------------------------------------------


def _is_record(value: Any) -> bool:
    return (chz.is_chz(value) or dataclasses.is_dataclass(value)) and not isinstance(value, type)


def _dump_record(record: Any) -> dict[str, Any]:
    name = _importable_name(type(record))
    if name is None:  # a class defined in a function: no import can find it
        return _lost(record)
    if chz.is_chz(record):
        # Names of the attributes with the value after the munger, and before it.
        names = [(f.logical_name, f.x_name) for f in chz.chz_fields(record).values()]
    else:
        names = [(f.name, f.name) for f in dataclasses.fields(record) if f.init]
    kinds: _Kinds = {}
    data: dict[str, Any] = {TYPE_KEY: name}
    for field, given_name in names:
        value, given = getattr(record, field), getattr(record, given_name)
        kinds_of_field: _Kinds = {}
        data[field] = _dump(value, _join("", field), kinds_of_field)
        # The value cannot be rebuilt, but the munger makes it again from its input.
        if given is not value and lost_fields(data[field]):
            kinds_of_field = {}
            data[field] = _dump(given, _join("", field), kinds_of_field)
        kinds |= kinds_of_field
    return {**data, KINDS_KEY: kinds} if kinds else data


def _dump(value: Any, where: str, kinds: _Kinds) -> Any:
    """Returns the JSON form of a value and notes in ``kinds`` how to restore it."""
    if isinstance(value, enum.Enum):
        name = _importable_name(type(value))
        if name is None or type(value.value) not in (bool, int, float, str):
            return _lost(value)
        kinds[where] = f"enum {name}"
        return value.value
    if value is None or type(value) in (bool, int, str):
        return value
    # JSON has no NaN and no infinity.
    if type(value) is float:
        if math.isfinite(value):
            return value
        kinds[where] = "float"
        return str(value)
    if _is_record(value):
        return _dump_record(value)
    if getattr(value, "ndim", None) == 0:  # a numpy or torch scalar
        return _dump(value.item(), where, kinds)
    if isinstance(value, PurePath):
        kinds[where] = "path"
        return str(value)
    if type(value) is functools.partial:
        kinds[where] = "partial"
        parts = {"func": value.func, "args": list(value.args), "keywords": value.keywords}
        return {key: _dump(part, _join(where, key), kinds) for key, part in parts.items()}
    if type(value) in (list, tuple, set, frozenset) or isinstance(value, Mapping):
        return _dump_container(value, where, kinds)
    # What is left is a function or a class, which is kept by its name.
    name = _importable_name(value)
    if name is None:
        return _lost(value)
    kinds[where] = "object"
    return name


def _dump_container(value: Any, where: str, kinds: _Kinds) -> Any:
    if not isinstance(value, Mapping):
        if type(value) is not list:
            kinds[where] = type(value).__name__
        # The order of a set is arbitrary; sorted, equal configs give equal files.
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return [_dump(item, _join(where, index), kinds) for index, item in enumerate(items)]
    if type(value) is not dict:
        return _lost(value)
    reserved = {TYPE_KEY, KINDS_KEY, LOST_KEY}
    # Other keys are written as pairs: as strings they would not be equal when read.
    if all(type(key) is str and key not in reserved for key in value):
        return {key: _dump(item, _join(where, key), kinds) for key, item in value.items()}
    kinds[where] = "pairs"
    return [
        [_dump(part, _join(_join(where, index), side), kinds) for side, part in enumerate(pair)]
        for index, pair in enumerate(value.items())
    ]


def _lost(value: Any) -> dict[str, str]:
    # Without the address, so that equal runs give equal files.
    lost = {LOST_KEY: re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))}
    digest = value_digest(value)
    return lost if digest is None else {**lost, DIGEST_KEY: digest}


def _join(where: str, part: object) -> str:
    text = str(part).replace("~", "~0").replace("/", "~1")  # as JSON pointers escape it
    return f"{where}/{text}" if where else text


def _importable_name(value: Any) -> str | None:
    """Returns ``"module:qualified.name"`` if importing this name returns ``value``, otherwise
    ``None``."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    try:
        # Looked up, since a decorator or a redefinition may have put another object under the name.
        found: Any = sys.modules[module]
        for part in name.split("."):
            found = getattr(found, part)
        same = found is value or bool(found == value)
    except (KeyError, AttributeError, TypeError, ValueError):
        return None
    # `python -m recipes.x` runs the module as __main__; its spec knows the real name.
    spec = getattr(sys.modules["__main__"], "__spec__", None) if module == "__main__" else None
    return f"{spec.name if spec is not None else module}:{name}" if same else None


# --- reading ---------------------------------------------------------------------------------


def _load(data: Any, where: str, kinds: Mapping[str, str], label: str) -> Any:
    """Builds the value at ``where``; ``label`` is its dotted name, for errors."""
    kind = kinds.get(where)
    if isinstance(data, dict) and kind is None:
        if LOST_KEY in data:
            raise ConfigurationError(
                f"{label or 'the config'} was {data[LOST_KEY]}, which cannot be rebuilt from a "
                f"file; give it as a function or class at the top level of a module"
            )
        if TYPE_KEY in data:
            return _load_record(data, label)
    loaded = data
    if isinstance(data, dict):
        loaded = {
            key: _load(item, _join(where, key), kinds, f"{label}.{key}" if label else key)
            for key, item in data.items()
        }
    elif isinstance(data, list):
        loaded = [
            _load(item, _join(where, index), kinds, f"{label}.{index}")
            for index, item in enumerate(data)
        ]
    return loaded if kind is None else _restore(kind, loaded, label)


def _load_record(data: dict[str, Any], label: str) -> Any:
    name = data[TYPE_KEY]
    kind = _find(name, label)
    if not isinstance(kind, type) or not (chz.is_chz(kind) or dataclasses.is_dataclass(kind)):
        raise ConfigurationError(
            f"{label or 'config'}: {name} is neither a chz class nor a dataclass"
        )
    kinds = data.get(KINDS_KEY, {})
    values = {
        key: _load(value, _join("", key), kinds, f"{label}.{key}" if label else key)
        for key, value in data.items()
        if key not in (TYPE_KEY, KINDS_KEY, FOLDER_KEY)
    }
    is_chz = chz.is_chz(kind)
    known = list(chz.chz_fields(kind)) if is_chz else [f.name for f in dataclasses.fields(kind)]
    # Checked here, since the error of the class would not name the nearest field.
    for key in values:
        if key not in known:
            raise ConfigurationError(
                f"{label or 'config'}: {name} has no field {key!r}{nearest(key, known)}; the file "
                f"was written by another version of the code"
            )
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigurationError(f"{label or 'config'}: {name} cannot be built: {error}") from error


def _restore(kind: str, value: Any, label: str) -> Any:
    if kind.startswith("enum "):
        members = _find(kind.removeprefix("enum "), label)
        try:
            return members(value)
        except ValueError as error:
            raise ConfigurationError(f"{label}: {error}") from error
    makers: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "path": Path,
        "tuple": tuple,
        "set": set,
        "frozenset": frozenset,
        "pairs": dict,
        "partial": lambda p: functools.partial(p["func"], *p["args"], **p["keywords"]),
        "object": lambda name: _find(name, label),
    }
    return makers[kind](value)


def _find(name: str, label: str) -> Any:
    """Imports the object that ``"module:qualified.name"`` names."""
    module, _, attributes = name.partition(":")
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    try:
        # The module that runs as __main__ is not imported a second time under its own name; but
        # where a program has done so, its config is of the class that was imported.
        is_main = spec is not None and spec.name == module and module not in sys.modules
        found = main if is_main else importlib.import_module(module)
        for part in attributes.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{label or 'config'}: {name} cannot be found; make its module importable "
            "(PYTHONPATH) or use the code version that wrote it"
        ) from error
    return found
