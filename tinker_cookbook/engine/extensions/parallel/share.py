"""What one rank computes: its datums of a batch, and its parts of weights, gradients and losses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from tinker_cookbook.engine.extensions.parallel.launch import keeping_step
from tinker_cookbook.engine.extensions.parallel.sharding import gathers_of
from tinker_cookbook.engine.memory import KnownLimits
from tinker_cookbook.engine.model.lora import Adapter
from tinker_cookbook.engine.training.losses import CustomLossFn, evaluate_custom
from tinker_cookbook.engine.training.packing import MicroBatch
from tinker_cookbook.engine.training.run import TrainingRun
from tinker_cookbook.exceptions import TrainingError


def shares_of(
    micros: Sequence[MicroBatch], sequences: Sequence[np.ndarray], ranks: int
) -> list[list[int]]:
    """Returns the datums of each rank, in ascending order; rank 0 has some at least.

    Rows of the planned micro-batches stay whole, so ranks share prefixes as one process does,
    unless a row has more than a rank's part of the tokens. Groups always stay whole.
    """
    waiting = [row for micro in micros for row in micro.units()]
    largest = sum(row.padded_tokens for row in waiting) / ranks
    rows: list[MicroBatch] = []
    while waiting:
        row = waiting.pop()
        halves = row.halves(sequences) if row.padded_tokens > largest else []
        waiting += halves
        rows += [] if halves else [row]
    # The largest first, each to the rank with the least work so far; equal batches give equal
    # shares.
    shares: list[list[int]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for row in sorted(rows, key=lambda row: (-row.padded_tokens, row.indices)):
        rank = work.index(min(work))
        shares[rank] += row.indices
        work[rank] += row.padded_tokens
    return [sorted(share) for share in shares]


def send_weights(adapter: Adapter) -> None:
    """Sends an adapter from rank 0 to the ranks that call ``receive_weights``."""
    distributed.broadcast(_flat(adapter.parameters()), 0)


@torch.no_grad()
def receive_weights(adapter: Adapter) -> None:
    """Replaces the numbers of an adapter by those of rank 0, bit for bit."""
    tensors = adapter.parameters()
    flat = _flat(tensors)
    distributed.broadcast(flat, 0)
    for name, values in _unflat(flat, tensors).items():
        tensors[name].copy_(values)


def send_gradients(adapter: Adapter, gradients: Mapping[str, Tensor]) -> None:
    """Adds the gradients of this rank to the sum that rank 0 takes."""
    distributed.reduce(_flat(adapter.parameters(), gradients), 0)


def sum_gradients(adapter: Adapter, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the sum of the gradients of all ranks; the others call ``send_gradients``."""
    # One tensor: many small ones would each take a round of messages.
    flat = _flat(adapter.parameters(), gradients)
    distributed.reduce(flat, 0)
    return _unflat(flat, adapter.parameters())


@dataclass(frozen=True)
class Steps:
    """How the ranks keep in step in a pass over a sharded base model."""

    micro_batches: int
    """Number that each rank runs."""
    token_budget: int
    """Tokens of one at most."""
    phases: Sequence[bool]
    """For each run over the micro-batches, whether it has a backward part."""
    limits: KnownLimits
    """Those of rank 0, which all ranks begin with."""


@contextmanager
def pass_in_step(
    run: TrainingRun, steps: Steps, on_error: Callable[[Exception], None]
) -> Iterator[None]:
    """Runs the block's pass in step with the other ranks; see ``keeping_step``."""
    gathers = gathers_of(run.base)

    def expected() -> list[int]:
        return [
            place
            for backward in steps.phases
            for _ in range(steps.micro_batches)
            for place in gathers.of_pass(run.adapter.tensors, backward=backward)
        ]

    run.keep_pass()  # the one before was not undone
    run.in_step, run.token_budget = steps.micro_batches, steps.token_budget
    run.base.limits = steps.limits
    try:
        with keeping_step("a pass over the sharded base model", gathers, expected, on_error):
            yield
    finally:
        run.in_step = None


Evaluated = tuple[float, dict[str, float], list[Tensor]]
"""Value, metrics and gradients of a custom loss."""


def stand_in(
    value: float,
    metrics: dict[str, float],
    gradients: Sequence[Tensor | np.ndarray],
    logprobs: list[Tensor],
) -> tuple[Tensor, dict[str, float]]:
    """Returns a loss that has a value and gradients for ``logprobs`` computed elsewhere."""
    total = torch.tensor(value, device=logprobs[0].device)
    for leaf, gradient in zip(logprobs, gradients, strict=True):
        slope = torch.as_tensor(gradient).to(leaf.device)
        total = total + (slope * (leaf - leaf.detach())).sum()
    return total, metrics


class _SharedLoss:
    """A custom loss that rank 0 computes for all ranks.

    ``in_step``: the ranks run the layers together, so a pass whose loss fails goes on without
    gradients; ``error`` is then raised after it.
    """

    def __init__(
        self,
        loss_fn: CustomLossFn,
        shares: Sequence[Sequence[int]],
        device: torch.device,
        *,
        in_step: bool = False,
    ) -> None:
        self._loss_fn, self._shares, self._device = loss_fn, shares, device
        self._in_step = in_step
        self.error: Exception | None = None
        """The first error of the loss: of a class that other ranks may not have."""

    def give_up(self, error: BaseException) -> None:
        """Ends the waiting for a rank that failed."""

    def _evaluate(self, numbers: Sequence[int], logprobs: list[Tensor]) -> Evaluated:
        try:
            return evaluate_custom(self._loss_fn, numbers, logprobs)
        except Exception as error:
            self.error = self.error or error
            if not self._in_step:
                raise
            return 0.0, {}, [torch.zeros_like(one) for one in logprobs]

    def _received(self, values: Sequence[np.ndarray]) -> list[Tensor]:
        return [torch.from_numpy(one).to(self._device) for one in values]


class GroupLoss(_SharedLoss):
    """A custom loss of whole groups: each rank has some of the groups."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._one_at_a_time = threading.Lock()

    def own(
        self, indices: Sequence[int], logprobs: list[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        """Computes the loss of groups of rank 0."""
        return stand_in(*self._of(0, indices, logprobs), logprobs)

    def answer(self, rank: int, indices: Sequence[int], values: Sequence[np.ndarray]) -> Any:
        """Returns value, metrics and gradients of groups of another rank."""
        value, metrics, found = self._of(rank, indices, self._received(values))
        return value, metrics, [gradient.cpu().numpy() for gradient in found]

    def _of(self, rank: int, indices: Sequence[int], logprobs: list[Tensor]) -> Evaluated:
        with self._one_at_a_time:
            return self._evaluate([self._shares[rank][i] for i in indices], logprobs)


class BatchLoss(_SharedLoss):
    """A custom loss that needs the log-probabilities of all ranks at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrival = threading.Condition()
        self._logprobs: dict[int, Tensor] = {}
        self._gradients: list[Tensor] | None = None
        self._missing: BaseException | None = None

    def own(
        self, indices: Sequence[int], logprobs: list[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        """Computes the loss once all ranks have given their part; value and metrics are rank 0's.

        Raises the error of a rank that failed before.
        """
        count = sum(len(share) for share in self._shares)
        with self._arrival:
            self._logprobs |= zip(self._shares[0], logprobs, strict=True)
            self._arrival.wait_for(lambda: self._missing or len(self._logprobs) == count)
            if self._missing is not None:
                raise self._missing
        # Outside of the lock: the other ranks wait for the gradients anyway.
        ordered = [self._logprobs[i].detach() for i in range(count)]
        value, metrics, found = self._evaluate(range(count), ordered)
        with self._arrival:
            self._gradients = found
            self._arrival.notify_all()
        return stand_in(value, metrics, [found[i] for i in self._shares[0]], logprobs)

    def answer(self, rank: int, indices: Sequence[int], values: Sequence[np.ndarray]) -> Any:
        """Takes the part of another rank, and returns its gradients when there are any."""
        logprobs = self._received(values)
        with self._arrival:
            self._logprobs |= zip(self._shares[rank], logprobs, strict=True)
            self._arrival.notify_all()
            self._arrival.wait_for(lambda: self._missing or self._gradients is not None)
            if self._gradients is None:
                raise TrainingError("another rank failed, so the loss was not computed")
        # Value and metrics are rank 0's.
        return 0.0, {}, [self._gradients[i].cpu().numpy() for i in self._shares[rank]]

    def give_up(self, error: BaseException) -> None:
        """Ends the waiting for a rank that failed."""
        with self._arrival:
            self._missing = self._missing or error
            self._arrival.notify_all()


def _flat(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor] | None = None) -> Tensor:
    """Returns one tensor of ``values`` (zeros where one is missing), laid out like ``tensors``."""
    values = tensors if values is None else values
    parts = [
        values[name].detach() if name in values else torch.zeros_like(tensor)
        for name, tensor in tensors.items()
    ]
    return torch.cat([part.reshape(-1) for part in parts])


def _unflat(flat: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    return {
        name: part.view(tensor.shape)
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    }
