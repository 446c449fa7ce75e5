"""One run on prompts with an image, by the engine or by plain transformers with peft.

Both begin with the bytes of PNG files, as a data set or a request has them.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from benchmarks.engine.ceilings import synchronize
from benchmarks.engine.variants import ADAM, ALPHA, start_adapter
from tinker_cookbook.engine.devices import cpu_threads, peak_memory_bytes
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.training.optimizer import AdamSettings
from tinker_cookbook.engine.training.run import TrainingRun
from tinker_cookbook.engine.vision.images import is_image, joined
from tinker_cookbook.engine.vision.processing import image_reader
from tinker_cookbook.image_processing_utils import decode_image, get_image_processor, pillow

_TARGETS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
_BEGINNING = 4
"""Tokens before the image."""


class Row(NamedTuple):
    """``text`` [T] token ids, an image after the first of them, and the number of trained ones."""

    text: np.ndarray
    image: bytes
    answer: int


class _Side(Protocol):
    def train(self, rows: Sequence[Row]) -> float:
        """Returns the mean loss of a step."""
        ...

    def sample(self, row: Row, count: int, tokens: int) -> None:
        """Draws ``count`` answers."""
        ...


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Returns losses, seconds and peak memory.

    Seconds on a CPU are those of the processor, which other programs do not change.
    """
    device = torch.device(job["device"])
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads())
    side: _Side = {"engine": _Engine, "plain": _Plain}[job["variant"]](job)
    rng = np.random.default_rng(job["seed"])
    loaded = peak_memory_bytes(device)

    def seconds(work: Callable[[], Any]) -> float:
        synchronize(device)
        start = clock()
        results.append(work())
        synchronize(device)
        return clock() - start

    results: list[Any] = []
    rows = [_row(job, rng) for _ in range(job["rows"])]
    group = [_row(job, rng, rows[0]) for _ in range(job["samples"])]
    # A first step lays out weights and gets memory from the system, which others do not.
    side.train([_row(job, rng) for _ in range(job["rows"])])
    results.clear()
    out = {
        "new_images": seconds(lambda: side.train(rows)),
        "seen_images": seconds(lambda: side.train(rows)),
        "group": seconds(lambda: side.train(group)),
        "loaded_bytes": loaded,
        "peak_bytes": peak_memory_bytes(device),
    }
    losses = list(results)
    prompts = [_row(job, rng, smaller=False) for _ in range(3)]
    side.sample(prompts[0], 2, 2)
    out |= {
        "prompt": seconds(lambda: side.sample(prompts[1], 1, 1)),
        "answers": seconds(lambda: side.sample(prompts[2], job["samples"], job["answer_tokens"])),
        # Of the engine these are the answers alone, because it has the prompt.
        "again": seconds(lambda: side.sample(prompts[2], job["samples"], job["answer_tokens"])),
    }
    return out | {"losses": losses, "threads": torch.get_num_threads()}


def _row(
    job: dict[str, Any],
    rng: np.random.Generator,
    like: Row | None = None,
    *,
    smaller: bool = True,
) -> Row:
    """Returns a row with an image of full or two thirds of the size; one ``like`` another has its
    prompt."""
    answer = int(rng.integers(job["answer_tokens"] // 8, job["answer_tokens"] + 1))
    text = rng.integers(10, job["vocabulary"] - 10, job["prompt_tokens"] + answer)
    if like is None:
        small = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
        out = io.BytesIO()
        side = job["image_side"]
        if smaller and rng.integers(2):
            side = side * 2 // 3
        pillow().fromarray(small).resize((side, side)).save(out, "PNG")
        return Row(text, out.getvalue(), answer)
    text[: job["prompt_tokens"]] = like.text[: job["prompt_tokens"]]
    return Row(text, like.image, answer)


class _Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        self._engine = Engine(job["device"], job["dtype"])
        self._folder, self._prompt = Path(job["folder"]), job["prompt_tokens"]
        self._settings = AdamSettings(
            learning_rate=ADAM["lr"], eps=ADAM["eps"], beta1=ADAM["betas"][0]
        )

        def create() -> TrainingRun:
            choice = self._engine.choice
            base = BaseModel("bench", self._folder, choice.device, choice.dtype)
            spec = AdapterSpec(job["rank"], train_unembed=False)
            adapter = Adapter.create(spec, base.targets, job["seed"], base.device)
            return TrainingRun("bench", base, adapter, self._engine.token_budget(base))

        self._run = self._engine.submit(create).result()
        self._sampler = Sampler(self._run.base, None)

    def train(self, rows: Sequence[Row]) -> float:
        total = sum(row.answer for row in rows)

        def example(row: Row) -> Example:
            tokens, images = self._tokens(row.text, row.image)
            weights = np.zeros(len(tokens) - 1, np.float32)
            weights[-row.answer :] = 1 / total
            targets = np.where(is_image(tokens), 0, tokens)[1:]
            inputs = {"target_tokens": targets, "weights": weights}
            return Example(tokens[:-1], inputs, images)

        data = [example(row) for row in rows]

        def step() -> float:
            loss = self._run.forward_backward(data, "cross_entropy").metrics["loss:sum"]
            self._run.optim_step(self._settings)
            return loss

        return self._engine.submit(step).result()

    def sample(self, row: Row, count: int, tokens: int) -> None:
        prompt, images = self._tokens(row.text[: self._prompt], row.image)
        settings = SamplingSettings(max_tokens=tokens, seed=0)
        request = sample_request(self._sampler, prompt, count, settings, images=images)
        self._engine.sample(request).result()

    def _tokens(self, text: np.ndarray, data: bytes) -> tuple[np.ndarray, tuple[Any, ...]]:
        image = image_reader("bench", self._folder).read(data, None, "image")
        return joined([text[:_BEGINNING], image, text[_BEGINNING:]])


class _Plain:
    """Transformers and peft: padded batches of all rows of a step, as collators make them."""

    def __init__(self, job: dict[str, Any]) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForImageTextToText

        self._folder, self._prompt = Path(job["folder"]), job["prompt_tokens"]
        self._dtype = getattr(torch, job["dtype"])
        model: Any = AutoModelForImageTextToText.from_pretrained(
            self._folder, dtype=self._dtype, attn_implementation="sdpa", local_files_only=True
        ).to(job["device"])
        self._model: Any = get_peft_model(
            model, LoraConfig(r=job["rank"], lora_alpha=ALPHA, target_modules=_TARGETS)
        )
        if job["plain_gradient_checkpointing"]:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        start_adapter(self._model, job["seed"])
        adapter = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(adapter, fused=True, **ADAM)
        self._config = model.config

    def train(self, rows: Sequence[Row]) -> float:
        self._model.train()  # in evaluation mode no layer is recomputed
        inputs = self._inputs([row.text for row in rows], [row.image for row in rows])
        ids = inputs["input_ids"]
        labels = torch.full_like(ids, -100)
        lengths = inputs["attention_mask"].sum(1).tolist()
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            at = slice(length - row.answer, length)
            labels[number, at] = ids[number, at]
        device, half = ids.device.type, self._dtype != torch.float32
        with torch.autocast(device, dtype=self._dtype, enabled=half):
            loss = self._model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    @torch.no_grad()
    def sample(self, row: Row, count: int, tokens: int) -> None:
        self._model.eval()
        self._model.generate(
            **self._inputs([row.text[: self._prompt]], [row.image]),
            num_return_sequences=count,
            do_sample=True,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
        )

    def _inputs(self, texts: Sequence[np.ndarray], images: Sequence[bytes]) -> dict[str, Any]:
        processor = get_image_processor(str(self._folder))
        found = processor(images=[decode_image(data) for data in images], return_tensors="pt")
        counts = found["image_grid_thw"].prod(-1) // processor.merge_size**2
        mark = self._config.image_token_id
        rows = [
            np.concatenate([text[:_BEGINNING], np.full(count, mark), text[_BEGINNING:]])
            for text, count in zip(texts, counts.tolist(), strict=True)
        ]
        ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        mask = np.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)], mask[number, : len(row)] = row, 1
        arrays = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": ids == mark}
        inputs = {name: torch.from_numpy(array).long() for name, array in arrays.items()}
        device = self._model.device
        return {name: part.to(device) for name, part in (inputs | dict(found)).items()}
