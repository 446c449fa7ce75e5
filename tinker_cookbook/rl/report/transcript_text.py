"""Episodes as text: what each turn adds to the prompt, and what the policy answered."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from tinker_cookbook.display import LEAD, decode_after
from tinker_cookbook.record.episodes import Tokens, common_prefix, tokens_of, turn_tokens
from tinker_cookbook.record.images import ImageFiles
from tinker_cookbook.record.schema import IMAGE
from tinker_cookbook.rl.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


class TokenText:
    """Decodes tokens for reading: special tokens are shown, whitespace is kept, images are named.

    Without a tokenizer, tokens are shown as numbers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        # The members of a group have the same prompt.
        self._cache: dict[tuple[bytes, bytes], str] = {}

    def episode(self, trajectory: Trajectory) -> EpisodeText:
        """Returns the text of an episode; a prompt that extends the turn before is not repeated."""
        turns: list[TurnText] = []
        seen, files = np.empty(0, np.int32), ImageFiles()
        for prompt, _, kept, answer in turn_tokens(trajectory, files):
            new = self.text(prompt[kept:], prompt[:kept])
            turns.append(TurnText(new, len(prompt) - kept, self.text(answer, prompt)))
            seen = np.concatenate([prompt, answer])
        # The final observation may be empty, or drop parts of earlier turns; then it is not shown.
        last, _ = tokens_of(trajectory.final_ob, files)
        extends = len(seen) > 0 and common_prefix(seen, last) == len(seen)
        return EpisodeText(turns, self.text(last[len(seen) :], seen) if extends else "")

    def text(self, tokens: Tokens, before: Tokens) -> str:
        """Returns the text of tokens, which follow ``before``."""
        key = tokens.tobytes(), before[-LEAD:].tobytes()
        if key in self._cache:
            return self._cache[key]
        text, passed = "", before[-LEAD:].tolist()
        for is_image, run in groupby(tokens.tolist(), lambda token: token == IMAGE):
            part = list(run)
            if is_image:
                text += f"[image: {len(part)} tokens]"
            elif self._tokenizer is None:
                text += "".join(f"[{token}]" for token in part)
            else:
                # Decoded with the tokens before: a decoder drops the space of its first token.
                lead = [token for token in passed[-LEAD:] if token != IMAGE]
                text += decode_after(self._tokenizer, lead, part)
            passed += part
        self._cache[key] = text
        return text


def number(value: float, sign: bool = False) -> str:
    """Formats a reward: ``0.500``, ``1,234.5``."""
    if not math.isfinite(value):
        return str(value)
    plus = "+" if sign else ""
    return format(value, f"{plus}.3f" if abs(value) < 100 else f"{plus},.1f")


def plural(count: int, noun: str) -> str:
    """Returns ``1 token``, ``1,200 tokens``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
