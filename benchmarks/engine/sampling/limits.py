"""The most tokens/s that a machine allows: no step reads weights faster than from memory, and no
multiply-add takes less than in registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.engine.flops import ModelSize
from benchmarks.engine.sampling.requests import Request


def limit(
    size: ModelSize,
    rank: int,
    requests: Sequence[Request],
    item_bytes: int,
    ceilings: dict[str, Any],
    with_prompts: bool,
) -> dict[str, Any]:
    """Tokens/s by ``memory`` and by ``products``; the lower is the limit.

    Each step reads all weights with the adapter once, and the keys and values of each sequence. All
    samples are in one batch, so there are as many steps as the longest answer has tokens. Products
    are those of the linear layers, those of attention not included. Everything is in ``item_bytes``
    per number, and nothing in a cache.
    """
    answers = sum(request.useful for request in requests)
    prompts = sum(len(request.prompt) for request in requests) if with_prompts else 0
    body, head = size.body + rank * size.lora_body, size.head + rank * size.lora_head
    operations = 2.0 * (body * (prompts + answers) + head * answers)
    context = sum(r.samples * r.tokens * (len(r.prompt) + (r.tokens + 1) / 2) for r in requests)
    steps = max(request.tokens for request in requests)
    numbers = steps * (body + head) + context * 2 * size.layers * size.kv_width
    seconds = {
        "memory": numbers * item_bytes / ceilings["bandwidth"],
        "products": operations / ceilings["flops"],
    }
    by = max(seconds, key=seconds.__getitem__)
    return {"tokens_per_second": answers / seconds[by], "by": by}
