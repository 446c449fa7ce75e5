"""Which package may import which, that imports form no circle, and the size of packages (3 s)."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tinker_cookbook.official import MODULES

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "tinker_cookbook"
# Optional features, which nothing but their own programs and each other may import.
LEAVES = tuple(
    f"tinker_cookbook.{name}"
    for name in (
        "backends.server_probe",
        "capture",
        "chat",
        "doctor",
        "engine.extensions",
        "eval.benchmarks.programs",
        "eval.custom_inspect_task",
        "eval.inspect_",
        "eval.run_inspect_evals",
        "fork",
        "official",
        "renderers.show",
        "replay",
        "runs",
        "sandbox",
        "server.openai.constraints",
        "server.openai.responses",
        "structured_output",
        "supervised.data_report",
        "sweep",
        "tool_use.mcp",
        "view",
        "weights._gguf_",
        "weights._ollama",
        "weights.gguf",
    )
)


def _files() -> Iterator[Path]:
    # rglob does not follow the links to recipes and tutorials, a layer above the package.
    above = {"recipes", "tutorials"}
    yield from (p for p in PACKAGE.rglob("*.py") if not above & {*p.relative_to(PACKAGE).parts})


def _module(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, modules: set[str]) -> set[str]:
    """Modules that ``path`` imports anywhere: in functions and under ``TYPE_CHECKING`` too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            children = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(children & modules)
            if len(children & modules) < len(children):
                found.add(node.module)
    return found


@cache
def _graph() -> dict[str, set[str]]:
    files = {_module(path): path for path in _files()}
    return {name: _imports(path, set(files)) for name, path in files.items()}


def test_the_package_imports_neither_recipes_nor_benchmarks():
    forbidden = ("recipes", "tinker_cookbook.recipes", "benchmarks", "tests")
    forbidden += ("tutorials", "tinker_cookbook.tutorials")
    wrong = {
        (name, used)
        for name, imports in _graph().items()
        for used in imports
        if any(used == root or used.startswith(f"{root}.") for root in forbidden)
    }
    assert wrong == set()


def test_the_core_imports_nothing_of_the_official_package():
    """Neither by an official path nor by a name in a text, except in the one lazy mechanism."""
    official = PACKAGE / "official"
    mechanism = PACKAGE / "utils" / "imports.py"
    naming = {
        _module(path)
        for path in _files()
        if official not in path.parents and path != mechanism
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and "tinker_cookbook.official" in str(node.value)
    }
    wrong = {
        (name, used)
        for name, imports in _graph().items()
        if not name.startswith("tinker_cookbook.official")
        for used in imports
        if used.startswith(("tinker_cookbook.official", *MODULES))
    }
    assert (naming, wrong) == (set(), set())


def test_the_core_imports_no_leaf():
    wrong = {
        (name, used)
        for name, imports in _graph().items()
        if not name.startswith(LEAVES)
        for used in imports
        if used.startswith(LEAVES)
    }
    assert wrong == set()


# Imports every module of the core, trains a step of SL and of RL, and then needs a leaf.
WITHOUT_LEAVES = """
import asyncio, importlib, pathlib, sys
from tinker_cookbook.backends import connect
from tinker_cookbook.backends.engine_options import EngineSettings

def imported(name):
    try:
        importlib.import_module(name)
    except Exception as error:
        cause = error.__cause__ or error  # a package that is not installed may be missing
        if not isinstance(cause, ImportError) or str(cause.name).startswith("tinker_cookbook"):
            raise

model, folder = sys.argv[1:]
for path in sorted(pathlib.Path("tinker_cookbook").rglob("*.py")):
    above = {"recipes", "tutorials", "inside"} & set(path.parts)
    if not above and path.stem not in ("__main__", "_serve"):
        imported(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
from recipes import rl_basic, sl_basic

for program, own in ((sl_basic, {"batch_size": 2}), (rl_basic, {"num_test": 0})):
    config = program.CLIConfig(
        model_name=model, max_steps=1, eval_every=0, device="cpu", renderer_name="role_colon",
        backend="local", log_path=f"{folder}/{program.__name__}", **own,
    )
    asyncio.run(program.main(config))
connect("local", engine_settings=EngineSettings(base_dtype="nf4"))
"""


@pytest.mark.slow
def test_the_core_works_without_the_leaves(tmp_path, stories_model):
    shutil.copytree(PACKAGE, tmp_path / "tinker_cookbook", symlinks=True)
    shutil.copytree(REPO / "recipes", tmp_path / "recipes")
    for leaf in LEAVES:
        path = tmp_path.joinpath(*leaf.split("."))
        for found in [*path.parent.glob(f"{path.name}*")]:
            shutil.rmtree(found) if found.is_dir() else found.unlink()
    arguments = [sys.executable, "-c", WITHOUT_LEAVES, stories_model, str(tmp_path / "runs")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
    last = done.stderr.strip().rpartition("\n")[2]
    assert "base_dtype=nf4 needs tinker_cookbook.engine.extensions.quantized" in last, done.stderr


def test_a_package_grows_only_with_its_entry_in_the_list():
    """Each entry is the number of lines that a package may have; a new total is a decision."""
    listed = json.loads((REPO / "tests" / "package_lines.json").read_text("utf-8"))
    lines: Counter[str] = Counter()
    for path in _files():
        first, *rest = path.relative_to(PACKAGE).parts
        lines[first if rest else "modules"] += path.read_text("utf-8").count("\n")
    grown = {
        name: f"{count} lines, {listed.get(name, 0)} in tests/package_lines.json; delete what the "
        "change made needless, or raise the entry in the same commit"
        for name, count in lines.items()
        if count > listed.get(name, 0)
    }
    assert grown == {}


def test_recipes_import_each_other_by_the_name_that_a_wheel_has():
    wrong = {
        (path.name, used)
        for path in (REPO / "recipes").rglob("*.py")
        for used in _imports(path, set())
        if used.split(".")[0] == "recipes"
    }
    assert wrong == set()


def test_the_engine_imports_only_itself_and_the_exceptions():
    allowed = (
        "tinker_cookbook.engine",
        "tinker_cookbook.exceptions",
        "tinker_cookbook.leaves",
        "tinker_cookbook._process",
        "tinker_cookbook.image_processing_utils",  # the one decoder, and the models' processors
        "tinker_cookbook.image_text_processor",
    )
    wrong = {
        (name, used)
        for name, imports in _graph().items()
        if name.startswith("tinker_cookbook.engine")
        for used in imports
        if used.startswith("tinker_cookbook.") and not used.startswith(allowed)
    }
    assert wrong == set()


def test_imports_form_no_circle():
    graph = _graph()
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for used in sorted((graph[name] & graph.keys()) - {name}):
                visit(used, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
