"""The real vLLM as sampler, started by this package (slow: 2 minutes; see ``python_of_vllm``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tinker
from environments import REPO, python_of_vllm
from tiny_model import make_tiny_model

from tinker_cookbook.backends import connect
from tinker_cookbook.engine.sampler_settings import SamplerSettings

pytestmark = pytest.mark.slow
# Without a thread for each core, and with little memory, as tests of other packages run beside it.
FLAGS = (
    "VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 --enforce-eager --max-model-len 512 "
    "--kv-cache-memory-bytes 268435456"
)
PROMPT = [1, 5, 6, 7, 8]
PARAMS = tinker.SamplingParams(max_tokens=24, seed=1, stop=[])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    # Attention of vLLM on CPUs needs heads of 32 or more.
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=128)


@pytest.fixture(scope="module")
def service(model):
    settings = SamplerSettings("vllm", python_of_vllm(), FLAGS)
    with connect("local", device="cpu", dtype="float32", sampler=settings) as connection:
        yield connection.service
        external = connection.service.engine.external
        process, folder = external._server.result().process, external._adapters.folder
    assert not process.running
    assert not folder.exists()


def step(client) -> None:
    """A step that changes every layer and the head."""
    tokens = np.arange(3, 60)
    fields = {
        "target_tokens": tinker.TensorData.from_numpy(tokens[1:]),
        "weights": tinker.TensorData.from_numpy(np.ones(len(tokens) - 1, dtype=np.float32)),
    }
    prompt = tinker.ModelInput.from_ints(tokens[:-1].tolist())
    datum = tinker.Datum(model_input=prompt, loss_fn_inputs=fields)
    client.forward_backward([datum], "cross_entropy")
    client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()


def ask(client, count: int = 4, **kwargs):
    return client.sample(tinker.ModelInput.from_ints(PROMPT), count, PARAMS, **kwargs)


def worst_difference(client, response) -> float:
    """Largest distance of log-probabilities from the engine's scores of the same tokens."""
    found = 0.0
    for sequence in response.sequences:
        whole = tinker.ModelInput.from_ints([*PROMPT, *sequence.tokens])
        scores = np.array(client.compute_logprobs(whole).result()[len(PROMPT) :])
        found = max(found, float(np.abs(scores - np.array(sequence.logprobs)).max()))
    return found


def tokens_of(response) -> list[list[int]]:
    return [list(sequence.tokens) for sequence in response.sequences]


def test_samples_are_those_of_the_weights(service, model, record_property):
    """Adapters with the head, several in a batch, new weights in the next request."""
    client = service.create_lora_training_client(model, rank=8, seed=0)
    samplers, alone = [service.create_sampling_client(base_model=model).result()], []
    for _ in range(2):
        step(client)
        samplers.append(client.save_weights_and_get_sampling_client().result())
    for sampler in samplers:
        response = ask(sampler).result()
        difference = worst_difference(sampler, response)
        record_property("vllm_engine_fp32", difference)
        assert difference <= 1e-4
        alone.append(tokens_of(response))
    assert len({str(tokens) for tokens in alone}) == 3
    together = [ask(sampler) for sampler in samplers + samplers]
    assert [tokens_of(future.result()) for future in together] == alone + alone


def test_a_request_is_streamed_cancelled_and_unloaded(service, model):
    sampler = service.create_sampling_client(base_model=model).result()
    seen: list[int] = []
    streamed = ask(sampler, 2, on_token=lambda index, _: seen.append(index)).result()
    assert tokens_of(streamed) == tokens_of(ask(sampler, 2).result())
    assert (seen.count(0), seen.count(1)) == (24, 24)
    long = tinker.SamplingParams(max_tokens=480, stop=[])
    future = sampler.sample(tinker.ModelInput.from_ints(PROMPT), 4, long).future()
    time.sleep(0.2)
    assert future.cancel()
    greedy = tinker.SamplingParams(max_tokens=5, temperature=0)
    found = sampler.sample(
        tinker.ModelInput.from_ints(PROMPT), 2, greedy, topk_sample_logprobs=3
    ).result()
    first, second = found.sequences
    assert list(first.tokens) == list(second.tokens)
    assert [row[0][0] for row in first.topk_logprobs] == list(first.tokens)


def test_a_recipe_runs_five_steps(model, tmp_path):
    """The sums are so small that a model of noise is right now and then."""
    settings = {
        "model_name": model, "log_path": tmp_path / "run", "renderer_name": "role_colon",
        "sampler": "vllm", "vllm_python": python_of_vllm(), "vllm_args": FLAGS,
        "device": "cpu", "dtype": "float32", "max_steps": 5, "group_size": 16, "max_operand": 1,
        "num_test": 0, "importance_ratio_cap": 2, "behavior_if_log_dir_exists": "raise",
    }  # fmt: skip
    words = [f"{name}={value}" for name, value in settings.items()]
    done = subprocess.run(
        [sys.executable, "-m", "recipes.rl_basic", *words],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "sampler: vLLM of" in done.stdout + done.stderr
    lines = (Path(tmp_path) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    trained = [row for row in rows if "optim/kl_sample_train_v2" in row]
    assert len(rows) >= 5
    assert trained
    for row in trained:
        assert row["optim/kl_sample_train_v2"] < 1e-8
        assert abs(row["optim/importance_ratio_max"] - 1) < 1e-3
