"""Requests to the samplers: random prompts, each with a number of samples of given length.

Speed does not depend on what the tokens mean, and no answer ends before its length is reached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.engine.config import SamplingConfig
from tinker_cookbook.exceptions import ConfigurationError

_WARM_PROMPT, _WARM_ANSWER = 16, 8


@dataclass(frozen=True)
class Request:
    """``samples`` continuations of ``prompt``, each of exactly ``tokens`` tokens."""

    prompt: list[int]
    samples: int
    tokens: int

    @property
    def useful(self) -> int:
        """Requested tokens."""
        return self.samples * self.tokens


def draw_cases(config: SamplingConfig, vocab: int) -> dict[str, list[Request]]:
    """The requests of each case in ``config.cases``, the same for the same seed.

    ``decode`` gives a case for each number of sequences: ``decode 8``.
    """
    rng = np.random.default_rng(config.seed)
    low, high = config.mixed_shortest, config.mixed_longest
    lengths = rng.integers(low, high + 1, size=(config.mixed_requests, 2)).tolist()
    alone = (config.decode_prompt_tokens, 1, config.decode_answer_tokens)
    shapes = {
        **{f"decode {rows}": [alone] * rows for rows in config.decode_rows},
        "mixed": [(prompt, 1, answer) for prompt, answer in lengths],
        "group": [(config.group_prompt_tokens, config.group_samples, config.group_answer_tokens)]
        * config.group_prompts,
    }
    requests = {
        case: [Request(_prompt(rng, vocab, length), count, tokens) for length, count, tokens in of]
        for case, of in shapes.items()
    }
    return {case: of for case, of in requests.items() if case.split()[0] in config.cases}


def check_context(requests: Sequence[Request], context: int) -> None:
    """Raises ``ConfigurationError`` where a prompt and its answer do not fit into the model."""
    longest = max((len(request.prompt) + request.tokens for request in requests), default=0)
    if longest > context:
        raise ConfigurationError(
            f"model: its context is {context} tokens, but prompt and answer have {longest}; "
            "lower mixed_longest, group_prompt_tokens or decode_prompt_tokens, or choose "
            "another model"
        )


def warm_up(requests: Sequence[Request], vocab: int) -> list[Request]:
    """As many samples of short prompts, cut to a few tokens; the prompts are others."""
    rng = np.random.default_rng(len(requests))
    return [
        dataclasses.replace(
            request,
            prompt=_prompt(rng, vocab, min(_WARM_PROMPT, len(request.prompt))),
            tokens=min(_WARM_ANSWER, request.tokens),
        )
        for request in requests
    ]


def to_json(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """As the job file holds them."""
    return [dataclasses.asdict(request) for request in requests]


def from_json(rows: Sequence[Mapping[str, Any]]) -> list[Request]:
    """What ``to_json`` gave."""
    return [Request(**row) for row in rows]


def _prompt(rng: np.random.Generator, vocab: int, length: int) -> list[int]:
    return rng.integers(0, vocab, size=length).tolist()
