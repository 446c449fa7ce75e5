"""Sampling through transformers' own cache, one request at a time.

For models whose layers keep more than keys and values, which the ``batcher`` cannot hold. The
prompt is run once for all samples of a request, and rows leave as they finish.
"""

from __future__ import annotations

from typing import Any

import torch

from tinker_cookbook.engine.draw_rows import draw_rows
from tinker_cookbook.engine.requests import SampleRequest


@torch.no_grad()
def sample_one_by_one(request: SampleRequest) -> None:
    """Completes ``request``; runs on the engine's worker."""
    from transformers import DynamicCache

    if request.future.cancelled():
        return
    base = request.sampler.base
    try:
        with base.with_segments(request.sampler.terms()):
            cache: Any = DynamicCache(config=base.config)
            tokens = torch.from_numpy(request.prompt).to(base.device)[None]
            hidden = base.hidden(tokens, past_key_values=cache, use_cache=True)[:, -1]
            rows = list(request.rows)
            if len(rows) > 1:
                cache.batch_repeat_interleave(len(rows))
                hidden = hidden.expand(len(rows), -1)
            while rows and not request.future.cancelled():
                ended = set(draw_rows(hidden, list(enumerate(rows))))
                keep = [i for i, row in enumerate(rows) if row not in ended]
                if keep and len(keep) < len(rows):
                    cache.batch_select_indices(torch.tensor(keep, device=base.device))
                rows = [rows[i] for i in keep]
                for row in ended:
                    row.request.row_ended()
                if rows:
                    drawn = torch.tensor([[row.sample.tokens[-1]] for row in rows]).to(base.device)
                    hidden = base.hidden(drawn, past_key_values=cache, use_cache=True)[:, -1]
    except Exception as error:
        request.fail(error)
