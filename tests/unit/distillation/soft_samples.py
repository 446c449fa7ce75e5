"""A small real model as student and teacher, and the same in plain transformers and peft."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tinker_cookbook.backends import connect
from tinker_cookbook.tokenizer_utils import get_tokenizer

STORIES = (
    ("Once upon a time,", " there was a little girl named Lily."),
    ("Tom had a dog.", " The dog liked to run and play in the park all day."),
    ("The sun", " was bright and the birds sang."),
)


@dataclass
class Place:
    """One engine with a student whose adapter does something, and its base model as teacher."""

    model: str
    service: Any
    student: Any
    teacher: Any
    tokenizer: Any

    @classmethod
    def of(cls, model: str) -> Place:
        service = connect("local", device="cpu", dtype="float32").service
        student = service.create_lora_training_client(model, rank=4, seed=0)
        teacher = service.create_sampling_client(base_model=model)
        place = cls(model, service, student, teacher, get_tokenizer(model))
        place.move()
        return place

    def move(self) -> None:
        """Some steps of training, so that the student is not the teacher."""
        import tinker

        data = [datum(self.tokenizer, prompt, answer) for prompt, answer in STORIES]
        for _ in range(3):
            self.student.forward_backward(data, "cross_entropy").result()
            self.student.optim_step(tinker.AdamParams(learning_rate=3e-3)).result()

    def peft_model(self) -> Any:
        """The student in float64, by peft from the files of its adapter."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        path = self.student.save_weights_for_sampler("reference").result().path
        run, kind, name = path.removeprefix("tinker://").split("/")
        folder = self.service.store.root / "runs" / run / kind / name
        plain = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float64)
        return PeftModel.from_pretrained(plain, str(folder), is_trainable=True).double().eval()

    def gradients(self) -> dict[str, torch.Tensor]:
        """What the last pass added; taken from the run, which has none then."""
        run = self.student._created.result()
        taken, run._gradients = run._gradients, {}
        return taken


def datum(tokenizer: Any, prompt: str, answer: str) -> Any:
    """The answer's tokens are trained, each with weight 1."""
    from tinker_cookbook.supervised.common import datum_from_tokens_weights

    head = tokenizer.encode(prompt)
    tail = tokenizer.encode(answer, add_special_tokens=False)
    return datum_from_tokens_weights(head + tail, [0.0] * len(head) + [1.0] * len(tail))


def reference_gradients(
    model: Any, data: list[Any], loss_of: Callable[[Any, torch.Tensor], torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Value and gradients of the sum of ``loss_of(datum, logits [T, V])``, by autograd."""
    total = torch.zeros((), dtype=torch.float64)
    for item in data:
        tokens = torch.tensor([item.model_input.to_ints()])
        total = total + loss_of(item, model(input_ids=tokens, use_cache=False).logits[0])
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    gradients = {
        name.replace(".default.weight", ".weight"): torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(named.items(), found, strict=True)
    }
    return float(total.detach()), gradients


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over all parameters, relative to the norm of what is expected."""
    assert set(found) == set(expected)
    wrong = sum(float((found[n].double() - expected[n]).square().sum()) for n in found)
    return (wrong / sum(float(e.square().sum()) for e in expected.values())) ** 0.5


def rows(log_path: Path | str) -> list[dict]:
    """The rows of ``metrics.jsonl`` without times."""
    lines = (Path(log_path) / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines
    ]
