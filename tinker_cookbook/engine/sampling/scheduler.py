"""Continuous batching of the requests of all clients of a base model.

Each step runs the model once: it decodes one token of every running sequence and prefills as many
prompt tokens as fit (chunked prefill). Then it samples. Finished sequences leave, and waiting ones
are admitted in the next step. A prompt is prefilled once for all its samples.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tinker_cookbook.engine.memory import MemoryBudget, out_of_memory, release_cached_memory
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.sampling.batch_attention import BatchLayout
from tinker_cookbook.engine.sampling.batch_plan import BatchPlan, halves_of
from tinker_cookbook.engine.sampling.fair_queue import (
    FairQueue,
    QueueKey,
    Shares,
    WaitingRequest,
    owner_of,
)
from tinker_cookbook.engine.sampling.paged_cache import BLOCK, BlockTable, LayerShape, PagedCache
from tinker_cookbook.engine.sampling.prefix_cache import Prefill, PrefixCache
from tinker_cookbook.engine.sampling.requests import SampledSequence, SampleRequest
from tinker_cookbook.engine.sampling.sample_tokens import sample_sequences
from tinker_cookbook.engine.sampling.sampler import segments_of
from tinker_cookbook.exceptions import OutOfMemoryError

logger = logging.getLogger(__name__)

_MOST_ROWS_CPU = 128  # more rows only make a step longer
_MOST_ROWS_GPU = 512
_STEP_TOKENS_CPU = 512
_STEP_TOKENS_GPU = 8192
_KEPT_BYTES_CPU = 512 << 20
_WORTH_WAITING_CPU = 64  # common tokens for which a prompt waits: at least as long as a pass
_WORTH_WAITING_GPU = 512
_ROOM_OF_SAMPLE = 2 * BLOCK  # tokens that a new sample is expected to need after its prompt


class _Restart(Exception):  # noqa: N818
    """Raised after the requests at fault have failed; the others keep their sampled tokens."""


class Scheduler:
    """The running batch of one base model. All methods run on the engine's worker."""

    def __init__(
        self, base: BaseModel, shapes: list[LayerShape], memory: MemoryBudget | None = None
    ) -> None:
        self._base, self._shapes = base, shapes
        self._memory = memory or MemoryBudget(base.device)
        if base.vision is not None:
            self._memory.add(base.vision.kept)
        on_cpu = base.device.type == "cpu"
        self._usual_rows = _MOST_ROWS_CPU if on_cpu else _MOST_ROWS_GPU
        self._most_rows = self._usual_rows  # lower while memory is short
        self._step_tokens = _STEP_TOKENS_CPU if on_cpu else _STEP_TOKENS_GPU
        self._worth_waiting = _WORTH_WAITING_CPU if on_cpu else _WORTH_WAITING_GPU
        self._waiting = FairQueue()
        self._clear()

    @property
    def busy(self) -> bool:
        """Whether a step has work to do."""
        return bool(self._prefills or self._rows or self._waiting)

    def load(self) -> tuple[int, int, float | None]:
        """Returns the running samples, the waiting ones, and the used share of the KV cache.

        Any thread may call it.
        """
        running = len(self._rows) + sum(len(prefill.rows) for prefill in list(self._prefills))
        used = self._cache.active_tokens / max(1, self._budget)
        return running, self._waiting.num_samples, min(1.0, used)

    def add(self, request: SampleRequest) -> None:
        """Queues a request."""
        # Measure again: training may have used or freed memory while nothing was sampled.
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
                # Free memory first, so that it can be given to waiting and growing sequences.
                self._drop_done()
                self._admit()
                # Before the forward pass, every running sequence needs space for one more token.
                self._grow_full_tables()
                self._begin_ready_prefills(self._prefills)
                self._advance(dict(self._rows), list(self._prefills))
        except _Restart:
            # The error may have left tables and queue inconsistent, so rebuild both.
            self._restart_all()
        except Exception as error:
            failed: Exception | None = error
            if out_of_memory(error):
                failed = self._restart_with_half(error)
            if failed is not None:
                # The error belongs to no single row, so the next step would fail too.
                _fail(self._running_rows(), failed)
                self._waiting.drop_done()
                self._clear()
        if not self.busy:
            self._cache.shrink()  # training may need the memory

    def give_up(self, error: Exception) -> None:
        """Fails every request; a new scheduler has to take over."""
        _fail(self._all_rows(), error)

    def cancel_all(self) -> None:
        """Cancels every request."""
        for row in self._all_rows():
            row.request.future.cancel()

    def _advance(
        self, rows: dict[BlockTable, SampledSequence], prefills: Sequence[Prefill]
    ) -> None:
        """Decodes one token for ``rows``, prefills part of ``prefills`` and samples.

        On an error, each half is tried separately, down to single requests, so that only the
        request at fault fails. This is safe because results do not depend on the batch.
        """
        # One row of tokens for decode and prefill: each linear layer is then a single product.
        plan = BatchPlan.of(rows, prefills, self._step_tokens)
        if plan is None:
            return
        device = self._base.device
        try:
            hidden = self._base.hidden_of_batch(
                torch.tensor(plan.tokens, device=device),
                torch.from_numpy(plan.rotary_positions()).to(device),
                BatchLayout(plan.runs),
                segments_of(plan.owners),
            )
            finished = set(sample_sequences(hidden, plan.outputs))
        except Exception as error:
            if out_of_memory(error):
                raise  # no request is at fault: the batch is too large
            halves = halves_of(rows, prefills)
            if not halves:
                _fail([*rows.values(), *(row for p in prefills for row in p.rows)], error)
                return
        else:
            self._update_after_step(plan, rows, finished)
            return
        # Outside the except block, whose traceback would keep the activations alive.
        for some_rows, some_prefills in halves:
            self._advance(some_rows, some_prefills)

    def _update_after_step(
        self,
        plan: BatchPlan,
        rows: dict[BlockTable, SampledSequence],
        finished: set[SampledSequence],
    ) -> None:
        """Counts the computed tokens; advances finished sequences and complete prefills."""
        # Only after success: after an error, the halves must write the same cache positions again.
        for table in rows:
            table.length += 1
        for _, table, count in plan.chunks:
            table.length += count
        for prefill, table, _ in plan.chunks:
            if not prefill.left:
                with _blame(prefill.rows):
                    self._start_decoding(prefill, table, finished)
        for table, row in rows.items():
            if row in finished:
                with _blame([row]):
                    self._finish(table)

    def _start_decoding(
        self, prefill: Prefill, table: BlockTable, finished: set[SampledSequence]
    ) -> None:
        """Gives each sample of a complete prefill its own block table."""
        # Start prefills that wait for it now, because the table may be freed below.
        self._begin_ready_prefills(self._prefills)
        # The cache of a failed prompt may contain NaN and must not enter the prefix cache.
        broken = all(row.failed for row in prefill.rows)
        running = [row for row in prefill.rows if row not in finished]
        # Samples share the full blocks of the prompt; each writes to a copy of the last block.
        forks = self._cache.fork(table, table.length, len(running))
        self._rows |= dict(zip(forks, running, strict=True))
        self._prefills.remove(prefill)
        for row in prefill.rows:
            if row in finished:
                self._keep_choices(row, table)
                row.request.row_ended()
        if broken:
            self._cache.free(table)
        else:
            self._prefixes.adopt(prefill.sampler, prefill.tokens, table)

    def _finish(self, table: BlockTable) -> None:
        """Moves the KV cache of a finished sequence to the prefix cache."""
        row = self._rows.pop(table)
        if row.failed:  # its cache may contain NaN
            self._cache.free(table)
            return
        self._keep_choices(row, table)
        self._prefixes.adopt(row.request.sampler, row.tokens, table)
        row.request.row_ended()

    def _keep_choices(self, row: SampledSequence, table: BlockTable) -> None:
        """Stores the expert choices of a finished sequence for training."""
        replay = self._base.replay
        if replay is not None and not row.failed:
            replay.keep(row.tokens[: table.length], self._cache.read_choices(table))

    def _drop_done(self) -> None:
        """Frees the memory of requests that were cancelled or have failed."""
        for table in [table for table, row in self._rows.items() if row.failed]:
            del self._rows[table]
            self._cache.free(table)
        self._waiting.drop_done()
        for prefill in self._prefills:
            prefill.rows = [row for row in prefill.rows if not row.failed]
        self._drop_empty_prefills()
        # A prefix belongs to one version of the weights and is evicted with its sampler.
        self._prefixes.purge()

    def _drop_empty_prefills(self) -> None:
        """Stops prefills without waiting samples; dependent prefills find another source."""
        for prefill in [prefill for prefill in self._prefills if not prefill.rows]:
            self._prefills.remove(prefill)
            if prefill.table is not None:
                self._cache.free(prefill.table)
        # Other prefills must not wait for a prefix that is never computed.
        for prefill in self._prefills:
            gone = isinstance(prefill.source, Prefill) and prefill.source not in self._prefills
            if prefill.table is None and gone:
                self._find_prefix(prefill)

    def _admit(self) -> None:
        """Admits waiting samples in fair order while rows and memory are free.

        If none are free, sequences of owners above their fair share are preempted.
        """
        # Each admission changes the shares, so the order is computed again after it.
        shares = Shares(self._running_rows())
        while any(
            self._admit_request(waiting, shares) for waiting in self._waiting.in_turn(shares)
        ):
            pass

    def _admit_request(self, waiting: WaitingRequest, shares: Shares) -> bool:
        """Admits samples of a request; returns whether any fitted."""
        # Whole blocks for the prompt, and an estimate for each sample; tables grow later.
        prompt = -(-len(waiting.tokens) // BLOCK) * BLOCK
        if not self._make_room(waiting, prompt + _ROOM_OF_SAMPLE, shares):
            return False
        free = self._most_rows - shares.total
        fit = (self._free_room() - prompt) // _ROOM_OF_SAMPLE
        # One at a time while several samplers wait, because each admission changes the fair order.
        most = 1 if self._waiting.contested else len(waiting.rows)
        count = max(1, min(free, fit, most))
        rows = self._waiting.take(waiting, count)
        with _blame(rows):
            self._start_prefill(waiting, rows)
        # Cached prefixes give way to running sequences.
        self._prefixes.trim(self._free_room() - count * _ROOM_OF_SAMPLE)
        shares.add(waiting.request, count)
        return True

    def _make_room(self, waiting: WaitingRequest, needed: int, shares: Shares) -> bool:
        """Returns whether a row and ``needed`` tokens are free, by preemption if necessary.

        An owner without any sequence gets its first one immediately. For further sequences, others
        are preempted only if their KV cache can be kept, so that no work is lost.
        """
        first = not shares.owners[owner_of(waiting.request)]
        while True:
            missing = needed - self._free_room()
            # A single sequence may always run: out of memory, it fails with advice.
            if shares.total < self._most_rows and (missing <= 0 or not shares.total):
                return True
            key = shares.preemptible_for(waiting.request)
            # To get memory, only an owner without a sequence preempts, and only if that frees
            # enough: otherwise the work of others would be lost without a benefit.
            if key is None or (missing > 0 and not (first and self._preemption_frees(missing))):
                return False
            row = self._preempt_of(key, only_if_kept=not first)
            if row is None:
                return False
            shares.add(row.request, -1)

    def _preemption_frees(self, missing: int) -> bool:
        """Returns whether preempting all rows but one of each owner frees this many tokens."""
        # Blocks that the remaining sequences share with preempted ones stay in use.
        tables: dict[Hashable, BlockTable] = {}
        for table, row in self._rows.items():
            tables.setdefault(owner_of(row.request), table)
        stay = [*tables.values(), *(p.table for p in self._prefills if p.table is not None)]
        blocks = {block for table in stay for block in table.blocks}
        return self._cache.active_tokens - len(blocks) * BLOCK >= missing

    def _preempt_of(self, key: QueueKey, *, only_if_kept: bool) -> SampledSequence | None:
        """Preempts the newest sequence of an owner's sampler and returns it.

        With ``only_if_kept``, returns ``None`` if the prefix cache has no room for its KV cache.
        """
        # A sequence in prefill loses the least work, so it is preempted before a decoding one.
        for prefill in reversed(self._prefills):
            for row in reversed(prefill.rows):
                if _holds(key, row):
                    prefill.rows.remove(row)
                    self._drop_empty_prefills()
                    self._waiting.add(WaitingRequest.of(row), first=True)
                    return row
        table = self._newest(key)
        row, fits = self._rows[table], self._prefixes.spare >= table.capacity
        if only_if_kept and not fits:
            return None
        self._preempt(table, keep=fits)
        return row

    def _newest(self, key: QueueKey) -> BlockTable:
        return next(table for table, row in reversed(self._rows.items()) if _holds(key, row))

    def _preempt(self, table: BlockTable, *, keep: bool) -> None:
        """Returns a decoding sequence to the queue; it resumes later after its sampled tokens."""
        # The prefix cache keeps its KV cache for when it resumes, but can still evict it.
        row = self._rows.pop(table)
        if keep:
            self._prefixes.adopt(row.request.sampler, row.tokens, table)
        else:
            self._cache.free(table)
        self._waiting.add(WaitingRequest.of(row), first=True)

    def _start_prefill(self, waiting: WaitingRequest, rows: list[SampledSequence]) -> None:
        """Starts the prefill of a prompt, or joins one that is running for the same prompt."""
        # Joining works until the prefill ends, because samples start when it is complete.
        new = Prefill(waiting.sampler, waiting.tokens, rows)
        for prefill in self._prefills:
            if prefill.sampler is new.sampler and prefill.key == new.key:
                prefill.rows += rows
                _count_cached(rows, len(new.tokens))
                return
        self._prefills.append(new)
        self._find_prefix(new)

    def _find_prefix(self, prefill: Prefill) -> None:
        """Chooses the source of a prefill's prefix, and starts the prefill if that is computed."""
        before = self._prefills[: self._prefills.index(prefill)]  # no circular waiting
        found = self._prefixes.find(prefill, before, self._worth_waiting)
        prefill.source, prefill.shared = found
        self._begin_ready_prefills([prefill])

    def _begin_ready_prefills(self, prefills: Iterable[Prefill]) -> None:
        """Starts the prefills with a common prefix that is computed now."""
        for prefill in prefills:
            if not prefill.ready:
                continue
            source = prefill.source
            # A fork shares the source's full blocks, so the source may be freed or grow later.
            if source is None or source.table is None:
                prefill.table = self._cache.new(len(prefill.tokens))
            else:
                (prefill.table,) = self._cache.fork(source.table, prefill.shared)
                self._cache.grow(prefill.table, len(prefill.tokens))
            prefill.source = None
            # The first sample computes the rest of the prompt; the others reuse all of it.
            _count_cached(prefill.rows[:1], prefill.shared)
            _count_cached(prefill.rows[1:], len(prefill.tokens))

    def _grow_full_tables(self) -> None:
        """Appends a block to each full table.

        If memory is short, preempts the newest sequences of the owner with the most sequences.
        """
        for table, row in list(self._rows.items()):
            # The sequence may have been preempted for an earlier table.
            if table not in self._rows or table.length < table.capacity:
                continue
            # The last sequence is never preempted: a single sequence may exceed the budget.
            while self._free_room() < BLOCK and len(self._rows) > 1:
                newest = self._newest(Shares(self._rows.values()).largest())
                self._preempt(newest, keep=False)
                if newest is table:
                    break
            else:
                with _blame([row]):
                    self._cache.grow(table, table.length + 1)
        self._prefixes.trim(self._free_room())

    def _free_room(self) -> int:
        """Returns the tokens of the budget that running sequences neither use nor will soon need.

        Cached prefixes are evicted for running sequences, so they do not count.
        """
        # Prefills that wait for a prefix are admitted but have no blocks yet.
        waiting = sum(len(prefill.tokens) for prefill in self._prefills if prefill.table is None)
        if self._base.device.type != "cpu":  # one block for each sample that has not started
            waiting += BLOCK * sum(len(prefill.rows) for prefill in self._prefills)
        return self._budget - self._cache.active_tokens - waiting

    def _free_tokens(self) -> int:
        """Returns the number of tokens that fit into the memory for KV caches."""
        return self._memory.cache_tokens(self._cache, self._base.context_length)

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
        """Returns all sequences to the queue; only their KV caches are recomputed."""
        # Each is put at the front of its queue, so the reverse order keeps the order of admission.
        for row in reversed(self._running_rows()):
            if row.ended:  # the error came after its last token
                row.request.row_ended()
            elif not row.failed:
                self._waiting.add(WaitingRequest.of(row), first=True)
        self._clear()

    def _running_rows(self) -> list[SampledSequence]:
        return [*self._rows.values(), *(row for p in self._prefills for row in p.rows)]

    def _all_rows(self) -> list[SampledSequence]:
        return [*self._running_rows(), *(row for w in self._waiting for row in w.rows)]

    def _clear(self) -> None:
        """Clears the KV cache and all running sequences."""
        base = self._base
        choices = 0 if base.replay is None else base.replay.width
        self._cache = PagedCache(self._shapes, base.dtype, base.device, choices)
        self._memory.add(self._cache)
        kept = self._free_tokens() // 8
        if base.device.type == "cpu":
            kept = min(kept, _KEPT_BYTES_CPU // self._cache.bytes_per_token)
        self._prefixes = PrefixCache(self._cache, kept)
        self._prefills: list[Prefill] = []
        self._rows: dict[BlockTable, SampledSequence] = {}
        self._budget = self._free_tokens()
        release_cached_memory(base.device)  # of the old pools


def _holds(key: QueueKey, row: SampledSequence) -> bool:
    return (owner_of(row.request), row.request.sampler) == key


def _fail(rows: Iterable[SampledSequence], error: Exception) -> None:
    for row in list(rows):
        row.request.fail(error)


@contextmanager
def _blame(rows: Sequence[SampledSequence]) -> Iterator[None]:
    """Fails the requests of ``rows`` on an error in the block other than out-of-memory."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        _fail(rows, error)
        raise _Restart from error


def _count_cached(rows: Iterable[SampledSequence], tokens: int) -> None:
    """Records that the first ``tokens`` of these rows' prompt came from the cache."""
    for row in rows:
        if not row.sample.tokens:  # not where a sample goes on after an interruption
            row.sample.cached_prompt_tokens = min(tokens, len(row.request.prompt))
