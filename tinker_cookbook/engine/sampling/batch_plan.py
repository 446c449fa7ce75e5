"""Plan of one step: which tokens run, at which positions, and with which adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinker_cookbook.engine.sampling.paged_cache import BlockTable, TokenSpan
from tinker_cookbook.engine.sampling.prefix_cache import Prefill
from tinker_cookbook.engine.sampling.requests import SampledSequence
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.vision.images import whole_images


@dataclass
class BatchPlan:
    """Tokens of one step in one row; ``owners`` is the sampler of each token."""

    runs: list[TokenSpan] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    axes: list[tuple[int, np.ndarray]] = field(default_factory=list)
    """Positions [3, n] of chunks with images, with the index of the chunk's first token."""
    owners: list[Sampler] = field(default_factory=list)
    outputs: list[tuple[int, SampledSequence]] = field(default_factory=list)
    """Sequences that sample a token in this step, with the index of their hidden state."""
    chunks: list[tuple[Prefill, BlockTable, int]] = field(default_factory=list)
    """Prefills that advance in this step, with the number of tokens."""

    @classmethod
    def of(
        cls,
        rows: Mapping[BlockTable, SampledSequence],
        prefills: Sequence[Prefill],
        step_tokens: int,
    ) -> BatchPlan | None:
        """Plans one token per row, then prefill up to ``step_tokens``; ``None`` if empty."""
        plan = cls()
        # Rows of one sampler are neighbours, so that its adapter is applied in one product.
        samplers: dict[Sampler, list[BlockTable]] = {}
        for table, row in rows.items():
            samplers.setdefault(row.request.sampler, []).append(table)
        for sampler, tables in samplers.items():
            for table in tables:
                row = rows[table]
                plan.runs.append(TokenSpan(table, table.length, len(plan.tokens), 1, decodes=True))
                plan.outputs.append((len(plan.tokens), row))
                position = table.length + row.request.position_offset
                plan._append([row.sample.tokens[-1]], [position], sampler)
        # Decode tokens come first and are always included: a long prompt must not delay them.
        plan._add_prefills(prefills, step_tokens - len(plan.tokens))
        if not plan.tokens:
            return None
        # Padding tokens belong to no sequence: no attention reads or writes them.
        last = plan.owners[-1]
        short = last.base.filling(len(plan.tokens))
        plan._append([0] * short, [0] * short, last)
        return plan

    def _add_prefills(self, prefills: Sequence[Prefill], room: int) -> None:
        """Divides ``room`` tokens equally among the samplers; unused tokens go to the next sampler.

        So a short prompt is prefilled immediately, however long other clients' prompts are.
        """
        queues: dict[Sampler, list[tuple[Prefill, BlockTable]]] = {}
        for prefill in prefills:
            if prefill.table is not None:  # otherwise it waits for a common prefix
                queues.setdefault(prefill.sampler, []).append((prefill, prefill.table))
        shortest_first = sorted(queues.values(), key=lambda queue: sum(p.left for p, _ in queue))
        for number, queue in enumerate(shortest_first):
            # Divide the unused part of a short queue among the later queues.
            share = -(-room // (len(queues) - number))
            for prefill, table in queue:
                if share <= 0:
                    break
                start, seen = table.length, prefill.last_seen
                count = whole_images(seen, start, min(share, prefill.left))
                end = start + count
                seen = None if seen is None else seen[start:end]
                self.runs.append(TokenSpan(table, start, len(self.tokens), count, last_seen=seen))
                tokens = prefill.tokens[start:end].tolist()
                if prefill.positions is not None:
                    self.axes.append((len(self.tokens), prefill.positions[:, start:end]))
                self._append(tokens, list(range(start, end)), prefill.sampler)
                self.chunks.append((prefill, table, count))
                # All samples of a prompt sample their first token from its last hidden state.
                if end == len(prefill.tokens):
                    self.outputs += [(len(self.tokens) - 1, row) for row in prefill.rows]
                share, room = share - count, room - count

    def rotary_positions(self) -> np.ndarray:
        """Returns the positions [T], or [3, T] if a chunk has images."""
        positions = np.array(self.positions, dtype=np.int64)
        if self.axes:
            positions = np.broadcast_to(positions, (3, len(positions))).copy()
            for first, chunk in self.axes:
                positions[:, first : first + chunk.shape[1]] = chunk
        return positions

    def _append(self, tokens: list[int], positions: list[int], owner: Sampler) -> None:
        self.tokens += tokens
        self.positions += positions
        self.owners += [owner] * len(tokens)


def halves_of(
    rows: Mapping[BlockTable, SampledSequence], prefills: Sequence[Prefill]
) -> list[tuple[dict[BlockTable, SampledSequence], list[Prefill]]]:
    """Splits a step by samplers, or the only sampler by requests; empty for a single request."""
    by_sampler: tuple[Callable[[SampledSequence], Any], Callable[[Prefill], Any]]
    by_sampler = (lambda row: row.request.sampler), (lambda prefill: prefill.sampler)
    by_request = (lambda row: row.request), (lambda prefill: prefill)
    for of_row, of_prefill in (by_sampler, by_request):
        keys = [*map(of_row, rows.values()), *map(of_prefill, prefills)]
        kinds = list(dict.fromkeys(keys))
        if len(kinds) > 1:
            first = set(kinds[: len(kinds) // 2])
            return [
                (
                    {table: row for table, row in rows.items() if (of_row(row) in first) is half},
                    [prefill for prefill in prefills if (of_prefill(prefill) in first) is half],
                )
                for half in (True, False)
            ]
    return []
