"""Reads a tutorial and runs its cells in the order of the file, without marimo."""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.tutorials import CHECKS
from tinker_cookbook.utils.imports import missing_extra

FOLDER = Path(__file__).resolve().parent
# 101 Hello Tinker (9 s): sample from a model.
_ABOUT = re.compile(r"(\d{3}) (.+) \((\d+) s\): (.+)\.")


@dataclass(frozen=True)
class Cell:
    """A cell: text in Markdown, or code."""

    text: str
    source: str
    body: list[ast.stmt]


@dataclass(frozen=True)
class Tutorial:
    """A tutorial's file and what its first line says; ``seconds`` are those of an idle core."""

    path: Path
    number: str
    title: str
    seconds: int
    idea: str

    def cells(self) -> list[Cell]:
        """Returns the cells that a reader sees."""
        source = self.path.read_text("utf-8")
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in ast.parse(source).body if isinstance(node, functions)]
        return [cell for node in nodes if (cell := _cell(node, source.splitlines())) is not None]


@dataclass(frozen=True)
class Output:
    """What a cell gave: printed lines (if they were captured), and the value of its last line."""

    cell: Cell
    printed: str
    value: Any


def tutorials() -> list[Tutorial]:
    """Returns all tutorials by number."""
    found = []
    for path in sorted(FOLDER.glob("[0-9]*.py")):
        about = " ".join((ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split())
        match = _ABOUT.fullmatch(about)
        assert match, f"{path}: expected a docstring like '101 Title (9 s): one idea.'"
        number, title, seconds, idea = match.groups()
        found.append(Tutorial(path, number, title, int(seconds), idea))
    return found


def find_tutorial(number: str, key: str = "number") -> Tutorial:
    """Returns the tutorial with a number; raises ConfigurationError, with the setting's ``key``, if
    there is none."""
    known = {one.number: one for one in tutorials()}
    if number not in known:
        raise ConfigurationError(
            f"{key}: got {number!r}, expected one of {', '.join(known)}; "
            "python -m tinker_cookbook.tutorials lists the tutorials"
        )
    return known[number]


def execute(tutorial: Tutorial, capture: bool = False) -> Iterator[Cell | Output]:
    """Runs a tutorial; yields each cell before it runs, and the output of code after it.

    The results of ``expect`` and ``mistake`` are in ``CHECKS``.

    Args:
        capture: Keep what cells print, instead of printing it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise missing_extra("the pictures of tutorials", error, "tutorials") from error

    matplotlib.use("Agg")  # no window
    CHECKS.clear()
    # A module that can be found, so that classes which cells define work as those of a file.
    module = types.ModuleType(f"tutorial_{tutorial.number}")
    sys.modules[module.__name__] = module
    try:
        with asyncio.Runner() as runner:
            for cell in tutorial.cells():
                yield cell
                if cell.body:
                    printed = io.StringIO()
                    with redirect_stdout(printed) if capture else nullcontext():
                        value = _run(cell.body, str(tutorial.path), vars(module), runner)
                    yield Output(cell, printed.getvalue(), value)
    finally:
        del sys.modules[module.__name__]


def _run(body: list[ast.stmt], file: str, names: dict[str, Any], runner: asyncio.Runner) -> Any:
    """Runs statements, which may await; returns the value of the last one if it has one."""
    value = None
    for statement in body:
        # Each line of code is compiled alone, so that the last one can have a value.
        tree: Any = ast.Module([statement], [])
        if isinstance(statement, ast.Expr):
            tree = ast.Expression(statement.value)
        mode = "eval" if isinstance(statement, ast.Expr) else "exec"
        code = compile(tree, file, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        value = eval(code, names)
        if code.co_flags & inspect.CO_COROUTINE:
            value = runner.run(value)
    return value


def _cell(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Cell | None:
    """Returns the cell of a function of marimo's format; None for the one that imports marimo."""
    body = node.body[:-1] if isinstance(node.body[-1], ast.Return) else node.body
    match body:
        case [] | [ast.Import(names=[ast.alias(name="marimo")])]:
            return None
        case [
            ast.Expr(
                ast.Call(
                    func=ast.Attribute(value=ast.Name(id="mo"), attr="md"),
                    args=[ast.Constant(value=str(text))],
                )
            )
        ]:
            return Cell(inspect.cleandoc(text), "", [])
    first = body[0].lineno - 1
    while lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return Cell("", textwrap.dedent("\n".join(lines[first : body[-1].end_lineno])), body)
