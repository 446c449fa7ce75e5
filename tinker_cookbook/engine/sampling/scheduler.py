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
from tinker_cookbook.engine.sampling.fair_queue import (
    FairQueue,
    Place,
    Shares,
    WaitingRequest,
    owner_of,
)
from tinker_cookbook.engine.sampling.kv_cache import KVCache, KVSlot, LayerShape
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
        self._most_rows = self._usual_rows  # lower while memory is short
        self._step_tokens = _STEP_TOKENS_CPU if on_cpu else _STEP_TOKENS_GPU
        self._worth_waiting = _WORTH_WAITING_CPU if on_cpu else _WORTH_WAITING_GPU
        self._waiting = FairQueue()
        self._clear()

    @property
    def running(self) -> bool:
        """Whether any sequence is running."""
        return bool(self._prefills or self._rows)

    @property
    def busy(self) -> bool:
        """Whether a step has work to do."""
        return self.running or bool(self._waiting)

    def add(self, request: SampleRequest) -> None:
        """Queues a request."""
        if not self.busy:
            self._budget, self._most_rows = self._free_tokens(), self._usual_rows
        self._waiting.add(WaitingRequest(request, request.prompt, deque(request.rows)))

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
            self._restart_all()
        except Exception as error:
            failed: Exception | None = error
            if out_of_memory(error):
                failed = self._restart_with_half(error)
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
        # Free memory first, so that it can be given to waiting and growing sequences.
        self._drop_done()
        self._admit()
        # Every running sequence needs space for one more token before the forward pass.
        self._grow_full_slots()
        self._admit_followers()
        self._advance(list(self._rows), list(self._prefills))

    def _advance(self, slots: Sequence[KVSlot], prefills: Sequence[PrefillRequest]) -> None:
        """Decodes one token for ``slots`` and prefills part of ``prefills``.

        On an error each half is tried by itself, down to single requests, so that only the request
        at fault fails. This is safe because results do not depend on the batch.
        """
        rows = {slot: self._rows[slot] for slot in slots}
        plan = BatchPlan.of(self._active, rows, prefills, self._step_tokens)
        if plan is None:
            return
        try:
            finished = self._compute(plan)
        except Exception as error:
            if out_of_memory(error):
                raise
            halves = _halves(rows, prefills)
            if not halves:
                _fail([*rows.values(), *(row for r in prefills for row in r.rows)], error)
                return
        else:
            self._update_after_step(plan, rows, finished)
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

    def _update_after_step(
        self, plan: BatchPlan, rows: dict[KVSlot, SampledSequence], finished: set[SampledSequence]
    ) -> None:
        """Updates the counts of a step and releases finished sequences."""
        for slot in rows:
            slot.length += 1
        for prefill in plan.advance():
            _guard(prefill.rows, lambda at=prefill: self._finish_prefill(at, finished))
        for slot, row in rows.items():
            if row in finished:
                _guard([row], lambda at=slot: self._finish(at))

    def _finish_prefill(self, prefill: PrefillRequest, finished: set[SampledSequence]) -> None:
        """Starts decoding after a complete prefill; each sample gets a copy of the KV cache."""
        assert prefill.slot is not None
        # Followers copy the common prefix now, because the slot may be freed below.
        self._admit_followers()
        # The cache of a failed prompt may hold NaN and must not enter the prefix cache.
        broken = all(row.failed for row in prefill.rows)
        room = self._initial_capacity(prefill)
        # Reserve memory once for all prefills that end with this capacity, not slot by slot.
        alike = (row for r in self._prefills if self._initial_capacity(r) == room for row in r.rows)
        self._active.reserve(room, sum(row.request.limit > 1 for row in alike))
        self._prefills.remove(prefill)
        for row in prefill.rows:
            if row in finished:
                row.request.row_ended()
            else:
                slot = self._active.copy(prefill.slot, prefill.slot.length, room)
                self._rows[slot] = row
        if broken:
            self._idle.free(prefill.slot)
        else:
            self._prefixes.adopt(prefill.sampler, prefill.tokens, prefill.slot)

    def _initial_capacity(self, prefill: PrefillRequest) -> int:
        """Returns the initial capacity of each sample's slot."""
        length = len(prefill.tokens)
        limits = (row.request.limit + len(row.request.prompt) for row in prefill.rows)
        return self._active.capacity(max(length + 1, min(max(limits), length + _HEADROOM)))

    def _finish(self, slot: KVSlot) -> None:
        """Moves the KV cache of a finished sequence to the prefix cache."""
        row = self._rows.pop(slot)
        if row.failed:
            self._active.free(slot)
            return
        self._prefixes.adopt(row.request.sampler, row.tokens, self._idle.adopt(slot))
        row.request.row_ended()

    def _drop_done(self) -> None:
        """Frees the slots of requests that were cancelled or have failed."""
        for slot in [s for s, row in self._rows.items() if row.failed]:
            del self._rows[slot]
            self._active.free(slot)
        self._waiting.drop_done()
        for prefill in self._prefills:
            prefill.rows = [row for row in prefill.rows if not row.failed]
        self._drop_empty_prefills()
        self._prefixes.purge()

    def _drop_empty_prefills(self) -> None:
        """Stops prefills that no sample waits for any more."""
        for prefill in [prefill for prefill in self._prefills if not prefill.rows]:
            self._prefills.remove(prefill)
            if prefill.slot is not None:
                self._idle.free(prefill.slot)
        for prefill in self._prefills:
            if prefill.leader is not None and prefill.leader not in self._prefills:
                self._schedule_prefill(prefill)

    def _admit(self) -> None:
        """Admits waiting samples in fair order while rows and memory are free.

        If none are free, sequences of owners above their fair share are preempted.
        """
        shares = Shares(self._running_rows())
        while any(
            self._admit_request(waiting, shares) for waiting in self._waiting.in_turn(shares)
        ):
            pass

    def _admit_request(self, waiting: WaitingRequest, shares: Shares) -> bool:
        """Admits samples of a request; returns whether any fitted."""
        size = self._active.capacity(len(waiting.tokens) + _HEADROOM)
        if not self._make_room(waiting, size, shares):
            return False
        free = self._most_rows - shares.total
        fit = (self._budget - self._tokens_in_use()) // size - 1  # and the prompt itself
        # One at a time while several samplers wait, because each admission changes the fair order.
        most = 1 if self._waiting.contested else len(waiting.rows)
        count = max(1, min(free, fit, most))
        rows = self._waiting.take(waiting, count)
        _guard(rows, lambda: self._start_prefill(waiting, rows))
        self._prefixes.trim(max(0, self._budget - self._tokens_in_use() - count * size))
        shares.add(waiting.request, count)
        return True

    def _make_room(self, waiting: WaitingRequest, size: int, shares: Shares) -> bool:
        """Returns whether a row and ``2 * size`` tokens are free, by preemption if necessary.

        An owner without any sequence gets its first one at once. For further ones others are
        preempted only if their KV cache can be kept, so that no work is lost.
        """
        first = not shares.of_owner(owner_of(waiting.request))
        while True:
            missing = 2 * size - (self._budget - self._tokens_in_use())
            if shares.total < self._most_rows and (missing <= 0 or not shares.total):
                return True
            place = shares.preemptible_for(waiting.request)
            if place is None or (missing > 0 and not (first and self._preemption_frees(missing))):
                return False
            # A sequence in prefill loses the least work, so it is preempted before a decoding one.
            row = self._requeue_prefill(place)
            if row is None:
                slot = self._newest_slot(place)
                if not first and self._prefixes.spare < slot.capacity:
                    return False
                row = self._preempt_sequence(slot)
            shares.add(row.request, -1)

    def _preemption_frees(self, missing: int) -> bool:
        """Returns whether preempting all rows but one of each owner would free this many tokens."""
        held: dict[Hashable, list[int]] = {}
        for slot, row in self._rows.items():
            held.setdefault(owner_of(row.request), []).append(slot.capacity)
        return sum(sum(sizes[1:]) for sizes in held.values()) >= missing

    def _newest_slot(self, place: Place) -> KVSlot:
        """Returns the slot of the newest sequence."""
        return next(slot for slot, row in reversed(self._rows.items()) if _holds(place, row))

    def _requeue_prefill(self, place: Place) -> SampledSequence | None:
        """Returns a sequence that is still in prefill to the queue, if there is one."""
        for prefill in reversed(self._prefills):
            for row in reversed(prefill.rows):
                if _holds(place, row):
                    prefill.rows.remove(row)
                    self._drop_empty_prefills()
                    self._waiting.add(WaitingRequest.of(row), first=True)
                    return row
        return None

    def _preempt_sequence(self, slot: KVSlot) -> SampledSequence:
        """Preempts a sequence; it resumes later with the same tokens."""
        row = self._rows.pop(slot)
        if self._prefixes.spare >= slot.capacity:
            self._prefixes.adopt(row.request.sampler, row.tokens, self._idle.adopt(slot))
        else:
            self._active.free(slot)
        self._waiting.add(WaitingRequest.of(row), first=True)
        return row

    def _start_prefill(self, waiting: WaitingRequest, rows: list[SampledSequence]) -> None:
        """Starts the prefill of a prompt, or joins one that is running for the same prompt."""
        for prefill in self._prefills:
            if prefill.joins(waiting.sampler, waiting.tokens):
                prefill.rows += rows
                _count_cached(rows, len(waiting.tokens))
                return
        prefill = PrefillRequest(waiting.sampler, waiting.tokens, rows)
        self._prefills.append(prefill)
        self._schedule_prefill(prefill)

    def _schedule_prefill(self, prefill: PrefillRequest) -> None:
        """Starts a prefill from the prefix cache, or makes it follow a running one with a common
        prefix."""
        known = self._prefixes.find(prefill.sampler, prefill.tokens)
        before = self._prefills[: self._prefills.index(prefill)]  # no circular waiting
        prefill.follow(before, (known[1] if known else 0) + self._worth_waiting)
        if prefill.leader is None:
            self._allocate_prefill(prefill, *(known or (None, 0)))

    def _admit_followers(self) -> None:
        """Starts the prefills whose leaders have computed the common prefix."""
        for prefill in self._prefills:
            if prefill.may_begin:
                assert prefill.leader is not None
                self._allocate_prefill(prefill, prefill.leader.slot, prefill.shared)

    def _allocate_prefill(self, prefill: PrefillRequest, known: KVSlot | None, shared: int) -> None:
        """Allocates a slot for a prompt and copies its first ``shared`` tokens from ``known``."""
        length = len(prefill.tokens)
        new = self._idle.new(length) if known is None else self._idle.copy(known, shared, length)
        prefill.slot, prefill.leader = new, None
        _count_cached(prefill.rows[:1], shared)
        _count_cached(prefill.rows[1:], length)

    def _grow_full_slots(self) -> None:
        """Grows the slots that are full.

        If memory runs short, the newest sequences of the owner with most are preempted.
        """
        for slot, row in list(self._rows.items()):
            if slot not in self._rows or slot.length < slot.capacity:
                continue
            needed = self._active.to_grow(slot)
            while self._tokens_in_use() + needed > self._budget and len(self._rows) > 1:
                newest = self._newest_slot(Shares(self._rows.values()).largest())
                self._begin_again(newest)
                if newest is slot:
                    break
            else:
                _guard([row], lambda at=slot: self._grow(at))

    def _grow(self, slot: KVSlot) -> None:
        grown = self._active.grow(slot, slot.length + 1)
        if grown is not slot:
            self._rows[grown] = self._rows.pop(slot)

    def _begin_again(self, slot: KVSlot) -> None:
        row = self._rows.pop(slot)
        self._active.free(slot)
        self._waiting.add(WaitingRequest.of(row), first=True)

    def _tokens_in_use(self) -> int:
        """Number of tokens in use, without the prefix cache."""
        running = sum(slot.capacity for slot in self._rows)
        return running + sum(prefill.held for prefill in self._prefills)

    def _free_tokens(self) -> int:
        """Returns the number of tokens whose KV cache fits into half of the free memory."""
        free = free_memory_bytes(self._base.device) // 2
        return max(self._base.context_length, free // self._idle.bytes_per_token)

    def _restart_with_half(self, error: Exception) -> Exception | None:
        """Restarts with half of the rows; returns the error if only one row is left."""
        rows = self._running_rows()
        if len(rows) <= 1:
            self._most_rows = self._usual_rows  # only this sequence was too long
            length = rows[0].length if rows else 0
            return OutOfMemoryError(
                f"a sequence of {length} tokens does not fit into the memory of "
                f"{self._base.device}: {error}; set max_tokens lower or shorten the prompt"
            )
        logger.warning("Out of memory with %d sequences; continuing with half of them.", len(rows))
        self._most_rows = max(1, len(rows) // 2)
        self._restart_all()
        return None

    def _restart_all(self) -> None:
        """Returns all sequences to the queue; sampled tokens are kept, the KV cache is
        recomputed."""
        for row in reversed(self._running_rows()):
            if row.ended:  # the error came after its last token
                row.request.row_ended()
            elif not row.failed:
                self._waiting.add(WaitingRequest.of(row), first=True)
        self._clear()

    def _fail_all(self, error: Exception) -> None:
        """Fails all requests after an error that belongs to no single row, since the next step
        would fail too."""
        _fail(self._running_rows(), error)
        self._waiting.drop_done()
        self._clear()

    def _running_rows(self) -> list[SampledSequence]:
        return [*self._rows.values(), *(row for r in self._prefills for row in r.rows)]

    def _all_rows(self) -> list[SampledSequence]:
        return [*self._running_rows(), *(row for w in self._waiting for row in w.rows)]

    def _clear(self) -> None:
        """Clears the KV cache and all running sequences."""
        base = self._base
        layout = (self._shapes, base.dtype, base.device, base.context_length)
        self._active: KVCache = cache_for(*layout)
        self._idle = self._active
        if not isinstance(self._active, PagedCache):
            # Cached prefixes have arenas of their own, so that running slots stay contiguous.
            self._idle = cache_for(*layout)
        kept = self._free_tokens() // 8
        if base.device.type == "cpu":
            kept = min(kept, _KEPT_BYTES_CPU // self._idle.bytes_per_token)
        self._prefixes = PrefixCache(self._idle, kept)
        self._prefills: list[PrefillRequest] = []
        self._rows: dict[KVSlot, SampledSequence] = {}
        self._budget = self._free_tokens()
        release_cached_memory(base.device)


def _holds(place: Place, row: SampledSequence) -> bool:
    """Returns whether a sequence belongs to an owner and one of its samplers."""
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


_Part = tuple[list[KVSlot], list[PrefillRequest]]


def _halves(
    rows: Mapping[KVSlot, SampledSequence], prefills: Sequence[PrefillRequest]
) -> list[_Part]:
    """Splits a step by samplers, or the only sampler by requests; empty for a single request."""
    for kind in ("sampler", "request"):
        parts: dict[object, _Part] = {}
        for slot, row in rows.items():
            key = row.request.sampler if kind == "sampler" else row.request
            parts.setdefault(key, ([], []))[0].append(slot)
        for prefill in prefills:
            key = prefill.sampler if kind == "sampler" else prefill
            parts.setdefault(key, ([], []))[1].append(prefill)
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
