"""Sampling with transformers' own cache, one request at a time for each owner.

It serves models with recurrent state, which the KV cache of ``scheduler`` cannot store. One
prefill serves all samples of a request, and finished rows leave the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tinker_cookbook.engine.sampling.fair_queue import FairQueue, Shares, WaitingRequest, owner_of
from tinker_cookbook.engine.sampling.requests import SampledSequence, SampleRequest
from tinker_cookbook.engine.sampling.sample_tokens import sample_sequences

_MOST_REQUESTS = 8
"""Maximum number of running requests; each has its own cache."""


class FallbackSampler:
    """Scheduler for models with recurrent state; has the methods of ``Scheduler``."""

    def __init__(self) -> None:
        self._waiting = FairQueue()
        self._running: dict[SampleRequest, Iterator[None]] = {}

    @property
    def busy(self) -> bool:
        """Whether a step has work to do."""
        return bool(self._running or self._waiting)

    def load(self) -> tuple[int, int, float | None]:
        """Returns the running and the waiting samples; its caches have no fixed size."""
        running = sum(len(request.rows) for request in list(self._running))
        return running, self._waiting.num_samples, None

    def add(self, request: SampleRequest) -> None:
        """Queues a request."""
        self._waiting.add(WaitingRequest(request, request.prompt, deque(request.rows)))

    def step(self) -> None:
        """Samples one token for each running sequence; an error fails only its request."""
        # One request of each owner runs at a time.
        self._waiting.drop_done()
        shares = Shares(row for request in self._running for row in request.rows[:1])
        for waiting in self._waiting.in_turn(shares):
            if len(self._running) >= _MOST_REQUESTS:
                break
            # One prefill serves all samples of a request, so they start together.
            if not shares.owners[owner_of(waiting.request)]:
                self._waiting.take(waiting, len(waiting.rows))
                shares.add(waiting.request)
                self._running[waiting.request] = _sampling(waiting.request)
        for request, steps in list(self._running.items()):
            try:
                next(steps)
            except StopIteration:
                del self._running[request]
            except Exception as error:  # requests are independent, so the others continue
                request.fail(error)
                del self._running[request]

    def give_up(self, error: Exception) -> None:
        """Fails every request."""
        for request in (*self._running, *(waiting.request for waiting in self._waiting)):
            request.fail(error)

    def cancel_all(self) -> None:
        """Cancels every request."""
        for request in (*self._running, *(waiting.request for waiting in self._waiting)):
            request.future.cancel()


def _sampling(request: SampleRequest) -> Iterator[None]:
    """Runs ``request`` to its end; yields after each forward pass."""
    from transformers import DynamicCache

    base = request.sampler.base
    cache: Any = DynamicCache(config=base.config)

    @torch.no_grad()
    def last_hidden(tokens: torch.Tensor, positions: np.ndarray | None) -> torch.Tensor:
        # transformers counts positions itself, except those of images and after them.
        at = None if positions is None else torch.from_numpy(positions).to(base.device)
        with base.with_segments(request.sampler.terms()):
            hidden = base.hidden(tokens, past_key_values=cache, use_cache=True, position_ids=at)
        return hidden[:, -1]

    of_prompt = base.positions(request.prompt)
    hidden = last_hidden(
        torch.from_numpy(request.prompt).to(base.device)[None],
        None if of_prompt is None else of_prompt[:, None],
    )
    rows = list(request.rows)
    if len(rows) > 1:
        # The only method that selects sequences in all cache types.
        cache.reorder_cache(torch.zeros(len(rows), dtype=torch.long, device=base.device))
        hidden = hidden.expand(len(rows), -1)
    while not request.future.done():
        with torch.no_grad():
            ended = set(sample_sequences(hidden, list(enumerate(rows))))
        keep = [i for i, row in enumerate(rows) if row not in ended]
        for row in ended:
            row.request.row_ended()
        if not keep:
            return
        if len(keep) < len(rows):
            cache.reorder_cache(torch.tensor(keep, device=base.device))
        rows = [rows[i] for i in keep]
        yield  # the request may be cancelled while others take their step
        if not request.future.done():
            newest = torch.tensor([[row.sample.tokens[-1]] for row in rows]).to(base.device)
            hidden = last_hidden(newest, None if of_prompt is None else _positions_of(rows))


def _positions_of(rows: list[SampledSequence]) -> np.ndarray:
    """Returns the rotary positions [3, rows, 1] of each row's newest token."""
    at = [row.length - 1 + row.request.position_offset for row in rows]
    return np.tile(np.array(at)[:, None], (3, 1, 1))
