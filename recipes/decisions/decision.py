"""A question with a fixed set of choices, answered with a probability for each of them.

The prompt contains the reply up to the one token that differs between the choices (``choice#?``).
The model's probabilities of that token are normalised over the choices. Nothing is sampled.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.exceptions import BackendError, ConfigurationError, DataValidationError
from tinker_cookbook.judges.labels import LabelRenderer
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.utils.imports import tinker

SYSTEM_PROMPT_TEMPLATE = (
    "Answer the user's question by picking exactly one of the choices they supply. Reply "
    "with the id of your choice, written as `{answer_format}`, and nothing else."
)
USER_PROMPT_TEMPLATE = (
    "{decision}\n\nChoices (your answer must be exactly one of these):\n{choices}"
)


@dataclass(frozen=True)
class Decision:
    """A question, and its choices as ``(label, description)`` in their order.

    Results are keyed by label. The model reads the descriptions, which may be empty.
    """

    text: str
    choices: Sequence[tuple[str, str]]

    def __post_init__(self) -> None:
        labels = self.labels
        if len(labels) < 2 or len(set(labels)) < len(labels):
            raise DataValidationError(
                f"choices: got the labels {labels}, expected at least two different ones"
            )

    @property
    def labels(self) -> list[str]:
        """The labels, in the order of the choices."""
        return [label for label, _ in self.choices]


@dataclass(frozen=True)
class ChoiceRendering:
    """How replies are written.

    ``answer_tokens`` are a reply with a placeholder at ``answer_position``, which the token of a
    label replaces.
    """

    answer_tokens: list[int]
    answer_position: int
    label_tokens: dict[str, int]

    def answer_tokens_for(self, label: str) -> list[int]:
        """Returns the tokens of the reply that selects ``label``."""
        tokens = list(self.answer_tokens)
        tokens[self.answer_position] = self.label_tokens[label]
        return tokens


class ChoiceRenderer(Protocol):
    """Decides how the choice of a label is written."""

    def render_choices(self, labels: Sequence[str]) -> ChoiceRendering:
        """Returns the replies of these labels."""
        ...


class PrefixedChoiceRenderer(ChoiceRenderer):
    """Replies ``choice#A``, ``choice#B``, … in the order of the choices, at most 26.

    Every id, and the placeholder that the model is shown, must be one token after the prefix.
    """

    def __init__(self, renderer: Renderer, prefix: str = "choice#", placeholder: str = "?") -> None:
        self.tokenizer, self.prefix = renderer.tokenizer, prefix
        self.answer_tokens = self._encode(placeholder)

    def render_choices(self, labels: Sequence[str]) -> ChoiceRendering:
        """Returns the replies; raises ``ConfigurationError`` if an id is not one token."""
        return self.with_ids(dict(zip(labels, string.ascii_uppercase, strict=False)))

    def with_ids(self, ids: Mapping[str, str]) -> ChoiceRendering:
        """Returns the replies in which each label has its id after the prefix."""
        tokens = {label: self._encode(name)[-1] for label, name in ids.items()}
        return ChoiceRendering(self.answer_tokens, len(self.answer_tokens) - 1, tokens)

    def _encode(self, name: str) -> list[int]:
        prefix, tokens = (
            list(self.tokenizer.encode(text, add_special_tokens=False))
            for text in (self.prefix, self.prefix + name)
        )
        if tokens[:-1] != prefix:
            raise ConfigurationError(
                f"prefix: {self.prefix + name!r} is tokenized as {tokens}, expected the tokens of "
                f"{self.prefix!r}, {prefix}, and one more; choose a prefix that ends where a token "
                "ends"
            )
        return tokens


@dataclass(frozen=True)
class DecisionRendering:
    """Tokens of a decision; the last one, at ``choice_pos``, is a placeholder for a label's."""

    tokens: list[int]
    choice_pos: int
    label_tokens: dict[str, int]

    def with_label(self, label: str) -> list[int]:
        """Returns ``tokens`` with the token of ``label``."""
        tokens = list(self.tokens)
        tokens[self.choice_pos] = self.label_tokens[label]
        return tokens


class DecisionRenderer:
    """Renders decisions in a chat format, up to the token of the choice.

    A system message has the format of the answer, a user message the question and the choices.
    ``choice_renderer`` decides how answers are written (default: ``PrefixedChoiceRenderer``).
    ``effort`` is accepted for the official cookbook's signature; no chat format here has it.
    """

    def __init__(
        self,
        renderer: Renderer,
        choice_renderer: ChoiceRenderer | None = None,
        *,
        effort: float = 0.0,
    ) -> None:
        self.renderer, self.tokenizer, self.effort = renderer, renderer.tokenizer, effort
        self.choice_renderer: ChoiceRenderer = choice_renderer or PrefixedChoiceRenderer(renderer)
        self._replies: dict[tuple[str, ...], LabelRenderer[str]] = {}

    def render(self, decision: Decision) -> DecisionRendering:
        """Returns the tokens of the decision.

        Raises ConfigurationError if there are more choices than ids, or if the chat format writes
        two replies alike.
        """
        choices = self.choice_renderer.render_choices(decision.labels)
        if missing := set(decision.labels) - set(choices.label_tokens):
            raise ConfigurationError(
                f"choices: got {len(decision.choices)}, and no id for {sorted(missing)}; the "
                f"choice renderer has {len(choices.label_tokens)}"
            )
        convo, replies = self._messages(decision, choices)
        # A reply may be tokenized differently within the conversation, so its tokens are
        # looked up there.
        key = tuple(replies)
        if key not in self._replies:
            self._replies[key] = LabelRenderer(self.renderer, replies, convo)
        found = self._replies[key]
        prompt = found.prompt(convo).to_ints()
        tokens = [found.tokens[reply] for reply in replies]
        return DecisionRendering(
            tokens=[*prompt, choices.answer_tokens[choices.answer_position]],
            choice_pos=len(prompt),
            label_tokens=dict(zip(decision.labels, tokens, strict=True)),
        )

    def _messages(
        self, decision: Decision, choices: ChoiceRendering
    ) -> tuple[list[Message], list[str]]:
        """Returns the messages before the reply, and the reply of each choice."""
        text = self._text(choices.answer_tokens)
        replies = [self._text(choices.answer_tokens_for(label)) for label in decision.labels]
        lines = []
        for (label, description), reply in zip(decision.choices, replies, strict=True):
            name = self._text([choices.label_tokens[label]])
            line = reply if name == label else f'{reply} = "{label}"'
            lines.append(f"{line}: {description}" if description else line)
        question = USER_PROMPT_TEMPLATE.format(decision=decision.text, choices="\n".join(lines))
        return [
            Message(role="system", content=SYSTEM_PROMPT_TEMPLATE.format(answer_format=text)),
            Message(role="user", content=question),
        ], replies

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens)).strip()


async def sample_decision(
    sampling_client: SamplingClient, rendering: DecisionRendering
) -> dict[str, float]:
    """Returns the probability of each label, in the order of the choices; they add up to 1.

    One request. Await several at once (``asyncio.gather``), so that the backend batches them.
    """
    import torch

    tokens, at = torch.tensor([*rendering.label_tokens.values()]), rendering.choice_pos
    # Row i has the tokens that are scored at prompt position i + 1; -1 scores none.
    targets = torch.full((len(rendering.tokens) - 1, len(tokens)), -1, dtype=torch.int64)
    targets[at - 1] = tokens
    client: Any = sampling_client
    response = await client.sample(
        prompt=tinker.ModelInput.from_ints(rendering.tokens),
        num_samples=1,
        sampling_params=tinker.SamplingParams(max_tokens=1),
        target_prompt_logprobs=tinker.TensorData.from_torch_sparse(targets, pad_value=-1),
    )
    if response.target_prompt_logprobs is None:
        raise BackendError(
            "target_prompt_logprobs: the response has none, expected the log-probabilities of "
            "the choices; update the server or the tinker SDK"
        )
    logprobs = np.asarray(response.target_prompt_logprobs.to_torch()[at - 1], dtype=np.float64)
    probabilities = np.exp(logprobs - np.logaddexp.reduce(logprobs))
    return dict(zip(rendering.label_tokens, map(float, probabilities), strict=True))
