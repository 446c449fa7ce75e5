"""Applies bias, penalties, minimum length and masks to the logits of the rows that have them.

All rows of a step are changed by one scatter per option. The state of an option (token counts,
state of the mask) belongs to the sequence. So a sequence that is
preempted and resumed continues with the same state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np
import torch

from tinker_cookbook.engine.sampling.options import LogitOptions, MaskState

_MASK_THREADS = 4


class LogitAdjuster:
    """Options of one sequence, with their state."""

    def __init__(
        self, options: LogitOptions, stop_tokens: Collection[int], prompt: np.ndarray
    ) -> None:
        self.options = options
        self.stop_tokens = np.array(sorted(stop_tokens), dtype=np.int64)
        self.length = 0
        self.counts: TokenCounts | None = None
        repeats = options.repetition_penalty != 1
        if repeats or options.presence_penalty or options.frequency_penalty:
            # Only the repetition penalty depends on tokens of the prompt.
            self.counts = TokenCounts(prompt if repeats else prompt[:0])
        mask = options.token_mask
        self.mask = None if mask is None else RowMask(mask.start())

    @property
    def active(self) -> bool:
        """Whether the next token is sampled from changed logits."""
        options = self.options
        lasting = self.counts is not None or self.mask is not None or len(options.logit_bias) > 0
        return lasting or self.length < options.min_tokens

    def add(self, token: int) -> bool:
        """Counts a sampled token; returns whether the mask ends the sequence after it."""
        self.length += 1
        if self.counts is not None:
            self.counts.add(token)
        return self.mask is not None and self.mask.add(token)


class TokenCounts:
    """How often each token is in a sample; tokens of the prompt alone have count 0."""

    def __init__(self, prompt: np.ndarray) -> None:
        ids = np.unique(prompt)
        self._size = len(ids)
        self._ids = np.concatenate([ids, np.zeros(64, dtype=np.int64)])
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._slots = {int(token): slot for slot, token in enumerate(ids)}

    @property
    def ids(self) -> np.ndarray:
        """Token ids [N], each once."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """Occurrences in the sample [N]."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Counts one more token."""
        slot = self._slots.setdefault(token, self._size)
        if slot == self._size:
            # Double the memory each time, so that copies are rare.
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token
            self._size += 1
        self._counts[slot] += 1


class RowMask:
    """Mask of a sequence's next token, computed on a thread while the model runs."""

    def __init__(self, state: MaskState) -> None:
        self._state = state
        self._next: Future[np.ndarray] = _threads().submit(state.allowed)

    def bits(self) -> np.ndarray:
        """Returns the mask, uint8 [B]; raises the error of its computation."""
        return self._next.result()

    def add(self, token: int) -> bool:
        """Advances by one token; returns whether the sequence ends there."""
        self._next.result()  # the state must not change while it is read
        self._state.add(token)
        if self._state.finished:
            return True
        self._next = _threads().submit(self._state.allowed)
        return False


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MASK_THREADS, thread_name_prefix="token-mask")


def adjusted_logits(
    logits: torch.Tensor, adjusters: Sequence[LogitAdjuster]
) -> dict[int, Exception]:
    """Changes fp32 ``logits`` [R, V] in place; returns the errors of rows, by their index."""
    biased = [(i, *a.options.bias) for i, a in enumerate(adjusters) if a.options.logit_bias]
    if biased:
        at = _pairs([(row, ids) for row, ids, _ in biased], logits.device)
        values = np.concatenate([values for _, _, values in biased])
        logits[at] += torch.from_numpy(values).to(logits.device)
    short = [(i, a.stop_tokens) for i, a in enumerate(adjusters) if a.length < a.options.min_tokens]
    if short:
        logits[_pairs(short, logits.device)] = -torch.inf
    _penalize(logits, adjusters)
    return _apply_masks(logits, adjusters)


def _pairs(
    ids_of_rows: Sequence[tuple[int, np.ndarray]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns row and token indices [N] of all tokens of all rows."""
    rows = np.repeat([row for row, _ in ids_of_rows], [len(ids) for _, ids in ids_of_rows])
    tokens = np.concatenate([ids for _, ids in ids_of_rows])
    return torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)


def _penalize(logits: torch.Tensor, adjusters: Sequence[LogitAdjuster]) -> None:
    rows = [(i, a.options, a.counts) for i, a in enumerate(adjusters) if a.counts is not None]
    if not rows:
        return
    at = _pairs([(row, counts.ids) for row, _, counts in rows], logits.device)
    lengths = [len(counts.ids) for _, _, counts in rows]

    def column(name: str) -> torch.Tensor:
        values = np.array([getattr(options, name) for _, options, _ in rows], dtype=np.float32)
        return torch.from_numpy(np.repeat(values, lengths)).to(logits.device)

    counts = torch.from_numpy(np.concatenate([counts.counts for *_, counts in rows]))
    counts = counts.to(logits.device)
    chosen, repetition = logits[at], column("repetition_penalty")
    chosen = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
    chosen -= column("frequency_penalty") * counts
    logits[at] = chosen - column("presence_penalty") * (counts > 0)


def _apply_masks(logits: torch.Tensor, adjusters: Sequence[LogitAdjuster]) -> dict[int, Exception]:
    rows, errors = [], {}
    vocab_size = logits.shape[-1]
    packed = np.zeros((len(adjusters), -(-vocab_size // 8)), dtype=np.uint8)
    for i, adjuster in enumerate(adjusters):
        if adjuster.mask is None:
            continue
        try:
            bits = adjuster.mask.bits()[: packed.shape[1]]
        except Exception as error:  # an error of one grammar must not affect other rows
            errors[i] = error
            continue
        packed[len(rows), : len(bits)] = bits
        rows.append(i)
    if rows:
        forbidden = _unpacked(~packed[: len(rows)], vocab_size, logits.device)
        if len(rows) == len(logits):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            index = torch.tensor(rows, device=logits.device)
            logits[index] = logits[index].masked_fill(forbidden, -torch.inf)
    return errors


def _unpacked(packed: np.ndarray, count: int, device: torch.device) -> torch.Tensor:
    """Returns the first ``count`` bits of each row of uint8 [R, B] as bool [R, count]."""
    if device.type == "cpu":
        bits = np.unpackbits(packed, axis=1, count=count, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    return unpacked_by_shifts(packed, count, device)


def unpacked_by_shifts(packed: np.ndarray, count: int, device: torch.device) -> torch.Tensor:
    """Like numpy's ``unpackbits``, on the device: only an eighth of the bytes is transferred."""
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    bits = (torch.from_numpy(packed).to(device)[:, :, None] >> shifts) & 1
    return bits.view(len(packed), -1)[:, :count].bool()
