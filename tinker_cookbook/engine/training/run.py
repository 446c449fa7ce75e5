"""One training run: an adapter on a shared base model, its gradients and its optimizer."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from tinker_cookbook.engine.devices import free_memory_bytes
from tinker_cookbook.engine.memory import out_of_memory, release_cached_memory
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.lora import Adapter, TermGradients
from tinker_cookbook.engine.model.low_rank import Terms
from tinker_cookbook.engine.training.examples import Example, check_examples
from tinker_cookbook.engine.training.losses import (
    LOSSES,
    CustomLossFn,
    Loss,
    evaluate_custom,
    get_loss,
)
from tinker_cookbook.engine.training.micro_batch import MicroBatchPass, plan_for
from tinker_cookbook.engine.training.optimizer import AdamSettings, AdamW
from tinker_cookbook.engine.training.packing import MicroBatch, Row
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataValidationError,
    OutOfMemoryError,
    TinkerCookbookError,
    TrainingError,
)

logger = logging.getLogger(__name__)

_ComputePass = Callable[..., None]
"""``run(micro_batch_pass, checkpoint=share)`` stores the results in the pass."""

TermsOf = Callable[[MicroBatch], Terms]
"""Returns the adapter terms for a micro-batch."""

_SHARES = (0.5, 1.0)
"""Shares of the layers to recompute, tried in this order when memory runs out."""


@dataclass
class LossOutput:
    """Log-probabilities of each datum's targets (fp32, shape of the targets) and metrics."""

    logprobs: list[np.ndarray]
    metrics: dict[str, float] = field(default_factory=dict)


def _add_to(total: TermGradients, gradients: TermGradients) -> None:
    """Adds a micro-batch's fp32 gradients of an adapter's terms to those of earlier ones."""
    for name, (a, b) in gradients.items():
        if name in total:
            total[name][0].add_(a)
            total[name][1].add_(b)
        else:
            # Take over the tensors of the first micro-batch: no copy, no sum with zeros.
            total[name] = (a, b)


@dataclass(frozen=True)
class PassRequest:
    """A ``forward_backward`` of a run that may be computed together with those of other runs
    (``extensions.joint``). If one of the functions raises, only this pass fails."""

    run: Callable[[], TrainingRun]
    examples: Callable[[], Sequence[Example]]
    loss_name: str
    loss_config: Mapping[str, float | str] | None = None


class TrainingRun:
    """Operations of one run. Gradients accumulate until ``optim_step``. ``pause`` is called between
    micro-batches, to let the sampler run; ``measure`` returns the token budget before each pass."""

    def __init__(
        self,
        run_id: str,
        base: BaseModel,
        adapter: Adapter,
        token_budget: int,
        step: int = 0,
        pause: Callable[[], None] = lambda: None,
        measure: Callable[[], int] | None = None,
    ) -> None:
        self.run_id = run_id
        self.base = base
        self.adapter = adapter.requires_grad_()
        self.optimizer = AdamW(adapter.parameters())
        self.step = step
        self.token_budget = token_budget
        self._pause, self._measure = pause, measure
        self._gradients: dict[str, torch.Tensor] = {}
        self._failure: str | None = None  # text, because an exception would keep the pass in memory
        self._shared_with_sampler = False
        self.in_step: int | None = None
        """Number of micro-batches that each process runs in this pass over a sharded base model."""
        self._pending: dict[str, torch.Tensor] = {}
        """Gradients of the last such pass, which is repeated if another rank is out of memory."""

    def forward_backward(
        self,
        data: Sequence[Example],
        loss_name: str,
        loss_config: Mapping[str, float | str] | None = None,
        *,
        backward: bool = True,
    ) -> LossOutput:
        """Returns log-probabilities and summed loss of ``data``; accumulates the gradient if
        ``backward``.

        If any part of the batch fails, no gradient is added, and the next ``optim_step`` raises.
        """
        with self.refusing_step_after_failure(backward):
            loss, data, config = self.checked(data, loss_name, loss_config)
            run = partial(MicroBatchPass.run, loss=loss, config=config, backward=backward)
            return self._sum_over(data, self._plan(data), run, backward=backward)

    def forward_backward_custom(
        self,
        data: Sequence[Example],
        loss_fn: CustomLossFn,
        group_size: int | None = None,
        *,
        trained_only: bool = False,
    ) -> LossOutput:
        """Accumulates the gradient of ``loss_fn(indices, logprobs)``, computed by autograd.

        With a ``group_size`` n, the loss is a sum over groups of n consecutive datums: it is called
        for some whole groups at a time, metrics are added up, and each forward pass runs once, in
        the memory of one micro-batch. Without it, the loss needs the whole batch and is called
        once: if the batch fits into one micro-batch, its graph is kept; otherwise the forward pass
        runs a second time for the gradient, micro-batch by micro-batch. With ``trained_only``, the
        loss does not read log-probabilities of targets without weight: these are 0 and need no
        logits.
        """
        with self.refusing_step_after_failure(True):
            self._check_custom(data, group_size)
            if group_size is None:
                return self._coupled(data, loss_fn, trained_only)
            run = partial(MicroBatchPass.run_custom, loss_fn=loss_fn, trained_only=trained_only)
            return self._sum_over(data, self._plan(data, group_size), run, backward=True)

    def optim_step(self, settings: AdamSettings) -> dict[str, float]:
        """Takes an AdamW step on the accumulated gradients, and clears them in any case. Weights
        do not change if the gradient is not finite or a pass since the last step failed."""
        # The step may have been submitted before a pass failed: it must not apply the other passes.
        gradients, self._gradients = self._gradients, {}
        failure, self._failure = self._failure, None
        if failure is not None:
            raise TrainingError(
                f"optim_step: a forward_backward since the last step failed ({failure}); the step "
                "was not taken and its gradients are dropped. Repeat the batch, then step"
            )
        if not gradients:
            raise DataValidationError(
                "optim_step: no gradient was computed since the last step; call forward_backward "
                "first"
            )
        if self._shared_with_sampler:
            # A sampler refers to the current tensors, which must not change: continue with copies.
            # Replace only the data: the optimizer's state is keyed by the tensor objects.
            for tensor in self.adapter.parameters().values():
                tensor.data = tensor.data.clone()
            self._shared_with_sampler = False
        metrics = self.optimizer.step(gradients, settings)
        # A refused step raises above and is not counted.
        self.step += 1
        return metrics

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Returns the accumulated gradients and clears them, together with the note of a
        failure."""
        self.keep_pass()
        gradients, self._gradients, self._failure = self._gradients, {}, None
        return gradients

    def checked(
        self,
        data: Sequence[Example],
        loss_name: str,
        loss_config: Mapping[str, float | str] | None,
    ) -> tuple[Loss, list[Example], Mapping[str, float]]:
        """Returns loss, data and settings of a ``forward_backward``; raises for invalid ones."""
        loss = get_loss(loss_name)
        data = [example.for_loss(loss) for example in data]
        optional = check_examples(data, loss, self.base)
        return loss, data, loss.resolve_config(loss_config, per_token=optional)

    def compute_joint(
        self, data: Sequence[Example], owners: np.ndarray, terms: TermsOf, run: _ComputePass
    ) -> tuple[TermGradients, list[np.ndarray]]:
        """Returns the gradients of ``terms`` and the log-probabilities for a pass over the data of
        several runs; ``owners`` as in ``plan``. No run is changed."""
        micros = [micro.sorted_by(owners) for micro in self._plan(data, owners=owners)]
        gradients, output = self._compute(data, micros, terms, run, backward=True)
        return gradients, output.logprobs

    def add_gradients(self, gradients: TermGradients) -> None:
        """Adds a finished batch's gradients of the terms to the run's (overwrites the argument)."""
        self._pending = self.adapter.parameter_gradients(gradients)
        if self.in_step is None:
            self.keep_pass()

    def keep_pass(self) -> None:
        """Adds the gradients of the last pass to those of earlier passes."""
        pending, self._pending = self._pending, {}
        for name, gradient in pending.items():
            if name in self._gradients:
                self._gradients[name].add_(gradient)
            else:
                self._gradients[name] = gradient

    def undo_pass(self) -> None:
        """Drops the gradients of the last pass, which another rank could not complete."""
        self._pending = {}

    def idle(self, count: int, terms: Terms, *, backward: bool) -> None:
        """Runs ``count`` micro-batches that train nothing, so that the other processes can run
        theirs over a sharded base model."""
        weights = np.zeros(1, np.float32)
        inputs = {"target_tokens": np.zeros(1, np.int64), "weights": weights}
        nothing = [Example(np.zeros(1, np.int64), inputs)]
        for _ in range(count):
            one = MicroBatchPass(self.base, terms, nothing, MicroBatch((Row((0,), 1),)))
            one.body(grad=backward, checkpoint=0)
            if backward:
                one.backward(torch.zeros(1, device=self.base.device), fill_logprobs=True)

    def snapshot(self) -> Adapter:
        """Returns the current weights for a sampler, by reference; later steps do not change
        them."""
        self._shared_with_sampler = True
        tensors = {n: (a.detach(), b.detach()) for n, (a, b) in self.adapter.tensors.items()}
        return Adapter(self.adapter.spec, self.adapter.targets, tensors)

    def replace_by(self, other: TrainingRun) -> None:
        """Takes over weights, optimizer and step of another run, as ``load_state`` does."""
        self.adapter, self.optimizer, self.step = other.adapter, other.optimizer, other.step
        # Gradients of the old weights must not be applied to the loaded ones. No sampler uses
        # the new tensors.
        self._gradients, self._failure, self._shared_with_sampler = {}, None, False

    def _check_custom(self, data: Sequence[Example], group_size: int | None) -> None:
        # A custom loss uses the fields of cross_entropy: targets, and weights that mark what is
        # trained.
        check_examples(data, LOSSES["cross_entropy"], self.base)
        if group_size is None:
            return
        if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 1:
            raise ConfigurationError(
                f"loss_fn.group_size: got {group_size!r}, expected a whole number of datums, "
                "at least 1; leave it out if the loss couples the whole batch"
            )
        if surplus := len(data) % group_size:
            raise DataValidationError(
                f"data: got {len(data)} datums, expected a multiple of "
                f"loss_fn.group_size={group_size}; the last {surplus} do not form a whole group"
            )

    @contextmanager
    def refusing_step_after_failure(self, backward: bool) -> Iterator[None]:
        """Context in which a pass runs. If it fails and is ``backward``, the next step raises."""
        try:
            yield
        except Exception as error:
            if backward:
                # The next step may already be in the queue, so the failure must be recorded.
                self._failure = str(error) or type(error).__name__
            if isinstance(error, TinkerCookbookError) or not out_of_memory(error):
                raise
            reason = str(error) or type(error).__name__
            traceback.clear_frames(error.__traceback__)  # the frames hold the activations
        else:
            return
        release_cached_memory(self.base.device)
        raise OutOfMemoryError(
            f"the pass does not fit into the memory of {self.base.device}: {reason}; nothing of it "
            "was applied. Give it fewer datums"
        )

    def _plan(
        self, data: Sequence[Example], group_size: int = 1, owners: np.ndarray | None = None
    ) -> list[MicroBatch]:
        tokens = [example.tokens for example in data]
        # The free memory may have changed; ranks in step have one plan for all.
        if self._measure is not None and self.in_step is None:
            self.token_budget = self._measure()
        return plan_for(self.base, tokens, self.token_budget, group_size, owners)

    def _recomputed_share(self, micro: MicroBatch) -> float:
        """Returns the share of layers to recompute: what a micro-batch of this size needed
        before, or all layers if it cannot be split (a single sequence or group) and is
        well over the budget."""
        if known := self.base.limits.recomputed_share(micro.padded_tokens):
            return known
        rows = 1 if micro.shared else min(2, len(micro.rows))  # padded rows of a group: at least 2
        return float(micro.padded_tokens > 4 * rows * self.token_budget)

    def _sum_over(
        self,
        data: Sequence[Example],
        micros: Sequence[MicroBatch],
        run: _ComputePass,
        *,
        backward: bool,
    ) -> LossOutput:
        """Runs micro-batches one by one, and adds up their losses, metrics and gradients."""
        # Cast the adapter once for all micro-batches.
        terms = self.adapter.terms(self.base.dtype, requires_grad=backward)
        gradients, output = self._compute(data, micros, lambda _: terms, run, backward=backward)
        self.idle((self.in_step or 0) - len(micros), terms, backward=backward)
        # Only now: a batch that fails in the middle adds nothing to the run.
        self.add_gradients(gradients)
        return output

    def _compute(
        self,
        data: Sequence[Example],
        micros: Sequence[MicroBatch],
        terms: TermsOf,
        run: _ComputePass,
        *,
        backward: bool,
    ) -> tuple[TermGradients, LossOutput]:
        logprobs: list[np.ndarray] = [np.empty(0)] * len(data)
        gradients, metrics, total = TermGradients(), dict[str, float](), 0.0
        for micro in micros:
            for part, result in self._with_retries(data, micro, terms, run, backward):
                # Losses are sums over tokens, so those of micro-batches add up without weights.
                total += result.loss
                _add_to(gradients, result.gradients)
                for name, value in result.metrics.items():
                    metrics[name] = metrics.get(name, 0.0) + float(value)
                for index, row in zip(part.indices, result.logprobs_by_sequence(), strict=True):
                    logprobs[index] = row.cpu().numpy()
            # Between micro-batches the sampler may use the device.
            self._pause()
        return gradients, LossOutput(logprobs, {**metrics, "loss:sum": total})

    def _coupled(
        self, data: Sequence[Example], loss_fn: CustomLossFn, trained_only: bool
    ) -> LossOutput:
        """Computes a loss that needs the log-probabilities of the whole batch at once."""
        terms = self.adapter.terms(self.base.dtype, requires_grad=True)
        micros = self._plan(data)
        passes = [MicroBatchPass(self.base, terms, data, micro) for micro in micros]
        # 1. Log-probabilities of all micro-batches. The graph of one micro-batch fits into memory,
        #    several graphs may not.
        count = self.in_step or len(micros)
        keep = count == 1
        logprobs: list[torch.Tensor] = [torch.empty(0)] * len(data)
        for micro, one in zip(micros, passes, strict=True):
            one.forward(
                grad=keep, checkpoint=self._recomputed_share(micro), trained_only=trained_only
            )
            for index, values in zip(micro.indices, one.logprobs_by_sequence(), strict=True):
                logprobs[index] = values
            self._pause()
        self.idle(count - len(micros), terms, backward=False)
        # 2. The loss and its gradient with respect to the log-probabilities.
        value, metrics, upstream = evaluate_custom(loss_fn, range(len(data)), logprobs)
        # 3. Backward through each micro-batch, after a second forward pass if no graph was kept.
        gradients = TermGradients()
        for micro, one in zip(micros, passes, strict=True):
            if not keep:
                # Only hidden states are needed: the head recomputes the softmax in its backward
                # pass.
                one.body(grad=True, checkpoint=self._recomputed_share(micro))
            _add_to(gradients, one.backward(torch.cat([upstream[i] for i in micro.indices])))
            one.release()
            self._pause()
        self.idle(count - len(micros), terms, backward=True)
        self.add_gradients(gradients)
        return LossOutput([row.cpu().numpy() for row in logprobs], {**metrics, "loss:sum": value})

    def _with_retries(
        self,
        data: Sequence[Example],
        micro: MicroBatch,
        terms: TermsOf,
        run: _ComputePass,
        backward: bool,
    ) -> list[tuple[MicroBatch, MicroBatchPass]]:
        """Runs a micro-batch. If out of memory, runs its halves, and finally one row with
        checkpointing."""
        attempts, reason = [self._recomputed_share(micro)], ""
        halves: list[MicroBatch] = []
        more: list[float] = []
        for checkpoint in attempts:
            one = MicroBatchPass(self.base, terms(micro), data, micro)
            try:
                run(one, checkpoint=checkpoint)
                if checkpoint > attempts[0]:  # so that the next pass does not fail first
                    self.base.limits.note_recomputed(micro.padded_tokens, checkpoint)
                return [(micro, one)]
            except Exception as error:
                if not out_of_memory(error):
                    raise
                reason = str(error)
            # Outside the except block, whose traceback would keep the activations alive.
            one.release()
            release_cached_memory(self.base.device)
            if len(attempts) == 1:
                halves = micro.halves([example.tokens for example in data])
                # Checkpointing costs a third more work, so it is tried only if halving is
                # impossible.
                if backward and not halves:
                    more = [share for share in _SHARES if share > attempts[0]]
                # It would leave the ranks that are in step: rank 0 repeats the pass instead.
                if self.in_step is None:
                    attempts += more
        if not halves:
            if self.in_step is not None and more:
                self.base.limits.note_recomputed(micro.padded_tokens, more[0])
            count = micro.group_size
            what = "a sequence" if count == 1 else f"a group of {count} sequences in rows"
            raise OutOfMemoryError(
                f"{what} of {micro.padded_length} tokens does not fit into the memory of "
                f"{self.base.device}: {reason}; set max_length lower"
            )
        tokens = micro.padded_tokens
        logger.warning("Out of memory at %d tokens; halving.", tokens)
        # Remember the limit for this and later runs on the same base model: another failure would
        # cost a pass.
        self.base.limits.note_failed(tokens, free_memory_bytes(self.base.device))
        self.token_budget = self.base.limits.budget(self.token_budget)
        if self.in_step is not None:
            raise OutOfMemoryError(
                f"a micro-batch of {tokens} tokens does not fit into the memory of "
                f"{self.base.device}: {reason}"
            )
        out = []
        for half in halves:
            out += self._with_retries(data, half, terms, run, backward)
        return out
