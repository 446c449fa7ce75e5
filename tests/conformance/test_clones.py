"""Sampling clients that were sent to another process, as data loaders and workers do."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import tinker
from tinker import types

CLONE = """
import json, sys, tinker
from tinker import types
client = tinker.SamplingClient.from_sampler_handle(sys.argv[1])
params = types.SamplingParams(max_tokens=6, seed=5, stop=[])
drawn = client.sample(types.ModelInput.from_ints([1, 44, 101]), 2, params).result()
print(json.dumps([list(map(int, one.tokens)) for one in drawn.sequences]))
"""


def test_a_client_samples_the_same_in_another_process(serving, stories_model, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", serving.url)
    monkeypatch.setenv("TINKER_API_KEY", serving.key())
    with tinker.ServiceClient() as service:
        client = service.create_sampling_client(base_model=stories_model).result()
        params = types.SamplingParams(max_tokens=6, seed=5, stop=[])
        prompt = types.ModelInput.from_ints([1, 44, 101])
        drawn = client.sample(prompt, 2, params).result()
        expected = [list(map(int, one.tokens)) for one in drawn.sequences]
        words = [sys.executable, "-c", CLONE, client.get_sampler_handle()]
        done = subprocess.run(words, env=os.environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout) == expected
        for _ in range(3):  # each chooses its own numbers
            clone = pickle.loads(pickle.dumps(client))
            again = clone.sample(prompt, 2, params).result()
            assert [list(map(int, one.tokens)) for one in again.sequences] == expected
