"""Scores multiple-choice questions by the log-probabilities of the choices, without sampling.

As in lm-eval, the prompt is plain text. The choice with the highest log-probability of its text is
the answer (``acc``, the reward), and ``acc_norm`` divides by the length of the text in bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from tinker_cookbook.eval.run.answers import ACC_NORM, ANSWER_LOG
from tinker_cookbook.eval.run.example_run import BenchmarkRun
from tinker_cookbook.eval.run.examples import Example
from tinker_cookbook.eval.run.sources import RendererSource
from tinker_cookbook.eval.run.types import StoredTrajectory, StoredTurn
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.imports import tinker


class LogprobRun(BenchmarkRun):
    """One row for each question; ``num_samples`` does not apply."""

    source: RendererSource

    async def prepare(self) -> dict[str, Any]:
        """Returns the key of the first question.

        Raises:
            ConfigurationError: the source has no log-probabilities, or the benchmark no choices.
        """
        if not isinstance(self.source, RendererSource):
            raise ConfigurationError(
                "scoring=logprob: a chat API cannot score given texts; use scoring=generation, "
                "or model_path= or model_name="
            )
        self.items = await asyncio.to_thread(self.builder.examples, self.config)
        if not all(e.choices and e.answer_index is not None and e.context for e in self.items):
            raise ConfigurationError(
                f"scoring=logprob: {self.builder.name} has no choices; use scoring=generation"
            )
        return {"first_prompt": _key_of(self.items[0])}

    def is_done(self, item: Example) -> bool:
        """Returns whether the question was scored with the same text."""
        row = self.file.rows.get((item.example_id, 0))
        return row is not None and row.error is None and row.prompt_key == _key_of(item)

    async def work(self, position: int, item: Example) -> list[StoredTrajectory]:
        """Returns the row of a question."""
        if self.is_done(item):
            return [self.file.rows[item.example_id, 0]]
        row = StoredTrajectory(
            idx=position,
            benchmark=self.builder.name,
            example_id=item.example_id,
            turns=[StoredTurn("user", item.context)],
            logs=dict(item.logs),
            prompt_key=_key_of(item),
        )
        sums = await self.attempt(row, self._logprobs(row, item))
        if sums is not None:
            grade_choices(row, item, sums)
        return [await self.store(row)]

    async def _logprobs(self, row: StoredTrajectory, example: Example) -> list[float]:
        """Returns the log-probability of each choice."""
        pairs = await asyncio.to_thread(self._tokens, example)
        row.turns[0].token_count = len(pairs[0][0])
        # Submit all requests before awaiting the first: the engine then prefills the prefix once.
        futures = [
            self.source.client.compute_logprobs(
                tinker.ModelInput.from_ints(context + choice), prompt_logprobs_last_n=len(choice)
            )
            for context, choice in pairs
        ]
        scores = [await future for future in futures]
        return [
            sum(value or 0.0 for value in logprobs[-len(choice) :])
            for logprobs, (_, choice) in zip(scores, pairs, strict=True)
        ]

    def _tokens(self, example: Example) -> list[tuple[list[int], list[int]]]:
        """Returns the tokens of the context and of each choice after it."""
        tokenizer: Any = self.source.renderer.tokenizer
        # Trailing spaces of the context belong to the choice, as in training texts.
        context = example.context.rstrip()
        spaces = example.context[len(context) :]
        before: list[int] = tokenizer.encode(context)
        pairs = []
        for choice in example.choices:
            # Encode together: a word may have other tokens after a text than alone.
            whole: list[int] = tokenizer.encode(context + spaces + choice)
            after = whole[len(before) :]
            room = (self.source.context_window or len(whole) + 1) - len(after)
            # A prompt that is too long loses its beginning: the first few-shot examples.
            pairs.append((before[-room:], after))
        return pairs


def _key_of(example: Example) -> str:
    text = "\0".join((example.context, *example.choices))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def grade_choices(row: StoredTrajectory, example: Example, sums: list[float]) -> None:
    """Sets reward, metrics and logs of a question from its choices' log-probabilities."""
    positions = range(len(sums))
    # The leading space only separates choice and prompt, so it does not count in the length.
    lengths = [max(1, len(choice.strip().encode())) for choice in example.choices]
    best = max(positions, key=lambda i: sums[i])
    best_by_length = max(positions, key=lambda i: sums[i] / lengths[i])
    row.reward = float(best == example.answer_index)
    row.metrics = {"acc": row.reward, ACC_NORM: float(best_by_length == example.answer_index)}
    # A benchmark with several subjects or tasks also has a score for each.
    if group := example.logs.get("group"):
        row.metrics[f"{group}/accuracy"] = row.reward
    row.turns.append(StoredTurn("assistant", example.choices[best]))
    row.logs["choice_logprobs"] = sums
    row.logs[ANSWER_LOG] = example.choices[best].strip()
