"""What TRL's sides need: a clock, and LoRA on the layers that TRL can adapt."""

from __future__ import annotations

import time
from typing import Any


def make_clock() -> Any:
    """A callback whose ``seconds`` are those between the ends of one step and the next."""

    import transformers  # takes seconds

    class Clock(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._last = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._last = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            self.seconds.append(now - self._last)
            self._last = now

    return Clock()


def lora_config(model: Any, rank: int) -> Any:
    """LoRA with alpha 32 on all linear layers but the unembedding, which TRL refuses."""
    from peft import LoraConfig
    from torch import nn

    head = model.get_output_embeddings()
    linears = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear))
    names = {name.rsplit(".", 1)[-1] for name, layer in linears if layer is not head}
    return LoraConfig(r=rank, lora_alpha=32, target_modules=sorted(names), task_type="CAUSAL_LM")


def training_arguments(
    job: dict[str, Any], config: Any, folder: str, choice: Any
) -> dict[str, Any]:
    """The arguments that every TRL config has, for the optimizer and precision of our side.

    ``config`` holds our learning rate and Adam's settings, ``choice`` is the device and dtype.
    """
    return {
        "output_dir": folder,
        "max_steps": job["steps"],
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_epsilon": config.adam_eps,
        "weight_decay": config.weight_decay,
        "max_grad_norm": 0.0,
        "bf16": str(choice.dtype) == "torch.bfloat16",
        "use_cpu": choice.device.type == "cpu",
        "gradient_checkpointing": job["trl_gradient_checkpointing"],
        "seed": job["seed"],
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
