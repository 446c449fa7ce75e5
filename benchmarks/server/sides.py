"""The sides of the measurement: the same calls in process, through a server, to an empty one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import tinker
from tinker import types

from benchmarks.server.config import Config
from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.server.wire import pass_message, sample_message

KINDS = ("forward_backward", "optim_step", "sample")


@dataclass(frozen=True)
class Work:
    """The requests: one batch for all passes, and a prompt for each call of ``sample``."""

    batch: Sequence[tinker.Datum]
    prompts: Sequence[types.ModelInput]
    sampling: types.SamplingParams

    @classmethod
    def random(cls, config: Config, vocabulary: int) -> Work:
        """Returns random tokens, the same for the same settings."""
        generator = np.random.default_rng(config.seed)

        def tokens(count: int) -> list[int]:
            return generator.integers(vocabulary, size=count).tolist()

        batch = []
        for _ in range(config.batch_size):
            row = tokens(config.length + 1)
            inputs = {"target_tokens": row[1:], "weights": [1.0] * config.length}
            batch.append(tinker.Datum(types.ModelInput.from_ints(row[:-1]), cast("Any", inputs)))
        count = config.warmup + config.calls
        prompts = [types.ModelInput.from_ints(tokens(config.prompt)) for _ in range(count)]
        sampling = types.SamplingParams(max_tokens=config.max_tokens, seed=config.seed, stop=[])
        return cls(batch, prompts, sampling)


class Side:
    """Clients of one service, and the seconds of each of their calls."""

    def __init__(self, service: Any, config: Config, work: Work) -> None:
        self._work = work
        rank, model = config.lora_rank, config.model_name
        self._training = service.create_lora_training_client(model, rank=rank, seed=0).result()
        self._sampling = service.create_sampling_client(base_model=model).result()
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def call(self, kind: str, number: int) -> Any:
        """Makes a call, waits for its result and records the time."""
        start = time.perf_counter()
        result = self._submit(kind, number).result()
        self.seconds[kind].append(time.perf_counter() - start)
        return result

    def forget(self) -> None:
        """Clears the recorded times."""
        self.seconds = {kind: [] for kind in KINDS}

    def _submit(self, kind: str, number: int) -> Any:
        if kind == "forward_backward":
            return self._training.forward_backward(list(self._work.batch), "cross_entropy")
        if kind == "optim_step":
            return self._training.optim_step(types.AdamParams(learning_rate=1e-6))
        prompt = self._work.prompts[number % len(self._work.prompts)]
        return self._sampling.sample(prompt, 1, self._work.sampling)


def messages_of(results: dict[str, Any]) -> dict[str, bytes]:
    """Returns the messages that the server would send for these results."""
    return {
        "forward_backward": pass_message(results["forward_backward"]),
        "asample": sample_message(results["sample"]),
    }


def start_empty(file: Path) -> tuple[subprocess.Popen[str], str]:
    """Starts the empty server; returns it and its URL."""
    command = [sys.executable, "-m", "benchmarks.server.empty", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    port = cast("IO[str]", process.stdout).readline().strip()
    if not port:
        raise BackendError(f"the empty server ended with status {process.wait()}")
    return process, f"http://127.0.0.1:{port}"


def in_turns(sides: dict[str, Side], calls: range) -> None:
    """Makes all kinds of calls on all sides; the first side changes from call to call."""
    names = list(sides)
    for number in calls:
        turn = number % len(names)
        for kind in KINDS:
            for name in names[turn:] + names[:turn]:
                sides[name].call(kind, number)
