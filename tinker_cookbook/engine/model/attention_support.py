"""Checks once, on a few tokens, whether a model supports the engine's attention.

Continuous batching and shared prefixes replace attention, so every layer must be attention of a
known kind. Models with recurrent layers, or with sliding windows given only as a mask, are sampled
one request at a time with transformers' own cache and trained without shared prefixes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinker_cookbook.engine.kernels import StepList
from tinker_cookbook.engine.memory import out_of_memory
from tinker_cookbook.engine.model.attention_hook import AttentionCall
from tinker_cookbook.engine.model.low_rank import Segments
from tinker_cookbook.engine.sampling.batch_attention import BatchLayout
from tinker_cookbook.engine.sampling.paged_cache import LayerShape, PagedCache, TokenSpan
from tinker_cookbook.engine.training.packed_attention import PackedLayout
from tinker_cookbook.engine.training.prefix_tree import lay_out
from tinker_cookbook.engine.training.tree_attention import TreeLayout

logger = logging.getLogger(__name__)

_UNSUPPORTED = (AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""Errors that an unsupported architecture may raise in the engine's attention."""


class _Probe(BatchLayout):
    """Layout that records the call and the cache shape of each layer and computes nothing."""

    def __init__(self) -> None:
        super().__init__([])
        self.shapes: dict[int, LayerShape] = {}
        self.calls: dict[int, AttentionCall] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        _, heads, width = call.key.shape
        plain = call.softcap is None and call.sinks is None
        self.calls[call.layer] = call
        self.shapes[call.layer] = LayerShape(heads, width, call.value.shape[2], plain)
        # Only the shapes matter here.
        return call.query.new_zeros(*call.query.shape[:2], call.value.shape[2])


@torch.no_grad()
def check_batch_attention(
    base: Any, decoder: Any
) -> tuple[list[LayerShape] | None, StepList | None]:
    """Returns the cache shapes of all layers, or ``None`` if the check fails; and the list that
    computes their step in one call, or ``None`` if a bit of its results differs."""
    try:
        # 1. Which layers call the attention, and which cache shapes would they need?
        probe = _Probe()
        tokens = torch.arange(2, device=base.device)
        base.hidden_of_batch(tokens, tokens, probe, Segments([]))
        shapes = [probe.shapes[layer] for layer in sorted(probe.shapes)]
        # 2. Does a batch give the same results as each sequence alone?
        found = _batch(base, shapes, base.hidden_of_batch)
        rows = [_row(base, tokens) for tokens in _sequences(base)]
        alone = torch.cat([base.hidden(row)[:, -1] for row in rows])
        if _all_layers_known(base, probe.windows_seen) and _close(found[1], alone):
            return shapes, _checked_steps(base, decoder, probe, shapes, found)
        reason = "its layers keep more than keys and values"
    except _UNSUPPORTED as error:
        if out_of_memory(error):
            raise
        reason = str(error)
    logger.info("%s: requests are sampled one at a time: %s", base.name, reason)
    return None, None


def _checked_steps(
    base: Any,
    decoder: Any,
    probe: _Probe,
    shapes: list[LayerShape],
    expected: Sequence[Tensor],
) -> StepList | None:
    # Images need their features and other positions.
    if base.vision is not None or not PagedCache(shapes, base.dtype, base.device).native:
        return None
    try:
        steps = StepList(decoder, [probe.calls[i] for i in sorted(probe.calls)], base.dtype)
    except _UNSUPPORTED as error:
        if out_of_memory(error):
            raise
        logger.info("%s: its layers are computed one by one: %s", base.name, error)
        return None
    found = _batch(
        base,
        shapes,
        lambda tokens, at, layout, segments: steps.hidden(tokens, at, layout.runs, segments),
    )
    return steps if all(map(torch.equal, found, expected)) else None


def _all_layers_known(base: Any, windows: Mapping[int, int | None]) -> bool:
    """Returns whether all layers called the attention, with a known type and the right window."""
    # Multimodal models have the settings of their language model in ``text_config``.
    config = getattr(base.config, "text_config", base.config)
    count = int(config.num_hidden_layers)
    # A layer that never called the attention has another kind of state (recurrent layers).
    if sorted(windows) != list(range(count)):
        return False
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    if not {"full_attention", "sliding_attention"}.issuperset(kinds):
        return False
    # A window that exists only in the model's mask would be lost, because the mask is ignored.
    return all(windows[i] is not None for i, kind in enumerate(kinds) if kind[0] == "s")


def _sequences(base: Any) -> list[np.ndarray]:
    # Different lengths, so that wrong rows, positions or masks would change the result.
    return [probe_tokens(base.vocab_size, n) for n in (5, 8, 12, 3)]


def _batch(
    base: Any, shapes: list[LayerShape], compute: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the hidden states of a batched prefill [T, H] and of a decode step [4, H]."""
    device = base.device
    cache = PagedCache(shapes, base.dtype, device)
    sequences = [_row(base, tokens) for tokens in _sequences(base)]
    lengths = [row.shape[1] - 1 for row in sequences]
    tables = [cache.new(length + 1) for length in lengths]
    # Prefill all but the last token of each sequence, in one batch.
    firsts = [sum(lengths[:i]) for i in range(len(lengths))]
    prefill = [TokenSpan(*run) for run in zip(tables, [0] * 4, firsts, lengths, strict=True)]
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    prompts = torch.cat([row[0, :-1] for row in sequences])
    prefilled = compute(prompts, positions, BatchLayout(prefill), Segments([]))
    # Decode the last tokens.
    decode = [
        TokenSpan(table, length, i, 1, decodes=True)
        for i, (table, length) in enumerate(zip(tables, lengths, strict=True))
    ]
    decoded = compute(
        torch.stack([row[0, -1] for row in sequences]),
        torch.tensor(lengths, device=device),
        BatchLayout(decode),
        Segments([]),
    )
    return prefilled, decoded


@torch.no_grad()
def check_packed_attention(base: Any) -> bool:
    """Returns whether sequences can be packed in one row, on CUDA: compares two packed sequences
    with each sequence alone."""
    if base.device.type != "cuda":
        return False
    tokens = probe_tokens(base.vocab_size, 19)
    return _row_agrees(base, PackedLayout, [[tokens[:11]], [tokens[11:]]])


@torch.no_grad()
def check_tree_attention(base: Any) -> type[PackedLayout | TreeLayout] | None:
    """Returns the layout for sequences that share a row, if one works: compares two sequences with
    a common prefix with each sequence alone."""
    tokens = probe_tokens(base.vocab_size, 19)
    sequences = [tokens[:11], np.concatenate([tokens[:3], tokens[11:]])]
    kinds = (PackedLayout, TreeLayout) if base.device.type == "cuda" else (TreeLayout,)
    return next((kind for kind in kinds if _row_agrees(base, kind, [sequences])), None)


def _row_agrees(
    base: Any,
    kind: type[PackedLayout | TreeLayout],
    groups: Sequence[Sequence[np.ndarray]],
) -> bool:
    """Compares groups of sequences, each in a shared row and one after another, with each sequence
    alone."""
    # ``shortest=1``: the common prefix has only three tokens.
    rows = [lay_out(group, shortest=1) for group in groups]
    layout = kind.of(rows, base.device)
    tokens, positions = (
        _row(base, np.concatenate(parts))
        for parts in ([row.tokens for row in rows], [row.positions for row in rows])
    )
    try:
        # A GPU may have a kernel for the forward pass alone (pytorch #198224).
        compute = base.hidden_with_backward if kind is PackedLayout else base.hidden
        with base.attending(layout):
            found = compute(tokens, position_ids=positions)[0]
    except _UNSUPPORTED as error:
        if out_of_memory(error):
            raise
        logger.info("%s: %s is not used: %s", base.name, kind.__name__, error)
        return False
    starts = np.cumsum([0, *(len(row.tokens) for row in rows)])
    return _all_layers_known(base, layout.windows_seen) and all(
        _close(found[torch.from_numpy(where + start)], base.hidden(_row(base, sequence))[0])
        for group, row, start in zip(groups, rows, starts, strict=False)
        for sequence, where in zip(group, row.where, strict=True)
    )


def probe_tokens(vocab_size: int, count: int) -> np.ndarray:
    """Returns token ids spread over the vocabulary: special tokens alone would be unusual input."""
    return (vocab_size // 3 + 37 * np.arange(count)) % vocab_size


def _row(base: Any, sequence: np.ndarray) -> Tensor:
    return torch.from_numpy(sequence).to(base.device)[None]


def _close(found: Tensor, expected: Tensor) -> bool:
    """Returns whether most positions [T, H] agree."""
    # Use the median: bfloat16 rounding moves single positions far, a wrong mask moves all of them.
    error = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    return error.median().item() <= (1e-4 if found.dtype == torch.float32 else 0.1)
