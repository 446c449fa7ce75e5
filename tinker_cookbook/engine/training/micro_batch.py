"""Forward and backward pass of one micro-batch.

A pass has three steps, split at the detached hidden states::

    hidden  = model(tokens)                        # with autograd
    g       = d loss / d logprobs(hidden)          # chunked head, then the loss on a small leaf
    d_adapter = autograd(hidden, head.backward(g)) # through the head, then the body

so the loss only sees [T] tensors, and the [T, V] logits are never stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.head import SavedSoftmax
from tinker_cookbook.engine.model.lora import TermGradients, cast
from tinker_cookbook.engine.model.low_rank import LowRank, Terms
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.training.losses import CustomLossFn, Loss, LossInputs, evaluate_custom
from tinker_cookbook.engine.training.packing import MicroBatch, PaddedBatch, concatenate, pad, plan
from tinker_cookbook.engine.training.tree_attention import TreeLayout

_SHARED_ROWS = 5
"""Maximum tokens of a row with a long shared prefix, in micro-batches: each further row would
compute the prefix again, which costs more than a larger row."""


def plan_for(
    base: BaseModel,
    sequences: Sequence[np.ndarray],
    token_budget: int,
    group_size: int = 1,
    owners: np.ndarray | None = None,
) -> list[MicroBatch]:
    """Plans the micro-batches of ``sequences`` for ``base`` and its device; ``owners`` as in
    ``plan``."""
    shared = token_budget if base.shares_prefixes else 0
    if base.device.type == "cpu":  # elsewhere memory, not speed, sets the budget
        shared *= _SHARED_ROWS
    return plan(
        sequences,
        token_budget,
        group_size=group_size,
        shared_budget=shared,
        packed=base.packs_rows,
        owners=owners,
    )


def pad_for(base: BaseModel, micro: MicroBatch, sequences: Sequence[np.ndarray]) -> PaddedBatch:
    """Lays out a micro-batch of the batch ``sequences`` for ``base``."""
    layout = base.shared_layout or TreeLayout
    return pad(micro, sequences, base.device, layout, base.vision)


class MicroBatchPass:
    """State between the forward and the backward pass of one micro-batch.

    ``checkpoint`` is the share of the layers that the backward pass recomputes.

    ``terms`` is the adapter as the layers apply it. After ``run``: ``loss``, ``gradients`` (fp32 by
    target name, empty without backward) and ``logprobs_by_sequence()``, in the order of
    ``micro.indices``; after ``run_custom`` also ``metrics``.
    """

    def __init__(
        self, base: BaseModel, terms: Terms, data: Sequence[Example], micro: MicroBatch
    ) -> None:
        self._base = base
        self._terms = terms
        self._indices = micro.indices
        self._examples = [data[i] for i in self._indices]
        self._batch = pad_for(base, micro, [example.tokens for example in data])
        targets = np.concatenate([example.targets for example in self._examples])
        self._choices, self._replayed = None, 0
        if base.replay is not None:
            tokens = [example.tokens for example in self._examples]
            positions = self._batch.tokens.numel()
            self._choices, self._replayed = base.replay.find(tokens, self._batch.flat, positions)
        # Sequences that share a prefix have most positions and targets in common: the head
        # computes each pair once, and `_expand` maps them back.
        self._expand: Tensor | None = None
        flat = self._batch.flat
        self._shared = micro.shared
        if self._shared and targets.ndim == 1:
            # Encode each (position, target) pair as one integer, so that ``np.unique`` finds equal
            # pairs.
            keys = flat.cpu().numpy() * base.vocab_size + targets
            keys, expand = np.unique(keys, return_inverse=True)
            targets = keys % base.vocab_size
            flat = torch.from_numpy(keys // base.vocab_size).to(base.device)
            self._expand = torch.from_numpy(expand).to(base.device)
        self._flat = flat
        self._targets = torch.from_numpy(targets).to(device=base.device, dtype=torch.int64)
        self._hidden: Tensor | None = None
        self._logprobs: Tensor | None = None
        self._kept: SavedSoftmax | None = None
        self.loss = 0.0
        self.metrics: dict[str, float] = {}
        self.gradients: TermGradients = {}

    def run(
        self, loss: Loss, config: Mapping[str, float], *, backward: bool, checkpoint: float
    ) -> None:
        """Computes the loss and, with ``backward``, the gradients."""
        inputs = loss_inputs(self._examples, loss, config, self._batch.sequence)
        if backward and loss.linear:
            # The loss's gradient is known beforehand: one pass through the head computes both.
            self.body(grad=True, checkpoint=checkpoint)
            self.gradients = self.backward(-inputs["weights"], fill_logprobs=True)
            self.loss = float(loss.function(self._expanded_logprobs(), inputs))
        else:
            # The loss reads a detached leaf of log-probabilities [T], so autograd ends there.
            # ``backward`` continues through the chunked head, which has a hand-written gradient.
            self.forward(grad=backward, checkpoint=checkpoint)
            leaf = self._expanded_logprobs().clone().requires_grad_(backward)
            value = loss.function(leaf, inputs)
            self.loss = value.item()
            if backward:
                (upstream,) = torch.autograd.grad(value, leaf)
                self.gradients = self.backward(upstream)
        if self._base.replay is not None:
            self.metrics = {"router_replayed_tokens:sum": self._replayed}
        self.release(keep_result=True)

    def run_custom(self, loss_fn: CustomLossFn, *, trained_only: bool, checkpoint: float) -> None:
        """Computes a custom loss over these sequences only, and its gradients."""
        self.forward(grad=True, checkpoint=checkpoint, trained_only=trained_only)
        self.loss, self.metrics, gradients = evaluate_custom(
            loss_fn, self._indices, self.logprobs_by_sequence()
        )
        self.gradients = self.backward(torch.cat(gradients))
        self.release(keep_result=True)

    def forward(self, *, grad: bool, checkpoint: float, trained_only: bool = False) -> None:
        """Computes hidden states (with a graph if ``grad``) and log-probabilities. With
        ``trained_only`` positions without weight get 0 and no logits are computed for them."""
        # Detached: the head has its own backward pass, because autograd would store [T, V] logits.
        hidden = self.body(grad=grad, checkpoint=checkpoint).detach()
        head, term = self._base.head, self._unembed_term()
        # Positions with a weight come first: only their softmax is needed in ``backward``.
        trained = self._trained()
        at = trained.nonzero()[:, 0]
        self._kept = SavedSoftmax(at) if grad else None
        self._logprobs = torch.zeros(self._targets.shape, device=hidden.device)
        of_rows = None if term is None else term.at(at)
        self._logprobs[at] = head.logprobs(hidden[at], self._targets[at], of_rows, self._kept)
        if not trained_only:
            at = (~trained).nonzero()[:, 0]
            of_rows = None if term is None else term.at(at)
            self._logprobs[at] = head.logprobs(hidden[at], self._targets[at], of_rows)

    def body(self, *, grad: bool, checkpoint: float) -> Tensor:
        """Returns the hidden states [T, H] of the positions that the head needs."""
        hidden = hidden_states(
            self._base,
            self._terms,
            self._batch,
            grad=grad,
            checkpoint=checkpoint,
            choices=self._choices,
        )
        # Drop padding, and repeat shared positions once per target. Without padding or sharing,
        # indexing would only copy.
        if len(self._flat) != len(hidden) or self._shared:
            hidden = hidden[self._flat]
        self._hidden = hidden
        return hidden

    def backward(self, upstream: Tensor, *, fill_logprobs: bool = False) -> TermGradients:
        """Returns the gradients of the adapter's terms for the gradient of the log-probabilities.
        With ``fill_logprobs`` the head computes the log-probabilities in the same pass."""
        hidden, base = self._hidden, self._base
        assert hidden is not None, "backward before forward"
        if self._expand is not None:
            # Gradients of sequences that share a position and target add up.
            total = upstream.new_zeros(len(self._targets))
            upstream = total.index_add_(0, self._expand, upstream)
        if fill_logprobs:
            self._logprobs = torch.empty(
                self._targets.shape, dtype=torch.float32, device=hidden.device
            )
        # 1. Through the head.
        head = base.head.backward(
            hidden.detach(),
            self._targets,
            upstream,
            self._unembed_term(),
            self._logprobs if fill_logprobs else None,
            self._kept,
        )
        self._kept = None
        # 2. Through the body. Checkpointed layers are recomputed here.
        out = {}
        # False if the adapter covers only the head.
        if hidden.requires_grad:
            # The layers get detached leaves in the compute dtype (``Adapter.terms``); the run
            # converts their gradients to gradients of the fp32 tensors.
            names = [name for name in self._terms if name != base.unembed_name]
            leaves = [side for n in names for side in (self._terms[n].a, self._terms[n].b)]
            adapted = base.adapted(self._terms, self._choices)
            with adapted, base.attending(self._batch.layout):
                found = torch.autograd.grad(hidden, leaves, head.hidden, allow_unused=True)
            # Gradients must be contiguous: fused AdamW reads memory in order, ignores
            # strides, and would silently apply a transposed gradient to the wrong elements.
            # A layer that the pass did not use has no gradient, which counts as zero.
            filled = cast(
                [
                    torch.zeros_like(leaf) if gradient is None else gradient
                    for leaf, gradient in zip(leaves, found, strict=True)
                ],
                torch.float32,
            )
            out = dict(zip(names, zip(filled[::2], filled[1::2], strict=True), strict=True))
        if head.a is not None and head.b is not None:
            out[base.unembed_name] = (head.a, head.b)
        return out

    def logprobs_by_sequence(self) -> list[Tensor]:
        """Returns the log-probabilities of each sequence, [T] or [T, K]."""
        return list(self._expanded_logprobs().split([len(e) for e in self._examples]))

    def release(self, *, keep_result: bool = False) -> None:
        """Drops graph and activations."""
        self._hidden = self._kept = None
        if not keep_result:
            self._logprobs, self.gradients = None, {}

    def _unembed_term(self) -> LowRank | None:
        """Returns the adapter of the head for its positions [T]."""
        term = self._terms.get(self._base.unembed_name)
        return None if term is None else term.at(self._flat)

    def _trained(self) -> Tensor:
        """Returns the mask [T] of the head's positions with a weight or, without weights, an
        advantage."""
        inputs = [example.inputs for example in self._examples]
        name = next((n for n in ("weights", "advantages") if n in inputs[0]), None)
        if name is None:
            return torch.ones(len(self._targets), dtype=torch.bool, device=self._targets.device)
        found = np.concatenate([given[name] != 0 for given in inputs])
        counts = torch.from_numpy(found if found.ndim == 1 else found.any(-1))
        counts = counts.to(self._targets.device)
        if self._expand is None:
            return counts
        # A shared position counts if any of its sequences needs it.
        out = counts.new_zeros(len(self._targets))
        out[self._expand[counts]] = True
        return out

    def _expanded_logprobs(self) -> Tensor:
        assert self._logprobs is not None
        return self._logprobs if self._expand is None else self._logprobs[self._expand]


def loss_inputs(
    examples: Sequence[Example], loss: Loss, config: Mapping[str, float], sequence: Tensor
) -> LossInputs:
    """Returns the inputs of ``loss``; ``sequence`` [T] is the index of each token's sequence."""
    # The loss computes in fp32, whatever the dtype of the model.
    fields = {
        name: concatenate(
            [example.inputs[name] for example in examples], torch.float32, sequence.device
        )
        for name in (*loss.required, *loss.optional)
        if name != "target_tokens" and name in examples[0].inputs
    }
    return LossInputs(fields, sequence, len(examples), config)


def hidden_states(
    base: BaseModel,
    terms: Terms,
    batch: PaddedBatch,
    *,
    grad: bool,
    checkpoint: float = False,
    choices: Tensor | None = None,
) -> Tensor:
    """Returns the last hidden states [B * L, H] of all positions of a padded micro-batch;
    ``choices`` are those of ``RouterReplay.find``."""
    with (
        torch.set_grad_enabled(grad),
        base.adapted(terms, choices),
        base.checkpointed(checkpoint if grad else 0),
        base.attending(batch.layout),
    ):
        hidden = base.hidden(batch.tokens, position_ids=batch.positions)
    return hidden.reshape(-1, hidden.shape[-1])
