"""The provider for LiteLLM, with LiteLLM in an environment of its own (250 MB)."""

from __future__ import annotations

from pathlib import Path

import pytest
from environments import REPO, python_with, run_in

pytestmark = [pytest.mark.slow, pytest.mark.shared]


def test_completions_equal_those_of_the_clients(serving, stories_model, tokenizer_folder):
    """Half a minute, most of it for imports."""
    printed = run_in(
        python_with("litellm"),
        str(Path(__file__).with_name("litellm_checks.py")), stories_model, serving.url,
        tokenizer_folder("qwen3"), KEY=serving.key(), OMP_NUM_THREADS="1", PYTHONPATH=str(REPO),
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )  # fmt: skip
    passed = [line[3:] for line in printed.splitlines() if line.startswith("ok ")]
    assert passed == ["completions", "stops", "tools", "checkpoint", "refusals", "server"]
