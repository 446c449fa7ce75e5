"""Whether the imports of the official tutorials and guides resolve against this package."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from pathlib import Path

from tinker_cookbook.exceptions import ConfigurationError

PACKAGE = "tinker_cookbook"
# The guides of 0.6.1 import these, but its own package does not have them either.
MISTAKES = frozenset(
    {
        "tinker_cookbook.preference.dpo_datasets.ComparisonBuilder",
        "tinker_cookbook.utils.ml_log.log_metrics",
    }
)
_CODE_BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def imported_names(source: Path) -> dict[str, str]:
    """``module.name`` (or ``module``) that a tutorial or guide imports, with one file that does."""
    found: dict[str, str] = {}
    files = [*source.glob("tutorials/*.py"), *source.glob("skills/**/*.md"), source / "README.md"]
    for file in sorted(files):
        text = file.read_text("utf-8")
        blocks = [text]
        if file.suffix == ".md":
            blocks = [textwrap.dedent(match.group(2)) for match in _CODE_BLOCK.finditer(text)]
        for block in blocks:
            for name in _imports(block):
                found.setdefault(name, file.relative_to(source).as_posix())
    return {name: file for name, file in found.items() if name not in MISTAKES}


def _imports(code: str) -> list[str]:
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a fragment that shows the shape of a call
        return []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.split(".")[0] == PACKAGE]


def resolves(name: str) -> bool:
    """Whether ``import name``, or ``from`` its parent ``import`` its last part, works."""
    parent, _, last = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ConfigurationError:  # the module is there, and needs an extra that is not installed
        return True
    except ImportError:
        try:
            return hasattr(importlib.import_module(parent), last)
        except ImportError:
            return False
    return True
