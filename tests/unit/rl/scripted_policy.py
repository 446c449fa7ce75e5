"""A policy that says what it is told to, so that environments are played without a model."""

from __future__ import annotations

import asyncio

import byte_tokenizer

from tinker_cookbook import tokenizer_utils
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollouts.episode import do_single_rollout
from tinker_cookbook.rl.types import Env, Trajectory

RUBBISH = "banana banana"
COMMON = {
    "model_name_for_tokenizer": byte_tokenizer.NAME,
    "renderer_name": "role_colon",
    "batch_size": 4,
    "group_size": 2,
}
"""Settings that every dataset builder takes."""


class Script(TokenCompleter):
    """Says one line after the other, each ended as it should be unless it is to be cut off."""

    def __init__(self, *lines: str, cut: bool = False) -> None:
        self.lines, self.cut = list(lines), cut
        self.tokenizer = tokenizer_utils.get_tokenizer(byte_tokenizer.NAME)

    async def __call__(self, model_input, stop) -> TokensWithLogprobs:
        text = f" {self.lines.pop(0)}" + ("" if self.cut else "\n\nUser:")
        tokens = self.tokenizer.encode(text)
        return TokensWithLogprobs(tokens, [0.0] * len(tokens), "length" if self.cut else "stop")


def play(env: Env, *lines: str, cut: bool = False) -> Trajectory:
    """Plays one episode with these answers."""
    return asyncio.run(do_single_rollout(Script(*lines, cut=cut), env))
