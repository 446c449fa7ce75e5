"""Drawing the next token of running samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tinker_cookbook.engine.draw import DrawSettings, Exponentials, draw_tokens
from tinker_cookbook.engine.low_rank import filling
from tinker_cookbook.engine.requests import SampleRow
from tinker_cookbook.engine.sampler import Sampler


def draw_rows(
    sampler: Sampler, hidden: torch.Tensor, places: Sequence[int], rows: Sequence[SampleRow]
) -> list[SampleRow]:
    """Draws a token for each row of one sampler; returns those that end with it.

    Row i goes by ``hidden[places[i]]``, which samples of one prompt share.
    """
    device = hidden.device
    once, which = np.unique(places, return_inverse=True)
    filled = np.pad(once, (0, filling(len(once))), mode="edge")
    logits = sampler.base.head.logits(
        hidden[torch.from_numpy(filled).to(device)], sampler.unembed_pair()
    )
    if device.type == "mps":  # it has no float64
        logits = logits.cpu()
    known = Exponentials.of(logits)
    in_order = np.array_equal(once, places)  # then the filling is cut off, and nothing copied
    chosen = slice(len(rows)) if in_order else torch.from_numpy(which).to(logits.device)
    logits, known = logits[chosen], known.take(chosen)
    normalizer = known.normalizer()
    drawn = draw_tokens(logits, _settings(rows), known)
    logprobs = (logits.gather(1, drawn[:, None]) - normalizer)[:, 0].tolist()
    most = max(row.request.topk for row in rows)
    top = (logits - normalizer).topk(most, dim=-1) if most else None
    ended = []
    for i, (row, token) in enumerate(zip(rows, drawn.tolist(), strict=True)):
        k, best = row.request.topk, None
        if top is not None and k:
            best = (top.indices[i, :k].cpu().numpy(), top.values[i, :k].cpu().numpy())
        if row.add(token, logprobs[i], best):
            ended.append(row)
    return ended


def _settings(rows: Sequence[SampleRow]) -> DrawSettings:
    asked = [row.request.settings for row in rows]
    return DrawSettings(
        temperature=np.array([settings.temperature for settings in asked]),
        top_k=np.array([settings.top_k for settings in asked]),
        top_p=np.array([settings.top_p for settings in asked]),
        uniform=np.array([row.uniform() for row in rows]),
    )
