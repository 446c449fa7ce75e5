"""The reference that people use on GPUs: TRL's SFTTrainer, with Liger's kernels on CUDA.

Same model, adapter, batches, optimizer and loss as the other variants; gradients are not clipped.
"""

from __future__ import annotations

import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.engine.ceilings import synchronize
from benchmarks.engine.variants import (
    ADAM,
    Batches,
    Measurement,
    Setup,
    lora_config,
    measurement,
    start_adapter,
)
from tinker_cookbook.engine.devices import cpu_threads, peak_memory_bytes


def run_trl(setup: Setup, batches: Batches) -> Measurement:
    """Trains with SFTTrainer, a step for each batch."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    device = torch.device(setup.device)
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads())
    model: Any = AutoModelForCausalLM.from_pretrained(
        setup.folder, dtype=getattr(torch, setup.dtype), attn_implementation="sdpa",
        local_files_only=True,
    )  # fmt: skip
    rows = [
        {"input_ids": row.tokens.tolist(), "completion_mask": row.trained.astype(int).tolist()}
        for batch in batches
        for row in batch
    ]
    clock = _clock(device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer_class()(
            model=model,
            args=_arguments(setup, len(batches[0]), len(batches), folder),
            train_dataset=Dataset.from_list(rows),
            processing_class=_tokenizer(),
            peft_config=lora_config(model, setup),
            callbacks=[clock],
        )
        start_adapter(trainer.model, setup.seed)
        loaded = peak_memory_bytes(device)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    parameters = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    liger = f" and liger-kernel {version('liger-kernel')}" if device.type == "cuda" else ""
    notes = [f"trl {version('trl')}{liger}, {setup.trl_batch_size} conversations in memory at once"]
    return measurement(
        setup, losses, clock.seconds, (loaded, peak_memory_bytes(device)), parameters,
        torch.get_num_threads(), notes,
    )  # fmt: skip


def _arguments(setup: Setup, batch_size: int, steps: int, folder: str) -> Any:
    from trl import SFTConfig  # pyright: ignore[reportMissingImports]

    kind = torch.device(setup.device).type
    return SFTConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=setup.trl_batch_size,
        gradient_accumulation_steps=batch_size // setup.trl_batch_size,
        max_length=None,  # conversations are cut already
        completion_only_loss=True,
        learning_rate=ADAM["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="adamw_torch_fused",
        adam_beta1=ADAM["betas"][0],
        adam_beta2=ADAM["betas"][1],
        adam_epsilon=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
        max_grad_norm=0.0,
        bf16=setup.dtype == "bfloat16",
        use_cpu=kind == "cpu",
        use_liger_kernel=kind == "cuda",
        gradient_checkpointing=setup.trl_gradient_checkpointing,
        seed=setup.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _clock(device: torch.device) -> Any:
    """A callback with ``seconds``: the times between the ends of successive steps."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._last = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._last = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            now = time.perf_counter()
            self.seconds.append(now - self._last)
            self._last = now

    return Clock()


def _trainer_class() -> Any:
    """An SFTTrainer that uses rows of token ids unchanged, in their order."""
    from torch.utils.data import SequentialSampler
    from trl import SFTTrainer  # pyright: ignore[reportMissingImports]

    class InOrder(SFTTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    return InOrder


def _tokenizer() -> Any:
    """A tokenizer for padding: random models have none of their own."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
