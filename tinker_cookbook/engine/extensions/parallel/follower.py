"""The other ranks: each has an engine of its own, which runs the operations that rank 0 sends."""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.extensions.parallel.launch import (
    ProcessRank,
    end_process,
    end_process_group,
    in_step,
    start_process_group,
)
from tinker_cookbook.engine.extensions.parallel.messages import (
    ERROR,
    FAILING,
    QUESTION,
    RESULT,
    Channel,
    sendable,
)
from tinker_cookbook.engine.extensions.parallel.sharding import gathers_of
from tinker_cookbook.engine.extensions.parallel.share import (
    Steps,
    pass_in_step,
    receive_weights,
    send_gradients,
    stand_in,
)
from tinker_cookbook.engine.memory import KnownLimits
from tinker_cookbook.engine.model.loading import import_library
from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec
from tinker_cookbook.engine.model.resolve import ResolvedModel
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.training.run import LossOutput, TrainingRun

_LOOKS_EVERY = 1.0
"""Seconds after which a rank looks whether rank 0 still exists. Mostly the socket tells, but a
child of rank 0 may have inherited it."""


class Follower:
    """Serves the operations of rank 0 (process ``leader``). Its runs have no optimizer state and no
    checkpoints: rank 0 takes the steps and sends the weights."""

    def __init__(self, channel: Channel, leader: int, store: Any, process: ProcessRank) -> None:
        self._channel, self._leader, self._store, self._rank = channel, leader, store, process
        self._engine: Engine | None = None
        self._runs: dict[int, TrainingRun] = {}
        self._answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def serve(self) -> NoReturn:
        """Serves until rank 0 ends."""
        # torchrun sends these to all ranks; rank 0 decides what is finished before the end.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        import_library()  # while rank 0 prepares its program
        while True:
            try:
                while not self._channel.waits(_LOOKS_EVERY):
                    os.kill(self._leader, 0)
                number, name, values = self._channel.receive()
            except (EOFError, OSError):
                if self._engine is not None:
                    end_process(f"rank {self._rank.rank}: rank 0 has ended, so this process ends")
                self._end()
            if name == "end":
                self._end()
            if name == "answer":
                self._answers.put(values)
            elif name in ("open_engine", "close_engine", "load_base"):
                # On this thread: the worker imports nothing and cannot wait for itself.
                try:
                    done = getattr(self, f"_{name}")(*values)
                except Exception as error:
                    self._reply(number, ERROR, sendable(error))
                else:
                    self._reply_later(number, done)
            else:
                self._submit(number, name, values)

    @property
    def _open(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def _end(self) -> NoReturn:
        self._close_engine()
        end_process_group()
        sys.exit(0)

    def _submit(self, number: int, name: str, values: tuple[Any, ...]) -> None:
        operation: Callable[..., Any] = getattr(self, f"_{name}")
        if name in ("forward_backward", "forward_backward_custom"):
            operation = partial(operation, number)
        self._reply_later(number, self._open.submit(operation, *values))

    def _reply_later(self, number: int, done: Future[Any] | None) -> None:
        def reply(future: Future[Any]) -> None:
            error = future.exception()
            if error is None:
                self._reply(number, RESULT, future.result())
            else:
                self._reply(number, ERROR, sendable(error))

        if done is None:
            self._reply(number, RESULT, None)
        else:
            done.add_done_callback(reply)

    def _reply(self, number: int, kind: str, value: Any) -> None:
        with suppress(OSError):  # the main thread sees it as well
            self._channel.send(number, kind, value)

    def _ask(self, number: int, *values: Any) -> Any:
        """Returns rank 0's answer to a question about an operation."""
        self._channel.send(number, QUESTION, values)
        kind, value = self._answers.get()
        if kind == ERROR:
            raise value
        return value

    def _open_engine(
        self, device: str, dtype: str, base_dtype: str, replay_router: bool, shard_base: bool
    ) -> None:
        with in_step("starting torch.distributed"):
            start_process_group(self._store, self._rank)
        self._engine = Engine(device, dtype, base_dtype, replay_router, shard_base=shard_base)

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine, self._runs = None, {}

    def _load_base(self, name: str, resolved: ResolvedModel) -> Future[Any]:
        engine = self._open
        engine.adopt(name, resolved)
        # Kept by the engine, and not sent.
        return engine.submit(lambda: engine.base_model(name) and None)

    def _assist(self, model: str) -> None:
        """Runs the layers of a sharded base model, because rank 0 runs them."""
        with in_step("running the layers"), torch.no_grad():
            base = self._open.base_model(model)
            gathers_of(base).start()
            base.hidden(torch.zeros(1, 1, dtype=torch.int64, device=base.device))

    def _keep_choices(self, model: str, known: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Stores the experts that the sampler in rank 0 has chosen for sequences of tokens."""
        replay = self._open.base_model(model).replay
        for tokens, chosen in known:
            replay.keep(tokens, chosen)

    def _take_weights(self, key: int, model: str, spec: AdapterSpec) -> None:
        """Receives the weights of a run, which rank 0 sends after each change."""
        with in_step("receiving weights"):
            engine, run = self._open, self._runs.get(key)
            if run is None or run.adapter.spec != spec:
                base = engine.base_model(model)
                adapter = Adapter.create(spec, base.targets, 0, base.device)
                run = self._runs[key] = engine.new_run(str(key), base, adapter)
            receive_weights(run.adapter)

    def _pass(
        self,
        number: int,
        run: TrainingRun,
        steps: Steps | None,
        data: Sequence[Example],
        work: Callable[[], LossOutput],
    ) -> LossOutput:
        """Runs a pass, in step with the other ranks where they share a sharded base model."""
        if steps is None:
            return work()

        def tell(error: Exception) -> None:
            # Before this rank catches up: rank 0 may be waiting for its part of a custom loss.
            self._channel.send(number, FAILING, sendable(error))

        with pass_in_step(run, steps, tell):
            if data:
                return work()
            terms = run.adapter.terms(run.base.dtype, requires_grad=True)
            for backward in steps.phases:
                run.idle(steps.micro_batches, terms, backward=backward)
            return LossOutput([])

    def _forward_backward(
        self,
        number: int,
        key: int,
        steps: Steps | None,
        data: Sequence[Example],
        loss_name: str,
        loss_config: Mapping[str, float | str] | None,
        backward: bool,
    ) -> LossOutput:
        run = self._runs[key]
        return self._pass(
            number,
            run,
            steps,
            data,
            lambda: run.forward_backward(data, loss_name, loss_config, backward=backward),
        )

    def _forward_backward_custom(
        self,
        number: int,
        key: int,
        steps: Steps | None,
        data: Sequence[Example],
        group_size: int | None,
        trained_only: bool,
    ) -> LossOutput:
        def loss_fn(indices: Sequence[int], logprobs: list[Any]) -> Any:
            # Rank 0 has the caller's function.
            values = [one.detach().cpu().numpy() for one in logprobs]
            value, metrics, gradients = self._ask(number, list(indices), values)
            return stand_in(value, metrics, gradients, logprobs)

        run = self._runs[key]
        return self._pass(
            number,
            run,
            steps,
            data,
            lambda: run.forward_backward_custom(
                data, loss_fn, group_size, trained_only=trained_only
            ),
        )

    def _undo_pass(self, key: int) -> KnownLimits:
        """Drops the gradients of a pass that will be repeated; returns the limits found by it."""
        run = self._runs[key]
        run.undo_pass()
        return run.base.limits

    def _give_gradients(self, key: int) -> None:
        with in_step("summing gradients"):
            run = self._runs[key]
            send_gradients(run.adapter, run.take_gradients())

    def _drop_gradients(self, key: int) -> None:
        if (run := self._runs.get(key)) is not None:
            run.take_gradients()

    def _end_run(self, key: int) -> None:
        self._runs.pop(key, None)
