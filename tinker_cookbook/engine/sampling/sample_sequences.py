"""Samples the next token of running sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from tinker_cookbook.engine.model.low_rank import filling
from tinker_cookbook.engine.sampling.requests import SampledSequence
from tinker_cookbook.engine.sampling.sample_tokens import (
    BatchSamplingParams,
    Exponentials,
    sample_tokens,
)
from tinker_cookbook.engine.sampling.sampler import Sampler, segments_of


def sample_sequences(
    hidden: torch.Tensor, outputs: Sequence[tuple[int, SampledSequence]]
) -> list[SampledSequence]:
    """Samples a token for each (index, row) of ``outputs``; returns the rows that end with it.

    A row uses ``hidden[index]``, which samples of one prompt share. A row whose
    log-probabilities are not finite, or whose token cannot be appended, fails alone: its request
    gets the error.
    """
    if not outputs:  # a step that only reads prompts
        return []
    places, rows = zip(*outputs, strict=True)
    once, first, which = np.unique(places, return_index=True, return_inverse=True)
    logits = _logits(hidden, once, [rows[i].request.sampler for i in first])
    if hidden.device.type == "mps":  # it has no float64
        logits = logits.cpu()
    known = Exponentials.of(logits)
    in_order = np.array_equal(once, places)  # then the filling is cut off, and nothing copied
    chosen = slice(len(rows)) if in_order else torch.from_numpy(which).to(logits.device)
    logits, known = logits[chosen], known.take(chosen)
    normalizer = known.normalizer()
    drawn = sample_tokens(logits, _settings(rows), known)
    logprobs = (logits.gather(1, drawn[:, None]) - normalizer)[:, 0].tolist()
    # Each number of them by itself, since equals may change places.
    top = {}
    for k in {row.request.topk for row in rows} - {0}:
        best = (logits - normalizer).topk(k, dim=-1)
        top[k] = best.indices.cpu().numpy(), best.values.cpu().numpy()
    # All that may fail for the rows together is done: from here on each stands for itself.
    ended = []
    for i, (row, token) in enumerate(zip(rows, drawn.tolist(), strict=True)):
        best = None
        if k := row.request.topk:
            best = top[k][0][i], top[k][1][i]
        if _add(row, token, logprobs[i], best):
            ended.append(row)
    return ended


def _add(
    row: SampledSequence, token: int, logprob: float, best: tuple[np.ndarray, np.ndarray] | None
) -> bool:
    """Appends a sampled token; returns whether the row ends or has failed."""
    request = row.request
    if row.failed:  # or another row of its request has
        return True
    if not math.isfinite(logprob):
        request.fail(request.sampler.diverged(row.length))
        return True
    request.sampler.base.sampled_tokens += 1
    try:
        return row.add(token, logprob, best)
    except Exception as error:
        request.fail(error)
        return True


def _logits(hidden: torch.Tensor, places: np.ndarray, owners: list[Sampler]) -> torch.Tensor:
    """Returns fp32 logits of ``hidden[places]`` with their owners' adapters, padded with some
    rows."""
    short = filling(len(places))
    filled = torch.from_numpy(np.pad(places, (0, short), mode="edge")).to(hidden.device)
    segments = segments_of(owners + owners[-1:] * short, hidden.device)
    base = owners[0].base
    return segments.apply(base.unembed_name, hidden[filled], base.head.logits_of_parts)


def _settings(rows: Sequence[SampledSequence]) -> BatchSamplingParams:
    asked = [row.request.settings for row in rows]
    return BatchSamplingParams(
        temperature=np.array([settings.temperature for settings in asked]),
        top_k=np.array([settings.top_k for settings in asked]),
        top_p=np.array([settings.top_p for settings in asked]),
        uniform=np.array([row.uniform() for row in rows]),
    )
