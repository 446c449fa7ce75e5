"""llama.cpp computes from exported files what the engine computes (3 minutes, and a download).

llama.cpp comes from PyPI's ``xllamacpp``, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from environments import python_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.fixture(scope="session")
def llama_python() -> Path:
    """A Python with xllamacpp and the packages of this one."""
    pytest.importorskip("gguf")
    return python_with("llama-cpp")


@pytest.fixture
def cases(llama_python, tmp_path):
    def run(*words: str) -> list[dict]:
        done = subprocess.run(
            [llama_python, HERE / "gguf_cases.py", tmp_path, *words],
            capture_output=True,
            text=True,
            env=dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{HERE}", OMP_NUM_THREADS="1"),
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_every_architecture_agrees_merged_and_as_lora(cases):
    rows = [row for row in cases("models") if row["reader"].startswith("llama.cpp")]
    assert len(rows) == 2 * 10
    for row in rows:
        assert row["positions"] > 400
        # llama.cpp has a table in float16 for the activation of Gemma.
        assert row["largest"] < (5e-3 if row["model"] == "gemma3" else 5e-5), row


def test_tokens_of_published_tokenizers_are_equal(cases, tokenizer_folder):
    families = ["smollm2", "qwen2_5", "qwen3", "llama3", "gemma3"]
    # A difference is an error of the export.
    rows = cases("tokenizers", *[str(tokenizer_folder(family)) for family in families])
    assert sum(row["reader"].startswith("llama.cpp") for row in rows) == len(families)


def test_llama_cpp_notices_a_wrong_order_of_rows(cases):
    (row,) = cases("permutation")
    assert "log-probabilities of llama.cpp" in row["error"]
    assert not row["kept"]


def test_stories260k_agrees_in_every_type(cases, shared_dir):
    rows = cases("stories", str(shared_dir / "models" / "stories260k"))
    found = {row["model"]: row for row in rows if row["reader"].startswith("llama.cpp")}
    assert list(found) == ["f32", "f16", "bf16", "q8_0", "q4_0"]
    assert found["f32"]["largest"] < 1e-3
    assert found["f16"]["mean"] < found["q8_0"]["mean"] < found["q4_0"]["mean"]


def test_llama_cpp_answers_in_the_format_of_the_run(cases):
    for row in cases("chat"):
        assert row["template"] == row["prompt"]
        assert row["answer"] == " house"
