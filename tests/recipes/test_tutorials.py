"""Every tutorial runs and gives the numbers that it promises; marimo can read all of them.

The pages stay in ``build/tutorials``, from where ``make docs`` takes them into the site.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from recipe_runs import REPO

from tinker_cookbook.tutorials import CHECKS
from tinker_cookbook.tutorials.commands import RenderSettings, render_tutorials
from tinker_cookbook.tutorials.model import make_model, tutorial_model
from tinker_cookbook.tutorials.notebook import FOLDER, tutorials

PAGES = REPO / "build" / "tutorials"
pytestmark = pytest.mark.slow  # 3 to 15 s each


@pytest.mark.parametrize("number", [one.number for one in tutorials()])
def test_a_tutorial_gives_what_it_promises(number):
    render_tutorials(RenderSettings(output=str(PAGES), only=number))
    page = (PAGES / f"{number}.md").read_text("utf-8")
    assert {check.is_mistake for check in CHECKS} == {True, False}
    assert f"![The picture of this tutorial]({number}.png)" in page
    assert (PAGES / f"{number}.png").stat().st_size > 5000
    # The last cell says what changes elsewhere.
    last = page.rpartition("\n## ")[2]
    assert "GPU" in last.partition("\n")[0]
    assert "hosted API" in last.partition("\n")[0]


def test_marimo_reads_every_tutorial():
    """Such as no name that two cells define, which marimo refuses."""
    pytest.importorskip("marimo")
    command = [sys.executable, "-m", "marimo", "check", *map(str, FOLDER.glob("[0-9]*.py"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_tutorial_is_a_program_of_marimo():
    pytest.importorskip("marimo")
    command = [sys.executable, str(FOLDER / "101_hello_tinker.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "answer: Grass is green.   (as expected" in done.stdout, done.stderr[-2000:]


def test_the_model_can_be_made_again(tmp_path):
    make_model(str(tmp_path / "model"), steps=2, conversations=500)
    configs = [Path(folder, "config.json") for folder in (tmp_path / "model", tutorial_model())]
    made, packaged = (json.loads(path.read_text("utf-8")) for path in configs)
    # Fewer texts have fewer tokens.
    assert made | {"vocab_size": 512} == packaged
