"""Label scores: the probability of each of a few answers, without sampling.

Each label is scored by the log-probability of its distinguishing token, normalised over the labels.
Unlike sampled verdicts, these scores have no sampling noise, are always readable, and are graded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.utils.imports import tinker, torch

L = TypeVar("L", bound=str)


class LabelRenderer(Generic[L]):
    """Renders conversations that are answered by one of ``labels``, such as Yes and No.

    The probability of a label is the probability of its distinguishing token: the first token, or a
    later one if the format writes an empty thinking block or a space before every answer. Examples
    end with that token. Further tokens of a label are not trained.

    ``trial`` is any conversation that the format can render. The tokens are determined at the first
    use, which raises ``ConfigurationError`` if two labels begin with the same token.
    """

    def __init__(
        self, renderer: Renderer, labels: Sequence[L], trial: Sequence[Message] | None = None
    ) -> None:
        self.renderer, self.labels = renderer, tuple(labels)
        self._trial = [Message(role="user", content="Hi")] if trial is None else list(trial)

    @property
    def tokens(self) -> dict[L, int]:
        """The distinguishing token of each label."""
        return self._distinguishing[1]

    def prompt(self, convo: Sequence[Message]) -> tinker.ModelInput:
        """Renders all tokens before the distinguishing token, as in training."""
        # Any label works: the prompt is everything before the distinguishing token.
        tokens, _ = self.example(convo, self.labels[0])
        return tinker.ModelInput.from_ints(tokens[:-1])

    def example(self, convo: Sequence[Message], label: L) -> tuple[list[int], torch.Tensor]:
        """Renders ``convo`` and the label up to its distinguishing token.

        Returns T tokens and weights [T], which are 0 on the prompt.
        """
        tokens, weights, first = self._with_label(convo, label)
        # The tokens after the distinguishing one carry no information.
        end = first + self._distinguishing[0] + 1
        return tokens[:end], weights[:end]

    @cached_property
    def _distinguishing(self) -> tuple[int, dict[L, int]]:
        """Number of trained tokens before the labels differ, and the distinguishing tokens."""
        answers: list[list[int]] = []
        for label in self.labels:
            tokens, _, first = self._with_label(self._trial, label)
            answers.append(tokens[first:])
        # Labels may share leading tokens, such as a space; all must differ at the same token.
        for offset, at in enumerate(zip(*answers, strict=False)):
            if len(set(at)) == len(self.labels):
                return offset, dict(zip(self.labels, at, strict=True))
            if len(set(at)) > 1:
                break
        raise ConfigurationError(
            f"renderer_name: with {self.renderer.spec!r} and this tokenizer the labels "
            f"{', '.join(self.labels)} begin with the same token in part, expected "
            f"{len(self.labels)} different ones; choose another renderer"
        )

    def _with_label(
        self, convo: Sequence[Message], label: L
    ) -> tuple[list[int], torch.Tensor, int]:
        """Returns tokens and weights of ``convo`` with ``label``, and the first trained index."""
        answer = Message(role="assistant", content=label)
        model_input, weights = self.renderer.build_supervised_example([*convo, answer])
        return model_input.to_ints(), weights, int(weights.nonzero()[0])


async def label_logprobs(
    client: SamplingClient, prompt: tinker.ModelInput, label_tokens: Mapping[L, int]
) -> dict[L, float]:
    """Returns the log-probability of each label after ``prompt``, in nats, normalised over them.

    Prompts that are submitted at the same time with a common prefix, such as several criteria
    on one answer, share it: the local engine prefills the prefix once.
    """

    async def score(token: int) -> float:
        value = (await client.compute_logprobs(prompt.append_int(token)))[-1]
        assert value is not None, "only the first token of a prompt has no log-probability"
        return value

    # Scoring instead of sampling with top-k: it is batch-invariant on the local engine, so a
    # resumed run has the same rewards. The engine prefills the prefix that the labels share once.
    found = await asyncio.gather(*map(score, label_tokens.values()))
    return normalised(dict(zip(label_tokens, found, strict=True)))


def normalised(logprobs: Mapping[L, float]) -> dict[L, float]:
    """Normalises log-probabilities so that the probabilities sum to 1."""
    total = float(np.logaddexp.reduce(list(logprobs.values())))
    return {label: value - total for label, value in logprobs.items()}


def mean_logprobs(orders: Iterable[Mapping[L, float]]) -> dict[L, float]:
    """Returns the normalised mean of several log-probabilities of the same labels.

    For two answers in both orders. A position bias is a constant in the log-odds, as in a
    Bradley-Terry model with an order effect (Davidson & Beaver 1977, Biometrics 33), and cancels.
    It would not cancel in a mean of probabilities, which such a bias pushes close to 0 or 1.
    """
    found = list(orders)
    return normalised({label: sum(one[label] for one in found) / len(found) for label in found[0]})
