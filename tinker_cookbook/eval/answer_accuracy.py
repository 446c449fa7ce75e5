"""Accuracy of greedy answers, for labels and other short answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.utils.imports import tinker


class AnswerAccuracyEvaluator(SamplingClientEvaluator):
    """Samples one greedy answer to each question and compares it with the expected answers.

    For each of ``references`` R (a list of answers, ``None`` where R has none) it returns
    ``NAME/R``, the share of equal answers, and ``NAME/num_R``, the number of questions with a
    reference. ``NAME/cut_off`` is the share of answers truncated at ``max_tokens``; it should fall
    to 0. ``read`` extracts the part of an answer to compare; ``last_answers`` has these parts for
    the latest evaluation. ``constants`` are logged with each evaluation.
    """

    def __init__(
        self,
        questions: Sequence[Sequence[Message]],
        references: Mapping[str, Sequence[str | None]],
        renderer: Renderer,
        max_tokens: int = 16,
        name: str = "test",
        read: Callable[[str], str] = str.strip,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        for reference, expected in references.items():
            if len(expected) != len(questions):
                raise DataValidationError(
                    f"{name}/{reference}: got {len(expected)} answers to {len(questions)} "
                    "questions, expected as many, with None where there is none"
                )
        # Render once, since every evaluation has the same questions.
        self._prompts = [renderer.build_generation_prompt(list(q)) for q in questions]
        self._references = {key: list(expected) for key, expected in references.items()}
        self._renderer, self._max_tokens, self._read = renderer, max_tokens, read
        self._name, self._constants = name, dict(constants or {})
        self.last_answers: list[str] = []

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Returns the metrics of the client's weights."""
        params = tinker.SamplingParams(
            max_tokens=self._max_tokens, temperature=0.0, stop=self._renderer.get_stop_sequences()
        )
        # Submit all requests first, so that the backend can form large batches.
        futures = [sampling_client.sample(prompt, 1, params) for prompt in self._prompts]
        answers: list[str] = []
        num_cut_off = 0
        for future in futures:
            message, ended = self._renderer.parse_response((await future).sequences[0].tokens)
            answers.append(self._read(get_text_content(message)))
            num_cut_off += not ended
        self.last_answers = answers
        metrics = {"cut_off": num_cut_off / len(answers)}
        for reference, expected in self._references.items():
            known = [pair for pair in zip(answers, expected, strict=True) if pair[1] is not None]
            # Without reference answers there is no share to report.
            if known:
                metrics[reference] = sum(a == wanted for a, wanted in known) / len(known)
            metrics[f"num_{reference}"] = float(len(known))
        return {f"{self._name}/{key}": value for key, value in (metrics | self._constants).items()}
