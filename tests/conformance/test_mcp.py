"""MCP servers with both major versions of the ``mcp`` package, each in an environment of its own.

The first run makes the environments (some 15 s and 20 MB each).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from environments import python_with, run_in

CHECKS = Path(__file__).resolve().parent / "mcp_checks" / "mcp_checks.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mcp1", "mcp2"])
def test_the_checks_pass(name):
    """12 s each, if the machine is idle: seven servers are started."""
    python = python_with(name)
    printed = run_in(python, "-m", "pytest", "-q", str(CHECKS), "-p", "no:cacheprovider")
    assert " passed" in printed
    assert "skipped" not in printed
