"""Continuous batching of the requests of all clients of a base model.

Each step runs the model once: it decodes one token of every running sequence and prefills as many
prompt tokens as fit (chunked prefill). Then it samples. Finished sequences leave, and waiting ones
are admitted in the next step. A prompt is prefilled once for all its samples.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch

from tinker_cookbook.engine.devices import free_memory_bytes
from tinker_cookbook.engine.memory import out_of_memory, release_cached_memory
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.sampling.batch_plan import BatchPlan
from tinker_cookbook.engine.sampling.fair_queue import FairQueue, Place, Shares, Waiting, owner_of
from tinker_cookbook.engine.sampling.kv_cache import AnyCache, AnySlot, LayerShape
from tinker_cookbook.engine.sampling.paged_cache import PagedCache, cache_for
from tinker_cookbook.engine.sampling.prefill import PrefillRequest
from tinker_cookbook.engine.sampling.prefix_cache import PrefixCache
from tinker_cookbook.engine.sampling.requests import SampledSequence, SampleRequest
from tinker_cookbook.engine.sampling.sample_sequences import sample_sequences
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


class _Restart(Exception):  # noqa: N818
    """Raised after the requests at fault have failed; the others continue after their sampled
    tokens."""


class Scheduler:
    """The running batch of one base model. All methods run on the engine's worker."""

    def __init__(self, base: BaseModel, shapes: list[LayerShape]) -> None:
        self._base, self._shapes = base, shapes
        on_cpu = base.device.type == "cpu"
        self._usual_rows = _MOST_ROWS_CPU if on_cpu else _MOST_ROWS_GPU
        self._most_rows = self._usual_rows  # less while memory is short
        self._step_tokens = _STEP_TOKENS_CPU if on_cpu else _STEP_TOKENS_GPU
        self._worth_waiting = _WORTH_WAITING_CPU if on_cpu else _WORTH_WAITING_GPU
        self._waiting = FairQueue()
        self._clear()

    @property
    def running(self) -> bool:
        """Whether any sequence is running."""
        return bool(self._readings or self._rows)

    @property
    def busy(self) -> bool:
        """Whether a step has work to do."""
        return self.running or bool(self._waiting)

    def add(self, request: SampleRequest) -> None:
        """Queues a request."""
        if not self.busy:
            self._budget, self._most_rows = self._free_tokens(), self._usual_rows
        self._waiting.add(Waiting(request, request.prompt, deque(request.rows)))

    def step(self) -> None:
        """Runs one forward pass and samples one token for each running sequence.

        An error fails the request that causes it and never reaches the caller; other requests
        get the same results as without it. Out of memory, the batch restarts with half its rows:
        sequences keep their sampled tokens, and only the KV cache is recomputed.
        """
        try:
            with torch.inference_mode():
                self._step()
        except _Restart:
            self._begin_all_again()
        except Exception as error:
            failed: Exception | None = error
            if out_of_memory(error):
                failed = self._preempt(error)
            if failed is not None:
                self._fail_all(failed)
        if not self.busy:
            self._active.shrink()  # training may need the memory

    def give_up(self, error: Exception) -> None:
        """Fails every request; a new scheduler has to take over."""
        for row in self._all_rows():
            row.request.fail(error)

    def cancel_all(self) -> None:
        """Cancels every request."""
        for row in self._all_rows():
            row.request.future.cancel()

    def _step(self) -> None:
        self._drop_done()
        self._admit()
        self._evict()
        self._admit_followers()
        self._advance(list(self._rows), list(self._readings))

    def _advance(self, slots: Sequence[AnySlot], readings: Sequence[PrefillRequest]) -> None:
        """Decodes one token for ``slots`` and prefills part of ``readings``.

        On an error each half is tried by itself, down to single requests, so that only the request
        at fault fails. This is safe because results do not depend on the batch.
        """
        rows = {slot: self._rows[slot] for slot in slots}
        plan = BatchPlan.of(self._active, rows, readings, self._step_tokens)
        if plan is None:
            return
        try:
            finished = self._compute(plan)
        except Exception as error:
            if out_of_memory(error):
                raise
            halves = _halves(rows, readings)
            if not halves:
                _fail([*rows.values(), *(row for r in readings for row in r.rows)], error)
                return
        else:
            self._settle_step(plan, rows, finished)
            return
        # Outside of the handler: its traceback would keep the activations alive.
        for part in halves:
            self._advance(*part)

    def _compute(self, plan: BatchPlan) -> set[SampledSequence]:
        """Runs the forward pass and samples a token for each row that needs one; returns the
        finished rows."""
        device = self._base.device
        hidden = self._base.hidden_of_batch(
            torch.tensor(plan.tokens, device=device),
            torch.tensor(plan.positions, device=device),
            plan.layout,
            plan.segments(device),
        )
        return set(sample_sequences(hidden, plan.outputs))

    def _settle_step(
        self, plan: BatchPlan, rows: dict[AnySlot, SampledSequence], finished: set[SampledSequence]
    ) -> None:
        """Updates the counts of a step and releases finished sequences."""
        for slot in rows:
            slot.length += 1
        for reading in plan.advance():
            _guard(reading.rows, lambda at=reading: self._end_reading(at, finished))
        for slot, row in rows.items():
            if row in finished:
                _guard([row], lambda at=slot: self._finish(at))

    def _end_reading(self, reading: PrefillRequest, finished: set[SampledSequence]) -> None:
        """Starts decoding after a complete prefill; each sample gets a copy of the KV cache."""
        assert reading.slot is not None
        self._admit_followers()  # what they wait for need not be kept after this
        broken = all(row.failed for row in reading.rows)  # what was computed may hold NaN
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
        if broken:
            self._idle.free(reading.slot)
        else:
            self._kept.adopt(reading.sampler, reading.tokens, reading.slot)

    def _room(self, reading: PrefillRequest) -> int:
        """Returns the initial capacity of each sample's slot."""
        length = len(reading.tokens)
        limits = (row.request.limit + len(row.request.prompt) for row in reading.rows)
        return self._active.capacity(max(length + 1, min(max(limits), length + _HEADROOM)))

    def _finish(self, slot: AnySlot) -> None:
        """Moves the KV cache of a finished sequence to the prefix cache."""
        row = self._rows.pop(slot)
        if row.failed:
            self._active.free(slot)
            return
        self._kept.adopt(row.request.sampler, row.tokens, self._idle.adopt(slot))
        row.request.row_ended()

    def _drop_done(self) -> None:
        """Frees the slots of requests that were cancelled or have failed."""
        for slot in [s for s, row in self._rows.items() if row.failed]:
            del self._rows[slot]
            self._active.free(slot)
        self._waiting.drop_done()
        for reading in self._readings:
            reading.rows = [row for row in reading.rows if not row.failed]
        self._drop_empty_readings()
        self._kept.purge()

    def _drop_empty_readings(self) -> None:
        """Stops prefills that no sample waits for any more."""
        for reading in [reading for reading in self._readings if not reading.rows]:
            self._readings.remove(reading)
            if reading.slot is not None:
                self._idle.free(reading.slot)
        for reading in self._readings:
            if reading.leader is not None and reading.leader not in self._readings:
                self._settle(reading)

    def _admit(self) -> None:
        """Admits waiting samples in fair order while rows and memory are free.

        If none are free, sequences of owners above their fair share are preempted.
        """
        shares = Shares(self._running_rows())
        while any(self._let_in(waiting, shares) for waiting in self._waiting.in_turn(shares)):
            pass

    def _let_in(self, waiting: Waiting, shares: Shares) -> bool:
        """Admits samples of a request; returns whether any fitted."""
        size = self._active.capacity(len(waiting.tokens) + _HEADROOM)
        if not self._find_room(waiting, size, shares):
            return False
        free = self._most_rows - shares.total
        fit = (self._budget - self._held()) // size - 1  # and the prompt itself
        # One at a time while others wait as well: whose turn it is changes with each.
        most = 1 if self._waiting.contested else len(waiting.rows)
        count = max(1, min(free, fit, most))
        rows = self._waiting.take(waiting, count)
        _guard(rows, lambda: self._read(waiting, rows))
        self._kept.trim(max(0, self._budget - self._held() - count * size))
        shares.add(waiting.request, count)
        return True

    def _find_room(self, waiting: Waiting, size: int, shares: Shares) -> bool:
        """Whether a row and ``2 * size`` tokens are free, by preemption if necessary.

        An owner without any sequence gets its first one at once. For further ones others are
        preempted only if their KV cache can be kept, so that no work is lost.
        """
        first = not shares.of_owner(owner_of(waiting.request))
        while True:
            missing = 2 * size - (self._budget - self._held())
            if shares.total < self._most_rows and (missing <= 0 or not shares.total):
                return True
            place = shares.gives_way_to(waiting.request)
            if place is None or (missing > 0 and not (first and self._can_free(missing))):
                return False
            row = self._send_back_unread(place)
            if row is None:
                slot = self._newest(place)
                if not first and self._kept.spare < slot.capacity:
                    return False
                row = self._interrupt(slot)
            shares.add(row.request, -1)

    def _can_free(self, missing: int) -> bool:
        """Whether preempting all rows but one of each owner would free this many tokens."""
        held: dict[Hashable, list[int]] = {}
        for slot, row in self._rows.items():
            held.setdefault(owner_of(row.request), []).append(slot.capacity)
        return sum(sum(sizes[1:]) for sizes in held.values()) >= missing

    def _newest(self, place: Place) -> AnySlot:
        """Returns the slot of the newest sequence."""
        return next(slot for slot, row in reversed(self._rows.items()) if _holds(place, row))

    def _send_back_unread(self, place: Place) -> SampledSequence | None:
        """Returns a sequence that is still in prefill to the queue, if there is one."""
        for reading in reversed(self._readings):
            for row in reversed(reading.rows):
                if _holds(place, row):
                    reading.rows.remove(row)
                    self._drop_empty_readings()
                    self._waiting.add(Waiting.of(row), first=True)
                    return row
        return None

    def _interrupt(self, slot: AnySlot) -> SampledSequence:
        """Preempts a sequence; it resumes later with the same tokens."""
        row = self._rows.pop(slot)
        if self._kept.spare >= slot.capacity:
            self._kept.adopt(row.request.sampler, row.tokens, self._idle.adopt(slot))
        else:
            self._active.free(slot)
        self._waiting.add(Waiting.of(row), first=True)
        return row

    def _read(self, waiting: Waiting, rows: list[SampledSequence]) -> None:
        """Starts the prefill of a prompt, or joins one that is running for the same prompt."""
        for reading in self._readings:
            if reading.joins(waiting.sampler, waiting.tokens):
                reading.rows += rows
                _count_cached(rows, len(waiting.tokens))
                return
        reading = PrefillRequest(waiting.sampler, waiting.tokens, rows)
        self._readings.append(reading)
        self._settle(reading)

    def _settle(self, reading: PrefillRequest) -> None:
        """Starts a prefill from the prefix cache, or makes it follow a running one with a common
        prefix."""
        known = self._kept.find(reading.sampler, reading.tokens)
        before = self._readings[: self._readings.index(reading)]  # so nobody waits for each other
        reading.follow(before, (known[1] if known else 0) + self._worth_waiting)
        if reading.leader is None:
            self._begin(reading, *(known or (None, 0)))

    def _admit_followers(self) -> None:
        """Starts the prefills whose leaders have computed the common prefix."""
        for reading in self._readings:
            if reading.may_begin:
                assert reading.leader is not None
                self._begin(reading, reading.leader.slot, reading.shared)

    def _begin(self, reading: PrefillRequest, known: AnySlot | None, shared: int) -> None:
        """Allocates a slot for a prompt and copies its first ``shared`` tokens from ``known``."""
        length = len(reading.tokens)
        new = self._idle.new(length) if known is None else self._idle.copy(known, shared, length)
        reading.slot, reading.leader = new, None
        _count_cached(reading.rows[:1], shared)
        _count_cached(reading.rows[1:], length)

    def _evict(self) -> None:
        """Grows the slots that are full.

        If memory runs short, the newest sequences of the owner with most are preempted.
        """
        for slot, row in list(self._rows.items()):
            if slot not in self._rows or slot.length < slot.capacity:
                continue
            needed = self._active.to_grow(slot)
            while self._held() + needed > self._budget and len(self._rows) > 1:
                newest = self._newest(Shares(self._rows.values()).largest())
                self._begin_again(newest)
                if newest is slot:
                    break
            else:
                _guard([row], lambda at=slot: self._grow(at))

    def _grow(self, slot: AnySlot) -> None:
        grown = self._active.grow(slot, slot.length + 1)
        if grown is not slot:
            self._rows[grown] = self._rows.pop(slot)

    def _begin_again(self, slot: AnySlot) -> None:
        row = self._rows.pop(slot)
        self._active.free(slot)
        self._waiting.add(Waiting.of(row), first=True)

    def _held(self) -> int:
        """Number of tokens in use, without the prefix cache."""
        running = sum(slot.capacity for slot in self._rows)
        return running + sum(reading.held for reading in self._readings)

    def _free_tokens(self) -> int:
        """Returns the number of tokens whose KV cache fits into half of the free memory."""
        free = free_memory_bytes(self._base.device) // 2
        return max(self._base.context_length, free // self._idle.bytes_per_token)

    def _preempt(self, error: Exception) -> Exception | None:
        """Restarts with half of the rows; returns the error if only one row is left."""
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
        self._begin_all_again()
        return None

    def _begin_all_again(self) -> None:
        """Returns all sequences to the queue; sampled tokens are kept, the KV cache is recomputed."""
        for row in reversed(self._running_rows()):
            if row.ended:  # what followed its last token broke off
                row.request.row_ended()
            elif not row.failed:
                self._waiting.add(Waiting.of(row), first=True)
        self._clear()

    def _fail_all(self, error: Exception) -> None:
        """Fails all requests after an error that belongs to no single row, since the next step
        would fail too."""
        _fail(self._running_rows(), error)
        self._waiting.drop_done()
        self._clear()

    def _running_rows(self) -> list[SampledSequence]:
        return [*self._rows.values(), *(row for r in self._readings for row in r.rows)]

    def _all_rows(self) -> list[SampledSequence]:
        return [*self._running_rows(), *(row for w in self._waiting for row in w.rows)]

    def _clear(self) -> None:
        """Clears the KV cache and all running sequences."""
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
        self._readings: list[PrefillRequest] = []
        self._rows: dict[AnySlot, SampledSequence] = {}
        self._budget = self._free_tokens()
        release_cached_memory(base.device)


def _holds(place: Place, row: SampledSequence) -> bool:
    """Whether a sequence belongs to an owner and one of its samplers."""
    return row.request.sampler is place[1] and owner_of(row.request) == place[0]


def _fail(rows: Iterable[SampledSequence], error: Exception) -> None:
    for row in list(rows):
        row.request.fail(error)


def _guard(rows: Sequence[SampledSequence], work: Callable[[], None]) -> None:
    """Runs a block for ``rows``; an error other than out-of-memory fails their requests."""
    try:
        work()
    except Exception as error:
        if out_of_memory(error):
            raise
        _fail(rows, error)
        raise _Restart from error


_Part = tuple[list[AnySlot], list[PrefillRequest]]


def _halves(
    rows: Mapping[AnySlot, SampledSequence], readings: Sequence[PrefillRequest]
) -> list[_Part]:
    """Splits a step by samplers, or the only sampler by requests; empty for a single request."""
    for kind in ("sampler", "request"):
        parts: dict[object, _Part] = {}
        for slot, row in rows.items():
            key = row.request.sampler if kind == "sampler" else row.request
            parts.setdefault(key, ([], []))[0].append(slot)
        for reading in readings:
            key = reading.sampler if kind == "sampler" else reading
            parts.setdefault(key, ([], []))[1].append(reading)
        found = list(parts.values())
        if len(found) > 1:
            middle = len(found) // 2
            return [_joined(found[:middle]), _joined(found[middle:])]
    return []


def _joined(parts: Sequence[_Part]) -> _Part:
    return [slot for part in parts for slot in part[0]], [r for part in parts for r in part[1]]


def _count_cached(rows: Iterable[SampledSequence], tokens: int) -> None:
    """Records that the first ``tokens`` of these rows' prompt came from the cache."""
    for row in rows:
        if not row.sample.tokens:  # not where a sample goes on after an interruption
            row.sample.cached_prompt_tokens = min(tokens, len(row.request.prompt))
