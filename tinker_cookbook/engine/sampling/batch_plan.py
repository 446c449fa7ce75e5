"""Plan of one step: which tokens run, at which positions, and with which adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tinker_cookbook.engine.model.low_rank import Segments, filling
from tinker_cookbook.engine.sampling.batch_attention import BatchLayout, Part, decoding, reading
from tinker_cookbook.engine.sampling.kv_cache import KVCache, KVSlot
from tinker_cookbook.engine.sampling.prefill import PrefillRequest
from tinker_cookbook.engine.sampling.requests import SampledSequence
from tinker_cookbook.engine.sampling.sampler import Sampler, segments_of


@dataclass
class BatchPlan:
    """Tokens of one step in one row; ``owners`` is the sampler of each token."""

    parts: list[Part] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    owners: list[Sampler] = field(default_factory=list)
    outputs: list[tuple[int, SampledSequence]] = field(default_factory=list)
    """Sequences that sample a token in this step, with the index of their hidden state."""
    _progress: list[tuple[PrefillRequest, int]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        cache: KVCache,
        rows: Mapping[KVSlot, SampledSequence],
        readings: Sequence[PrefillRequest],
        step_tokens: int,
    ) -> BatchPlan | None:
        """Plans one token for each of ``rows``, then prefill up to ``step_tokens``; ``None`` if
        empty."""
        plan = cls()
        for slots in cache.groups(_by_sampler(rows)):
            plan._decode(slots, rows)
        plan._read_fairly(readings, step_tokens - len(plan.tokens))
        if not plan.tokens:
            return None
        # Nobody attends to the filling.
        count = len(plan.tokens)
        last = plan.owners[-1]
        short = -count % 32 if last.base.ragged else filling(count)
        plan._append([0] * short, [0] * short, last)
        return plan

    @property
    def layout(self) -> BatchLayout:
        """Returns the layout that attention uses."""
        return BatchLayout(self.parts)

    def segments(self, device: torch.device) -> Segments:
        """Returns the token segments of each adapter."""
        return segments_of(self.owners, device)

    def advance(self) -> list[PrefillRequest]:
        """Advances the prefills; returns those that are complete."""
        done = []
        for prompt, count in self._progress:
            assert prompt.slot is not None
            prompt.slot.length += count
            if prompt.slot.length == len(prompt.tokens):
                done.append(prompt)
        return done

    def _decode(self, slots: Sequence[KVSlot], rows: Mapping[KVSlot, SampledSequence]) -> None:
        self.parts += decoding(slots, len(self.tokens))
        for slot in slots:
            row = rows[slot]
            self.outputs.append((len(self.tokens), row))
            self._append([row.sample.tokens[-1]], [slot.length], row.request.sampler)

    def _read_fairly(self, readings: Sequence[PrefillRequest], room: int) -> None:
        """Divides the token budget ``room`` equally among samplers; the next ones get what one
        leaves.

        So a short prompt is prefilled at once, however long another client's prompts are.
        """
        prompts: dict[Sampler, list[PrefillRequest]] = {}
        for prompt in readings:
            if prompt.slot is not None:
                prompts.setdefault(prompt.sampler, []).append(prompt)
        queues = sorted(prompts.values(), key=lambda queue: sum(prompt.left for prompt in queue))
        for number, queue in enumerate(queues):
            part = -(-room // (len(queues) - number))
            for prompt in queue:
                if part > 0 and prompt.slot is not None:
                    count = min(part, prompt.left)
                    self._read(prompt, prompt.slot, count)
                    part, room = part - count, room - count

    def _read(self, prompt: PrefillRequest, slot: KVSlot, count: int) -> None:
        start, end = slot.length, slot.length + count
        self.parts.append(reading(slot, len(self.tokens), end - start))
        self._append(prompt.tokens[start:end].tolist(), list(range(start, end)), prompt.sampler)
        self._progress.append((prompt, end - start))
        if end == len(prompt.tokens):
            self.outputs += [(len(self.tokens) - 1, row) for row in prompt.rows]

    def _append(self, tokens: list[int], positions: list[int], owner: Sampler) -> None:
        self.tokens += tokens
        self.positions += positions
        self.owners += [owner] * len(tokens)


def _by_sampler(rows: Mapping[KVSlot, SampledSequence]) -> list[KVSlot]:
    """Returns the slots, with those of one sampler next to each other."""
    samplers: dict[Sampler, list[KVSlot]] = {}
    for slot, row in rows.items():
        samplers.setdefault(row.request.sampler, []).append(slot)
    return [slot for slots in samplers.values() for slot in slots]
