"""Samples of several adapters at once: `adapters_together.py MODEL [ADAPTERS] [TOKENS]`.

Several runs of one engine each request one answer: one after the other, all at
once, and as many answers of a single run at once, in turn. Prints tokens a second of each, medians
of five rounds, and whether every run's answer alone equals its answer in the batch, token by token.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tinker

from tinker_cookbook.backends import connect

ROUNDS = 5
PROMPT = 64


def main(model: str, adapters: int = 8, tokens: int = 64) -> None:
    """All three, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        connection = connect("local", device="cpu", dtype="float32", root=Path(folder))
        clients = [sampler(connection.service, model, seed) for seed in range(adapters)]
        size = len(clients[0].get_tokenizer())
        generator = np.random.default_rng(0)
        seconds: dict[str, list[float]] = {"in turn": [], "at once": [], "one run": []}
        for _ in range(ROUNDS):  # never the same prompt twice: what was read is kept
            prompts = generator.integers(0, size, (3, adapters, PROMPT))
            for name, batch in zip(seconds, prompts, strict=True):
                requested = [clients[0]] * adapters if name == "one run" else clients
                took = timed(requested, batch, tokens, together=name != "in turn")[1]
                seconds[name].append(took)
        batch = generator.integers(0, size, (adapters, PROMPT))
        together = timed(clients, batch, tokens, together=True)[0]
        same = together == timed(clients, batch, tokens, together=False)[0]
        connection.close()
    for name, values in seconds.items():
        print(f"{name}: {adapters * tokens / median(values):.1f} tok/s")
    print(f"answers in the batch as alone: {same}")


def sampler(service: Any, model: str, seed: int) -> Any:
    """The sampling client of a run that has taken one step, so that its adapter is not zero."""
    run = service.create_lora_training_client(model, rank=32, seed=seed).result()
    tokens = np.random.default_rng(seed).integers(0, 100, 17).tolist()
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64", shape=[16]),
            "weights": tinker.TensorData(data=[1.0] * 16, dtype="float32", shape=[16]),
        },
    )
    run.forward_backward([datum], "cross_entropy").result()
    run.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    return run.save_weights_and_get_sampling_client()


def timed(
    clients: Sequence[Any], prompts: np.ndarray, tokens: int, *, together: bool
) -> tuple[list[list[int]], float]:
    """Greedy answers of each client to its prompt, and the seconds of all."""
    params = tinker.SamplingParams(max_tokens=tokens, temperature=0.0, stop=[])
    inputs = [tinker.ModelInput.from_ints(prompt.tolist()) for prompt in prompts]
    start = time.perf_counter()
    futures = []
    for client, prompt in zip(clients, inputs, strict=True):
        futures.append(client.sample(prompt, 1, params))
        if not together:
            futures[-1].result()
    answers = [future.result().sequences[0].tokens for future in futures]
    return answers, time.perf_counter() - start


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
