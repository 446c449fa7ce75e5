"""Recipes on SkyRL's server of the Tinker protocol, with its JAX backend on the CPU (90 s).

SkyRL needs Python 3.12 and other versions of packages than this environment has. The tests are
skipped unless TINKER_COOKBOOK_SKYRL_PYTHON is set to the Python of an environment with it:

    python3.12 -m venv skyrl-env && skyrl-env/bin/pip install 'skyrl[tinker,jax]==0.4.0' aiohttp

That is 6 GB, because its dependencies bring torch for CUDA. What was recorded of it is tested by
tests/unit/backends/test_server_needs.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from environments import REPO

VARIABLE = "TINKER_COOKBOOK_SKYRL_PYTHON"
START_SECONDS, RUN_SECONDS = 300, 1500

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not os.environ.get(VARIABLE),
        reason=f"{VARIABLE} is not set; SkyRL needs Python 3.12 (the docstring says how)",
    ),
]

# SkyRL starts its engine by `uv run FLAGS -m MODULE`; here everything is installed already.
UV = """#!{python}
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, *sys.argv[sys.argv.index("-m"):]])
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda n, _: child.send_signal(n))
sys.exit(child.wait())
"""


@dataclass
class SkyRL:
    url: str
    model: str


@pytest.fixture(scope="module")
def skyrl(tokenizer_folder, tmp_path_factory):
    """A server of a tiny Qwen3 with random weights."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    root = tmp_path_factory.mktemp("skyrl")
    model = root / "model"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder("qwen3"))
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
    ).save_pretrained(model)
    tokenizer.save_pretrained(model)
    bin_folder = root / "bin"
    bin_folder.mkdir()
    (bin_folder / "uv").write_text(UV.format(python=os.environ[VARIABLE]))
    (bin_folder / "uv").chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"uv run -m skyrl.tinker.api --backend jax --host 127.0.0.1 --port {port}".split()
    words += ["--base-model", str(model), "--checkpoints-base", str(root / "checkpoints")]
    words += ["--database-url", f"sqlite:///{root / 'tinker.db'}"]
    words += ["--backend-config", json.dumps({"max_lora_adapters": 16, "max_lora_rank": 8})]
    log = root / "server.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            words,
            cwd=root,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "PATH": f"{bin_folder}:{os.environ['PATH']}",
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": "",
            },
        )
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + START_SECONDS
    while not _responds(url):
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < until, log.read_text()[-3000:]
        time.sleep(1)
    yield SkyRL(url, str(model))
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def _responds(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=2).close()
    except OSError:
        return False
    return True


def run(skyrl: SkyRL, recipe: str, folder: Path, *words: str) -> tuple[int, str]:
    """Runs a recipe on the server; returns its status and what it printed."""
    common = [f"backend={skyrl.url}", f"model_name={skyrl.model}", "lora_rank=8", "eval_every=0"]
    done = subprocess.run(
        [sys.executable, "-m", recipe, *common, f"log_path={folder}", *words],
        cwd=REPO,
        env={**os.environ, "TINKER_API_KEY": "tml-local", "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    return done.returncode, done.stdout + done.stderr


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


RL = ("groups_per_batch=2", "group_size=2", "num_test=0", "max_tokens=4", "max_steps=3")


def test_supervised_learning_lowers_the_loss(skyrl, tmp_path):
    words = ("max_steps=3", "batch_size=2", "max_length=64", "learning_rate=1e-2")
    status, printed = run(skyrl, "recipes.sl_basic", tmp_path / "run", *words, "show_samples=0")
    assert status == 0, printed[-3000:]
    assert "reports no summed loss" in printed
    losses = [row["train_mean_nll"] for row in rows_of(tmp_path / "run")]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_rl_runs_with_a_loss_that_it_has(skyrl, tmp_path):
    status, printed = run(skyrl, "recipes.rl_basic", tmp_path / "run", *RL, "loss_fn=ppo")
    assert status == 0, printed[-3000:]
    assert "is replaced by" not in printed
    assert len(rows_of(tmp_path / "run")) == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("kl_penalty_coef=0.1",),
            r"kl_penalty_coef=0.1 needs log-probabilities of prompts \(it returned 3 log-"
            r"probabilities for 4 prompt tokens\)",
        ),
        (("loss_fn=gspo", *("loss_fn_config.clip_low_threshold=0.8",)), "needs the loss gspo"),
        (("grad_clip_norm=1.0",), "have no grad_clip_norm, which it would ignore"),
        (("train_unembed=False",), "needs the choice of adapted layers"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_it_lacks_is_said_before_the_first_step(skyrl, tmp_path, words, expected):
    status, printed = run(skyrl, "recipes.rl_basic", tmp_path / "run", *RL, *words)
    assert status == 1
    assert re.search(expected, printed), printed[-2000:]
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not rows_of(tmp_path / "run")
