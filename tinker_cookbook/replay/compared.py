"""What a replay compares, and what it says about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from tinker_cookbook.record.episodes import Numbers, Tokens

_SHOWN = 10

_BOUNDS = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.02}
"""Largest mean difference of log-probabilities in nats that rounding explains: about twice what
``docs/engine.md`` measures between two orders of computation."""


@dataclass(frozen=True)
class Compared:
    """Tokens of a turn or an example, recorded and computed again; ``logprobs`` are [T] each."""

    name: str
    tokens: tuple[Tokens, Tokens]
    logprobs: tuple[Numbers, Numbers]

    @property
    def same_tokens(self) -> int:
        """Number of equal tokens at the start."""
        shorter = min(map(len, self.tokens))
        differ = self.tokens[0][:shorter] != self.tokens[1][:shorter]
        return int(differ.argmax()) if differ.any() else shorter

    @property
    def differences(self) -> Numbers:
        """Differences of the log-probabilities of the equal tokens at the start."""
        before, now = (values[: self.same_tokens] for values in self.logprobs)
        shorter = min(len(before), len(now))
        return np.abs(before[:shorter] - now[:shorter])

    @property
    def first_different(self) -> int | None:
        """Index of the first token with another id or log-probability; ``None``: identical."""
        # NaN is different from everything, itself too.
        differ = ~(self.differences == 0)
        if differ.any():
            return int(differ.argmax())
        whole = {len(one) for one in (*self.tokens, *self.logprobs)} == {self.same_tokens}
        return None if whole else self.same_tokens

    def describe(self) -> str:
        """Returns the first difference in a line."""
        at = self.first_different or 0
        parts = [
            "nothing" if at >= len(ids) else f"{ids[at]} ({values[at]:.6f})"
            for ids, values in zip(self.tokens, self.logprobs, strict=True)
        ]
        return f"{self.name}: token {at} was {parts[0]}, is {parts[1]}"


@dataclass
class Result:
    """Everything that a replay compared.

    ``others`` are differences of other kinds (rewards, tensors), ``notes`` what was not compared.
    ``origins`` tells what computed the step then and now.
    """

    compared: list[Compared] = field(default_factory=list)
    unit: str = "turns"
    others: list[str] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    """What else was compared and is identical."""
    notes: list[str] = field(default_factory=list)
    origins: tuple[Mapping[str, str], Mapping[str, str]] = field(default_factory=lambda: ({}, {}))

    @property
    def different(self) -> list[Compared]:
        """Those that are not identical."""
        return [one for one in self.compared if one.first_different is not None]

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return not (self.different or self.others)

    @property
    def bound(self) -> tuple[float, str] | None:
        """Bound of the mean difference, and for what; ``None`` where results are identical."""
        for origin in self.origins:
            if origin.get("backend", "local") != "local":
                return _BOUNDS["bfloat16"], f"a remote backend ({origin['backend']})"
            if origin.get("device", "cpu") != "cpu":
                dtype = origin["dtype"]
                return _BOUNDS[dtype], f"{dtype} on {origin['device']}"
        return None

    @property
    def passed(self) -> bool:
        """Whether everything is identical, or differs within the bound."""
        if self.identical or self.bound is None or self.others:
            return self.identical
        return self._mean <= self.bound[0]

    @property
    def _mean(self) -> float:
        return float(self._differences.mean()) if self._differences.size else 0.0

    @property
    def _differences(self) -> Numbers:
        return np.concatenate([one.differences for one in self.compared])

    def lines(self) -> Iterator[str]:
        """Yields what is identical, what differs first, and why that may be."""
        tokens = sum(len(one.tokens[0]) for one in self.compared)
        what = [f"{len(self.compared)} {self.unit}, {tokens} tokens"] if self.compared else []
        if self.identical:
            # A step that trained on nothing may have only notes.
            if parts := [*what, *self.also]:
                yield f"identical: {'; '.join(parts)}"
            yield from self.notes
            return
        if self.different:
            same = len(self.compared) - len(self.different)
            yield f"{same} of {len(self.compared)} {self.unit} are identical"
            yield from (one.describe() for one in self.different[:_SHOWN])
            yield from self._numbers()
        yield from self.others[:_SHOWN]
        yield from (f"identical: {what}" for what in self.also)
        yield from self.notes
        yield from self._causes()

    def _numbers(self) -> Iterator[str]:
        differences = self._differences
        if not differences.size:
            return
        tokens = "token" if differences.size == 1 else f"{differences.size} tokens"
        told = (
            f"log-probabilities of the {tokens} before: mean difference "
            f"{self._mean:.2g}, largest {differences.max():.2g}"
        )
        if self.bound is None:
            yield told
            return
        limit, where = self.bound
        verdict = "within" if self._mean <= limit else "outside"
        yield f"{told}; {verdict} the bound of the mean, {limit:g}, for {where}"

    def _causes(self) -> Iterator[str]:
        then, now = self.origins
        if not then:
            yield "the record does not tell what computed the step; it is of an earlier version"
            return
        for key in {**then, **now}:
            if then.get(key) != now.get(key):
                yield f"{key}: was {then.get(key, 'none')}, is {now.get(key, 'none')}"
