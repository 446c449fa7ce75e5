"""The process of TRL's side: DPOTrainer on the same tokens as our recipe.

The initial adapter, the order of the data and the Adam settings are ours; gradients are not
clipped.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import run_worker
from benchmarks.preference.config import recipe_settings
from benchmarks.trl_comparison import lora_config, make_clock, training_arguments
from tinker_cookbook.exceptions import DataValidationError


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Returns seconds and loss of every step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tinker_cookbook.engine.devices import choose_device, cpu_threads
    from tinker_cookbook.engine.model.resolve import resolve_model

    choice = choose_device(job["device"], job["dtype"])
    if choice.device.type == "cpu":
        torch.set_num_threads(cpu_threads())
    folder = resolve_model(job["model_name"]).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=choice.dtype)
    rows, config = read_pairs(job)
    clock = make_clock()
    with tempfile.TemporaryDirectory() as folder_out:
        trainer = _trainer_class()(
            model=model,
            args=dpo_config(job, config, folder_out, choice),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[clock],
            peft_config=lora_config(model, job["lora_rank"]),
        )
        notes = _begin_like_ours(trainer.model, job)
        trainer.train()
    return {
        "seconds": clock.seconds,
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "notes": notes,
        "trl": version("trl"),
    }


def read_pairs(job: dict[str, Any]) -> tuple[list[dict[str, list[int]]], Any]:
    """Returns the pairs of all steps as token ids, in our order, and the recipe's config."""
    from tinker_cookbook.supervised.batch_loop import Schedule, batches
    from tinker_cookbook.utils.model_inputs import whole_sequence

    config = recipe_settings(job, Path("unused")).resolved()
    train_set, _ = config.dataset_builder()
    schedule = Schedule.of(train_set, config)
    rows = []
    for data in batches(train_set, schedule, config.seed, 0):
        if len(data) != 2 * job["batch_size"]:
            raise DataValidationError(
                f"dataset: a batch has {len(data) // 2} pairs that can be trained, expected "
                f"{job['batch_size']}, since TRL makes its own batches; raise max_length, or use "
                "another dataset"
            )
        for chosen, rejected in zip(data[::2], data[1::2], strict=True):
            start = int((chosen.loss_fn_inputs["weights"].to_numpy() != 0).argmax()) + 1
            first, second = (whole_sequence(datum).to_ints() for datum in (chosen, rejected))
            rows.append(
                {
                    "prompt_ids": first[:start],
                    "chosen_ids": first[start:],
                    "rejected_ids": second[start:],
                }
            )
    return rows, config


def dpo_config(job: dict[str, Any], config: Any, folder: str, choice: Any) -> Any:
    """``DPOConfig`` for the same step as ours."""
    from trl import DPOConfig  # pyright: ignore[reportMissingImports]

    return DPOConfig(
        per_device_train_batch_size=job["batch_size"],
        max_length=None,  # pairs are cut already
        beta=job["dpo_beta"],
        **training_arguments(job, config, folder, choice),
    )


def _trainer_class() -> Any:
    """Returns a DPOTrainer that uses rows of token ids unchanged, in their order."""
    from torch.utils.data import SequentialSampler
    from trl import DPOTrainer  # pyright: ignore[reportMissingImports]

    class InOrder(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    return InOrder


def _begin_like_ours(model: Any, job: dict[str, Any]) -> list[str]:
    """Sets the initial values of our adapter; returns what differs between the sides."""
    import torch

    from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec, Target

    layers = {
        name.removeprefix("base_model.model."): layer
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }
    sizes = {name: (layer.in_features, layer.out_features) for name, layer in layers.items()}
    targets = [
        Target(name, "attn" if "attn" in name else "mlp", *size) for name, size in sizes.items()
    ]
    spec = AdapterSpec(job["lora_rank"], train_unembed=False)
    ours = Adapter.create(spec, targets, job["seed"], torch.device("cpu"))
    with torch.no_grad():
        for name, (a, b) in ours.tensors.items():
            layers[name].lora_A.default.weight.copy_(a)
            layers[name].lora_B.default.weight.copy_(b)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return [f"{trained:,} trained parameters"]


if __name__ == "__main__":
    sys.exit(run_worker(run, *sys.argv[1:]))
