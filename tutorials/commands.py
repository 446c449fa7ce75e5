"""The commands: list, run, open and render tutorials."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.exceptions import ConfigurationError, TrainingError, install_command
from tinker_cookbook.plot import save_figure
from tinker_cookbook.tutorials import CHECKS
from tinker_cookbook.tutorials.notebook import (
    FOLDER,
    Cell,
    Tutorial,
    execute,
    find_tutorial,
    tutorials,
)
from tinker_cookbook.utils.terminal import get_console

PROGRAM = "python -m tinker_cookbook.tutorials"
# By the first digit of a tutorial's number.
READERS = {
    "1": "begin",
    "2": "want to know the parts of a loop",
    "3": "write a task or a run of their own",
    "4": "choose a method or its settings",
    "5": "use a trained model in other programs",
}


@chz.chz
class ListSettings:
    """Settings of the list."""


@chz.chz
class OneSettings:
    """Settings of the commands for one tutorial."""

    number: str = chz.field(doc="Number of the tutorial, such as 101")


@chz.chz
class RenderSettings:
    """Settings of the pages."""

    output: str = chz.field(doc="Folder for NNN.md and NNN.png")
    only: str | None = chz.field(default=None, doc="Number of a single tutorial; default: all")


def list_tutorials(_: ListSettings) -> None:
    """Prints the tutorials."""
    found = tutorials()
    width = max(len(one.title) for one in found)
    for one in found:
        print(f"{one.number}  {one.title:{width}}  {one.seconds:3} s  {one.idea}")
    print(f"\n{PROGRAM} run 101    runs one in the terminal")
    print(f"{PROGRAM} open 101   opens one as a notebook (marimo)")


def run_tutorial(settings: OneSettings) -> None:
    """Runs a tutorial in the terminal: its text, code, output and numbers; saves its picture.

    Raises:
        TrainingError: A number is not as the text says.
    """
    from rich.markdown import Markdown
    from rich.syntax import Syntax

    tutorial, console = find_tutorial(settings.number), get_console()
    for step in execute(tutorial):
        if isinstance(step, Cell):
            code = Syntax("", "python").highlight(step.source)
            code.rstrip()
            console.print(Markdown(step.text) if step.text else code, soft_wrap=not step.text)
        elif _is_figure(step.value):
            folder = Path(cli_utils.default_log_path("tutorials"))
            folder.mkdir(parents=True, exist_ok=True)
            save_figure(step.value, folder / f"{tutorial.number}.png", "output")
            print(f"picture: {folder}/{tutorial.number}.png")
        elif step.value is not None:
            print(step.value)
        console.print()
    _require_promised()


def open_tutorial(settings: OneSettings) -> None:
    """Copies a tutorial to the working folder and opens it as a notebook in the browser.

    Raises:
        ConfigurationError: marimo is not installed.
    """
    tutorial = find_tutorial(settings.number)
    if importlib.util.find_spec("marimo") is None:
        raise ConfigurationError(
            f"the notebook needs marimo: {install_command('tutorials')}; without it: "
            f"{PROGRAM} run {settings.number}"
        )
    # A copy, because the reader changes cells, and marimo saves them.
    copy = Path(tutorial.path.name)
    if not copy.exists():
        shutil.copy(tutorial.path, copy)
    print(f"your copy: {copy.absolute()}")
    sys.exit(subprocess.call([sys.executable, "-m", "marimo", "edit", str(copy)]))


def render_tutorials(settings: RenderSettings) -> None:
    """Runs tutorials and writes a page with their texts, code, outputs and picture for each.

    Raises:
        TrainingError: A number is not as the text says.
    """
    folder = Path(settings.output)
    folder.mkdir(parents=True, exist_ok=True)
    for one in tutorials() if settings.only is None else [find_tutorial(settings.only, "only")]:
        print(f"{one.number} {one.title}", flush=True)
        with _new_runs_folder() as runs:
            page = page_of(one, folder).replace(runs, cli_utils.EXAMPLES_ROOT)
        (folder / f"{one.number}.md").write_text(page, "utf-8")


@contextmanager
def _new_runs_folder() -> Iterator[str]:
    """Default folders of runs are in an empty folder, so that no page tells of earlier runs."""
    before = os.environ.get(cli_utils.RUNS_DIR_ENV_VAR)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[cli_utils.RUNS_DIR_ENV_VAR] = folder
        try:
            yield folder
        finally:
            # An empty value counts as none.
            os.environ[cli_utils.RUNS_DIR_ENV_VAR] = before or ""


def page_of(tutorial: Tutorial, folder: Path) -> str:
    """Runs a tutorial and returns it as Markdown; writes its picture to ``folder``."""
    parts: list[str] = []
    for step in execute(tutorial, capture=True):
        if isinstance(step, Cell):
            parts.append(step.text or f"```python\n{step.source}\n```")
            continue
        # Commands that a run prints work with the reader's Python.
        printed = step.printed.replace(sys.executable, "python")
        if _is_figure(step.value):
            name = f"{tutorial.number}.png"
            save_figure(step.value, folder / name, "output")
            parts.append(f"![The picture of this tutorial]({name})")
        elif step.value is not None:
            printed += f"{step.value}\n"
        if printed:
            # Errors name files; the page should not say where it was made.
            parts.append(f"```text\n{printed.rstrip()}\n```".replace(str(FOLDER), FOLDER.name))
    _require_promised()
    readers = f"For people who {READERS[tutorial.number[0]]}: {tutorial.idea}."
    parts[0] = parts[0].replace("\n\n", f"\n\n{readers}\n\n", 1)
    start = f"`{PROGRAM} run {tutorial.number}` runs this page ({tutorial.seconds} s on a core)"
    parts.insert(1, f"{start}; `{PROGRAM} open {tutorial.number}` opens it as a notebook.")
    return "\n\n".join(parts) + "\n"


def _require_promised() -> None:
    if missed := [check.line for check in CHECKS if not check.holds]:
        raise TrainingError("not as the text says:\n" + "\n".join(missed))


def _is_figure(value: Any) -> bool:
    from matplotlib.figure import Figure

    return isinstance(value, Figure)
