"""Episodes as text: what each turn adds to the prompt, and what the policy answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from tinker_cookbook.display import LEAD, decode_after
from tinker_cookbook.rl.types import Observation, Trajectory, TrajectoryGroup
from tinker_cookbook.utils.logtree import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Image:
    """An image in a prompt of ``length`` tokens; ``key`` identifies its content."""

    length: int
    key: str


Item: TypeAlias = int | Image


@dataclass(frozen=True)
class TurnText:
    """One turn: the part of the prompt that earlier turns did not show, and the answer."""

    prompt: str
    num_new_tokens: int
    answer: str


@dataclass(frozen=True)
class EpisodeText:
    """All turns of an episode; ``final`` is what the environment added after the last answer."""

    turns: list[TurnText]
    final: str


@dataclass
class LoggedGroup:
    """A finished group as a transcript shows it.

    ``index`` is its position in the batch, ``advantages`` are ``None`` in an evaluation, ``log`` is
    what the environments logged, and ``texts`` are added in the writer's thread.
    """

    index: int
    group: TrajectoryGroup
    tags: list[str]
    advantages: list[float] | None = None
    log: Trace | None = None
    texts: list[EpisodeText] = field(default_factory=list)


class TokenText:
    """Decodes tokens for reading: special tokens are shown, whitespace is kept, images are named.

    Without a tokenizer, tokens are shown as numbers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        # The members of a group have the same prompt.
        self._cache: dict[tuple[tuple[Item, ...], tuple[Item, ...]], str] = {}

    def episode(self, trajectory: Trajectory) -> EpisodeText:
        """Returns the text of an episode; a prompt that extends the turn before is not repeated."""
        turns: list[TurnText] = []
        seen: list[Item] = []
        for transition in trajectory.transitions:
            prompt, answer = _items(transition.ob), list(transition.ac.tokens)
            start = _common_prefix(seen, prompt)
            new = prompt[start:]
            turns.append(
                TurnText(
                    prompt=self.text(new, before=prompt[:start]),
                    num_new_tokens=sum(getattr(item, "length", 1) for item in new),
                    # Answers differ, so only prompts are cached.
                    answer=self.text(answer, before=prompt, keep=False),
                )
            )
            seen = [*prompt, *answer]
        # The final observation may be empty, or drop parts of earlier turns; then it is not shown.
        last = _items(trajectory.final_ob)
        extends = bool(seen) and _common_prefix(seen, last) == len(seen)
        final = self.text(last[len(seen) :], before=seen) if extends else ""
        return EpisodeText(turns, final)

    def prompt(self, observation: Observation) -> str:
        """Returns the whole prompt."""
        return self.text(_items(observation))

    def text(self, items: Sequence[Item], before: Sequence[Item] = (), keep: bool = True) -> str:
        """Returns the text of ``items``, which follow ``before``; ``keep`` caches it."""
        key = (tuple(items), tuple(before[-LEAD:]))
        if key in self._cache:
            return self._cache[key]
        found, everything, position = "", [*key[1], *items], len(key[1])
        for is_image, run in groupby(items, lambda item: isinstance(item, Image)):
            part = list(run)
            # Decoded with the tokens before: a decoder drops the space of its first token.
            lead = _tokens(everything[max(0, position - LEAD) : position])
            position += len(part)
            if is_image:
                found += "".join(f"[image: {getattr(item, 'length', 1)} tokens]" for item in part)
            elif self._tokenizer is None:
                found += "".join(f"[{token}]" for token in part)
            else:
                found += decode_after(self._tokenizer, lead, _tokens(part))
        if keep:
            self._cache[key] = found
        return found


def number(value: float, sign: bool = False) -> str:
    """Formats a reward: ``0.500``, ``1,234.5``."""
    if not math.isfinite(value):
        return str(value)
    plus = "+" if sign else ""
    return format(value, f"{plus}.3f" if abs(value) < 100 else f"{plus},.1f")


def plural(count: int, noun: str) -> str:
    """Returns ``1 token``, ``1,200 tokens``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _items(observation: Observation) -> list[Item]:
    """Returns the tokens of a prompt; each image is one item."""
    items: list[Item] = []
    for chunk in observation.chunks:
        tokens = getattr(chunk, "tokens", None)
        if tokens is not None:
            items.extend(tokens)
        else:
            # Compared within this process only, so a hash is enough.
            source = getattr(chunk, "data", None) or getattr(chunk, "location", None)
            items.append(Image(chunk.length, str(hash(source))))
    return items


def _tokens(items: Sequence[Item]) -> list[int]:
    return [item for item in items if not isinstance(item, Image)]


def _common_prefix(first: list[Item], second: list[Item]) -> int:
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:  # the usual case, without a loop over tokens
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])
