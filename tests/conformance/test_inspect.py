"""Inspect AI in an environment of its own, which the first run makes (about a minute, 200 MB)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from environments import REPO, python_with, run_in

pytestmark = [pytest.mark.slow, pytest.mark.shared]

HERE = Path(__file__).resolve().parent
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

@task
def cats():
    return Task(dataset=[Sample(input="Where is the cat?", target="a")], scorer=includes())
"""


@pytest.fixture(scope="module")
def inspect_python() -> Path:
    return python_with("inspect")


def test_the_checks_of_the_integration_pass(inspect_python):
    """One process, one to two minutes."""
    checks = sorted(map(str, (HERE / "inspect_checks").glob("*_checks.py")))
    words = ("-m", "pytest", "-q", *checks, "-p", "no:cacheprovider", "-p", "no:xdist")
    printed = run_in(inspect_python, *words, "--show-capture=no", HF_HUB_OFFLINE="1")
    assert " passed" in printed
    assert "skipped" not in printed


def test_a_chat_run_logs_the_tasks_of_inspect(inspect_python, stories_model, shared_dir, tmp_path):
    """Half a minute."""
    run_in(
        inspect_python, "-m", "recipes.chat_sl.train", "inline_evals=inspect",
        f"inline_evals_data={shared_dir / 'data'}", "inline_evals_limit=2",
        f"dataset={REPO / 'recipes' / 'example_data' / 'conversations.jsonl'}",
        f"model_name={stories_model}", "renderer_name=role_colon", "device=cpu", "dtype=float32",
        "batch_size=2", "max_length=128", "max_steps=2", "infrequent_eval_every=2",
        "eval_every=0", "show_samples=0", f"log_path={tmp_path / 'run'}", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "openai/gsm8k/accuracy" in row]
    assert [row["step"] for row in rows] == [0, 2]
    for row in rows:
        assert (row["openai/gsm8k/num_examples"], row["openai/gsm8k/num_errors"]) == (2, 0)
        assert (
            0
            <= row["google/IFEval/prompt_strict_acc"]
            <= row["google/IFEval/prompt_loose_acc"]
            <= 1
        )
    assert len(list((tmp_path / "run" / "inspect-logs").glob("*.eval"))) == 4


def test_inspect_finds_the_model_of_an_installed_wheel(inspect_python, stories_model, tmp_path):
    """Half a minute: builds the wheel, and runs Inspect in a folder without this checkout."""
    source, installed, empty = (tmp_path / name for name in ("source", "installed", "empty"))
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPO / "tinker_cookbook", source / "tinker_cookbook", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    # Built by this Python: that of the environment has an older setuptools.
    build = [sys.executable, "-m", "pip", "wheel", str(source), "-w", str(tmp_path)]
    build += ["-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(build, capture_output=True, text=True)
    if "setuptools" in done.stderr and done.returncode:
        pytest.skip("this environment has no setuptools to build with")
    assert done.returncode == 0, done.stderr[-2000:]
    install = [str(inspect_python), "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    install += ["--target", str(installed), str(next(tmp_path.glob("*.whl")))]
    subprocess.run(install, check=True)
    empty.mkdir()
    (empty / "task.py").write_text(TASK)
    command = [str(inspect_python), "-P", "-m", "inspect_ai", "eval", "task.py"]
    command += ["--model", f"tinker-sampling/{stories_model}", "--display", "plain"]
    for setting in ("renderer_name=role_colon", "device=cpu", "dtype=float32"):
        command += ["-M", setting]
    command += ["--max-tokens", "8", "--log-format", "json", "--log-dir", "logs"]
    env = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    log = json.loads(next((empty / "logs").glob("*.json")).read_text())
    assert log["status"] == "success"
    assert log["eval"]["model"] == f"tinker-sampling/{stories_model}"
    assert log["samples"][0]["output"]["usage"]["output_tokens"] == 8
