"""Runs the tests of the official tinker-cookbook against an implementation of its package.

The tests are copied into a scratch folder, so that ``import tinker_cookbook`` finds the
implementation and not the source that the tests came from. One pytest process runs one suite.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# A missing name at the top of a test file would fail all tests of the file. The copies import
# each name by this function instead, so that only the tests which use the name fail.
LENIENT = '''
import importlib
import os


class MissingName:
    """Stands for a name that the implementation lacks; any use of it fails."""

    def __init__(self, where):
        object.__setattr__(self, "where", where)

    def _fail(self, *args, **kwargs):
        raise ImportError(f"MISSING {self.where}")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingName(f"{self.where}.{name}")

    def __mro_entries__(self, bases):
        return (_Base,)

    def __call__(self, *args, **kwargs):
        # While test files are imported, a decorator or a constant that is missing must not
        # fail the whole file: the tests that use the result fail.
        return self._fail() if "PYTEST_CURRENT_TEST" in os.environ else self

    __getitem__ = __call__
    __iter__ = __len__ = __enter__ = __add__ = __or__ = __eq__ = __bool__ = __contains__ = _fail
    __hash__ = object.__hash__


class _Base:
    def __init__(self, *args, **kwargs):
        raise ImportError("MISSING base class")


def get(module, name=None):
    if module == "tinker_cookbook.renderers.testing_utils":
        module = "official_testing_utils"  # a helper of the tests, no part of the library
    elif module.endswith("_test"):  # helpers of another test file, which was copied too
        module = "unit." + module.split(".", 1)[1].replace(".", "__")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return MissingName(f"{module}.{name}" if name else module)
    if name is None:
        return found
    if hasattr(found, name):
        return getattr(found, name)
    try:
        return importlib.import_module(f"{module}.{name}")
    except ImportError:
        return MissingName(f"{module}.{name}")
'''

_PRIVATE = re.compile(
    r"MISSING [\w.]*\._\w+|has no attribute '_[a-z]\w*'|cannot import name '_\w+'"
    r"|does not have the attribute '_\w+'"
)


@dataclass(frozen=True)
class Outcome:
    """How one test ended: ``passed``, ``failed`` or ``skipped``, with its error."""

    status: str
    message: str = ""

    @property
    def needs_private_name(self) -> bool:
        """Whether the test failed because it uses a private name of the original."""
        return self.status == "failed" and _PRIVATE.search(self.message) is not None

    def needs_package(self, packages: Iterable[str]) -> bool:
        """Whether the test failed because it uses one of these packages."""
        missing = (f"MISSING tinker_cookbook.{package}" for package in packages)
        return self.status == "failed" and any(name in self.message for name in missing)


class _LenientImports(ast.NodeTransformer):
    """Replaces ``from tinker_cookbook… import name`` by calls that never fail."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.AST]:
        if not (node.module or "").startswith("tinker_cookbook"):
            return node
        return [
            _assignment(alias.asname or alias.name, str(node.module), alias.name)
            for alias in node.names
        ]

    def visit_Import(self, node: ast.Import) -> ast.AST | list[ast.AST]:
        ours = [alias for alias in node.names if alias.name.startswith("tinker_cookbook.")]
        if not ours or any(alias.asname is None for alias in ours):
            return node
        return [_assignment(str(alias.asname), alias.name, None) for alias in ours]


def _assignment(target: str, module: str, name: str | None) -> ast.stmt:
    argument = "" if name is None else f", {name!r}"
    return ast.parse(f"{target} = compat_lenient.get({module!r}{argument})").body[0]


def _make_lenient(source: str) -> str:
    tree = ast.parse(source)
    body = tree.body
    # A docstring and `from __future__` imports must stay at the top of the file.
    keep = next(
        (
            index
            for index, node in enumerate(body)
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            and not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        ),
        len(body),
    )
    body.insert(keep, ast.parse("import compat_lenient").body[0])
    return ast.unparse(ast.fix_missing_locations(_LenientImports().visit(tree)))


def is_test_file(file: Path) -> bool:
    """Whether pytest collects tests from the file; the others are helpers."""
    return file.name.startswith("test_") or file.stem.endswith("_test")


def copy_tests(source: Path, files: Iterable[Path], scratch: Path, *, lenient: bool) -> list[Path]:
    """Copies test files (relative to ``source``) into ``scratch`` and returns the copies."""
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "compat_lenient.py").write_text(LENIENT, "utf-8")
    (scratch / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    slow\n    integration\n    downstream_compat\n"
        "    timeout\n    asyncio\n",
        "utf-8",
    )
    helper = source / "tinker_cookbook" / "renderers" / "testing_utils.py"
    text = helper.read_text("utf-8")
    (scratch / "official_testing_utils.py").write_text(
        _make_lenient(text) if lenient else text, "utf-8"
    )
    copies = []
    for file in files:
        # One flat folder for unit tests: a folder named like the package would hide the package.
        parts = file.parts if file.parts[0] == "tests" else ("unit", "__".join(file.parts[1:]))
        target = scratch.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (source / file).read_text("utf-8")
        target.write_text(_make_lenient(text) if lenient and is_test_file(file) else text, "utf-8")
        if is_test_file(file):
            copies.append(target)
    for folder in (scratch / "tests", scratch / "tests" / "downstream_compat"):
        if folder.is_dir():
            (folder / "__init__.py").touch()
    return copies


def run_tests(
    implementation: Path, copies: Iterable[Path], scratch: Path, environment: dict[str, str]
) -> dict[str, Outcome]:
    """Runs copied test files with the package found in ``implementation``; outcome by test id."""
    report = scratch / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
    command += ["-o", "junit_family=xunit1", f"--junitxml={report}", "--import-mode=importlib"]
    command += [
        "--continue-on-collection-errors",
        "--timeout=120",
        "-p",
        "no:randomly",
        "-p",
        "no:xdist",
    ]
    command += [str(copy.relative_to(scratch)) for copy in copies]
    path = os.pathsep.join([str(scratch), str(implementation)])
    env = {**os.environ, **environment, "PYTHONPATH": path}
    with open(scratch / "pytest.log", "w", encoding="utf-8") as log:
        subprocess.run(command, cwd=scratch, env=env, stdout=log, stderr=subprocess.STDOUT)
    if not report.is_file():
        raise RuntimeError(f"pytest ended without a report; see {scratch / 'pytest.log'}")
    return _outcomes(report)


def _outcomes(report: Path) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        within = (case.get("classname") or "").rsplit(".", 1)[-1]
        file = case.get("file") or case.get("classname") or ""
        name = f"{file}::{within}::{case.get('name')}"
        problem = next((e for e in case if e.tag in ("failure", "error")), None)
        if problem is not None:
            text = " ".join(f"{problem.get('message') or ''}\n{problem.text or ''}".split())
            found[name] = Outcome("failed", text[:600])
            if problem.get("message") == "collection failure":
                # The cause stands at the end; it is that of all tests of the file.
                file_name = f"{(case.get('name') or '').replace('.', '/')}.py"
                found[file_name] = Outcome("failed", text[-600:])
        elif any(element.tag == "skipped" for element in case):
            found[name] = Outcome("skipped")
        else:
            found[name] = Outcome("passed")
    return found


def read_outcomes(file: Path) -> dict[str, Outcome]:
    """Outcomes that :func:`write_outcomes` wrote."""
    rows = json.loads(file.read_text("utf-8"))
    return {name: Outcome(*row) for name, row in rows.items()}


def write_outcomes(file: Path, outcomes: dict[str, Outcome]) -> None:
    """Writes outcomes as JSON, one entry for each test."""
    rows = {name: (outcome.status, outcome.message) for name, outcome in outcomes.items()}
    file.write_text(json.dumps(rows, indent=0), "utf-8")


def fresh_folder(folder: Path) -> Path:
    """An empty folder at this path."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
