"""Inspect AI is optional; ``tests/conformance/test_inspect.py`` checks what needs it."""

from __future__ import annotations

import importlib
import sys

import pytest

from tinker_cookbook.eval.inspect_bridge.evaluators import InspectEvaluatorBuilder
from tinker_cookbook.eval.inspect_bridge.logs import write_inspect_logs
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
    with pytest.raises(ConfigurationError, match=PIP):
        write_inspect_logs("answers", "logs")


def test_the_defaults_are_the_official_ones():
    builder = InspectEvaluatorBuilder(tasks="a.py,b.py@c")
    assert (builder.temperature, builder.max_tokens, builder.top_p, builder.top_k) == (
        1.0, 1000, 1.0, -1
    )  # fmt: skip
    assert (builder.num_choices, builder.limit, builder.seed) == (1, None, None)
    assert (builder.debug_errors, builder.max_connections, builder.log_level) == (True, 512, "INFO")
    assert (builder.verbose, builder.include_reasoning, builder.log_dir) == (False, False, None)


def test_the_folder_of_a_run_is_known_inside_it_only(tmp_path):
    assert current_run_folder() is None
    with run_in_folder(tmp_path):
        assert current_run_folder() == tmp_path
    assert current_run_folder() is None
