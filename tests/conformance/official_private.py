"""Which of the official unit tests use private names of the official package.

A test of a private name says nothing about code that people wrote against the public ones, so the
count of the unit tests leaves such tests out. A test uses a private name where its function, or a
fixture or helper that it refers to, imports ``_name`` from the package, reads ``object._name`` of
something imported from it, or patches such a name.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

PACKAGE = "tinker_cookbook"
_PRIVATE_PATH = re.compile(rf"{PACKAGE}(\.\w+)*\._[a-z][\w.]*$")


def tests_of_private_names(file: Path, source: Path) -> frozenset[str]:
    """Names of the test functions of ``file`` (relative to ``source``) that use private names."""
    return frozenset(name for name in _users(file, source) if name.startswith("test_"))


@cache
def _users(file: Path, source: Path) -> frozenset[str]:
    """Names at the top of ``file``, and of its tests, that lead to a private name."""
    tree = ast.parse((source / file).read_text("utf-8"))
    imported, tainted = _imports(tree, source)
    blocks = _blocks(tree)
    tainted |= {name for name, nodes in blocks.items() if _is_direct(nodes, imported)}
    while True:  # a helper of a helper needs another pass
        found = {name for name, nodes in blocks.items() if _refers(nodes, tainted)}
        if found <= tainted:
            return frozenset(tainted)
        tainted |= found


def _imports(tree: ast.Module, source: Path) -> tuple[set[str], set[str]]:
    """Names imported from the package, and those of them that lead to a private name."""
    imported: set[str] = set()
    tainted: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.startswith(PACKAGE)]
            imported |= {alias.asname or alias.name.split(".")[0] for alias in names}
            tainted |= {str(alias.asname) for alias in names if _PRIVATE_PATH.match(alias.name)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            bound = {alias.name: alias.asname or alias.name for alias in node.names}
            imported |= set(bound.values())
            module = Path(*str(node.module).split(".")).with_suffix(".py")
            if module.stem.endswith("_test"):  # helpers of another test file
                private = _users(module, source)
            elif _PRIVATE_PATH.match(str(node.module)):
                private = set(bound)
            else:
                private = {name for name in bound if _is_private(name)}
            tainted |= {bound[name] for name in private if name in bound}
    return imported, tainted


def _blocks(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """What each name at the top of a file, and each method of its test classes, is made of."""
    blocks: dict[str, list[ast.AST]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for method in node.body:
                if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    blocks.setdefault(method.name, []).append(method)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            blocks.setdefault(node.name, []).append(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    blocks.setdefault(name.id, []).append(node)
    return blocks


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_direct(nodes: list[ast.AST], imported: set[str]) -> bool:
    """Whether code reads or patches a private attribute of something imported."""
    return any(_is_private_use(node, imported) for outer in nodes for node in ast.walk(outer))


def _is_private_use(node: ast.AST, imported: set[str]) -> bool:
    match node:
        case ast.Attribute(value=value, attr=name):
            return _is_private(name) and _root(value) in imported
        case ast.Call(args=[target, ast.Constant(value=str(name)), *_]):  # setattr(module, "_name")
            return _is_private(name) and _root(target) in imported
        case ast.Constant(value=str(path)):  # patch("package.module._name")
            return _PRIVATE_PATH.match(path) is not None
    return False


def _refers(nodes: list[ast.AST], names: set[str]) -> bool:
    """Whether code reads one of the names, takes a fixture of that name, or asks for it by text."""
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Name) and node.id in names:
            return True
        if isinstance(node, ast.arg) and node.arg in names:
            return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
            return True  # pytest.mark.usefixtures("name")
    return False
