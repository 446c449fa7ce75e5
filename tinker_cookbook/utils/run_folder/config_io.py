"""``config.json``: a configuration written so that the same object can be built from it again.

Plain fields stand at their own place under their own name, so a script reads
``json.load(f)["learning_rate"]``. Two keys carry what JSON has no words for:

* ``"_type": "module:Class"`` in each object that stands for a chz (or data-) class, so that which
  builder was chosen is not lost;
* ``"_kinds": {"train_on_what": "enum module:TrainOnWhat"}`` beside the fields of such an object,
  for values that are written in a readable form but are no plain JSON: enums (by value), tuples,
  sets, paths (as strings), functions and classes (as ``"module:name"``), ``functools.partial``,
  dicts with keys other than strings (as pairs), and numbers that are not finite (as strings). A
  key is the path to the value below the object, ``/`` between its parts.

What cannot be found again by name (a lambda, a closure, a live object) is written as
``{"_not_rebuildable": "<its repr>"}``: the run goes on and the file shows what it lost;
:func:`load_config` refuses such a file and names the field.

The values are those in force, after chz mungers; a munger must therefore accept its own result.
Where a munger makes something that has no JSON form, what was given to it is written instead.
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
from tinker_cookbook.utils.run_folder.paths import write_atomically

TYPE_KEY = "_type"
KINDS_KEY = "_kinds"
LOST_KEY = "_not_rebuildable"
CONFIG_FILE = "config.json"

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
    if kinds and isinstance(data, dict):
        return {**data, KINDS_KEY: kinds}
    return data


def load_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> Any:
    """Builds the configuration that :func:`dump_config` wrote.

    It imports the modules and calls the classes that the file names, so load only files you trust.

    Args:
        source: A ``config.json``, the log folder that holds one, or its parsed content.

    Raises:
        ConfigurationError: No such file, not JSON, a class that is gone, a field that the class
            does not have, or a value that could not be written in a form to rebuild.
    """
    if isinstance(source, Mapping):
        return _load_top(dict(source))
    path = Path(source)
    try:
        return _load_file(path)
    except ConfigurationError as error:
        # Said by the innermost of many nested calls; a traceback through all of them says no more.
        raise ConfigurationError(str(error)) from None


def _load_file(path: Path) -> Any:
    if path.is_dir():
        path = path / CONFIG_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    return _load_top(data)


def write_config(path: Path, config: Any) -> list[str]:
    """Writes ``config`` to ``path`` and returns the fields that cannot be rebuilt from it.

    Raises:
        OSError: The file cannot be written.
    """
    data = dump_config(config)
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, text.encode("utf-8", "backslashreplace"))
    return lost_fields(data)


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
    kind = type(record)
    name = _importable_name(kind)
    if name is None:  # defined in a function: no import can find it
        return _lost(record)
    kinds: _Kinds = {}
    data: dict[str, Any] = {TYPE_KEY: name}
    for field, value, given in _fields(record):
        trial: _Kinds = {}
        dumped = _dump(value, _join("", field), trial)
        if given is not value and lost_fields(dumped):
            trial = {}
            dumped = _dump(given, _join("", field), trial)
        data[field] = dumped
        kinds.update(trial)
    return {**data, KINDS_KEY: kinds} if kinds else data


def _fields(record: Any) -> list[tuple[str, Any, Any]]:
    """Name, value in force and value given of each constructor argument."""
    if chz.is_chz(record):
        return [
            (field.logical_name, getattr(record, field.logical_name), getattr(record, field.x_name))
            for field in chz.chz_fields(record).values()
        ]
    values = [(f.name, getattr(record, f.name)) for f in dataclasses.fields(record) if f.init]
    return [(name, value, value) for name, value in values]


def _dump(value: Any, where: str, kinds: _Kinds) -> Any:
    if isinstance(value, enum.Enum):
        return _dump_enum(value, where, kinds)
    if value is None or type(value) in (bool, int, str):
        return value
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
    if type(value) in (list, tuple, set, frozenset):
        return _dump_items(value, where, kinds)
    if type(value) is functools.partial:
        kinds[where] = "partial"
        parts = {"func": value.func, "args": list(value.args), "keywords": value.keywords}
        return {key: _dump(part, _join(where, key), kinds) for key, part in parts.items()}
    if isinstance(value, Mapping):
        return _dump_mapping(value, where, kinds)
    name = _importable_name(value)
    if name is not None:
        kinds[where] = "object"
        return name
    return _lost(value)


def _dump_enum(value: enum.Enum, where: str, kinds: _Kinds) -> Any:
    name = _importable_name(type(value))
    if name is None or value.value.__class__ not in (bool, int, float, str):
        return _lost(value)
    kinds[where] = f"enum {name}"
    return value.value


def _dump_items(value: Any, where: str, kinds: _Kinds) -> list[Any]:
    if type(value) is not list:
        kinds[where] = type(value).__name__
    # The order of a set is arbitrary; sorted, equal configs give equal files.
    items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    return [_dump(item, _join(where, index), kinds) for index, item in enumerate(items)]


def _dump_mapping(value: Mapping[Any, Any], where: str, kinds: _Kinds) -> Any:
    if type(value) is not dict:
        return _lost(value)
    reserved = {TYPE_KEY, KINDS_KEY, LOST_KEY}
    if all(type(key) is str and key not in reserved for key in value):
        return {key: _dump(item, _join(where, key), kinds) for key, item in value.items()}
    kinds[where] = "pairs"
    return [
        [_dump(part, _join(_join(where, index), side), kinds) for side, part in enumerate(pair)]
        for index, pair in enumerate(value.items())
    ]


def _lost(value: Any) -> dict[str, str]:
    # Without the address, so that equal runs give equal files.
    return {LOST_KEY: re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))}


def _join(where: str, part: object) -> str:
    text = str(part).replace("~", "~0").replace("/", "~1")  # as JSON pointers escape it
    return f"{where}/{text}" if where else text


def _importable_name(value: Any) -> str | None:
    """Returns ``"module:qualified.name"`` if importing that gives ``value`` back, else ``None``."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    try:
        found: Any = sys.modules[module]
        for part in name.split("."):
            found = getattr(found, part)
        same = found is value or bool(found == value)
    except (KeyError, AttributeError, TypeError, ValueError):
        return None
    return f"{_true_module_name(module)}:{name}" if same else None


def _true_module_name(module: str) -> str:
    """Returns ``python -m recipes.x`` runs the module as ``__main__``; its spec knows the real
    name."""
    spec = getattr(sys.modules["__main__"], "__spec__", None) if module == "__main__" else None
    return spec.name if spec is not None else module


# --- reading ---------------------------------------------------------------------------------


def _load_top(data: Any) -> Any:
    if isinstance(data, dict) and TYPE_KEY not in data:
        plain = {key: value for key, value in data.items() if key != KINDS_KEY}
        return _load(plain, "", data.get(KINDS_KEY, {}), "")
    return _load(data, "", {}, "")


def _load(data: Any, where: str, kinds: Mapping[str, str], label: str) -> Any:
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
        raise ConfigurationError(f"{label or 'config'}: {name} is no chz class and no dataclass")
    kinds = data.get(KINDS_KEY, {})
    values = {
        key: _load(value, _join("", key), kinds, f"{label}.{key}" if label else key)
        for key, value in data.items()
        if key not in (TYPE_KEY, KINDS_KEY)
    }
    known = list(chz.chz_fields(kind) if chz.is_chz(kind) else _dataclass_fields(kind))
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


def _dataclass_fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


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
    if kind not in makers:
        raise ConfigurationError(
            f"{label}: unknown kind {kind!r}; expected one of {', '.join(makers)}"
        )
    return makers[kind](value)


def _find(name: str, label: str) -> Any:
    module, _, attributes = name.partition(":")
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    try:
        # The module that runs as __main__ is not imported a second time under its own name.
        found = (
            main if spec is not None and spec.name == module else importlib.import_module(module)
        )
        for part in attributes.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        hint = (
            "it was defined in the script that was started; load the config from within that script"
            if module == "__main__"
            else "make its module importable (PYTHONPATH) or use the code version that wrote it"
        )
        raise ConfigurationError(f"{label or 'config'}: {name} cannot be found; {hint}") from error
    return found
