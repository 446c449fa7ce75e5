"""Sampling parameters. The reported log-probabilities stay the model's own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from tinker_cookbook.exceptions import ConfigurationError

MAX_LOGIT_BIAS = 100.0  # as in OpenAI's API


class MaskState(Protocol):
    """Mask of one sequence, which changes with each of its tokens."""

    @property
    def finished(self) -> bool:
        """Whether the sequence ends here: no token can follow, not even a stop token."""
        ...

    def allowed(self) -> np.ndarray:
        """Returns the tokens that may come next as bits, uint8 [ceil(V / 8)].

        Token ``t`` is bit ``t % 8`` (1, 2, 4, …) of byte ``t // 8``; tokens beyond the array are
        not allowed. Called on a thread while the model runs.
        """
        ...

    def add(self, token: int) -> None:
        """Advances by one sampled token."""
        ...


class TokenMask(Protocol):
    """Constraint on sampled tokens, such as a grammar (``tinker_cookbook.structured_output``)."""

    def start(self) -> MaskState:
        """Returns the state of a new sequence; called once for each sample of a request."""
        ...


@dataclass(frozen=True)
class LogitOptions:
    """Options that change the logits before a token is sampled, applied as in vLLM.

    The order is: ``logit_bias`` (token id -> number from -100 to 100, added to the logit);
    ``min_tokens`` (no stop token or stop string before); ``repetition_penalty`` (logits of tokens
    in prompt or sample are divided by it if positive, multiplied if negative);
    ``frequency_penalty`` (subtracted for each occurrence in the sample) and ``presence_penalty``
    (subtracted once if the token is in the sample); ``token_mask``; temperature; ``min_p`` (tokens
    below this share of the highest probability are excluded); top-k and top-p.
    """

    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    token_mask: TokenMask | None = None

    def __post_init__(self) -> None:
        bias = self.logit_bias.values()
        infinite = float("inf")
        self._require(
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("presence_penalty", abs(self.presence_penalty) < infinite, "a finite number"),
            ("frequency_penalty", abs(self.frequency_penalty) < infinite, "a finite number"),
            ("repetition_penalty", 0 < self.repetition_penalty < infinite, "a number > 0"),
            (
                "logit_bias",
                all(abs(value) <= MAX_LOGIT_BIAS for value in bias),
                f"numbers from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
            ),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
        )
        if self.min_tokens and self.token_mask is not None:
            raise ConfigurationError(
                f"min_tokens: got {self.min_tokens} with a token mask, which may allow only the "
                "end; leave one of them out"
            )

    def _require(self, *rules: tuple[str, bool, str]) -> None:
        for name, ok, expected in rules:
            if not ok:
                raise ConfigurationError(f"{name}: got {getattr(self, name)}, expected {expected}")

    @cached_property
    def in_effect(self) -> tuple[str, ...]:
        """Names of options with non-default values, which therefore affect sampling."""
        default = {one.name: one.default for one in fields(LogitOptions)}
        return tuple(
            name
            for name, value in default.items()
            if (self.logit_bias if name == "logit_bias" else getattr(self, name) != value)
        )

    @cached_property
    def change_logits(self) -> bool:
        """Whether an option other than ``min_p`` is set; ``min_p`` needs no per-sequence state."""
        return bool(set(self.in_effect) - {"min_p"})

    @cached_property
    def bias(self) -> tuple[np.ndarray, np.ndarray]:
        """``logit_bias`` as token ids int64 [N] and numbers float32 [N]."""
        ids = np.fromiter(self.logit_bias, dtype=np.int64, count=len(self.logit_bias))
        return ids, np.array([self.logit_bias[int(i)] for i in ids], dtype=np.float32)


@dataclass(frozen=True)
class SamplingSettings(LogitOptions):
    """Sampling parameters of a request.

    ``stop_tokens`` end a sample when sampled (and are kept in it); ``stop_strings`` when they
    appear in the decoded text. ``top_k`` -1 and ``top_p`` 1 mean the whole vocabulary;
    ``temperature`` 0 is greedy. With ``seed``, sample i of a request depends
    only on (seed, i).

    This is the one form of sampling parameters: ``of`` reads it from SDK and HTTP requests.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        given: Any,
        eos_ids: Collection[int],
        options: LogitOptions | None = None,
        **values: Any,
    ) -> SamplingSettings:
        """Reads the fields of ``given`` (the SDK's ``SamplingParams``, or the body of a request).

        A field that ``given`` lacks, or that is None, has its default; ``values`` replace fields.
        If ``stop`` is None, a sample ends at the model's ``eos_ids``. Strings or token ids are
        added to these. With an empty list, a sample ends only at ``max_tokens``.
        """
        sources = (given,) if options is None else (given, options)
        found: dict[str, Any] = {
            one.name: value
            for source in sources
            for one in fields(cls)
            if (value := getattr(source, one.name, None)) is not None
        }
        found |= values
        stop = found.pop("stop", getattr(given, "stop", None))
        stop = [stop] if isinstance(stop, str) else stop
        if stop is not None and "" in stop:
            raise ConfigurationError("stop: got an empty string, which would end every sample")
        ends = stop is None or len(stop) > 0
        tokens = [item for item in stop or () if not isinstance(item, str)]
        try:
            # The keys of a JSON object are strings.
            bias = found.get("logit_bias", {})
            found["logit_bias"] = {int(token): value for token, value in bias.items()}
        except ValueError as error:
            raise ConfigurationError(f"logit_bias: expected token ids as keys: {error}") from error
        return cls(
            **found,
            stop_tokens=frozenset((*eos_ids, *tokens)) if ends else frozenset(),
            stop_strings=tuple(item for item in stop or () if isinstance(item, str)),
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        smallest = np.finfo(np.float32).tiny
        for name in ("temperature", "top_p"):
            # Sampling is in float32, where a smaller number would be 0.
            if 0 < (value := getattr(self, name)) < smallest:
                raise ConfigurationError(
                    f"{name}: got {value}, which float32 cannot hold (its smallest number is "
                    f"{smallest:.1e}); temperature=0 takes the most probable token"
                )
        most = self.max_tokens
        self._require(
            ("max_tokens", most is None or most >= 1, "at least 1, or none"),
            ("temperature", 0 <= self.temperature < float("inf"), "a number >= 0"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (off) or at least 1"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_tokens", most is None or self.min_tokens <= most, f"max_tokens={most} at most"),
        )
