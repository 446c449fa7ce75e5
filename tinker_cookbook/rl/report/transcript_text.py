"""Tokens of an episode as text: what is new in each prompt, and what the policy answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

from tinker_cookbook.display import special_ids
from tinker_cookbook.rl.types import Observation, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A sentencepiece decoder drops the space in front of the first token that it is given, so these
# many tokens before are decoded too and their text is cut off again.
_LEAD = 4


@dataclass(frozen=True)
class Image:
    """An image in a prompt; ``key`` tells two images apart."""

    length: int
    key: str


Item: TypeAlias = int | Image


@dataclass(frozen=True)
class Piece:
    """Text of one kind; ``special`` is a token such as ``<|im_end|>``."""

    text: str
    special: bool = False


@dataclass(frozen=True)
class TurnText:
    """One turn: the part of the prompt that the turn before did not show, and the answer."""

    prompt: list[Piece]
    num_new_tokens: int
    answer: list[Piece]


@dataclass(frozen=True)
class EpisodeText:
    """An episode turn by turn; ``final`` is what the environment said to the last answer."""

    turns: list[TurnText]
    final: list[Piece]


class TokenText:
    """Decodes for people: special tokens are shown, whitespace is kept, images are named.

    Args:
        tokenizer: Of the policy; without one, tokens are shown as their numbers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer: Any = tokenizer
        # The members of a group have the same prompt.
        self._cache: dict[tuple[tuple[Item, ...], tuple[Item, ...]], list[Piece]] = {}

    def episode(self, trajectory: Trajectory) -> EpisodeText:
        """Returns the whole episode, no token twice as long as each prompt extends the last
        turn."""
        turns: list[TurnText] = []
        seen: list[Item] = []
        for transition in trajectory.transitions:
            prompt, answer = items_of(transition.ob), list(transition.ac.tokens)
            start = _common_prefix(seen, prompt)
            turns.append(
                TurnText(
                    prompt=self.pieces(prompt[start:], before=prompt[:start]),
                    num_new_tokens=sum(map(_length, prompt[start:])),
                    answer=self.pieces(answer, before=prompt, keep=False),
                )
            )
            seen = [*prompt, *answer]
        last = items_of(trajectory.final_ob)
        extends = bool(seen) and _common_prefix(seen, last) == len(seen)
        final = self.pieces(last[len(seen) :], before=seen) if extends else []
        return EpisodeText(turns, final)

    def prompt(self, observation: Observation) -> list[Piece]:
        """Returns a prompt from its first token."""
        return self.pieces(items_of(observation))

    def pieces(
        self, items: Sequence[Item], before: Sequence[Item] = (), keep: bool = True
    ) -> list[Piece]:
        """Text of ``items``, which stand behind ``before``; ``keep`` it for the next asker."""
        key = (tuple(items), tuple(before[-_LEAD:]))
        found = self._cache.get(key)
        if found is None:
            found = list(self._decoded(key[0], key[1]))
            if keep:
                self._cache[key] = found
        return found

    def _decoded(self, items: tuple[Item, ...], before: tuple[Item, ...]) -> Iterator[Piece]:
        place, everything = len(before), (*before, *items)
        for kind, run in groupby(items, self._kind):
            part = list(run)
            lead = everything[max(0, place - _LEAD) : place]
            place += len(part)
            tokens = [item for item in part if not isinstance(item, Image)]
            if tokens:
                yield Piece(self._decode_after(lead, tokens), special=kind == "special")
            else:
                names = [f"[image: {_length(item)} tokens]" for item in part]
                yield Piece("".join(names), special=True)

    def _kind(self, item: Item) -> str:
        if isinstance(item, Image):
            return "image"
        return "special" if item in self._special_ids else "text"

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        if self._tokenizer is None:
            return frozenset()
        return frozenset(special_ids(self._tokenizer))

    def _decode_after(self, lead: Sequence[Item], tokens: list[int]) -> str:
        known = [item for item in lead if not isinstance(item, Image)]
        before = self._decode(known) if known else ""
        text = self._decode([*known, *tokens])
        return text[len(before) :] if text.startswith(before) else self._decode(tokens)

    def _decode(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return "".join(f"[{token}]" for token in tokens)
        try:
            return self._tokenizer.decode(
                tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        except TypeError:  # a tokenizer of user code with ``decode(tokens)`` alone
            return self._tokenizer.decode(tokens)


def items_of(observation: Observation) -> list[Item]:
    """Returns the tokens of a prompt; each image is one item."""
    items: list[Item] = []
    for chunk in observation.chunks:
        tokens = getattr(chunk, "tokens", None)
        if tokens is not None:
            items.extend(tokens)
        else:
            source = getattr(chunk, "data", None) or getattr(chunk, "location", None)
            items.append(Image(chunk.length, str(hash(source))))
    return items


def plain(pieces: Sequence[Piece]) -> str:
    """Returns the text of all pieces."""
    return "".join(piece.text for piece in pieces)


def _length(item: Item) -> int:
    return item.length if isinstance(item, Image) else 1


def _common_prefix(first: Sequence[Item], second: Sequence[Item]) -> int:
    shorter = min(len(first), len(second))
    for index in range(shorter):
        if first[index] != second[index]:
            return index
    return shorter
