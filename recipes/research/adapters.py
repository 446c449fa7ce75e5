"""Several adapters on one tiny base model, for studies in which models meet each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tinker

from tinker_cookbook.backends import SamplingClient, ServiceClient
from tinker_cookbook.recipes.rl_loop import make_datum
from tinker_cookbook.recipes.tiny_models.dialogues import RENDERER, dialogue
from tinker_cookbook.renderers import get_renderer, get_text_content
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer


@dataclass(frozen=True)
class Answer:
    """A sampled answer."""

    question: str
    text: str
    tokens: list[int]
    logprobs: list[float]


class Adapter:
    """One LoRA adapter, with the operations that studies need.

    Args:
        service: Where the base model is; adapters of one service share it.
        model: Folder of a model of ``dialogues_model``.
    """

    def __init__(
        self, service: ServiceClient, model: str, seed: int, learning_rate: float, rank: int = 16
    ) -> None:
        self._client = service.create_lora_training_client(model, rank=rank, seed=seed).result()
        self._sampler: SamplingClient | None = None
        self._adam = tinker.AdamParams(learning_rate=learning_rate)
        self.renderer = get_renderer(RENDERER, get_tokenizer(model))

    def sample(
        self, questions: Sequence[str], count: int, max_tokens: int, seed: int
    ) -> list[list[Answer]]:
        """Returns ``count`` answers to each question."""
        # A sampling client has the weights of the moment, so it serves until the next update.
        if self._sampler is None:
            self._sampler = self._client.save_weights_and_get_sampling_client().result()
        sampler = self._sampler
        futures = [
            sampler.sample(
                self._prompt(question),
                count,
                tinker.SamplingParams(
                    max_tokens=max_tokens,
                    stop=self.renderer.get_stop_sequences(),
                    seed=1000 * seed + number,
                ),
            )
            for number, question in enumerate(questions)
        ]
        return [
            [self._answer(question, one) for one in future.result().sequences]
            for question, future in zip(questions, futures, strict=True)
        ]

    def reinforce(
        self, groups: Sequence[Sequence[Answer]], rewards: Sequence[Sequence[float]]
    ) -> None:
        """Updates the weights once; an advantage is a reward minus the mean of its group."""
        data = [
            self._weighted(one, reward - mean)
            for group, values in zip(groups, rewards, strict=True)
            for mean in (sum(values) / len(values),)
            for one, reward in zip(group, values, strict=True)
            if reward != mean
        ]
        if data:
            self._update(data, "importance_sampling")

    def follow(self, answers: Sequence[Answer], advantages: Sequence[Sequence[float]]) -> None:
        """Updates the weights once, with an advantage for each token of its answers."""
        pairs = zip(answers, advantages, strict=True)
        self._update([self._weighted(*pair) for pair in pairs], "importance_sampling")

    def logprobs(self, answers: Sequence[Answer]) -> list[list[float]]:
        """Returns the log-probabilities of the tokens of answers, its own or those of another."""
        data = [self._weighted(one, 0.0) for one in answers]
        outputs = self._client.forward(data, "importance_sampling").result().loss_fn_outputs
        return [
            output["logprobs"].tolist()[-len(one.tokens) :]
            for one, output in zip(answers, outputs, strict=True)
        ]

    def imitate(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Updates the weights once on pairs of a question and its answer."""
        self._update([self._example(*pair) for pair in pairs], "cross_entropy")

    def probability(self, questions: Sequence[str], answer: str) -> list[float]:
        """Returns the probability of ``answer``, a text of one token, for each question."""
        if not questions:
            return []
        data = [self._example(question, answer) for question in questions]
        outputs = self._client.forward(data, "cross_entropy").result().loss_fn_outputs
        found: list[float] = []
        for datum, output in zip(data, outputs, strict=True):
            # The first position with a weight is the answer; after it comes the stop token.
            first = int(np.argmax(np.asarray(datum.loss_fn_inputs["weights"].tolist()) > 0))
            found.append(math.exp(output["logprobs"].tolist()[first]))
        return found

    def _update(self, data: list[tinker.Datum], loss: tinker.types.LossFnType) -> None:
        self._client.forward_backward(data, loss).result()
        self._client.optim_step(self._adam).result()
        self._sampler = None

    def _prompt(self, question: str) -> tinker.ModelInput:
        return self.renderer.build_generation_prompt(dialogue(question))

    def _weighted(self, answer: Answer, advantage: float | Sequence[float]) -> tinker.Datum:
        prompt = self._prompt(answer.question)
        return make_datum(prompt, answer.tokens, answer.logprobs, advantage)

    def _example(self, question: str, answer: str) -> tinker.Datum:
        return conversation_to_datum(dialogue(question, answer), self.renderer, None)

    def _answer(self, question: str, sequence: tinker.SampledSequence) -> Answer:
        tokens = list(sequence.tokens)
        text = get_text_content(self.renderer.parse_response(tokens)[0])
        return Answer(question, text, tokens, list(sequence.logprobs or ()))
