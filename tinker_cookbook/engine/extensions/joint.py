"""Joint passes of several runs: sequences share micro-batches, adapters share a product.

The adapters of a layer are stacked (see ``stacked_terms``), so a layer needs as many kernels for
several runs as for one.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tinker_cookbook.engine.extensions.stacked_terms import StackedTerms, can_stack
from tinker_cookbook.engine.memory import release_cached_memory
from tinker_cookbook.engine.model.lora import TermGradients
from tinker_cookbook.engine.model.low_rank import Terms
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.training.losses import Loss
from tinker_cookbook.engine.training.micro_batch import MicroBatchPass, loss_inputs
from tinker_cookbook.engine.training.packing import MicroBatch, concatenate
from tinker_cookbook.engine.training.run import LossOutput, PassRequest, TrainingRun

logger = logging.getLogger(__name__)

MOST_TOKENS = 4096
"""Maximum tokens of a joint pass. More tokens keep a GPU busy anyway, and a mask makes each token
compute the ranks of other runs. An estimate, not measured: the launches of a pass (about 91 per
layer, 5 us each) take as long as a few hundred tokens of an 8B model, or two thousand of a 0.6B
model.
"""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Pass:
    """A request with checked data; ``number`` is its index among the requests."""

    number: int
    request: PassRequest
    run: TrainingRun
    loss: Loss
    data: list[Example]
    config: Mapping[str, float]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.data))

    def joins(self, others: Sequence[_Pass]) -> bool:
        """Returns whether this pass can be computed together with ``others``."""
        passes, first = (*others, self), others[0]
        base = self.run.base
        return (
            base is first.run.base
            and self._kind == first._kind
            and all(one._joinable for one in passes)
            and can_stack(base, [one.run.adapter for one in passes])
            and sum(one.tokens for one in passes) <= min(MOST_TOKENS, self.run.token_budget)
        )

    @property
    def _kind(self) -> tuple[object, ...]:
        """Properties that joint passes must share, because their inputs are concatenated: the loss,
        its settings, optional fields, and the number of targets per token."""
        return self.loss.name, self.config, set(self.data[0].inputs), self.data[0].targets.shape[1:]

    @property
    def _joinable(self) -> bool:
        # Subclasses compute in several processes. Router replay supports one run at a time. Images
        # that see in both directions remove the padding by which owners are counted on a CPU.
        base = self.run.base
        both_ways = any(base.last_seen(one.tokens) is not None for one in self.data)
        return (
            type(self.run) is TrainingRun
            and base.replay is None
            and (base.packs_rows or not both_ways)
        )


def run_together(
    requests: Sequence[PassRequest],
) -> Iterator[tuple[int, LossOutput | Exception]]:
    """Computes passes of different runs, jointly if possible; yields the index of each and
    its result, or its error, as soon as it is complete.

    An error of one pass does not affect the others. If a joint pass fails (out of memory, numbers
    that are not finite), its runs are computed separately.
    """
    waiting: list[_Pass] = []
    for number, request in enumerate(requests):
        try:
            waiting.append(_checked(number, request))
        except Exception as error:
            yield number, error
    while waiting:
        group = [waiting.pop(0)]
        for one in list(waiting):
            if one.joins(group):
                group.append(one)
                waiting.remove(one)
        outputs = _joined(group) if len(group) > 1 else None
        for place, one in enumerate(group):
            yield one.number, _alone(one) if outputs is None else outputs[place]


def _checked(number: int, request: PassRequest) -> _Pass:
    run = request.run()
    with run.refusing_step_after_failure(True):
        given = request.examples()
        loss, data, config = run.checked(given, request.loss_name, request.loss_config)
    return _Pass(number, request, run, loss, data, config)


def _alone(one: _Pass) -> LossOutput | Exception:
    try:
        return one.run.forward_backward(one.data, one.loss.name, one.request.loss_config)
    except Exception as error:
        return error


def _joined(passes: Sequence[_Pass]) -> list[LossOutput] | None:
    """Adds the gradients of a joint pass to its runs and returns the results; ``None`` if it
    failed, and then nothing was added."""
    try:
        outputs, gradients = _compute(passes)
    except Exception as error:
        reason = str(error) or type(error).__name__
        traceback.clear_frames(error.__traceback__)  # its frames hold the activations
    else:
        for one, found in zip(passes, gradients, strict=True):
            one.run.add_gradients(found)
        return outputs
    release_cached_memory(passes[0].run.base.device)
    logger.warning(
        "A joint pass of %d runs failed (%s); computing each separately.", len(passes), reason
    )
    return None


def _compute(passes: Sequence[_Pass]) -> tuple[list[LossOutput], list[TermGradients]]:
    first = passes[0]
    base = first.run.base
    stacked = StackedTerms(base, [one.run.adapter for one in passes])
    data = [example for one in passes for example in one.data]
    owners = np.repeat(np.arange(len(passes)), [len(one.data) for one in passes])

    def terms(micro: MicroBatch) -> Terms:
        # The sequences of a row have one owner.
        rows = owners[[row.indices[0] for row in micro.rows]]
        return stacked.of(np.repeat(rows, micro.row_tokens))

    run = partial(MicroBatchPass.run, loss=first.loss, config=first.config, backward=True)
    gradients, logprobs = first.run.compute_joint(data, owners, terms, run)
    # A mask cannot stop NaN (0 times NaN is NaN), so one diverged run would affect the others.
    sides = [side for pair in gradients.values() for side in pair]
    norms = torch.stack(torch._foreach_norm(sides))  # pyright: ignore[reportPrivateImportUsage]
    if not (norms.isfinite().all() and all(np.isfinite(row).all() for row in logprobs)):
        raise FloatingPointError("the gradients or log-probabilities of a run are NaN or infinite")
    ends = np.cumsum([0] + [len(one.data) for one in passes])
    outputs = [
        _output(one, logprobs[start:end])
        for one, start, end in zip(passes, ends[:-1], ends[1:], strict=True)
    ]
    return outputs, stacked.split(gradients)


def _output(one: _Pass, logprobs: list[np.ndarray]) -> LossOutput:
    """Returns the result of one run; its loss is computed from the log-probabilities."""
    sequence = torch.from_numpy(np.repeat(np.arange(len(one.data)), [len(d) for d in one.data]))
    inputs = loss_inputs(one.data, one.loss, one.config, sequence)
    value = one.loss.function(concatenate(logprobs, torch.float32, _CPU), inputs)
    return LossOutput(logprobs, {"loss:sum": value.item()})
