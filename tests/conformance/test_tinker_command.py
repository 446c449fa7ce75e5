"""The SDK's command line in a process of its own against the server: downloads.

All other commands: ``compatibility.command_probes``."""

from __future__ import annotations

import os
import signal
import sys

import forks
import peft
import pytest
import tinker
import torch
from safetensors.torch import load_file
from test_clients import ADAM, DATA
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

TINKER = [sys.executable, "-m", "tinker.cli"]


@pytest.fixture(scope="module")
def run(serving, stories_model):
    """A run that stepped once; ends with the module."""
    os.environ["TINKER_API_KEY"] = serving.key()
    service = tinker.ServiceClient(base_url=serving.url)
    client = service.create_lora_training_client(stories_model, rank=4, seed=0).result()
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(ADAM).result()
    yield client
    service.close("success").result()
    del os.environ["TINKER_API_KEY"]


@pytest.fixture
def command(serving, tmp_path):
    """``command("run", "list")`` gives what it prints; ``status`` is the exit code expected."""

    def call(*words: str, status: int = 0) -> str:
        done = forks.run(
            [*TINKER, *words],
            env={
                **os.environ,
                "TINKER_BASE_URL": serving.url,
                "TINKER_API_KEY": serving.key(),
                "COLUMNS": "200",
                "HOME": str(tmp_path),
            },
            cwd=tmp_path,
            timeout=120,
        )
        # Threads of the SDK sometimes abort when the interpreter ends, after the work is done.
        assert done.returncode in (status, -signal.SIGABRT), done.stderr
        return done.stdout if status == 0 else done.stderr

    return call


@pytest.mark.parametrize("kind", ["weights", "external_weights"])
def test_a_download_gives_an_adapter_that_peft_loads(run, command, stories_model, tmp_path, kind):
    save = run.save_state if kind == "weights" else run.save_weights_external
    path = save(f"fetched-{kind}").result().path
    command("checkpoint", "download", path, "-o", "got")
    folder = tmp_path / "got" / path.removeprefix("tinker://").replace("/", "_")
    assert load_file(folder / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(stories_model, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, folder)
    tokens = DATA[0].model_input.to_ints()
    logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    targets = DATA[0].loss_fn_inputs["target_tokens"].to_torch()
    expected = run.forward(DATA[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    found = logits.gather(1, targets[:, None])[:, 0].detach()
    torch.testing.assert_close(found, expected.to_torch(), atol=1e-4, rtol=0)
    refused = command("checkpoint", "download", path, "-o", "got", status=1)
    assert "already exists" in refused
    command("checkpoint", "download", path, "-o", "got", "--force")
