"""The two samplers that are compared. Both sample at temperature 1 over the whole vocabulary.

Both hold the base model in ``dtype``, apply the same adapter unmerged in ``dtype``, and return
answers of exactly the requested lengths. The engine also returns the log-probability of each token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.engine.ceilings import synchronize
from benchmarks.engine.sampling.requests import Request, draw_probes, warm_up
from tinker_cookbook.engine.devices import cpu_threads, peak_memory_bytes
from tinker_cookbook.exceptions import TrainingError

_PROBES = 5

Answers = list[list[int]]
"""Tokens of every sample, request by request."""


@dataclass(frozen=True)
class Setup:
    """Settings of a side. ``device`` and ``dtype`` are resolved names."""

    folder: Path
    adapter: Path
    device: str
    dtype: str
    rank: int


@dataclass(frozen=True)
class StaticBatches:
    """Batches of ``generate``: samples at a time, and whether they are sorted by length."""

    batch_size: int
    by_length: bool


@dataclass
class Measurement:
    """Result of one run of a side; times in seconds, memory in bytes.

    ``first_token_seconds`` is the median time from a call on an idle sampler to an answer of one
    token, ``first_step_seconds`` that to the first forward pass (``None`` if it was not seen).
    """

    seconds: float
    first_token_seconds: float
    first_step_seconds: float | None
    loaded_bytes: int
    """Peak when the model was loaded and nothing was sampled yet."""
    peak_bytes: int
    threads: int
    notes: list[str] = field(default_factory=list)


class EngineSide:
    """The engine's batching sampler; all requests are submitted at once."""

    def __init__(self, setup: Setup) -> None:
        from safetensors.torch import load_file

        from tinker_cookbook.engine.engine import Engine
        from tinker_cookbook.engine.model.base_model import BaseModel
        from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec
        from tinker_cookbook.engine.sampling.sampler import Sampler

        self.engine = Engine(setup.device, setup.dtype)
        self.device = self.engine.choice.device

        def load() -> Sampler:
            base = BaseModel("bench", setup.folder, self.device, self.engine.choice.dtype)
            saved = load_file(setup.adapter / "adapter_model.safetensors")
            spec, source = AdapterSpec(setup.rank), str(setup.adapter)
            return Sampler(base, Adapter.load(spec, base.targets, saved, self.device, source))

        self.sampler = self.engine.submit(load).result()
        self.vocab = self.sampler.base.vocab_size

    def sample(self, requests: Sequence[Request], temperature: float = 1.0) -> Answers:
        """Submits all, then waits for all."""
        from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request

        futures = [
            self.engine.sample(
                sample_request(
                    self.sampler,
                    request.prompt,
                    request.samples,
                    SamplingSettings(
                        max_tokens=request.tokens, temperature=temperature, seed=number
                    ),
                )
            )
            for number, request in enumerate(requests)
        ]
        return [sample.tokens for future in futures for sample in future.result()]

    def embedding(self) -> torch.nn.Module:
        """The layer that every forward pass begins with."""
        return self.sampler.base._model.get_input_embeddings()

    def threads(self) -> int:
        """Threads that compute."""
        return self.engine.submit(torch.get_num_threads).result()

    def close(self) -> None:
        """Ends the engine's worker."""
        self.engine.close()


class GenerateSide:
    """``PeftModel.generate`` on left-padded static batches."""

    def __init__(self, setup: Setup, batches: StaticBatches) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.device, self._batches = torch.device(setup.device), batches
        if self.device.type == "cpu":
            torch.set_num_threads(cpu_threads())
        model: Any = AutoModelForCausalLM.from_pretrained(
            setup.folder, dtype=getattr(torch, setup.dtype), local_files_only=True
        )
        # The model's own settings of sampling and of its end would override ours.
        model.generation_config = GenerationConfig(pad_token_id=0)
        model.to(self.device)
        self.vocab: int = model.get_output_embeddings().weight.shape[0]
        self._model: Any = PeftModel.from_pretrained(
            model, str(setup.adapter), autocast_adapter_dtype=False
        ).eval()

    def sample(self, requests: Sequence[Request], temperature: float = 1.0) -> Answers:
        """Batch after batch, each until its longest answer is done; the surplus is cut off."""
        rows = [request for request in requests for _ in range(request.samples)]
        order = list(range(len(rows)))
        if self._batches.by_length:
            order.sort(key=lambda i: (rows[i].tokens, len(rows[i].prompt)))
        answers: Answers = [[] for _ in rows]
        size = self._batches.batch_size
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            sampled = self._generate([rows[i] for i in chosen], temperature)
            for i, tokens in zip(chosen, sampled, strict=True):
                answers[i] = tokens[: rows[i].tokens]
        return answers

    def _generate(self, rows: Sequence[Request], temperature: float) -> Answers:
        width = max(len(row.prompt) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, width - len(row.prompt) :] = torch.tensor(row.prompt)
            mask[i, width - len(row.prompt) :] = 1
        drawing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids.to(self.device),
                attention_mask=mask.to(self.device),
                max_new_tokens=max(row.tokens for row in rows),
                **(drawing if temperature else {"do_sample": False}),
            )
        return out[:, width:].tolist()

    def embedding(self) -> torch.nn.Module:
        """The layer that every forward pass begins with."""
        return self._model.get_input_embeddings()

    def threads(self) -> int:
        """Threads that compute."""
        return torch.get_num_threads()

    def close(self) -> None:
        """Nothing to end."""


Side = EngineSide | GenerateSide


@contextmanager
def open_side(setup: Setup, batches: StaticBatches | None) -> Iterator[Side]:
    """The engine, or ``generate`` where ``batches`` are given."""
    if batches is not None:
        yield GenerateSide(setup, batches)
        return
    side = EngineSide(setup)
    try:
        yield side
    finally:
        side.close()


def measure(
    setup: Setup, requests: Sequence[Request], batches: StaticBatches | None
) -> Measurement:
    """Warms up, probes the time to the first token, then samples all requests once.

    Raises:
        TrainingError: An answer does not have the requested length.
    """
    with open_side(setup, batches) as side:
        loaded = peak_memory_bytes(side.device)
        side.sample(warm_up(requests, side.vocab))
        first_token, first_step = _probe(side, draw_probes(requests, side.vocab, _PROBES))
        synchronize(side.device)
        start = time.perf_counter()
        answers = side.sample(requests)
        synchronize(side.device)
        seconds = time.perf_counter() - start
        check_lengths(requests, answers)
        return Measurement(
            seconds=seconds,
            first_token_seconds=first_token,
            first_step_seconds=first_step,
            loaded_bytes=loaded,
            peak_bytes=peak_memory_bytes(side.device),
            threads=side.threads(),
        )


def check_lengths(requests: Sequence[Request], answers: Answers) -> None:
    """Raises ``TrainingError`` if an answer does not have the requested length."""
    expected = [request.tokens for request in requests for _ in range(request.samples)]
    given = [len(answer) for answer in answers]
    if given != expected:
        differing = (
            i for i, pair in enumerate(zip(given, expected, strict=False)) if len({*pair}) > 1
        )
        wrong = next(differing, 0)
        raise TrainingError(
            f"the sampler gave {len(given)} answers for {len(expected)}; sample {wrong} has "
            f"{given[wrong] if given else 0} tokens, expected {expected[wrong]}"
        )


def _probe(side: Side, prompts: Sequence[list[int]]) -> tuple[float, float | None]:
    """Median seconds from a call to an answer of one token, and to the first forward pass."""
    first_token, first_step = [], []
    for prompt in prompts:
        with _watching(side.embedding()) as forwards:
            start = time.perf_counter()
            side.sample([Request(prompt, 1, 1)])
            first_token.append(time.perf_counter() - start)
        if forwards:
            first_step.append(forwards[0] - start)
    return median(first_token), median(first_step) if first_step else None


@contextmanager
def _watching(layer: torch.nn.Module) -> Iterator[list[float]]:
    """Collects the times at which ``layer`` is called."""
    times: list[float] = []

    def note(*_: object) -> None:
        times.append(time.perf_counter())

    handle = layer.register_forward_pre_hook(note)
    try:
        yield times
    finally:
        handle.remove()
