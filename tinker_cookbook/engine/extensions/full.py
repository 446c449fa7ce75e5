"""Trains all weights of a small model instead of an adapter (``lora_rank=0``).

A run has its own copy of the model in float32, which plain autograd differentiates. Each snapshot
for sampling is a new base model with these weights. So a run needs about six times the memory of
the model, and a snapshot costs as much as loading it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.training.losses import CustomLossFn, evaluate_custom
from tinker_cookbook.engine.training.micro_batch import loss_inputs
from tinker_cookbook.engine.training.run import LossOutput, TrainingRun
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError

_ValueOf = Callable[[Sequence[int], Sequence[Tensor]], tuple[float, dict[str, float], list[Tensor]]]
"""Returns a loss, its metrics and its gradients, for datums and their log-probabilities."""


@dataclass(frozen=True)
class FullSpec(AdapterSpec):
    """In place of an adapter's shape: all weights are trained, and the rank is 0."""

    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("train_attn", "train_mlp", "train_unembed"):
            if not getattr(self, name):
                raise ConfigurationError(
                    f"{name}: got False with lora_rank=0, which trains all weights; leave {name} "
                    "out, or set lora_rank=32"
                )
        if self.train_vision:
            raise ConfigurationError(
                "train_vision: got True with lora_rank=0, which trains text models only; set "
                "lora_rank=32"
            )


class FullWeights:
    """The float32 weights of a run, with the interface of ``Adapter`` that runs and checkpoints
    use."""

    def __init__(self, spec: AdapterSpec, model: Any) -> None:
        self.spec, self.model = spec, model

    @classmethod
    def load(cls, base: BaseModel, saved: Mapping[str, Tensor] | None, source: str) -> FullWeights:
        """Loads the model of ``base``, with the weights of a checkpoint if they are given."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            base.folder, dtype=torch.float32, local_files_only=True
        )
        # Evaluation mode: dropout would make training differ from sampling.
        weights = cls(FullSpec(), model.eval().to(base.device))
        if saved is not None:
            for name, tensor in weights.parameters().items():
                if name not in saved or saved[name].shape != tensor.shape:
                    raise CheckpointError(
                        f"{source}: tensor {name!r} is missing or has another shape than in "
                        f"{base.name!r}; load it with the model it was trained on"
                    )
                tensor.data = saved[name].to(device=base.device, dtype=torch.float32, copy=True)
        return weights

    def parameters(self) -> dict[str, Tensor]:
        """Returns all weights by their name in transformers; tied ones have one name."""
        return dict(self.model.named_parameters())

    def requires_grad_(self, on: bool = True) -> FullWeights:
        """Marks all weights as leaves that need a gradient."""
        self.model.requires_grad_(on)
        return self

    def peft_config(self, base_model: str) -> dict[str, Any]:
        """Returns what the checkpoint's ``adapter_config.json`` says."""
        return {"peft_type": "FULL_WEIGHTS", "base_model_name_or_path": base_model, "r": 0}

    def logprobs(self, rows: Sequence[Example]) -> list[Tensor]:
        """Returns the log-probabilities [T] or [T, K] of each example's targets."""
        tokens_BL = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens_BL[i, : len(row)] = torch.from_numpy(row.tokens)
        # Padding is on the right, where no token of an example sees it.
        logits_BLV = self.model(tokens_BL.to(self.model.device), use_cache=False).logits
        found: list[Tensor] = []
        for row, logits_LV in zip(rows, logits_BLV, strict=True):
            targets = torch.from_numpy(row.targets).to(logits_LV.device)
            logprobs_TV = logits_LV[: len(row)].float().log_softmax(-1)
            picked = logprobs_TV.gather(1, targets.reshape(len(row), -1))
            found.append(picked.reshape(targets.shape))
        return found


class FullRun(TrainingRun):
    """A run that trains all weights of its own copy of the model."""

    adapter: Any  # FullWeights

    def forward_backward(
        self,
        data: Sequence[Example],
        loss_name: str,
        loss_config: Mapping[str, float | str] | None = None,
        *,
        backward: bool = True,
    ) -> LossOutput:
        """As in ``TrainingRun``."""
        with self.refusing_step_after_failure(backward):
            loss, checked, config = self.checked(data, loss_name, loss_config)

            def value_of(indices: Sequence[int], logprobs: Sequence[Tensor]) -> Any:
                rows = [checked[i] for i in indices]
                lengths = torch.tensor([len(row) for row in rows], device=self.base.device)
                sequence = torch.arange(len(rows), device=lengths.device)
                inputs = loss_inputs(rows, loss, config, sequence.repeat_interleave(lengths))
                leaf = torch.cat(list(logprobs)).requires_grad_(backward)
                value = loss.function(leaf, inputs)
                upstream = torch.autograd.grad(value, leaf) if backward else ()
                return value.item(), {}, list(upstream)

            return self._sum_over_rows(checked, value_of, 1, backward=backward)

    def forward_backward_custom(
        self,
        data: Sequence[Example],
        loss_fn: CustomLossFn,
        group_size: int | None = None,
        *,
        trained_only: bool = False,
    ) -> LossOutput:
        """As in ``TrainingRun``; without a ``group_size`` the graph of the whole batch is kept."""
        with self.refusing_step_after_failure(True):
            self._check_custom(data, group_size)

            def value_of(indices: Sequence[int], logprobs: Sequence[Tensor]) -> Any:
                return evaluate_custom(loss_fn, indices, logprobs)

            return self._sum_over_rows(data, value_of, group_size or len(data), backward=True)

    def snapshot(self) -> Any:
        """Makes ``base`` a new base model with the current weights, for a sampler without an
        adapter."""
        self.base = base_with(self.base, self.adapter.parameters())

    def _sum_over_rows(
        self, data: Sequence[Example], value_of: _ValueOf, group_size: int, *, backward: bool
    ) -> LossOutput:
        parameters = self.adapter.parameters()
        logprobs, metrics, total = list[Any](), dict[str, float](), 0.0
        sums: dict[str, Tensor] = {}
        for indices in self._parts(data, group_size):
            with torch.set_grad_enabled(backward):
                found = self.adapter.logprobs([data[i] for i in indices])
            value, more, upstream = value_of(indices, [one.detach() for one in found])
            total += value
            for name, number in more.items():
                metrics[name] = metrics.get(name, 0.0) + float(number)
            if backward:
                whole, given = torch.cat(found), torch.cat(upstream)
                each = torch.autograd.grad(
                    whole, list(parameters.values()), given, materialize_grads=True
                )
                for name, gradient in zip(parameters, each, strict=True):
                    sums[name] = sums[name].add_(gradient) if name in sums else gradient
            logprobs += [one.detach().cpu().numpy() for one in found]
            self._pause()
        # Only now: a batch that fails in the middle adds nothing to the run.
        self._pending = {name: one.contiguous() for name, one in sums.items()}
        self.keep_pass()
        return LossOutput(logprobs, {**metrics, "loss:sum": total})

    def _parts(self, data: Sequence[Example], group_size: int) -> Iterator[range]:
        """Yields the datums of each micro-batch: whole groups, within the token budget."""
        start = longest = 0
        for group in range(0, len(data), group_size):
            end = group + group_size
            longest = max(longest, *(len(data[i]) for i in range(group, end)))
            if group > start and (end - start) * longest > self.token_budget:
                yield range(start, group)
                start, longest = group, max(len(data[i]) for i in range(group, end))
        yield range(start, len(data))


def base_with(base: BaseModel, weights: Mapping[str, Tensor]) -> BaseModel:
    """Returns a base model like ``base`` with other weights."""
    new = BaseModel(base.name, base.folder, base.device, base.dtype, weights=weights)
    new.limits = base.limits
    return new


def open_run(
    engine: Engine,
    run_id: str,
    base: BaseModel,
    saved: Mapping[str, Tensor] | None = None,
    step: int = 0,
    source: str = "",
) -> FullRun:
    """Returns a run from the weights of ``base``, or from those of a checkpoint.

    Raises:
        ConfigurationError: the engine has settings that this cannot have.
    """
    given = {
        "sampler=vllm": engine.external is not None,
        f"base_dtype={engine.base_dtype}": engine.base_dtype != "auto",
        "replay_router=true": engine.replay_router,
        "torchrun": engine.processes > 1,
        f"dtype={str(base.dtype).removeprefix('torch.')}": base.dtype != torch.float32,
        f"{base.name} with images": base.vision is not None,
    }
    if wrong := [name for name, on in given.items() if on]:
        raise ConfigurationError(
            f"lora_rank=0 trains all weights of a text model in one process, in float32, but got "
            f"{', '.join(wrong)}; set dtype=float32 and leave the rest out, or set lora_rank=32"
        )
    weights: Any = FullWeights.load(base, saved, source)
    return FullRun(run_id, base, weights, engine.token_budget(base), step, engine.pause)
