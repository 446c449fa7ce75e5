"""Drawing the next token of running samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tinker_cookbook.engine.draw import DrawSettings, Exponentials, draw_tokens
from tinker_cookbook.engine.low_rank import filling
from tinker_cookbook.engine.requests import SampleRow
from tinker_cookbook.engine.sampler import Sampler, segments_of


def draw_rows(hidden: torch.Tensor, outputs: Sequence[tuple[int, SampleRow]]) -> list[SampleRow]:
    """Draws a token for each of ``outputs``, (place, row); returns the rows that end with it.

    A row goes by ``hidden[place]``, which samples of one prompt share.
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
    drawn = draw_tokens(logits, _settings(rows), known)
    logprobs = (logits.gather(1, drawn[:, None]) - normalizer)[:, 0].tolist()
    # Each number of them by itself, since equals may change places.
    asked = {row.request.topk for row in rows} - {0}
    top = {k: (logits - normalizer).topk(k, dim=-1) for k in asked}
    ended = []
    for i, (row, token) in enumerate(zip(rows, drawn.tolist(), strict=True)):
        best = None
        if k := row.request.topk:
            best = (top[k].indices[i].cpu().numpy(), top[k].values[i].cpu().numpy())
        if row.add(token, logprobs[i], best):
            ended.append(row)
    return ended


def _logits(hidden: torch.Tensor, places: np.ndarray, owners: list[Sampler]) -> torch.Tensor:
    """fp32 logits of ``hidden[places]`` with their owners' adapters, and of some filling."""
    short = filling(len(places))
    filled = torch.from_numpy(np.pad(places, (0, short), mode="edge")).to(hidden.device)
    segments = segments_of(owners + owners[-1:] * short, hidden.device)
    base = owners[0].base
    return segments.apply(base.unembed_name, hidden[filled], base.head.logits_of_parts)


def _settings(rows: Sequence[SampleRow]) -> DrawSettings:
    asked = [row.request.settings for row in rows]
    return DrawSettings(
        temperature=np.array([settings.temperature for settings in asked]),
        top_k=np.array([settings.top_k for settings in asked]),
        top_p=np.array([settings.top_p for settings in asked]),
        uniform=np.array([row.uniform() for row in rows]),
    )
