"""What code written for the official tinker-cookbook uses by name, and how ours compares.

``official_names.json`` holds, one line for each module, what the modules of the original define
(``names``) and what its recipes, tutorials, skills and READMEs import (``imports``):

- a function or class: its parameters, ``name`` or ``name=DEFAULT`` (JSON; ``?`` where the default
  is no plain value); None where Python cannot tell them;
- a constant: ``=VALUE`` (JSON), or None where it is no plain value;
- ``__all__``: its names.

A text of more than 40 characters stands as the start of its SHA-256. The file is written from the
unpacked source, with the libraries that the original needs:

    PYTHONPATH=tinker_cookbook-0.6.1 python tests/conformance/official_names.py

``official_exceptions.json`` lists what differs on purpose, with a reason for each.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import chz
from official_page import share
from official_tutorials import PACKAGE

from tinker_cookbook.exceptions import TinkerCookbookError

HERE = Path(__file__).resolve().parent
NAMES = HERE / "official_names.json"
EXCEPTIONS = HERE / "official_exceptions.json"

Described = list[str] | str | None
_COLLECTED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NOT_PUBLIC = ("logger", "F", "T")  # every module has a logger; type variables
_NO_DEFAULT, _UNKNOWN = object(), "?"
_LONGEST_TEXT = 40


def plain(value: Any) -> str:
    """A value as JSON, with long texts as digests; ``?`` for what is no plain value."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, str):
        value = value.replace(str(Path.home()), "~")
        if len(value) > _LONGEST_TEXT:
            value = "sha256:" + hashlib.sha256(value.encode()).hexdigest()[:12]
        return json.dumps(value)
    if isinstance(value, float):  # 0.0 and 0 are the same default
        return json.dumps(int(value) if value.is_integer() else value)
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, Mapping):
        parts = [f"{plain(k)}: {plain(v)}" for k, v in value.items()]
    elif isinstance(value, list | tuple):
        parts = [plain(item) for item in value]
    elif isinstance(value, set | frozenset):
        parts = sorted(plain(item) for item in value)
    else:
        return _UNKNOWN
    if any(_UNKNOWN in part for part in parts):
        return _UNKNOWN
    found = ", ".join(parts)
    return f"[{found}]" if len(found) <= 2 * _LONGEST_TEXT else f"[{plain(found)}]"


def _made_by(factory: Any) -> Any:
    try:
        return factory()
    except Exception:
        return _made_by  # no plain value


def _defaults(value: Any) -> dict[str, Any]:
    """Default by parameter of a function or class; ``_NO_DEFAULT`` where one is required."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(value).parameters.items():
        if parameter.kind not in _COLLECTED:
            empty = parameter.default is parameter.empty
            found[name] = _NO_DEFAULT if empty else parameter.default
    if chz.is_chz(value):  # a config takes its fields by keyword; chz hides some
        for name, field in chz.chz_fields(value).items():
            default, factory = field._default, field._default_factory
            if repr(factory) != "MISSING":
                found[name] = _made_by(factory)
            else:
                found[name] = _NO_DEFAULT if repr(default) == "MISSING" else default
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            factory = field.default_factory
            if field.init and callable(factory):
                found[field.name] = _made_by(factory)
    return found


def parameters_of(value: Any) -> list[str] | None:
    """Parameters of a function or of a class's constructor; None if unknown."""
    try:
        defaults = _defaults(value)
    except (TypeError, ValueError):
        return None
    return [
        name if default is _NO_DEFAULT else f"{name}={plain(default)}"
        for name, default in defaults.items()
        if not name.startswith("_") and name != "self"
    ]


def _described(value: Any) -> Described:
    if inspect.isfunction(value) or inspect.isclass(value):
        return parameters_of(value)
    return _constant(plain(value))


def _constant(spelled: str) -> str | None:
    """A constant; None for what is no plain value, and for what is filled later."""
    return None if spelled in (_UNKNOWN, "[]") else f"={spelled}"


def public_names(module: ModuleType, tree: ast.Module) -> dict[str, Described]:
    """Functions, classes and constants that a module defines, and what its ``__all__`` names."""
    listed = set(getattr(module, "__all__", ())) | {name for name, _ in _assigned(tree)}
    found: dict[str, Described] = {}
    if hasattr(module, "__all__"):
        found["__all__"] = sorted(module.__all__)
    for name in sorted(set(vars(module)) | listed):
        value = getattr(module, name, None)
        is_code = inspect.isfunction(value) or inspect.isclass(value)
        defined_here = is_code and value.__module__ == module.__name__
        if name not in listed and (name.startswith("_") or not defined_here):
            continue
        if not inspect.ismodule(value):
            # What another module defines is described there.
            found[name] = None if is_code and not defined_here else _described(value)
    return found


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """Public constants and type aliases of a module."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            name = target.id if isinstance(target, ast.Name) else "_"
            if not name.startswith("_") and name not in _NOT_PUBLIC:
                assert isinstance(node, ast.Assign | ast.AnnAssign)
                yield name, node.value


def _names_of_text(tree: ast.Module) -> dict[str, Described]:
    """As ``public_names``, of a module that cannot be imported because a library is absent."""

    def literal(node: ast.expr | None) -> str:
        try:
            return plain(ast.literal_eval(node)) if node is not None else _UNKNOWN
        except ValueError:
            return _UNKNOWN

    def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
        pos = [*node.args.posonlyargs, *node.args.args]
        given = [None] * (len(pos) - len(node.args.defaults)) + list(node.args.defaults)
        pairs = [*zip(pos, given, strict=True)]
        pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        return [
            a.arg if default is None else f"{a.arg}={literal(default)}"
            for a, default in pairs
            if a.arg != "self" and not a.arg.startswith("_")
        ]

    def fields(node: ast.ClassDef) -> list[str] | None:
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                return parameters(item)
        if not node.decorator_list:  # neither a dataclass nor chz
            return None
        return [
            ast.unparse(item.target) + (f"={literal(item.value)}" if item.value else "")
            for item in node.body
            if isinstance(item, ast.AnnAssign)
        ]

    found: dict[str, Described] = {}
    for name, value in _assigned(tree):
        found[name] = _constant(literal(value))
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = fields(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = parameters(node)
    return {name: value for name, value in found.items() if not name.startswith("_")}


def modules_of(source: Path) -> Iterator[tuple[str, Path]]:
    """Dotted names and files of all modules of the original that are neither tests nor private."""
    for file in sorted((source / "tinker_cookbook").rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        is_test = parts[-1].endswith("_test") or parts[-1] in ("testing_utils", "conftest")
        if not (is_test or any(part.startswith("_") for part in parts)):
            yield ".".join(parts), file


def survey(source: Path) -> dict[str, dict[str, Described]]:
    """Public names by module of the original's source, which must be on the path."""
    found: dict[str, dict[str, Described]] = {}
    for name, file in modules_of(source):
        tree = ast.parse(file.read_text("utf-8"))
        try:
            found[name] = public_names(importlib.import_module(name), tree)
        except Exception as error:  # a missing library
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            found[name] = _names_of_text(tree)
    return found


def read_names() -> dict[str, dict[str, Described]]:
    """What the modules of the original define, by module."""
    return json.loads(NAMES.read_text("utf-8"))["names"]


def read_exceptions() -> dict[str, str]:
    """Reason by module, ``module.name`` or ``module.name.parameter``, which may have a ``*``."""
    reasons: dict[str, list[str]] = json.loads(EXCEPTIONS.read_text("utf-8"))
    return {f"{PACKAGE}.{place}": why for why, places in reasons.items() for place in places}


def covers(exception: str, name: str) -> bool:
    """Whether an exception is meant for a name: it is the name, or stands above it."""
    return fnmatchcase(name, exception) or name.startswith(f"{exception}.")


def excuse(name: str, exceptions: Mapping[str, str]) -> str | None:
    """The reason for which a name may differ: its own or that of a module above it."""
    return next((why for place, why in exceptions.items() if covers(place, name)), None)


def missing(module_name: str, name: str | None = None) -> str | None:
    """Why ``from module_name import name`` would fail here, or None."""
    try:
        module = importlib.import_module(module_name)
        if name is None or hasattr(module, name):
            return None
        importlib.import_module(f"{module_name}.{name}")
    except ImportError as error:
        known = (module_name, f"{module_name}.{name}")
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith(PACKAGE):
            return None  # the module is there, and needs a library that is not installed
        return "there is no such name" if str(error.name) == known[1] else str(error)
    except TinkerCookbookError:  # as above, said by an error of our own
        return None
    return None


def unlike(module_name: str, name: str, described: Described) -> dict[str, str]:
    """What code written for a name that is here would find different: problem by place."""
    place = f"{module_name}.{name}"
    try:
        value = getattr(importlib.import_module(module_name), name)
    except (ImportError, TinkerCookbookError):
        return {}
    if isinstance(described, str):
        ours = _described(value)
        return {} if ours == described else {place: f"is {ours}, not {described}"}
    if described is None or _takes_anything(value):
        return {}
    defaults: dict[str, str | None] = {}
    for item in parameters_of(value) or ():
        parameter, equals, default = item.partition("=")
        defaults[parameter] = default if equals else None
    found: dict[str, str] = {}
    for item in described:
        parameter, _, default = item.partition("=")
        if parameter not in defaults:
            found[f"{place}.{parameter}"] = f"expected one of {', '.join(defaults)}"
        elif (
            defaults[parameter] is None
            if default == _UNKNOWN
            else (default and defaults[parameter] != default)
        ):
            found[f"{place}.{parameter}"] = f"default {defaults[parameter]}, not {default}"
    return found


def _takes_anything(value: Any) -> bool:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return True
    return not chz.is_chz(value) and any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
    )


def _not_exported(module_name: str, names: Described) -> dict[str, str]:
    """Names that ``from module_name import *`` would not give here."""
    module = importlib.import_module(module_name)
    ours = getattr(module, "__all__", None)
    if ours is None and not hasattr(module, "__path__"):
        return {}  # a plain module exports everything public
    lost = set(names or ()) - set(ours or ())
    return {f"{module_name}.{name}": "not in __all__" for name in sorted(lost)}


def differences() -> dict[str, str]:
    """All that differs from the official names, values and defaults, by place."""
    found: dict[str, str] = {}
    for module, members in read_names().items():
        problem = missing(module)
        for name, described in members.items():
            if name == "__all__":
                found |= {} if problem else _not_exported(module, described)
            elif why := problem or missing(module, name):
                found[f"{module}.{name}"] = why
            else:
                found |= unlike(module, name, described)
    return found


def unresolved_imports() -> dict[str, str]:
    """Imports of the original's programs and guides that would fail here, with the cause."""
    imports: dict[str, list[str]] = json.loads(NAMES.read_text("utf-8"))["imports"]
    pairs = [(module, name) for module, names in imports.items() for name in names]
    return {f"{m}.{n}".rstrip("."): why for m, n in pairs if (why := missing(m, n or None))}


def counts(found: Mapping[str, str]) -> dict[str, str]:
    """Shares of names that are here, and here without a difference; of imports that resolve."""
    different = {
        name[:end]
        for name in found
        for end in range(len(name) + 1)
        if name[end : end + 1] in ("", ".")
    }
    shares: dict[str, str] = {}
    names = read_names()
    for title, is_recipe in (("package", False), ("recipes", True)):
        pairs = [
            (module, name)
            for module, members in names.items()
            if module.startswith(f"{PACKAGE}.recipes") == is_recipe
            for name in members
            if name != "__all__"
        ]
        here = [pair for pair in pairs if missing(*pair) is None]
        same = [pair for pair in here if ".".join(pair) not in different]
        shares[title] = share(len(here), len(pairs))
        shares[f"{title}_same"] = f"{len(same):,}"
    recipes = [module for module in names if module.startswith(f"{PACKAGE}.recipes")]
    shares["recipe_modules"] = str(len(recipes))
    shares["modules"] = str(len(names) - len(recipes))
    imports = json.loads(NAMES.read_text("utf-8"))["imports"]
    total = sum(len(members) for members in imports.values())
    return {**shares, "imports": share(total - len(unresolved_imports()), total)}


def _write(content: Mapping[str, Mapping[str, Any]]) -> None:
    """JSON with one line for each module."""
    parts = []
    for title, modules in content.items():
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in modules.items()]
        parts.append(f"{json.dumps(title)}: {{\n" + ",\n".join(lines) + "\n}")
    NAMES.write_text("{\n" + ",\n".join(parts) + "\n}\n", "utf-8")


if __name__ == "__main__":
    from official_tutorials import imported_names

    import tinker_cookbook

    root = Path(str(tinker_cookbook.__file__)).parents[1]
    _write({"imports": imported_names(root), "names": survey(root)})
