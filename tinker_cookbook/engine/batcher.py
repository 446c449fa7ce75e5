"""Continuous batching: the requests of all clients of a base model, sampled together.

Each step runs the model once over one token of every running sample, and over as many tokens of
waiting prompts as fit; then it draws. Samples leave when they end, and others take their place in
the next step. A prompt is read once for all samples of it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from tinker_cookbook.engine.base_model import BaseModel
from tinker_cookbook.engine.batch_plan import BatchPlan
from tinker_cookbook.engine.devices import free_memory_bytes
from tinker_cookbook.engine.draw_rows import draw_rows
from tinker_cookbook.engine.kv_cache import AnyCache, AnySlot, LayerShape
from tinker_cookbook.engine.memory import out_of_memory, release_cached_memory
from tinker_cookbook.engine.paged_cache import PagedCache, cache_for
from tinker_cookbook.engine.prefix_cache import PrefixCache
from tinker_cookbook.engine.reading import Reading
from tinker_cookbook.engine.requests import SampleRequest, SampleRow
from tinker_cookbook.engine.sampler import Sampler
from tinker_cookbook.exceptions import OutOfMemoryError

logger = logging.getLogger(__name__)

_MOST_ROWS_CPU = 128  # beyond, a step only takes longer
_MOST_ROWS_GPU = 512
_STEP_TOKENS_CPU = 512
_STEP_TOKENS_GPU = 8192
_KEPT_BYTES_CPU = 512 << 20
_WORTH_WAITING_CPU = 64  # common tokens for which a prompt waits: as long as a pass at least
_WORTH_WAITING_GPU = 512
_HEADROOM = 64  # tokens that a new sample is expected to need beside its prompt


@dataclass(eq=False)
class _Waiting:
    """Samples that have not begun, or begin again, after the same ``tokens``."""

    sampler: Sampler
    tokens: np.ndarray
    rows: deque[SampleRow] = field(default_factory=deque)


class Batcher:
    """The running batch of one base model. All methods run on the engine's worker."""

    def __init__(self, base: BaseModel, shapes: list[LayerShape]) -> None:
        self._base, self._shapes = base, shapes
        on_cpu = base.device.type == "cpu"
        self._usual_rows = _MOST_ROWS_CPU if on_cpu else _MOST_ROWS_GPU
        self._most_rows = self._usual_rows  # less while memory is short
        self._step_tokens = _STEP_TOKENS_CPU if on_cpu else _STEP_TOKENS_GPU
        self._worth_waiting = _WORTH_WAITING_CPU if on_cpu else _WORTH_WAITING_GPU
        self._waiting: deque[_Waiting] = deque()
        self._clear()

    @property
    def running(self) -> bool:
        """Whether any sample has begun."""
        return bool(self._readings or self._rows)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return self.running or bool(self._waiting)

    def add(self, request: SampleRequest) -> None:
        """Queues a request."""
        if not self.busy:
            self._budget, self._most_rows = self._free_tokens(), self._usual_rows
        self._waiting.append(_Waiting(request.sampler, request.prompt, deque(request.rows)))

    def step(self) -> None:
        """One forward pass and one token for each running sample.

        Errors go to the requests, never to the caller. Out of memory, the batch begins again with
        half its rows: samples keep what was drawn, only keys and values are computed anew.
        """
        try:
            with torch.inference_mode():
                self._step()
        except Exception as error:
            failed: Exception | None = error
            if out_of_memory(error):
                failed = self._shed(error)
            if failed is not None:
                self._fail_all(failed)
        if not self.busy:
            self._active.shrink()  # training may need the memory

    def give_up(self, error: Exception) -> None:
        """Fails every request; another batcher has to go on."""
        for row in self._all_rows():
            row.request.fail(error)

    def cancel_all(self) -> None:
        """Cancels every request."""
        for row in self._all_rows():
            row.request.future.cancel()

    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        self._make_room()
        self._begin_followers()
        plan = BatchPlan.of(self._active, self._rows, self._readings, self._step_tokens)
        if plan is None:
            return
        device = self._base.device
        hidden = self._base.hidden_of_batch(
            torch.tensor(plan.tokens, device=device),
            torch.tensor(plan.positions, device=device),
            plan.layout,
            plan.segments(device),
        )
        finished = set(draw_rows(hidden, plan.outputs))
        for slot in self._rows:
            slot.length += 1
        for reading in plan.advance():
            self._end_reading(reading, finished)
        for slot in [slot for slot, row in self._rows.items() if row in finished]:
            self._retire(slot)

    def _end_reading(self, reading: Reading, finished: set[SampleRow]) -> None:
        """A prompt was read: its samples run on, each with a copy of its keys and values."""
        assert reading.slot is not None
        self._begin_followers()  # what they wait for need not be kept after this
        room = self._room(reading)
        alike = (row for r in self._readings if self._room(r) == room for row in r.rows)
        self._active.reserve(room, sum(row.request.limit > 1 for row in alike))
        self._readings.remove(reading)
        for row in reading.rows:
            if row in finished:
                row.request.row_ended()
            else:
                slot = self._active.copy(reading.slot, reading.slot.length, room)
                self._rows[slot] = row
        self._kept.adopt(reading.sampler, reading.tokens, reading.slot)

    def _room(self, reading: Reading) -> int:
        """Tokens that a slot for each of its samples is to hold at first."""
        length = len(reading.tokens)
        limits = (row.request.limit + len(row.request.prompt) for row in reading.rows)
        return self._active.capacity(max(length + 1, min(max(limits), length + _HEADROOM)))

    def _retire(self, slot: AnySlot) -> None:
        """A sample has ended: what was computed for it is kept for a next turn."""
        row = self._rows.pop(slot)
        self._kept.adopt(row.request.sampler, row.tokens, self._idle.adopt(slot))
        row.request.row_ended()

    def _drop_cancelled(self) -> None:
        """Frees what belongs to requests that nobody waits for any more."""
        for slot in [s for s, row in self._rows.items() if row.request.future.cancelled()]:
            del self._rows[slot]
            self._active.free(slot)
        for waiting in self._waiting:
            waiting.rows = deque(r for r in waiting.rows if not r.request.future.cancelled())
        self._waiting = deque(waiting for waiting in self._waiting if waiting.rows)
        for reading in list(self._readings):
            reading.rows = [r for r in reading.rows if not r.request.future.cancelled()]
            if not reading.rows:
                self._readings.remove(reading)
                if reading.slot is not None:
                    self._idle.free(reading.slot)
        for reading in self._readings:
            if reading.leader is not None and reading.leader not in self._readings:
                self._settle(reading)
        self._kept.purge()

    def _admit(self) -> None:
        """Lets waiting samples in, in order, while there are rows and memory for them."""
        free = self._most_rows - len(self._rows) - sum(len(r.rows) for r in self._readings)
        while self._waiting and free > 0:
            waiting = self._waiting[0]
            size = self._active.capacity(len(waiting.tokens) + _HEADROOM)
            fit = (self._budget - self._held()) // size - 1  # and the prompt itself
            if fit < 1 and self.running:
                return
            count = max(1, min(free, fit, len(waiting.rows)))
            rows = [waiting.rows.popleft() for _ in range(count)]
            if not waiting.rows:
                self._waiting.popleft()
            self._read(waiting, rows)
            self._kept.trim(max(0, self._budget - self._held() - count * size))
            free -= count

    def _read(self, waiting: _Waiting, rows: list[SampleRow]) -> None:
        """Begins with a prompt, or joins the rows to one that is being read."""
        for reading in self._readings:
            if reading.joins(waiting.sampler, waiting.tokens):
                reading.rows += rows
                _count_cached(rows, len(waiting.tokens))
                return
        reading = Reading(waiting.sampler, waiting.tokens, rows)
        self._readings.append(reading)
        self._settle(reading)

    def _settle(self, reading: Reading) -> None:
        """Begins with a prompt from what is kept, or has it wait for one that is further."""
        known = self._kept.find(reading.sampler, reading.tokens)
        before = self._readings[: self._readings.index(reading)]  # so nobody waits for each other
        reading.follow(before, (known[1] if known else 0) + self._worth_waiting)
        if reading.leader is None:
            self._begin(reading, *(known or (None, 0)))

    def _begin_followers(self) -> None:
        """Begins with the prompts whose leaders have read what they have in common."""
        for reading in self._readings:
            if reading.may_begin:
                assert reading.leader is not None
                self._begin(reading, reading.leader.slot, reading.shared)

    def _begin(self, reading: Reading, known: AnySlot | None, shared: int) -> None:
        """Makes a slot for a prompt, with its first ``shared`` tokens from ``known``."""
        length = len(reading.tokens)
        new = self._idle.new(length) if known is None else self._idle.copy(known, shared, length)
        reading.slot, reading.leader = new, None
        _count_cached(reading.rows[:1], shared)
        _count_cached(reading.rows[1:], length)

    def _make_room(self) -> None:
        """Gives room to rows that have none left; where memory is short the newest begin again."""
        for slot, row in list(self._rows.items()):
            if slot not in self._rows or slot.length < slot.capacity:
                continue
            needed = self._active.to_grow(slot)
            while self._held() + needed > self._budget and len(self._rows) > 1:
                newest = next(reversed(self._rows))
                self._begin_again(newest)
                if newest is slot:
                    break
            else:
                grown = self._active.grow(slot, slot.length + 1)
                if grown is not slot:
                    del self._rows[slot]
                    self._rows[grown] = row

    def _begin_again(self, slot: AnySlot) -> None:
        row = self._rows.pop(slot)
        self._active.free(slot)
        self._waiting.appendleft(_Waiting(row.request.sampler, row.tokens, deque([row])))

    def _held(self) -> int:
        """Tokens for which there is memory in use, prompts that are kept for others aside."""
        running = sum(slot.capacity for slot in self._rows)
        return running + sum(reading.held for reading in self._readings)

    def _free_tokens(self) -> int:
        """Tokens whose keys and values fit into half of the memory at hand."""
        free = free_memory_bytes(self._base.device) // 2
        return max(self._base.context_length, free // self._idle.bytes_per_token)

    def _shed(self, error: Exception) -> Exception | None:
        """Starts again with half the rows; returns the error for a single one, which cannot."""
        rows = self._running_rows()
        if len(rows) <= 1:
            self._most_rows = self._usual_rows  # this one was too much, not the others
            length = rows[0].length if rows else 0
            return OutOfMemoryError(
                f"a sequence of {length} tokens does not fit into the memory of "
                f"{self._base.device}: {error}; set max_tokens lower or shorten the prompt"
            )
        logger.warning("Out of memory with %d samples; going on with half of them.", len(rows))
        self._most_rows = max(1, len(rows) // 2)
        for row in reversed(rows):
            again = _Waiting(row.request.sampler, row.tokens, deque([row]))
            self._waiting.appendleft(again)
        self._clear()
        return None

    def _fail_all(self, error: Exception) -> None:
        """What broke a step would break the next: all who take part in it are told."""
        for row in self._running_rows():
            row.request.fail(error)
        self._waiting = deque(
            waiting for waiting in self._waiting if not waiting.rows[0].request.future.done()
        )
        self._clear()

    def _running_rows(self) -> list[SampleRow]:
        return [*self._rows.values(), *(row for r in self._readings for row in r.rows)]

    def _all_rows(self) -> list[SampleRow]:
        return [*self._running_rows(), *(row for w in self._waiting for row in w.rows)]

    def _clear(self) -> None:
        """Forgets everything that was computed."""
        base = self._base
        layout = (self._shapes, base.dtype, base.device, base.context_length)
        self._active: AnyCache = cache_for(*layout)
        self._idle = self._active
        if not isinstance(self._active, PagedCache):
            self._idle = cache_for(*layout)  # what does not run must not be in between
        kept = self._free_tokens() // 8
        if base.device.type == "cpu":
            kept = min(kept, _KEPT_BYTES_CPU // self._idle.bytes_per_token)
        self._kept = PrefixCache(self._idle, kept)
        self._readings: list[Reading] = []
        self._rows: dict[AnySlot, SampleRow] = {}
        self._budget = self._free_tokens()
        release_cached_memory(base.device)


def _count_cached(rows: Iterable[SampleRow], tokens: int) -> None:
    """Notes that the first ``tokens`` of these rows' prompt were not computed for them."""
    for row in rows:
        row.sample.cached_prompt_tokens = min(tokens, len(row.request.prompt))
