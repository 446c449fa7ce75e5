"""Inspect AI in an environment of its own, which the first run makes (about a minute, 180 MB)."""

from __future__ import annotations

from pathlib import Path

import pytest
from environments import python_with, run_in

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def inspect_python() -> Path:
    return python_with("inspect", "inspect-ai>=0.3.100")


@pytest.mark.slow
@pytest.mark.shared
def test_the_checks_of_the_integration_pass(inspect_python):
    """One process, one to two minutes."""
    checks = sorted(map(str, (HERE / "inspect_checks").glob("*_checks.py")))
    words = ("-m", "pytest", "-q", *checks, "-p", "no:cacheprovider", "-p", "no:xdist")
    printed = run_in(inspect_python, *words, "--show-capture=no", HF_HUB_OFFLINE="1")
    assert " passed" in printed
    assert "skipped" not in printed
