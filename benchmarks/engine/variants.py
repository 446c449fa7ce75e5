"""The two training loops that are compared. Each trains the same adapter on the same batches.

Loss is the mean negative log-likelihood of a batch's trained tokens, the optimizer
``torch.optim.AdamW`` (fused) with the settings below, the adapter starts from the same numbers.
So the losses of all steps agree up to rounding, and only their computation differs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.ceilings import synchronize
from benchmarks.engine.conversations import Conversation
from tinker_cookbook.engine.devices import cpu_threads, peak_memory_bytes

ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
ALPHA = 32

Batches = Sequence[Sequence[Conversation]]


@dataclass(frozen=True)
class Setup:
    """What a variant needs to know. ``device`` and ``dtype`` are resolved names."""

    folder: Path
    device: str
    dtype: str
    rank: int
    seed: int
    warmup: int
    train_unembed: bool = True
    trl_batch_size: int = 1
    trl_gradient_checkpointing: bool = False


@dataclass
class Measurement:
    """What a variant reports of one run. Times and losses are of the steps after the warm-up.

    ``first_loss`` is the loss of the first batch, before any update; peaks are bytes.
    """

    first_loss: float
    losses: list[float]
    seconds: list[float]
    loaded_bytes: int
    """Peak when the model was loaded and no step was made yet."""
    peak_bytes: int
    adapter_parameters: int
    threads: int
    notes: list[str] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """Processor seconds of the steps, all threads together; empty where they are not known."""


def run_engine(setup: Setup, batches: Batches) -> Measurement:
    """Trains through the engine, in its worker thread, with the micro-batches it chooses."""
    from tinker_cookbook.engine.engine import Engine
    from tinker_cookbook.engine.model.base_model import BaseModel
    from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec
    from tinker_cookbook.engine.training.examples import Example
    from tinker_cookbook.engine.training.optimizer import AdamSettings
    from tinker_cookbook.engine.training.run import TrainingRun

    settings = AdamSettings(
        learning_rate=ADAM["lr"],
        beta1=ADAM["betas"][0],
        beta2=ADAM["betas"][1],
        eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
    )
    engine = Engine(setup.device, setup.dtype)

    def create() -> TrainingRun:
        base = BaseModel("bench", setup.folder, engine.choice.device, engine.choice.dtype)
        spec = AdapterSpec(setup.rank, train_unembed=setup.train_unembed)
        adapter = Adapter.create(spec, base.targets, setup.seed, base.device)
        return TrainingRun("bench", base, adapter, engine.token_budget(base))

    def train(run: TrainingRun, batch: Sequence[Conversation]) -> float:
        total = sum(int(row.trained[1:].sum()) for row in batch)
        examples = [
            Example(
                row.tokens[:-1],
                {
                    "target_tokens": row.tokens[1:],
                    "weights": (row.trained[1:] / total).astype(np.float32),
                },
            )
            for row in batch
        ]
        loss = run.forward_backward(examples, "cross_entropy").metrics["loss:sum"]
        run.optim_step(settings)
        return loss

    run = engine.submit(create).result()
    loaded = peak_memory_bytes(engine.choice.device)
    parameters = sum(tensor.numel() for tensor in run.adapter.parameters().values())
    losses, seconds, cpu = _timed(
        lambda batch: engine.submit(train, run, batch).result(), batches, engine.choice.device
    )
    threads = engine.submit(torch.get_num_threads).result()
    limits = run.base.limits
    short = limits.failed_tokens is not None or limits.recomputed
    notes = [
        f"micro-batches of up to {run.token_budget} tokens, "
        f"{'packed' if run.base.packs_rows else 'padded'}; "
        f"{'memory ran out and parts were repeated' if short else 'no part was repeated'}"
    ]
    peak = peak_memory_bytes(engine.choice.device)
    engine.close()
    return measurement(setup, losses, seconds, (loaded, peak), parameters, threads, notes, cpu)


def run_plain(setup: Setup, batches: Batches) -> Measurement:
    """Trains in a plain loop with transformers and peft.

    One padded batch with an attention mask, labels of -100 for untrained tokens, full logits.
    Adapter weights are fp32; below fp32 the forward runs under autocast, as Trainer's does.
    """
    device, dtype = torch.device(setup.device), getattr(torch, setup.dtype)
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads())
    model = _peft_model(setup, device, dtype)
    adapter = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapter, fused=True, **ADAM)
    loaded = peak_memory_bytes(device)

    def train(batch: Sequence[Conversation]) -> float:
        inputs = _padded(batch, device)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    losses, seconds, cpu = _timed(train, batches, device)
    parameters = sum(p.numel() for p in adapter)
    peaks = (loaded, peak_memory_bytes(device))
    threads = torch.get_num_threads()
    return measurement(setup, losses, seconds, peaks, parameters, threads, [], cpu)


RUNNERS: dict[str, Callable[[Setup, Batches], Measurement]] = {
    "engine": run_engine,
    "before": run_engine,  # the runner gives the process another checkout
    "plain": run_plain,
    "stock": run_plain,  # the runner sets other environment variables
}


def _peft_model(setup: Setup, device: torch.device, dtype: torch.dtype) -> Any:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        setup.folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    model.to(device)
    model = get_peft_model(model, lora_config(model, setup))
    start_adapter(model, setup.seed)
    return model


def lora_config(model: Any, setup: Setup) -> Any:
    """peft's settings of the same adapter as the engine's."""
    from peft import LoraConfig

    kept = None if setup.train_unembed else model.get_output_embeddings()
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not kept
    ]
    return LoraConfig(
        r=setup.rank,
        lora_alpha=ALPHA,
        target_modules=sorted({name.rsplit(".", 1)[-1] for name in linears}),
        task_type="CAUSAL_LM",
    )


@torch.no_grad()
def start_adapter(model: torch.nn.Module, seed: int) -> None:
    """Samples the ``A`` matrices in layer order, as the engine does, so that both start equal."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_A" in name:
            bound = 1 / math.sqrt(weight.shape[1])
            values = torch.empty(weight.shape).uniform_(-bound, bound, generator=generator)
            weight.copy_(values)


def _padded(batch: Sequence[Conversation], device: torch.device) -> dict[str, torch.Tensor]:
    """Right-padded input_ids, attention_mask and labels, each [B, longest]."""
    shape = (len(batch), max(len(row.tokens) for row in batch))
    ids, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, -100, dtype=np.int64)
    for i, row in enumerate(batch):
        length = len(row.tokens)
        ids[i, :length] = row.tokens
        mask[i, :length] = 1
        labels[i, :length][row.trained] = row.tokens[row.trained]
    arrays = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def _timed(
    train: Callable[[Sequence[Conversation]], float], batches: Batches, device: torch.device
) -> tuple[list[float], list[float], list[float]]:
    """Losses, seconds and processor seconds of each batch, from its arrays to the update."""
    losses, seconds, cpu = [], [], []
    for batch in batches:
        synchronize(device)
        start, used = time.perf_counter(), time.process_time()
        losses.append(train(batch))
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return losses, seconds, cpu


def measurement(
    setup: Setup,
    losses: list[float],
    seconds: list[float],
    peaks: tuple[int, int],
    parameters: int,
    threads: int,
    notes: list[str],
    cpu: Sequence[float] = (),
) -> Measurement:
    """Returns what a variant reports; ``peaks`` are bytes when loaded and at the end."""
    return Measurement(
        first_loss=losses[0],
        losses=losses[setup.warmup :],
        seconds=seconds[setup.warmup :],
        loaded_bytes=peaks[0],
        peak_bytes=peaks[1],
        adapter_parameters=parameters,
        threads=threads,
        notes=notes,
        cpu_seconds=list(cpu[setup.warmup :]),
    )
