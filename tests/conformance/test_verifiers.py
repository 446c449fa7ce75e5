"""Environments of the verifiers library, each generation of it in an environment of its own.

The first run makes the environments: 600 MB and 75 s for 0.4, 350 MB and 30 s for 0.1.9.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from environments import REPO, python_with, run_in

pytestmark = [pytest.mark.slow, pytest.mark.shared]

CHECKS = Path(__file__).resolve().parent / "verifiers_checks"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v1", ["one_turn", "turns", "tools", "failures", "served", "documented", "learning"]),
        ("legacy", ["rollouts", "own_client", "failures", "learning"]),
    ],
)
def test_rollouts_are_exact_and_train(
    serving, stories_model, tokenizer_folder, tmp_path, name, expected
):
    """Half a minute each: tokens, masks, log-probabilities, errors, a run and its continuation."""
    python = python_with(f"verifiers-{name}")
    printed = run_in(
        python, str(CHECKS / f"checks_{name}.py"), str(stories_model), serving.url, str(tmp_path),
        tokenizer_folder("qwen3"), KEY=serving.key(), OMP_NUM_THREADS="1",
        PYTHONPATH=f"{REPO}:{CHECKS}",
    )  # fmt: skip
    passed = [line.split()[1] for line in printed.splitlines() if line.startswith("ok ")]
    assert passed == expected
