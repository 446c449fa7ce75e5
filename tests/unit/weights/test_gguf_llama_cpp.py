"""llama.cpp computes from exported files what the engine computes (90 s, and a download).

llama.cpp comes from PyPI's ``xllamacpp``, in an environment of its own; one process has all cases.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from environments import python_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
HERE = Path(__file__).parent
ROOT = HERE.parents[2]


# "llama" and "qwen2" are parts of others.
MODELS = (
    "llama_tied", "llama_biases", "llama3", "llama_linear", "mistral", "qwen2_yarn", "qwen3",
    "gemma3",
)  # fmt: skip
FAMILIES = ("smollm2", "qwen2_5", "llama3")  # stories260k has SentencePiece


@pytest.fixture(scope="module")
def rows(request, tmp_path_factory) -> Callable[[str], list[dict]]:
    """``rows("models")`` gives what one process with xllamacpp found; skips what is absent here."""
    pytest.importorskip("gguf")
    wanted: dict[str, list[str]] = {"models": [*MODELS], "chat": []}
    with contextlib.suppress(pytest.skip.Exception):
        tokenizer_folder = request.getfixturevalue("tokenizer_folder")
        wanted["tokenizers"] = [str(tokenizer_folder(family)) for family in FAMILIES]
        wanted["stories"] = [request.getfixturevalue("stories_model")]
    wanted["permutation"] = []  # the last: it breaks the export
    done = subprocess.run(
        [
            *(python_with("llama-cpp"), HERE / "gguf_cases.py"),
            *(tmp_path_factory.mktemp("gguf"), json.dumps(wanted)),
        ],
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{HERE}", OMP_NUM_THREADS="1"),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))

    def of(name: str) -> list[dict]:
        return found[name] if name in wanted else pytest.skip("trial data is absent")

    return of


def test_every_architecture_agrees_merged_and_as_lora(rows):
    found = [row for row in rows("models") if row["reader"].startswith("llama.cpp")]
    assert len(found) == 2 * len(MODELS) - 2
    for row in found:
        assert row["positions"] > 400
        # llama.cpp has a table in float16 for the activation of Gemma.
        assert row["largest"] < (5e-3 if row["model"] == "gemma3" else 5e-5), row


def test_tokens_of_published_tokenizers_are_equal(rows):
    # A difference is an error of the export.
    found = rows("tokenizers")
    assert sum(row["reader"].startswith("llama.cpp") for row in found) == len(FAMILIES)


def test_llama_cpp_notices_a_wrong_order_of_rows(rows):
    (row,) = rows("permutation")
    assert "log-probabilities of llama.cpp" in row["error"]
    assert not row["kept"]


def test_stories260k_agrees_in_every_type(rows):
    found = {row["model"]: row for row in rows("stories") if row["reader"].startswith("llama.cpp")}
    assert list(found) == ["f32", "f16", "bf16", "q8_0", "q4_0"]
    assert found["f32"]["largest"] < 1e-3
    assert found["f16"]["mean"] < found["q8_0"]["mean"] < found["q4_0"]["mean"]


def test_llama_cpp_answers_in_the_format_of_the_run(rows):
    for row in rows("chat"):
        assert row["template"] == row["prompt"]
        assert row["answer"] == " house"
