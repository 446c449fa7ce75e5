"""The forward and backward pass of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tinker_cookbook.engine.adapters import Adapter, Pairs
from tinker_cookbook.engine.base_model import BaseModel
from tinker_cookbook.engine.examples import Example
from tinker_cookbook.engine.losses import Loss, LossInputs
from tinker_cookbook.engine.packing import concatenate, pad


class MicroBatchPass:
    """Holds what lives between the forward and the backward pass of a few sequences.

    After ``run``: ``loss`` (float), ``gradients`` (adapter tensors by peft name, empty without
    backward) and ``split_logprobs()``.
    """

    def __init__(self, base: BaseModel, examples: Sequence[Example]) -> None:
        self._base = base
        self._examples = examples
        device = base.device
        self._batch = pad([e.tokens for e in examples], max(len(e) for e in examples), device)
        self._targets = concatenate([e.targets for e in examples], torch.int64, device)
        self._hidden: torch.Tensor | None = None
        self._adapter: Adapter | None = None
        self._pairs: Pairs = {}
        self._logprobs: torch.Tensor | None = None
        self.loss = 0.0
        self.gradients: dict[str, torch.Tensor] = {}

    def run(
        self,
        adapter: Adapter,
        loss: Loss,
        config: Mapping[str, float],
        *,
        backward: bool,
        checkpoint: bool,
    ) -> None:
        """Forward, loss and, if asked, backward."""
        inputs = self._loss_inputs(loss, config)
        if backward and loss.linear:
            self._body(adapter, grad=True, checkpoint=checkpoint)
            self.gradients = self.backward(-inputs["weights"], fill_logprobs=True)
            assert self._logprobs is not None
            self.loss = float(loss.function(self._logprobs, inputs))
        else:
            self.forward(adapter, grad=backward, checkpoint=checkpoint)
            assert self._logprobs is not None
            leaf = self._logprobs.clone().requires_grad_(backward)
            value = loss.function(leaf, inputs)
            self.loss = float(value)
            if backward:
                (upstream,) = torch.autograd.grad(value, leaf)
                self.gradients = self.backward(upstream)
        self.release(keep_result=True)

    def forward(self, adapter: Adapter, *, grad: bool, checkpoint: bool) -> None:
        """Hidden states (with a graph if ``grad``) and log-probabilities."""
        hidden = self._body(adapter, grad=grad, checkpoint=checkpoint)
        self._logprobs = self._base.head.logprobs(
            hidden.detach(), self._targets, self._base.unembed_pair(self._pairs)
        )

    def backward(
        self, upstream: torch.Tensor, *, fill_logprobs: bool = False
    ) -> dict[str, torch.Tensor]:
        """Adapter gradients, by peft name, for those of the log-probabilities."""
        hidden, adapter = self._hidden, self._adapter
        assert hidden is not None and adapter is not None, "backward before forward"
        if fill_logprobs:
            self._logprobs = torch.empty(
                self._targets.shape, dtype=torch.float32, device=hidden.device
            )
        head = self._base.head.backward(
            hidden.detach(),
            self._targets,
            upstream,
            self._base.unembed_pair(self._pairs),
            self._logprobs if fill_logprobs else None,
        )
        parameters = adapter.parameters()
        out: dict[str, torch.Tensor] = {}
        if hidden.requires_grad:
            leaves = list(parameters.values())
            with self._base.adapted(self._pairs):  # checkpointed layers run forward again here
                found = torch.autograd.grad(hidden, leaves, head.hidden, allow_unused=True)
            out = {n: g for n, g in zip(parameters, found, strict=True) if g is not None}
        if head.a is not None and head.b is not None:
            name = next(t.name for t in adapter.targets if t.group == "unembed")
            out[f"base_model.model.{name}.lora_A.weight"] = head.a
            out[f"base_model.model.{name}.lora_B.weight"] = head.b * adapter.spec.scaling
        return out

    def logprobs_by_row(self) -> list[torch.Tensor]:
        """Log-probabilities of each sequence, [T] or [T, K]."""
        assert self._logprobs is not None
        return list(self._logprobs.detach().split([len(e) for e in self._examples]))

    def split_logprobs(self) -> list[np.ndarray]:
        """Log-probabilities of each sequence on the host."""
        return [row.cpu().numpy() for row in self.logprobs_by_row()]

    def release(self, *, keep_result: bool = False) -> None:
        """Drops graph and activations."""
        self._hidden, self._adapter, self._pairs = None, None, {}
        if not keep_result:
            self._logprobs, self.gradients = None, {}

    def _body(self, adapter: Adapter, *, grad: bool, checkpoint: bool) -> torch.Tensor:
        """Hidden states [N, H] of the real positions."""
        base = self._base
        with torch.set_grad_enabled(grad):
            pairs = adapter.pairs(base.dtype)
            with base.adapted(pairs), base.checkpointed(checkpoint and grad):
                hidden = base.hidden(self._batch.tokens)
            hidden = hidden.reshape(-1, hidden.shape[-1])
            if len(self._batch.flat) != len(hidden):
                hidden = hidden[self._batch.flat]
        self._adapter, self._hidden, self._pairs = adapter, hidden, pairs
        return hidden

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
