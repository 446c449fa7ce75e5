"""The engine and ``generate``. Both sample at temperature 1 over the whole vocabulary.

Both hold the base model in ``dtype``, apply the same adapter unmerged in ``dtype``, and return
answers of exactly the requested lengths. The engine also returns the log-probability of each token.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.engine.ceilings import synchronize
from benchmarks.engine.sampling.requests import Request, warm_up
from tinker_cookbook.engine.devices import cpu_threads, peak_memory_bytes
from tinker_cookbook.exceptions import TrainingError

_Call = tuple[float, float, int]
"""Time, processor seconds and number of tokens of a forward pass."""

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
class CaseResult:
    """One run of one case.

    ``fastest`` is the rate of the fastest step of a decode case, ``cpu_seconds`` the processor
    seconds of a token, ``prompt_seconds`` the time until all prompts of a decode case were
    computed. ``measured`` tells how much of the case was run.
    """

    tokens_per_second: float
    fastest: float | None
    cpu_seconds: float | None
    prompt_seconds: float | None
    measured: str
    peak_bytes: int


@dataclass
class Measurement:
    """Result of one run of a side; memory in bytes."""

    cases: dict[str, CaseResult]
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

    def __init__(self, setup: Setup) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.device = torch.device(setup.device)
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

    def sample(
        self, requests: Sequence[Request], temperature: float = 1.0, batch_size: int | None = None
    ) -> Answers:
        """Batch after batch, each until its longest answer is done; the surplus is cut off."""
        rows = [request for request in requests for _ in range(request.samples)]
        size = batch_size or len(rows)
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        sampled = [tokens for part in parts for tokens in self._generate(part, temperature)]
        return [tokens[: row.tokens] for row, tokens in zip(rows, sampled, strict=True)]

    def estimate(
        self, requests: Sequence[Request], batch_size: int, seconds: float
    ) -> tuple[float, int, int]:
        """Seconds that all batches take, and how many of how many steps that is estimated from.

        A batch stops when steps have taken ``seconds``, its share of them; its other steps are
        taken to last as long, although their context is longer. Samples are sorted by the lengths
        of their answers, which are unknown in practice.
        """
        rows = [request for request in requests for _ in range(request.samples)]
        rows.sort(key=lambda row: (row.tokens, len(row.prompt)))
        parts = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        whole, done, steps = 0.0, 0, 0
        for part in parts:
            with watching(self.embedding()) as calls:
                start = time.perf_counter()
                self._generate(part, 1.0, seconds / len(parts))
                end = time.perf_counter()
            longest = max(row.tokens for row in part)
            second = calls[1][0] if len(calls) > 1 else end
            step = (end - second) / max(1, len(calls) - 1)
            whole += end - start + (longest - len(calls)) * step
            done, steps = done + len(calls), steps + longest
        return whole, done, steps

    def _generate(
        self, rows: Sequence[Request], temperature: float, seconds: float = math.inf
    ) -> Answers:
        from transformers import StoppingCriteriaList

        end: list[float] = []

        def time_is_up(ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            now = time.perf_counter()
            end.append(end[0] if end else now + seconds)
            return torch.full((len(ids),), now >= end[0], device=ids.device)

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
                stopping_criteria=StoppingCriteriaList([time_is_up]),
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
def open_side(setup: Setup, variant: str) -> Iterator[Side]:
    """The engine, or ``generate``."""
    side = GenerateSide(setup) if variant == "generate" else EngineSide(setup)
    try:
        yield side
    finally:
        side.close()


def measure(
    setup: Setup,
    variant: str,
    cases: Mapping[str, Sequence[Request]],
    seconds: float,
    batch_size: int,
) -> Measurement:
    """Measures the cases one after another; see ``SamplingConfig`` for the settings.

    Raises:
        TrainingError: An answer does not have the requested length.
    """
    with open_side(setup, variant) as side:
        loaded = peak_memory_bytes(side.device)
        found = {
            case: _decode(side, requests, seconds)
            if case.startswith("decode")
            else _whole(side, requests, seconds, batch_size)
            for case, requests in cases.items()
        }
        return Measurement(found, loaded, peak_memory_bytes(side.device), side.threads())


def _decode(side: Side, requests: Sequence[Request], seconds: float) -> CaseResult:
    """Rate of the steps in which each sequence gets a token and no prompt is computed."""
    rows = len(requests)
    with watching(side.embedding()) as calls:
        side.sample(warm_up(requests, side.vocab))
    fits = int(seconds / min(_steps(calls)[0])[0])
    tokens = min(requests[0].tokens, max(8, fits))
    with watching(side.embedding()) as calls:
        start = time.perf_counter()
        asked = [dataclasses.replace(request, tokens=tokens) for request in requests]
        check_lengths(asked, side.sample(asked))
    steps, first = _steps(calls)
    return CaseResult(
        tokens_per_second=rows / median(step for step, _ in steps),
        fastest=rows / min(steps)[0],
        cpu_seconds=median(used for _, used in steps) / rows,
        prompt_seconds=first - start,
        measured=f"{len(steps)} steps",
        peak_bytes=peak_memory_bytes(side.device),
    )


def _steps(calls: Sequence[_Call]) -> tuple[list[tuple[float, float]], float]:
    """Seconds and processor seconds of the passes of all sequences, and when the first began.

    Their number of tokens is the most frequent one: some commits pad rows, so it is not known.
    """
    (tokens, _), *_ = Counter(count for _, _, count in calls).most_common()
    steps = [
        (after[0] - call[0], after[1] - call[1])
        for call, after in pairwise(calls)
        if call[2] == after[2] == tokens
    ]
    return steps, next(at for at, _, count in calls if count == tokens)


def _whole(side: Side, requests: Sequence[Request], seconds: float, batch_size: int) -> CaseResult:
    """Requested tokens by the time from the first call to the last answer."""
    useful = sum(request.useful for request in requests)
    side.sample(warm_up(requests, side.vocab))
    measured, processor = "all steps", None
    if isinstance(side, GenerateSide):
        taken, done, steps = side.estimate(requests, batch_size, seconds)
        if done < steps:
            measured = f"estimated from {done} of {steps} steps"
    else:
        start, used = time.perf_counter(), time.process_time()
        answers = side.sample(requests)
        synchronize(side.device)
        taken = time.perf_counter() - start
        processor = (time.process_time() - used) / useful
        check_lengths(requests, answers)
    peak = peak_memory_bytes(side.device)
    return CaseResult(useful / taken, None, processor, None, measured, peak)


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


@contextmanager
def watching(layer: torch.nn.Module) -> Iterator[list[_Call]]:
    """Collects the calls of ``layer``."""
    calls: list[_Call] = []

    def note(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        calls.append((time.perf_counter(), time.process_time(), inputs[0].numel()))

    handle = layer.register_forward_pre_hook(note)
    try:
        yield calls
    finally:
        handle.remove()
