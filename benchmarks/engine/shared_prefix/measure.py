"""One training run on groups of sequences, with prefixes shared or each sequence for itself."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.ceilings import synchronize
from tinker_cookbook.engine.devices import peak_memory_bytes
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.training.optimizer import AdamSettings
from tinker_cookbook.engine.training.run import TrainingRun

_LEARNING_RATE = 1e-4
_OFF_POLICY = 0.1
"""Standard deviation of the learner's minus the sampler's log-probabilities."""


@dataclass
class Measurement:
    """What a run reports; seconds and losses are of the timed steps, memory in bytes."""

    seconds: list[float]
    losses: list[float]
    grad_norms: list[float]
    computed_tokens: int
    """Padded tokens of the micro-batches that one pass computes."""
    token_budget: int
    loaded_bytes: int
    peak_bytes: int
    threads: int


def sample_tokens(job: dict[str, Any], vocab: int) -> list[np.ndarray]:
    """Returns random sequences [prompt + answer] of the case; a group shares its prompt."""
    rng = np.random.default_rng(job["seed"])
    shared = job["case"] == "shared"
    groups, size = (job["groups"], job["group_size"]) if shared else (job["distinct"], 1)
    out = []
    for _ in range(groups):
        prompt = rng.integers(0, vocab, size=job["prompt_tokens"])
        answers = rng.integers(0, vocab, size=(size, job["answer_tokens"]))
        out += [np.concatenate([prompt, answer]) for answer in answers]
    return out


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Trains ``job["steps"]`` steps; the log-probabilities before the first go to a file."""
    engine = Engine(job["device"], job["dtype"])
    try:
        found, logprobs = engine.submit(_measure, engine, job).result()
    finally:
        engine.close()
    np.save(Path(job["logprobs"]), logprobs)
    return dataclasses.asdict(found)


def _measure(engine: Engine, job: dict[str, Any]) -> tuple[Measurement, np.ndarray]:
    """On the worker: what is timed are passes and updates, not the way to the worker."""
    device = engine.choice.device
    base = BaseModel("bench", Path(job["folder"]), device, engine.choice.dtype)
    shares = base.shares_prefixes  # read in both variants, so that both have run its check
    # There is no public switch, so the cached value of the property is set.
    base.__dict__["shares_prefixes"] = shares and job["share"]
    adapter = Adapter.create(AdapterSpec(job["rank"]), base.targets, job["seed"], device)
    training = TrainingRun("bench", base, adapter, engine.token_budget(base))
    loaded = peak_memory_bytes(device)
    tokens = sample_tokens(job, base.vocab_size)
    budget = training.token_budget  # before a lack of memory lowers it
    before, data = _on_policy(training, tokens, job)
    planned = training._plan(data)
    _step(training, data[:2], 0.0)  # the first backward pass lays out weights anew
    losses, grad_norms, seconds = [], [], []
    for _ in range(job["steps"]):
        synchronize(device)
        start = time.perf_counter()
        loss, norm = _step(training, data, _LEARNING_RATE)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        losses.append(loss)
        grad_norms.append(norm)
    found = Measurement(
        seconds=seconds,
        losses=losses,
        grad_norms=grad_norms,
        computed_tokens=sum(micro.padded_tokens for micro in planned),
        token_budget=budget,
        loaded_bytes=loaded,
        peak_bytes=peak_memory_bytes(device),
        threads=torch.get_num_threads(),
    )
    return found, np.concatenate(before)


def _step(
    training: TrainingRun, data: Sequence[Example], learning_rate: float
) -> tuple[float, float]:
    """Loss and gradient norm of one pass and update."""
    loss = training.forward_backward(data, "importance_sampling").metrics["loss:sum"]
    metrics = training.optim_step(AdamSettings(learning_rate=learning_rate))
    return loss, metrics["grad_norm"]


def _on_policy(
    training: TrainingRun, tokens: Sequence[np.ndarray], job: dict[str, Any]
) -> tuple[list[np.ndarray], list[Example]]:
    """The model's log-probabilities of each row's targets, and the datums that come of them.

    The sampler's are the model's own, disturbed a little. This pass also warms up. Advantages are
    random, and zero on the prompt.
    """
    rng = np.random.default_rng([job["seed"], 1])

    def example(row: np.ndarray, logprobs: np.ndarray, advantages: np.ndarray) -> Example:
        inputs = {"target_tokens": row[1:], "logprobs": logprobs, "advantages": advantages}
        return Example(row[:-1], inputs)

    nothing = np.zeros(len(tokens[0]) - 1, dtype=np.float32)
    blank = [example(row, nothing, nothing) for row in tokens]
    before = training.forward_backward(blank, "importance_sampling", backward=False).logprobs
    trained = np.arange(len(nothing)) >= job["prompt_tokens"] - 1
    data = []
    for row, logprobs in zip(tokens, before, strict=True):
        disturbed = logprobs + rng.normal(0, _OFF_POLICY, len(row) - 1)
        advantages = rng.normal(0, 1, len(row) - 1)
        data.append(
            example(
                row,
                np.where(trained, disturbed, 0).astype(np.float32),
                np.where(trained, advantages, 0).astype(np.float32),
            )
        )
    return before, data
