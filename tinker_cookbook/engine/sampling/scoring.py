"""Log-probabilities of given texts, batched over requests.

Teachers, reference models and KL penalties score hundreds of sequences at once. Each request is an
operation of the worker. The first one is scored in one batch with other waiting requests of its
sampler, as many as fit into one micro-batch of training, and all of them complete.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from tinker_cookbook.engine.memory import out_of_memory, release_cached_memory
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.sampling.prefill_scoring import STEP_TOKENS, read_together
from tinker_cookbook.engine.sampling.requests import PromptScores, ScoreRequest, settle
from tinker_cookbook.engine.sampling.sample_tokens import sample_sequences
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.training.micro_batch import hidden_states, pad_for, plan_for
from tinker_cookbook.engine.vision.images import is_image
from tinker_cookbook.exceptions import OutOfMemoryError

logger = logging.getLogger(__name__)

MASK_LOGPROB = -99999.0


class Scorer:
    """Batches scoring requests. ``add`` may be called in any thread; everything else runs on the
    worker."""

    def __init__(
        self, token_budget: Callable[[BaseModel], int], pause: Callable[[], None] = lambda: None
    ) -> None:
        self._token_budget, self._pause = token_budget, pause
        self._arrived: deque[ScoreRequest] = deque()
        self._waiting: list[ScoreRequest] = []
        self._most_tokens: int | None = None  # less than the budget, once that was too much

    def add(self, request: ScoreRequest) -> None:
        """Registers a request, so that an earlier one can include it in its batch."""
        self._arrived.append(request)

    def serve(self, request: ScoreRequest) -> None:
        """Completes ``request``; an error is set on its future."""
        if not (request.batch or request.future.done()):
            # Plan batches of all waiting requests of the sampler.
            self._collect()
            mine = [other for other in self._waiting if other.sampler is request.sampler]
            self._waiting = [
                other for other in self._waiting if other.sampler is not request.sampler
            ]
            longer = [other for other in mine if len(other.computed)]
            groups = [[other] for other in mine if not len(other.computed)]
            groups += [[longer[i] for i in g] for g in self._groups(request.sampler.base, longer)]
            # Each request knows its batch: the first one to run computes all of it.
            for group in groups:
                for other in group:
                    other.batch = group
        batch, request.batch = request.batch, []
        if request.future.done():
            if request.future.cancelled():
                self._collect()  # frees the memory of cancelled requests
            return
        for other in batch:  # they reference each other, and the sampler
            other.batch = []
        self._score([other for other in batch if not other.future.done()])

    def _collect(self) -> None:
        """Collects new requests and drops cancelled ones."""
        while self._arrived:
            self._waiting.append(self._arrived.popleft())
        self._waiting = [request for request in self._waiting if not request.future.done()]

    def _groups(self, base: BaseModel, requests: Sequence[ScoreRequest]) -> Sequence[Sequence[int]]:
        sequences = [request.computed for request in requests]
        if not sequences:
            return []
        budget = self._token_budget(base)
        if base.device.type == "cpu":
            if base.kv_shapes is None:  # results would depend on the batch
                return [[i] for i in range(len(requests))]
            budget = max(budget, 2 * STEP_TOKENS)
        if self._most_tokens is not None:
            budget = min(budget, self._most_tokens)
        return [micro.indices for micro in plan_for(base, sequences, budget)]

    def _score(self, requests: Sequence[ScoreRequest]) -> None:
        """Scores a batch; on an error tries each half, until the request at fault fails alone."""
        if not requests:
            return
        sampler = requests[0].sampler
        base = sampler.base
        try:
            for request, scores in zip(requests, self._answers(requests), strict=True):
                logprobs = scores.logprobs
                given = request.tokens[request.first :]
                checked = (
                    None if logprobs is None else logprobs[request.first :][~is_image(given)],
                    scores.topk_logprobs,
                    scores.target_logprobs,
                )
                # NaN comes from the weights of a diverged run.
                if any(part is not None and np.isnan(part).any() for part in checked):
                    settle(request.future, error=sampler.diverged(len(request.tokens)))
                else:
                    settle(request.future, scores)
            return
        except Exception as error:
            short = out_of_memory(error)
            reason = str(error)
            if len(requests) == 1 and not short:
                settle(requests[0].future, error=error)
                return
        # Outside the handler, because its traceback would keep the activations alive.
        release_cached_memory(base.device)
        if len(requests) == 1:
            self._most_tokens = None  # only this request was too long
            settle(
                requests[0].future,
                error=OutOfMemoryError(
                    f"a prompt of {len(requests[0].tokens)} tokens does not fit into the memory of "
                    f"{base.device}: {reason}; shorten it"
                ),
            )
            return
        logger.warning("Scoring %d prompts at once failed (%s); halving.", len(requests), reason)
        if short:
            self._most_tokens = sum(len(request.tokens) for request in requests) // 2
        # Halves until the request at fault is alone; all others get their scores.
        middle = len(requests) // 2
        self._score(requests[:middle])
        self._score(requests[middle:])

    @torch.no_grad()
    def _answers(self, requests: Sequence[ScoreRequest]) -> list[PromptScores]:
        """Computes the scores of requests of one sampler."""
        sampler = requests[0].sampler
        answers = []
        for request in requests:
            scores, length, k = PromptScores(), len(request.tokens), request.topk
            if request.logprobs:
                scores.logprobs = np.full(length, np.nan, dtype=np.float32)
            if k:
                scores.topk_logprobs = np.full((length, k), MASK_LOGPROB, dtype=np.float32)
                scores.topk_ids = np.zeros((length, k), dtype=np.int32)
            if request.targets is not None:
                scores.target_logprobs = np.zeros(request.targets.shape, dtype=np.float32)
            answers.append(scores)
        # A prompt of one token has no scores and nothing to compute.
        if not len(requests[0].computed):
            return answers
        hidden, read = self._hidden(sampler, [request.computed for request in requests])
        # The state at a position predicts the next token, so the last one predicts no given token.
        where = [indices[: len(r.tokens) - 1] for indices, r in zip(read, requests, strict=True)]
        scored = list(zip(requests, where, answers, strict=True))
        _fill_logprobs(sampler, hidden, scored)
        _fill_topk(sampler, hidden, scored)
        for request, indices, answer in scored:
            if request.targets is not None:
                answer.target_logprobs = _logprobs(sampler, hidden, indices, request.targets)
        # The one token that was requested together with the scores.
        outputs = [
            (int(indices[-1]), row)
            for indices, request in zip(read, requests, strict=True)
            if request.sample is not None
            for row in request.sample.rows
        ]
        sample_sequences(hidden, outputs)
        for _, row in outputs:
            row.request.row_ended()
        return answers

    def _hidden(
        self, sampler: Sampler, sequences: Sequence[np.ndarray]
    ) -> tuple[torch.Tensor, list[np.ndarray]]:
        """Returns hidden states [S, H] and the indices of each sequence in them."""
        base, terms = sampler.base, sampler.terms()
        if base.device.type == "cpu" and base.kv_shapes is not None:
            return read_together(base, base.kv_shapes, terms, sequences, self._pause)
        parts: list[torch.Tensor] = []
        where: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(sequences)
        start = 0
        for micro in plan_for(base, sequences, self._token_budget(base)):
            batch = pad_for(base, micro, sequences)
            parts.append(hidden_states(base, terms, batch, grad=False))
            ends = np.cumsum([len(sequences[i]) for i in micro.indices])
            indices = np.split(batch.flat.cpu().numpy() + start, ends[:-1])
            for number, part in zip(micro.indices, indices, strict=True):
                where[number] = part
            start += len(parts[-1])  # indices continue in the states of all micro-batches
        return torch.cat(parts), where


_Scored = Sequence[tuple[ScoreRequest, np.ndarray, PromptScores]]
"""Requests with the indices of their hidden states [T - 1], and their results."""


def _fill_logprobs(sampler: Sampler, hidden: torch.Tensor, scored: _Scored) -> None:
    """Fills in log-probabilities of the prompts' tokens; common prefixes are computed once."""
    wanted = [item for item in scored if item[0].logprobs]
    if not wanted:
        return
    indices = np.concatenate([where[r.first - 1 :] for r, where, _ in wanted])
    targets = np.concatenate([r.tokens[r.first :] for r, _, _ in wanted])
    vocab_size = sampler.base.vocab_size
    # The positions of an image have no probability and stay NaN.
    text = ~is_image(targets)
    # A (state, target) pair as one number, so that equal pairs of a shared prefix are found.
    pairs = indices[text] * vocab_size + targets[text]
    keys, expand = np.unique(pairs, return_inverse=True)
    values = np.full(len(targets), np.nan, dtype=np.float32)
    values[text] = _logprobs(sampler, hidden, keys // vocab_size, keys % vocab_size)[expand]
    for request, _, answer in wanted:
        assert answer.logprobs is not None
        count = len(request.tokens) - request.first
        answer.logprobs[request.first :], values = values[:count], values[count:]


def _fill_topk(sampler: Sampler, hidden: torch.Tensor, scored: _Scored) -> None:
    """Fills in the most probable tokens, for each k alone: the order of ties may depend on k."""
    head, lora = sampler.base.head, sampler.terms().get(sampler.base.unembed_name)
    for k in sorted({request.topk for request, _, _ in scored} - {0}):
        wanted = [item for item in scored if item[0].topk == k]
        indices = np.concatenate([where[r.first - 1 :] for r, where, _ in wanted])
        once, expand = np.unique(indices, return_inverse=True)
        values = np.empty((len(once), k), dtype=np.float32)
        ids = np.empty((len(once), k), dtype=np.int32)
        for index in _chunks(sampler.base, len(once)):
            found = head.topk(hidden[_tensor(once[index], hidden)], k, lora)
            values[index], ids[index] = (part.cpu().numpy() for part in found)
        values, ids = values[expand], ids[expand]
        for request, _, answer in wanted:
            assert answer.topk_logprobs is not None
            assert answer.topk_ids is not None
            count = len(request.tokens) - request.first
            answer.topk_logprobs[request.first :], values = values[:count], values[count:]
            answer.topk_ids[request.first :], ids = ids[:count], ids[count:]


def _logprobs(
    sampler: Sampler, hidden: torch.Tensor, indices: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """Returns fp32 log-probabilities of ``targets`` [N] or [N, K] at ``indices`` of ``hidden``."""
    out = np.empty(targets.shape, dtype=np.float32)
    lora = sampler.terms().get(sampler.base.unembed_name)
    for index in _chunks(sampler.base, len(indices)):
        states = hidden[_tensor(indices[index], hidden)]
        found = sampler.base.head.logprobs(states, _tensor(targets[index], hidden), lora)
        out[index] = found.cpu().numpy()
    return out


def _chunks(base: BaseModel, count: int) -> Iterator[np.ndarray]:
    """Returns chunks of positions that go through the head together.

    The last chunk is padded to full size, so that a position's result does not depend on their
    number.
    """
    size = max(8, base.head.chunk_rows // 8 * 8)
    for start in range(0, count, size):
        index = np.arange(start, min(start + size, count))
        yield np.pad(index, (0, -len(index) % 8), mode="edge")


def _tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)
