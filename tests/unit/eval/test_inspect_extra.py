"""Inspect AI is optional; ``tests/conformance/test_inspect.py`` checks what needs it."""

from __future__ import annotations

import importlib
import sys

import pytest

from tinker_cookbook.eval.inspect_bridge.evaluators import InspectEvaluatorBuilder
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.current import current_run_folder, run_in_folder

PIP = r"need the package inspect_ai.*pip install -e '.*\[inspect\]'"


@pytest.fixture
def _without_inspect(monkeypatch):
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    for name in ("inspect_utils", "inspect_messages"):
        monkeypatch.delitem(sys.modules, f"tinker_cookbook.eval.{name}", raising=False)


@pytest.mark.usefixtures("_without_inspect")
def test_a_missing_package_is_named_with_the_command_that_installs_it():
    # The builder itself needs nothing: a config may hold it.
    builder = InspectEvaluatorBuilder(tasks="my_task.py", renderer_name="llama3")
    with pytest.raises(ConfigurationError, match=PIP):
        builder()
    with pytest.raises(ConfigurationError, match=PIP):
        importlib.import_module("tinker_cookbook.eval.inspect_bridge.model")


def test_the_folder_of_a_run_is_known_inside_it_only(tmp_path):
    assert current_run_folder() is None
    with run_in_folder(tmp_path):
        assert current_run_folder() == tmp_path
    assert current_run_folder() is None
