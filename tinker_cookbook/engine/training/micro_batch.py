"""The forward and backward pass of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.head import SavedSoftmax
from tinker_cookbook.engine.model.low_rank import Terms
from tinker_cookbook.engine.training.custom_loss import CustomLossFn, evaluate
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.training.losses import Loss, LossInputs
from tinker_cookbook.engine.training.packing import (
    MicroBatch,
    PaddedBatch,
    concatenate,
    pad,
    plan_groups,
)

_SHARED_ROWS = 5
"""Micro-batches' worth of tokens in a row that shares a long prefix: each further row would compute
the prefix again, which costs more than a large row does."""


def plan_for(
    base: BaseModel, sequences: Sequence[np.ndarray], token_budget: int, group_size: int = 1
) -> list[MicroBatch]:
    """Micro-batches of ``sequences`` as ``base`` can run them, and as its device does it best."""
    shared = token_budget if base.shares_prefixes else 0
    if base.device.type == "cpu":  # elsewhere the budget is all there is
        shared *= _SHARED_ROWS
    return plan_groups(sequences, group_size, token_budget, shared_budget=shared)


class MicroBatchPass:
    """Holds what lives between the forward and the backward pass of a few sequences.

    ``terms`` is the adapter as the layers apply it; gradients are those of its tensors. After
    ``run``: ``loss`` (float), ``gradients`` (fp32 by target name, empty without backward) and
    ``split_logprobs()``, in the order of ``micro.indices``; after ``run_custom`` also ``metrics``.
    """

    def __init__(
        self, base: BaseModel, terms: Terms, data: Sequence[Example], micro: MicroBatch
    ) -> None:
        self._base = base
        self._terms = terms
        self._indices = micro.indices
        self._examples = [data[i] for i in self._indices]
        self._batch = pad(micro, [example.tokens for example in data], base.device)
        targets = np.concatenate([example.targets for example in self._examples])
        # Of sequences that share a prefix, most positions and targets are the same: the head
        # computes each once, and `_expand` maps them back.
        self._expand: torch.Tensor | None = None
        flat = self._batch.flat
        if self._batch.tree is not None and targets.ndim == 1:
            keys = flat.cpu().numpy() * base.vocab_size + targets
            keys, expand = np.unique(keys, return_inverse=True)
            targets = keys % base.vocab_size
            flat = torch.from_numpy(keys // base.vocab_size).to(base.device)
            self._expand = torch.from_numpy(expand).to(base.device)
        self._flat = flat
        self._targets = torch.from_numpy(targets).to(device=base.device, dtype=torch.int64)
        self._hidden: torch.Tensor | None = None
        self._logprobs: torch.Tensor | None = None
        self._kept: SavedSoftmax | None = None
        self.loss = 0.0
        self.metrics: dict[str, float] = {}
        self.gradients: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(
        self, loss: Loss, config: Mapping[str, float], *, backward: bool, checkpoint: bool
    ) -> None:
        """Forward, loss and, if asked, backward."""
        inputs = self._loss_inputs(loss, config)
        if backward and loss.linear:
            self.body(grad=True, checkpoint=checkpoint)
            self.gradients = self.backward(-inputs["weights"], fill_logprobs=True)
            self.loss = float(loss.function(self._expanded_logprobs(), inputs))
        else:
            self.forward(grad=backward, checkpoint=checkpoint)
            leaf = self._expanded_logprobs().clone().requires_grad_(backward)
            value = loss.function(leaf, inputs)
            self.loss = value.item()
            if backward:
                (upstream,) = torch.autograd.grad(value, leaf)
                self.gradients = self.backward(upstream)
        self.release(keep_result=True)

    def run_custom(self, loss_fn: CustomLossFn, *, trained_only: bool, checkpoint: bool) -> None:
        """Forward, a loss of the caller's over these sequences alone, and backward."""
        self.forward(grad=True, checkpoint=checkpoint, trained_only=trained_only)
        result = evaluate(loss_fn, self._indices, self.logprobs_by_sequence())
        self.loss, self.metrics = result.value, result.metrics
        self.gradients = self.backward(torch.cat(result.gradients))
        self.release(keep_result=True)

    def forward(self, *, grad: bool, checkpoint: bool, trained_only: bool = False) -> None:
        """Hidden states (with a graph if ``grad``) and log-probabilities; of the positions without
        weight they are 0 if ``trained_only``, and no logits are computed there."""
        hidden = self.body(grad=grad, checkpoint=checkpoint).detach()
        head, pair = self._base.head, self._base.unembed_pair(self._terms)
        trained = self._trained()
        at = trained.nonzero()[:, 0]
        self._kept = SavedSoftmax(at) if grad else None
        self._logprobs = torch.zeros(self._targets.shape, device=hidden.device)
        self._logprobs[at] = head.logprobs(hidden[at], self._targets[at], pair, self._kept)
        if not trained_only:
            at = (~trained).nonzero()[:, 0]
            self._logprobs[at] = head.logprobs(hidden[at], self._targets[at], pair)

    def body(self, *, grad: bool, checkpoint: bool) -> torch.Tensor:
        """Hidden states of the positions that the head needs."""
        hidden = hidden_states(
            self._base, self._terms, self._batch, grad=grad, checkpoint=checkpoint
        )
        if len(self._flat) != len(hidden) or self._batch.tree is not None:
            hidden = hidden[self._flat]
        self._hidden = hidden
        return hidden

    def backward(
        self, upstream: torch.Tensor, *, fill_logprobs: bool = False
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Gradients of the adapter's terms, for those of the log-probabilities."""
        hidden = self._hidden
        assert hidden is not None, "backward before forward"
        if self._expand is not None:
            total = upstream.new_zeros(len(self._targets))
            upstream = total.index_add_(0, self._expand, upstream)
        if fill_logprobs:
            self._logprobs = torch.empty(
                self._targets.shape, dtype=torch.float32, device=hidden.device
            )
        head = self._base.head.backward(
            hidden.detach(),
            self._targets,
            upstream,
            self._base.unembed_pair(self._terms),
            self._logprobs if fill_logprobs else None,
            self._kept,
        )
        self._kept = None
        out = self._body_gradients(hidden, head.hidden) if hidden.requires_grad else {}
        if head.a is not None and head.b is not None:
            out[self._base.unembed_name] = (head.a, head.b)
        return out

    def logprobs_by_sequence(self) -> list[torch.Tensor]:
        """Log-probabilities of each sequence, [T] or [T, K]."""
        return list(self._expanded_logprobs().split([len(e) for e in self._examples]))

    def split_logprobs(self) -> list[np.ndarray]:
        """Log-probabilities of each sequence on the host."""
        return [row.cpu().numpy() for row in self.logprobs_by_sequence()]

    def release(self, *, keep_result: bool = False) -> None:
        """Drops graph and activations."""
        self._hidden = self._kept = None
        if not keep_result:
            self._logprobs, self.gradients = None, {}

    def _body_gradients(
        self, hidden: torch.Tensor, upstream: torch.Tensor
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        names = [name for name in self._terms if name != self._base.unembed_name]
        leaves = [tensor for name in names for tensor in (self._terms[name].a, self._terms[name].b)]
        # Checkpointed layers run forward again here.
        with self._base.adapted(self._terms), self._base.along_tree(self._batch.tree):
            found = torch.autograd.grad(hidden, leaves, upstream, allow_unused=True)
        # A transposed gradient must not leave here: fused AdamW reads memory in order, whatever
        # the strides, and would silently apply it to the wrong elements.
        filled = [
            (torch.zeros_like(leaf) if gradient is None else gradient).to(
                torch.float32, memory_format=torch.contiguous_format
            )
            for leaf, gradient in zip(leaves, found, strict=True)
        ]
        return dict(zip(names, zip(filled[::2], filled[1::2], strict=True), strict=True))

    def _trained(self) -> torch.Tensor:
        """Returns which of the head's positions [T] count: have a weight or, else, an advantage."""
        inputs = [example.inputs for example in self._examples]
        name = next((n for n in ("weights", "advantages") if n in inputs[0]), None)
        if name is None:
            return torch.ones(len(self._targets), dtype=torch.bool, device=self._targets.device)
        found = np.concatenate([given[name] != 0 for given in inputs])
        counts = torch.from_numpy(found if found.ndim == 1 else found.any(-1))
        counts = counts.to(self._targets.device)
        if self._expand is None:
            return counts
        out = counts.new_zeros(len(self._targets))
        out[self._expand[counts]] = True
        return out

    def _expanded_logprobs(self) -> torch.Tensor:
        assert self._logprobs is not None
        return self._logprobs if self._expand is None else self._logprobs[self._expand]

    def _loss_inputs(self, loss: Loss, config: Mapping[str, float]) -> LossInputs:
        names = [n for n in (*loss.required, *loss.optional) if n in self._examples[0].inputs]
        fields = {
            name: concatenate(
                [e.inputs[name] for e in self._examples], torch.float32, self._base.device
            )
            for name in names
            if name != "target_tokens"
        }
        return LossInputs(fields, self._batch.sequence, len(self._examples), config)


def hidden_states(
    base: BaseModel, terms: Terms, batch: PaddedBatch, *, grad: bool, checkpoint: bool = False
) -> torch.Tensor:
    """Last hidden states [B * L, H] of all places of a padded micro-batch."""
    layout = {} if batch.positions is None else {"position_ids": batch.positions}
    with (
        torch.set_grad_enabled(grad),
        base.adapted(terms),
        base.checkpointed(checkpoint and grad),
        base.along_tree(batch.tree),
    ):
        hidden = base.hidden(batch.tokens, **layout)
    return hidden.reshape(-1, hidden.shape[-1])
