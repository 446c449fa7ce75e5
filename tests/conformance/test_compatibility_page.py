"""The page of what works is what is found today; what is not known ends it with an error."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conformance.compatibility.survey import unprobed

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_page_is_what_a_server_does_today(stories_model, tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    if f"`tinker` {version('tinker')}." not in page:
        pytest.skip(f"the page is of another SDK than {version('tinker')}; write it anew")
    written = tmp_path / "page.md"
    module = "tests.conformance.compatibility"
    done = subprocess.run(
        [sys.executable, "-m", module, f"model_name={stories_model}", f"output={written}"],
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert written.read_text(encoding="utf-8") == page


def test_nothing_that_the_sdk_has_is_without_a_probe():
    assert list(unprobed()) == []
