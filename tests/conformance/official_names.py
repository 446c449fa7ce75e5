"""Public names of the official tinker-cookbook with their parameters, and how ours compare.

``official_names.json`` holds, by module, each public function and class with the names of its
parameters (None where it takes none that Python can tell). It is written from the unpacked source:

    PYTHONPATH=tinker_cookbook-0.6.1 python tests/conformance/official_names.py > names.json

``official_exceptions.json`` lists what differs on purpose, with a reason for each.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
NAMES = HERE / "official_names.json"
EXCEPTIONS = HERE / "official_exceptions.json"

# The reason of packages that a later version will have.
LATER = "a package that is not built yet"

Parameters = list[str] | None
_COLLECTED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NOT_PUBLIC = ("logger", "F", "T")  # every module has a logger; type variables


def parameters_of(value: Any) -> Parameters:
    """Names of the parameters of a function or of a class's constructor; None if unknown."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    return [
        name
        for name, parameter in signature.parameters.items()
        if not name.startswith("_") and parameter.kind not in _COLLECTED and name != "self"
    ]


def public_names(module: ModuleType) -> dict[str, Parameters]:
    """Functions, classes and constants that a module defines, and what its ``__all__`` names."""
    listed = set(getattr(module, "__all__", ())) | set(_assigned_names(module))
    found: dict[str, Parameters] = {}
    for name in sorted(set(vars(module)) | listed):
        value = getattr(module, name, None)
        is_code = inspect.isfunction(value) or inspect.isclass(value)
        defined_here = is_code and value.__module__ == module.__name__
        if (name in listed or (defined_here and not name.startswith("_"))) and not inspect.ismodule(
            value
        ):
            found[name] = parameters_of(value) if is_code else None
    return found


def _assigned_names(module: ModuleType) -> Iterator[str]:
    """Public constants and type aliases of a module."""
    for node in ast.parse(inspect.getsource(module)).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            name = target.id if isinstance(target, ast.Name) else "_"
            if not name.startswith("_") and name not in _NOT_PUBLIC:
                yield name


def modules_of(package: ModuleType) -> Iterator[str]:
    """Dotted names of all modules of a package that are neither tests nor private."""
    yield package.__name__
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", lambda name: None):
        last = info.name.rsplit(".", 1)[-1]
        within = info.name.split(".")[1]
        is_test = last.endswith("_test") or last == "testing_utils"
        if not (last.startswith("_") or is_test or within in ("recipes", "scripts")):
            yield info.name


def survey(package: ModuleType) -> dict[str, dict[str, Parameters] | None]:
    """Public names by module; None for a module that needs a library which is not installed."""
    found: dict[str, dict[str, Parameters] | None] = {}
    for name in modules_of(package):
        try:
            found[name] = public_names(importlib.import_module(name))
        except Exception as error:  # a program that runs at import, or a missing library
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            found[name] = None
    return found


def read_exceptions() -> dict[str, str]:
    """Reason by module or ``module.name``; a module stands for all that it contains."""
    return json.loads(EXCEPTIONS.read_text("utf-8"))


def excuse(name: str, exceptions: dict[str, str]) -> str | None:
    """The reason for which a name may differ: its own or that of a module above it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        reason = exceptions.get(".".join(parts[:end]))
        if reason is not None:
            return reason
    return None


def difference(module_name: str, name: str, parameters: Parameters) -> str | None:
    """What code written for the official name would miss here, or None."""
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        return f"the module does not import: {error}"
    if not hasattr(module, name):
        return "there is no such name"
    if parameters is None:
        return None
    value = getattr(module, name)
    ours = parameters_of(value)
    if ours is None or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in inspect.signature(value).parameters.values()
    ):
        return None
    missing = [parameter for parameter in parameters if parameter not in ours]
    if missing:
        return f"parameters {', '.join(missing)} are missing; there are {', '.join(ours)}"
    return None


def differences() -> dict[str, str]:
    """All that differs from the official names, by ``module.name``."""
    names: dict[str, dict[str, Parameters] | None] = json.loads(NAMES.read_text("utf-8"))
    found = {}
    for module_name, members in names.items():
        for name, parameters in (members or {}).items():
            problem = difference(module_name, name, parameters)
            if problem is not None:
                found[f"{module_name}.{name}"] = problem
    return found


if __name__ == "__main__":
    import tinker_cookbook

    json.dump(survey(tinker_cookbook), sys.stdout, indent=1, sort_keys=True)
