"""Code written for the official tinker-cookbook finds its names, parameters and behaviour here.

The first three tests compare with a committed list (3 s). The slow ones run the original's own
tests and recipes; they need its unpacked source in ``TINKER_COOKBOOK_OFFICIAL_SOURCE`` and take
some ten minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import official_names
import pytest

from tinker_cookbook.recipes.rubric.train import CLIConfig
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments

HERE = Path(__file__).resolve().parent


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


@pytest.fixture(scope="module")
def official_source() -> Path:
    folder = os.environ.get("TINKER_COOKBOOK_OFFICIAL_SOURCE")
    if not folder:
        pytest.skip("set TINKER_COOKBOOK_OFFICIAL_SOURCE to the source of tinker-cookbook 0.6.1")
    return Path(folder)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", ["downstream", "unit", "recipes", "renderings"])
def test_official_tests_and_recipes_pass(part, official_source, shared_dir, tmp_path):
    """The script exits with 0 where the share that the page about migration names is reached."""
    script = HERE / "official_cookbook.py"
    command = [sys.executable, str(script), str(official_source), part, "--scratch", str(tmp_path)]
    command += ["--tokenizers", str(shared_dir / "tokenizers")]
    command += ["--model", str(shared_dir / "models" / "stories260k")]
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
