"""A training run whose batches are shared among the processes of torchrun."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.checkpoint import CheckpointError

from tinker_cookbook.engine.devices import free_memory_bytes
from tinker_cookbook.engine.extensions.parallel.launch import Followers, in_step
from tinker_cookbook.engine.extensions.parallel.share import (
    BatchLoss,
    GroupLoss,
    Steps,
    pass_in_step,
    send_weights,
    shares_of,
    sum_gradients,
)
from tinker_cookbook.engine.memory import KnownLimits
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.training.losses import CustomLossFn
from tinker_cookbook.engine.training.micro_batch import plan_for
from tinker_cookbook.engine.training.optimizer import AdamSettings
from tinker_cookbook.engine.training.run import LossOutput, TrainingRun
from tinker_cookbook.exceptions import OutOfMemoryError

logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 8
"""Attempts of a pass over a sharded base model before its error is raised."""
_keys = itertools.count()


class DataParallelRun(TrainingRun):
    """The run of rank 0. Losses are sums over datums, so the gradients of the ranks add up.

    Rank 0 alone takes the steps, saves and loads. The other ranks get its weights before the first
    pass after a change, so all compute with the same bits.
    """

    def __init__(self, *args: Any, followers: Followers, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._followers, self._key = followers, next(_keys)
        if self.base.sharding is not None:
            # Sampling in the middle of a pass would leave the processes that are in step.
            self._pause = lambda: None
        self._weights_sent = False
        # Not sent from the finalizer, which may run in the middle of another message.
        weakref.finalize(self, followers.ended_runs.append, self._key).atexit = False

    def forward_backward(
        self,
        data: Sequence[Example],
        loss_name: str,
        loss_config: Mapping[str, float | str] | None = None,
        *,
        backward: bool = True,
    ) -> LossOutput:
        """See ``TrainingRun.forward_backward``; an error of any rank refuses the pass."""
        with self.refusing_step_after_failure(backward):
            # The whole batch: messages number its datums, and no rank begins a batch that is wrong.
            _, data, _ = self.checked(data, loss_name, loss_config)
            more = loss_name, loss_config, backward

            def attempt() -> LossOutput:
                shares = self._shares(data)
                return self._on_all_ranks(
                    "forward_backward",
                    shares,
                    {rank: ([data[i] for i in own], *more) for rank, own in enumerate(shares)},
                    lambda own: super(DataParallelRun, self).forward_backward(
                        own, loss_name, loss_config, backward=backward
                    ),
                    self._steps(data, shares, [backward]),
                )

            return self._with_repetition(attempt)

    def forward_backward_custom(
        self,
        data: Sequence[Example],
        loss_fn: CustomLossFn,
        group_size: int | None = None,
        *,
        trained_only: bool = False,
    ) -> LossOutput:
        """See ``TrainingRun.forward_backward_custom``. ``loss_fn`` is called in rank 0 alone, one
        call at a time; with a ``group_size`` also on threads that wait for other ranks."""
        with self.refusing_step_after_failure(True):
            self._check_custom(data, group_size)
            kind = BatchLoss if group_size is None else GroupLoss
            more = group_size, trained_only

            def attempt() -> LossOutput:
                shares = self._shares(data, group_size or 1)
                steps = self._steps(data, shares, [True], group_size or 1)
                # A loss of the whole batch runs the layers twice if a rank has several
                # micro-batches.
                if steps is not None and steps.micro_batches > 1 and group_size is None:
                    steps = replace(steps, phases=[False, True])
                loss = kind(loss_fn, shares, self.base.device, in_step=steps is not None)
                return self._on_all_ranks(
                    "forward_backward_custom",
                    shares,
                    {rank: ([data[i] for i in own], *more) for rank, own in enumerate(shares)},
                    lambda own: super(DataParallelRun, self).forward_backward_custom(
                        own, loss.own, group_size, trained_only=trained_only
                    ),
                    steps,
                    loss,
                )

            return self._with_repetition(attempt)

    def optim_step(self, settings: AdamSettings) -> dict[str, float]:
        """See ``TrainingRun.optim_step``."""
        if self._gradients and self._failure is None:
            giving = self._followers.start("give_gradients", self._key)
            with in_step("summing gradients"):
                self._gradients = sum_gradients(self.adapter, self._gradients)
            giving.wait()
        else:  # the step will be refused
            self._drop_gradients()
        self._weights_sent = False
        return super().optim_step(settings)

    def replace_by(self, other: TrainingRun) -> None:
        """See ``TrainingRun.replace_by``."""
        super().replace_by(other)
        self._drop_gradients()
        self._weights_sent = False

    def _shares(self, data: Sequence[Example], group_size: int = 1) -> list[list[int]]:
        tokens = [example.tokens for example in data]
        micros = self._plan(data, group_size)
        return shares_of(micros, tokens, self._followers.process.world)

    def _steps(
        self,
        data: Sequence[Example],
        shares: Sequence[Sequence[int]],
        phases: Sequence[bool],
        group_size: int = 1,
    ) -> Steps | None:
        """Returns how a pass keeps the ranks in step; ``None`` if each has a whole base model."""
        if self.base.sharding is None:
            return None
        # With the budget of ``shares``, which is not measured again.
        budget, base = self.token_budget, self.base
        tokens = ([data[i].tokens for i in share] for share in shares)
        count = max(len(plan_for(base, one, budget, group_size)) for one in tokens)
        return Steps(count, budget, phases, base.limits)

    def _with_repetition(self, attempt: Callable[[], LossOutput]) -> LossOutput:
        """Runs a pass. If a rank that shares the base model is out of memory, repeats it on all
        ranks with what that rank has found: they cannot halve a micro-batch each by itself."""
        if self.base.sharding is None:
            return attempt()
        failure = self._failure
        for left in reversed(range(_MOST_ATTEMPTS)):
            known = deepcopy(self.base.limits)
            try:
                output = attempt()
            except Exception as error:
                self.undo_pass()
                if not (left and isinstance(error, OutOfMemoryError) and self._learned(known)):
                    raise
                logger.warning("%s; the pass is repeated on all ranks.", error)
            else:
                self.keep_pass()
                return output
            self._failure = failure  # the repetition decides
        raise AssertionError("unreachable")

    def _learned(self, known: KnownLimits) -> bool:
        """Undoes a pass on the other ranks; returns whether any rank found limits that were not
        ``known``."""
        others = self._followers.start("undo_pass", self._key).wait()
        found = [self.base.limits, *others.values()]
        self.base.limits = known
        return known.learn(found, free_memory_bytes(self.base.device))

    def _on_all_ranks(
        self,
        name: str,
        shares: Sequence[Sequence[int]],
        arguments: Mapping[int, tuple[Any, ...]],
        own: Callable[[list[Example]], LossOutput],
        steps: Steps | None,
        loss: BatchLoss | GroupLoss | None = None,
    ) -> LossOutput:
        """Runs a pass, each rank its share, and puts the results together."""
        self._send_weights()
        self._send_choices({rank: given[0] for rank, given in arguments.items()})
        others = {
            rank: (self._key, steps, *arguments[rank])
            for rank in self._followers.ranks
            # A batch may have fewer datums than there are ranks.
            if shares[rank] or steps is not None
        }
        call = self._followers.start_each(name, others, None if loss is None else loss.answer)
        if loss is not None:
            call.on_error(loss.give_up)
        errors: list[BaseException] = []
        outputs = dict[int, LossOutput]()
        try:
            with self._keeping_step(steps, loss.give_up if loss is not None else lambda _: None):
                outputs[0] = own(arguments[0][0])
        except Exception as caught:
            errors.append(caught)
            if loss is not None:
                loss.give_up(caught)
        # Also after an error here: the others end first.
        others, failed = call.outcomes()
        errors += failed
        if loss is not None and loss.error is not None:
            raise loss.error
        if errors:
            # Without the weights of a rank that failed, others recompute different layers: that
            # error is not the cause.
            raise min(errors, key=lambda error: isinstance(error, CheckpointError))
        return _joined(outputs | others, shares)

    @contextmanager
    def _keeping_step(
        self, steps: Steps | None, on_error: Callable[[Exception], None]
    ) -> Iterator[None]:
        if steps is None:
            yield
            return
        # The others run their own micro-batches, and not the layers for rank 0.
        with_processes, self.base.with_processes = self.base.with_processes, nullcontext
        try:
            with pass_in_step(self, steps, on_error):
                yield
        finally:
            self.base.with_processes = with_processes

    def _send_weights(self) -> None:
        self._end_runs()
        if self._weights_sent:
            return
        taking = self._followers.start("take_weights", self._key, self.base.name, self.adapter.spec)
        with in_step("sending weights"):
            send_weights(self.adapter)
        taking.wait()
        self._weights_sent = True

    def _send_choices(self, shares: Mapping[int, Sequence[Example]]) -> None:
        """Sends the other ranks the sampler's choices of experts for their shares."""
        replay = self.base.replay
        if replay is None:
            return
        known = {rank: replay.known([one.tokens for one in shares[rank]]) for rank in shares}
        arguments = {rank: (self.base.name, known[rank]) for rank in self._followers.ranks}
        self._followers.start_each("keep_choices", arguments).wait()

    def _drop_gradients(self) -> None:
        self._followers.start("drop_gradients", self._key).wait()

    def _end_runs(self) -> None:
        """Frees runs of the other ranks that no longer exist here."""
        while ended := self._followers.ended_runs:
            self._followers.start("end_run", ended.pop())


def _joined(outputs: Mapping[int, LossOutput], shares: Sequence[Sequence[int]]) -> LossOutput:
    logprobs: list[np.ndarray] = [np.empty(0)] * sum(len(share) for share in shares)
    metrics = dict[str, float]()
    for rank, output in outputs.items():
        for index, values in zip(shares[rank], output.logprobs, strict=True):
            logprobs[index] = values
        # Sums, like those of micro-batches.
        for name, value in output.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
    return LossOutput(logprobs, metrics)
