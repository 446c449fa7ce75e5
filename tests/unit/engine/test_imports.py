"""In a fresh process the engine's worker imports nothing that the user's thread imports as well.

Two processes, about 7 s each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from homes import new_home

import tinker_cookbook

_ROOT = str(Path(tinker_cookbook.__file__).parent.parent)
_PROBE = """
import importlib.abc, json, sys, threading

class Recorder(importlib.abc.MetaPathFinder):
    seen = []
    def find_spec(self, name, path=None, target=None):
        self.seen.append((threading.current_thread().name, name))

sys.meta_path.insert(0, Recorder())
from tinker_cookbook.backends import connect

connection = connect("local", device="cpu")
client = connection.service.create_lora_training_client(sys.argv[1], rank=4)
if sys.argv[2] == "tokenizer":
    client.get_tokenizer()
else:
    from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from tinker import types

tokens = types.ModelInput.from_ints([1, 2, 3])
inputs = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
datum = types.Datum(model_input=tokens, loss_fn_inputs=inputs)
client.forward_backward([datum], "cross_entropy").result()
client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
sampler = client.save_weights_and_get_sampling_client()
sampler.sample(tokens, 2, types.SamplingParams(max_tokens=3)).result()
print(json.dumps([name for thread, name in Recorder.seen if thread == "engine"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["tokenizer", "transformers"])
def test_the_worker_imports_nothing(stories_model, tmp_path, order):
    environment = {**os.environ, "PYTHONPATH": _ROOT, "TINKER_COOKBOOK_HOME": new_home(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, stories_model, order],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    imported = json.loads(done.stdout.splitlines()[-1])
    shared = ("transformers.", "huggingface_hub.", "tokenizers.", "safetensors.")
    assert [name for name in imported if name.startswith(shared)] == []
    assert len(imported) < 20  # a spare module of torch or numpy, which imports nothing in circles
