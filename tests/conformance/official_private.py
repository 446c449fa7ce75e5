"""Which of the official unit tests use private names of the official package.

A test of a private name says nothing about code that people wrote against the public ones, so the
count of the unit tests leaves such tests out. A test uses a private name where its function, or a
fixture or helper that it refers to, imports ``_name`` from the package, reads ``object._name`` of
something imported from it, or patches such a name.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

PACKAGE = "tinker_cookbook"
_PRIVATE = re.compile(r"\._[A-Za-z]")


def tests_of_private_names(file: Path, source: Path) -> frozenset[str]:
    """Names of the test functions of ``file`` (relative to ``source``) that use private names."""
    return frozenset(name for name in _users(file, source) if name.startswith("test_"))


@cache
def _users(file: Path, source: Path) -> frozenset[str]:
    """Names at the top of ``file``, and of its tests, that lead to a private name."""
    tree = ast.parse((source / file).read_text("utf-8"))
    imported, users = _imports(tree, source)
    # ``module._name``, ``setattr(module, "_name", …)`` or ``patch("package.module._name")``.
    objects = "|".join([PACKAGE, *imported])
    private = re.compile(rf"\b({objects})(\.\w+)*(\._[A-Za-z]|, '_[A-Za-z])")
    codes = _codes(tree)
    users |= {
        name
        for name, nodes in codes.items()
        if any(private.search(ast.unparse(node)) for node in nodes)
    }
    while True:  # a helper of a helper needs another pass
        found = {name for name, nodes in codes.items() if not users.isdisjoint(_words(nodes))}
        if found <= users:
            return frozenset(users)
        users |= found


def _imports(tree: ast.Module, source: Path) -> tuple[set[str], set[str]]:
    """Names imported from the package, and those of them that lead to a private name."""
    imported: set[str] = set()
    users: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {a.asname for a in node.names if a.asname and a.name.startswith(PACKAGE)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            module = Path(*str(node.module).split(".")).with_suffix(".py")
            is_test = module.stem.endswith("_test")  # helpers of another test file
            for alias in node.names:
                imported.add(bound := alias.asname or alias.name)
                path = f"{node.module}.{alias.name}"
                if alias.name in _users(module, source) if is_test else _PRIVATE.search(path):
                    users.add(bound)
    return imported, users


def _codes(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """What each name at the top of a file, and each method of its test classes, is made of."""
    codes: dict[str, list[ast.AST]] = defaultdict(list)
    for node in tree.body:
        parts: list[ast.stmt] = [node]
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            parts = node.body
        for part in parts:
            match part:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    codes[name].append(part)
                case ast.ClassDef(name=name):
                    codes[name].append(part)
                case ast.Assign() | ast.AnnAssign():
                    for inner in ast.walk(part):
                        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                            codes[inner.id].append(part)
    return codes


def _words(nodes: list[ast.AST]) -> set[str]:
    """Names that code reads, takes as parameters (fixtures), or has as texts (usefixtures)."""
    words: set[str] = set()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        match node:
            case ast.Name(id=word) | ast.arg(arg=word) | ast.Constant(value=str(word)):
                words.add(word)
    return words
