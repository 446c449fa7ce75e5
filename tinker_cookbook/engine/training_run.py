"""One training run: an adapter on a shared base model, its gradients and its optimizer.

A pass over a micro-batch has three steps, which meet at the detached hidden states::

    hidden  = model(tokens)                        # with autograd
    g       = d loss / d logprobs(hidden)          # chunked head, then the loss on a small leaf
    d_adapter = autograd(hidden, head.backward(g)) # through the head, then the body

so the loss sees only [T] tensors, and the [T, V] logits are never kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from tinker_cookbook.engine.adapters import Adapter
from tinker_cookbook.engine.base_model import BaseModel
from tinker_cookbook.engine.examples import Example, check_examples
from tinker_cookbook.engine.losses import LOSSES, Loss, get_loss
from tinker_cookbook.engine.low_rank import Terms
from tinker_cookbook.engine.memory import out_of_memory, release_cached_memory
from tinker_cookbook.engine.micro_batch import MicroBatchPass
from tinker_cookbook.engine.optimizer import AdamSettings, AdamW
from tinker_cookbook.engine.packing import MicroBatch, plan
from tinker_cookbook.exceptions import DataValidationError, OutOfMemoryError, TrainingError

logger = logging.getLogger(__name__)

_SHARED_ROWS = 5
"""Micro-batches' worth of tokens in a row that shares a long prefix: each further row would compute
the prefix again, which costs more than a large row does."""

CustomLossFn = Callable[[list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]


@dataclass
class LossOutput:
    """Log-probabilities of each datum's targets (fp32, shape of the targets) and metrics."""

    logprobs: list[np.ndarray]
    metrics: dict[str, float] = field(default_factory=dict)


class TrainingRun:
    """The verbs of one run. Gradients add up until ``optim_step``."""

    def __init__(
        self,
        run_id: str,
        base: BaseModel,
        adapter: Adapter,
        token_budget: int,
        step: int = 0,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self.run_id = run_id
        self.base = base
        self.adapter = adapter.requires_grad_()
        self.optimizer = AdamW(adapter.parameters())
        self.step = step
        self.token_budget = token_budget
        self._pause = pause  # called between micro-batches: sampling goes on meanwhile
        self._gradients: dict[str, torch.Tensor] = {}
        self._failure: Exception | None = None
        self._shared_with_sampler = False

    def forward_backward(
        self,
        data: Sequence[Example],
        loss_name: str,
        loss_config: Mapping[str, float | str] | None = None,
        *,
        backward: bool = True,
    ) -> LossOutput:
        """Log-probabilities and summed loss of ``data``; adds the gradient if ``backward``.

        When any part of the batch fails, nothing is added, and the next ``optim_step`` refuses.
        """
        with self._refusing_step_after_failure(backward):
            loss = get_loss(loss_name)
            optional = check_examples(data, loss, self.base.vocab_size, self.base.context_length)
            config = loss.resolve_config(loss_config, per_token=optional)
            terms = self.adapter.terms(self.base.dtype, requires_grad=backward)
            logprobs: list[np.ndarray] = [np.empty(0)] * len(data)
            gradients = _GradientSums()
            total = 0.0
            for group in self._plan(data):
                for part, result in self._with_retries(data, group, terms, loss, config, backward):
                    total += result.loss
                    gradients.add(result.gradients)
                    for index, values in zip(part.indices, result.split_logprobs(), strict=True):
                        logprobs[index] = values
                self._pause()
            self._keep(gradients)
            return LossOutput(logprobs, {"loss:sum": total})

    def forward_backward_custom(self, data: Sequence[Example], loss_fn: CustomLossFn) -> LossOutput:
        """Adds the gradient of ``loss_fn(logprobs)``, a function over the whole batch.

        The user's function runs once, under real autograd. Where the batch fits into one
        micro-batch its graph is kept; else the forward runs a second time for the gradient,
        micro-batch by micro-batch.
        """
        with self._refusing_step_after_failure(True):
            loss = LOSSES["cross_entropy"]
            check_examples(data, loss, self.base.vocab_size, self.base.context_length)
            terms = self.adapter.terms(self.base.dtype, requires_grad=True)
            groups = self._plan(data)
            passes = [MicroBatchPass(self.base, terms, data, group) for group in groups]
            keep = len(groups) == 1
            leaves: list[torch.Tensor] = [torch.empty(0)] * len(data)
            for group, micro in zip(groups, passes, strict=True):
                micro.forward(grad=keep, checkpoint=self._too_long(group))
                for index, values in zip(group.indices, micro.logprobs_by_sequence(), strict=True):
                    leaves[index] = values.detach().clone().requires_grad_()
                self._pause()
            value, metrics = _call_custom_loss(loss_fn, leaves)
            upstream = _custom_gradients(value, leaves)
            gradients = _GradientSums()
            for group, micro in zip(groups, passes, strict=True):
                if not keep:
                    micro.forward(grad=True, checkpoint=self._too_long(group))
                gradients.add(micro.backward(torch.cat([upstream[i] for i in group.indices])))
                micro.release()
                self._pause()
            self._keep(gradients)
            logprobs = [leaf.detach().cpu().numpy() for leaf in leaves]
            return LossOutput(logprobs, {**metrics, "loss:sum": float(value.detach())})

    def optim_step(self, settings: AdamSettings) -> dict[str, float]:
        """One AdamW step on the gradients added up so far, which are then cleared.

        Weights stay as they are, and gradients are cleared, if the gradient is not finite or if
        a pass since the last step failed: a step that was submitted behind it must not apply
        what is left.
        """
        gradients, self._gradients = self._gradients, {}
        failure, self._failure = self._failure, None
        if failure is not None:
            raise TrainingError(
                f"optim_step: a forward_backward since the last step failed ({failure}); the step "
                "was not taken and its gradients are dropped. Repeat the batch, then step"
            ) from failure
        if not gradients:
            raise DataValidationError(
                "optim_step: no gradient was computed since the last step; call forward_backward "
                "first"
            )
        if self._shared_with_sampler:
            # A sampler holds the present tensors: move on to new ones and leave it those.
            for tensor in self.adapter.parameters().values():
                tensor.data = tensor.data.clone()
            self._shared_with_sampler = False
        metrics = self.optimizer.step(gradients, settings)
        self.step += 1
        return metrics

    def snapshot(self) -> Adapter:
        """The present weights for a sampler, by reference; later steps leave them alone."""
        self._shared_with_sampler = True
        tensors = {n: (a.detach(), b.detach()) for n, (a, b) in self.adapter.tensors.items()}
        return Adapter(self.adapter.spec, self.adapter.targets, tensors)

    def replace_by(self, other: TrainingRun) -> None:
        """Takes over weights, optimizer and step of another run, as ``load_state`` does."""
        self.adapter, self.optimizer, self.step = other.adapter, other.optimizer, other.step
        self._gradients, self._failure, self._shared_with_sampler = {}, None, False

    @contextmanager
    def _refusing_step_after_failure(self, backward: bool) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if backward:
                self._failure = error
            raise

    def _plan(self, data: Sequence[Example]) -> list[MicroBatch]:
        tokens = [example.tokens for example in data]
        shared = self.token_budget if self.base.shares_prefixes else 0
        if self.base.device.type == "cpu":  # elsewhere the budget is all there is
            shared *= _SHARED_ROWS
        return plan(tokens, self.token_budget, shared_budget=shared)

    def _too_long(self, group: MicroBatch) -> bool:
        """A single sequence well over the budget: recompute its layers rather than keep them."""
        return group.padded_tokens > 4 * self.token_budget

    def _with_retries(
        self,
        data: Sequence[Example],
        group: MicroBatch,
        terms: Terms,
        loss: Loss,
        config: Mapping[str, float],
        backward: bool,
    ) -> list[tuple[MicroBatch, MicroBatchPass]]:
        """Runs a micro-batch; out of memory, runs its halves, and at last one row checkpointed."""
        halves = group.halves([example.tokens for example in data])
        attempts = [self._too_long(group)]
        if backward and not halves and not attempts[0]:
            attempts.append(True)
        reason = ""
        for checkpoint in attempts:
            micro = MicroBatchPass(self.base, terms, data, group)
            try:
                micro.run(loss, config, backward=backward, checkpoint=checkpoint)
                return [(group, micro)]
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                reason = str(error)
            # Outside of the handler: its traceback would keep the activations alive.
            micro.release()
            release_cached_memory(self.base.device)
        if not halves:
            raise OutOfMemoryError(
                f"a sequence of {group.padded_length} tokens does not fit into the memory of "
                f"{self.base.device}: {reason}; set max_length lower"
            )
        logger.warning("Out of memory at %d tokens; halving.", group.padded_tokens)
        self.token_budget = max(1, group.padded_tokens // 2)
        out = []
        for part in halves:
            out += self._with_retries(data, part, terms, loss, config, backward)
        return out

    def _keep(self, gradients: _GradientSums) -> None:
        """Adds a finished batch's gradient to the run's."""
        for name, gradient in self.adapter.parameter_gradients(gradients.by_name).items():
            if name in self._gradients:
                self._gradients[name].add_(gradient)
            else:
                self._gradients[name] = gradient


class _GradientSums:
    """Adds up the fp32 gradients of an adapter's terms over micro-batches."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, gradients: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        for name, (a, b) in gradients.items():
            if name in self.by_name:
                self.by_name[name][0].add_(a)
                self.by_name[name][1].add_(b)
            else:
                self.by_name[name] = (a, b)


def _call_custom_loss(
    loss_fn: CustomLossFn, leaves: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    with torch.enable_grad():
        result = loss_fn(leaves)
    if not isinstance(result, tuple) or len(result) != 2:
        raise DataValidationError(
            f"loss_fn: returned {type(result).__name__}, expected a tuple (loss, metrics)"
        )
    return result


def _custom_gradients(value: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """``d value / d logprobs`` of each datum; zero where the loss does not use it."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise DataValidationError(
            f"loss_fn: returned {type(value).__name__} "
            f"{tuple(value.shape) if isinstance(value, torch.Tensor) else ''} as loss, expected a "
            "tensor of one element"
        )
    if not value.requires_grad:
        raise DataValidationError(
            "loss_fn: the loss does not depend on the log-probabilities it was given; compute it "
            "with torch operations, without .item() or .detach()"
        )
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    out = []
    for index, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        gradient = torch.zeros_like(leaf) if gradient is None else gradient.float()
        if not torch.isfinite(gradient).all():
            raise DataValidationError(
                f"loss_fn: its gradient is not finite at datum {index}; check for log(0) or 0/0"
            )
        out.append(gradient)
    return out
