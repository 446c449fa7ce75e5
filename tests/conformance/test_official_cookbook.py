"""Code written for the official tinker-cookbook finds its names, parameters and behaviour here.

All but the last test compare with committed lists. The last one runs the original's own tests,
programs and tutorials; see ``official_cookbook.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import official_cookbook
import official_names
import official_page
import official_renderings
import pytest
from environments import CACHE, REPO, python_with, run_in
from official_tokenizers import fill_hub_cache

from tinker_cookbook.recipes.rubric.train import CLIConfig
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments

HERE = Path(__file__).resolve().parent
SOURCE = "TINKER_COOKBOOK_OFFICIAL_SOURCE"


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return official_names.differences() | official_names.unresolved_imports()


def test_every_difference_from_the_official_package_has_a_reason(found):
    """Names, parameters, defaults, constants, ``__all__``, and imports of its programs."""
    exceptions = official_names.read_exceptions()
    unexplained = {
        name: problem
        for name, problem in found.items()
        if official_names.excuse(name, exceptions) is None
    }
    assert not unexplained, json.dumps(unexplained, indent=1)


def test_every_exception_is_still_needed(found):
    exceptions = official_names.read_exceptions()
    needless = [
        exception
        for exception in exceptions
        if not any(official_names.covers(exception, name) for name in found)
    ]
    assert not needless


def test_a_group_size_has_the_name_of_the_original_on_the_command_line_too():
    config = parse_arguments(CLIConfig, ["train_group_size=5"])
    assert config.group_size == 5


def test_the_page_has_the_table_that_the_program_writes():
    page = official_page.PAGE.read_text("utf-8")
    assert official_page.page_with_table(page) == page
    assert official_page.table() in page


@pytest.fixture(scope="module")
def official_source(tmp_path_factory) -> Path:
    """The unpacked source, of the folder that the variable names or from the package index."""
    if named := os.environ.get(SOURCE):
        return Path(named)
    folder = CACHE.parent / "tinker_cookbook-0.6.1"
    if not folder.is_dir():
        target = tmp_path_factory.mktemp("official")
        download = ["download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(target)]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *download, "tinker-cookbook==0.6.1"], capture_output=True
        )
        if done.returncode:
            pytest.skip(f"the source cannot be downloaded; set {SOURCE}: {done.stderr[-300:]}")
        (archive,) = target.glob("*.tar.gz")
        shutil.unpack_archive(archive, target, filter="data")
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(target / folder.name, folder)
    return folder


@pytest.mark.slow
def test_renderings_are_those_that_are_listed(shared_dir, tmp_path):
    """20 s, most of it for tokenizers."""
    fill_hub_cache(shared_dir / "tokenizers", tmp_path)
    recorded = json.loads(official_renderings.RECORDED.read_text("utf-8"))
    found = official_renderings.render(tmp_path / "hub")
    good, _ = official_renderings.report_renderings(recorded, found)
    assert good


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_official_tests_pass(official_source, shared_dir, tmp_path):
    """Half a minute: stability tests; half an hour, with all parts and the original's own side,
    where the variable names the source."""
    parts = official_cookbook.PARTS if os.environ.get(SOURCE) else ("downstream", "--recorded")
    run_in(
        python_with("official-cookbook"),
        str(HERE / "official_cookbook.py"), str(official_source), *parts,
        "--scratch", str(tmp_path), "--tokenizers", str(shared_dir / "tokenizers"),
        "--model", str(shared_dir / "models" / "stories260k"),
        timeout=3500, PYTHONPATH=os.pathsep.join([str(REPO), str(HERE.parent)]),
    )  # fmt: skip
