"""MT-Bench: 80 conversations of two questions, rated by a judge (Zheng et al. 2023).

The judge rates each of the two answers from 1 to 10. The reward is the mean rating divided by 10.
Ratings depend on the judge: compare only scores of the same judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tinker_cookbook.completers import MessageCompleter, StopCondition, TinkerMessageCompleter
from tinker_cookbook.eval.benchmarks.data import Row, Source, column, mean_by_key
from tinker_cookbook.eval.benchmarks.registry import register
from tinker_cookbook.eval.run.sources import context_of
from tinker_cookbook.eval.run.types import (
    METRIC_MAX_TOKENS_REACHED,
    BenchmarkBuilder,
    BenchmarkConfig,
    BenchmarkResult,
    Metrics,
)
from tinker_cookbook.exceptions import DataValidationError, EvalGradingError
from tinker_cookbook.judges.judge import TextJudge, read_number
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.types import Action, ActionExtra, Env, Observation, StepResult

SOURCE = Source(
    "HuggingFaceH4/mt_bench_prompts",
    "train",
    folders=("mt_bench", "mt-bench"),
    files=("question.jsonl", "mt_bench_prompts.jsonl"),
)
MAX_RATING = 10
JUDGE_MAX_TOKENS = 2048
_VERDICT = r"\[\[\s*(\d+(?:\.\d+)?)\s*(?:/\s*10\s*)?\]\]"
_INSTRUCTIONS = (
    "You rate answers of an assistant. Read the conversation below and rate the last answer: is it "
    "helpful, relevant, correct, deep, creative and detailed? Explain your view in a few "
    "sentences, then write the rating on a line of its own, as a number from 1 to 10 in double "
    "brackets, for example: Rating: [[5]]"
)


def judge_prompt(turns: Sequence[Message], reference: str = "") -> str:
    """Returns the judge's prompt: instructions, the conversation, and a reference if any."""
    parts = [_INSTRUCTIONS]
    if reference:
        parts.append(f"[Reference answer to the last question]\n{reference}")
    for turn in turns:
        name = "Question of the user" if turn["role"] == "user" else "Answer of the assistant"
        parts.append(f"[{name}]\n{get_text_content(turn).strip()}")
    return "\n\n".join(parts) + "\n\n[End of the conversation]"


read_verdict = read_number(_VERDICT, 1, MAX_RATING)
"""Reads the rating in the last double brackets; raises ``EvalGradingError`` without one."""


class MTBenchEnv(Env):
    """One conversation: two questions, two answers, then two ratings."""

    def __init__(
        self,
        example_id: str,
        questions: Sequence[str],
        renderer: Renderer,
        judge: MessageCompleter,
        category: str = "",
        references: Sequence[str] = (),
        system_prompt: str | None = None,
    ) -> None:
        self.example_id, self.questions, self.renderer = example_id, list(questions), renderer
        self.judge, self.category, self.references = judge, category, list(references)
        self.messages: list[Message] = []
        if system_prompt:
            self.messages.append(Message(role="system", content=system_prompt))
        self._num_answers = 0
        self._truncated = False

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """Returns the first question."""
        return await self._ask()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Returns the next question; after the last answer, the judge rates all answers.

        A truncated answer is rated unchanged.

        Raises:
            EvalGradingError: the judge's rating cannot be read.
        """
        message, _ = await asyncio.to_thread(self.renderer.parse_response, action)
        self.messages.append(Message(role="assistant", content=get_text_content(message)))
        self._num_answers += 1
        self._truncated |= (extra or {}).get("stop_reason") == "length"
        if self._num_answers < len(self.questions):
            return StepResult(0.0, False, *await self._ask())
        # Rate both answers concurrently; the second one with the first as context.
        ends = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        verdicts = await asyncio.gather(*(self._rate(i, end) for i, end in enumerate(ends)))
        ratings = [rating for rating, _ in verdicts]
        mean = sum(ratings) / len(ratings)
        metrics: Metrics = {f"turn_{i}/rating": rating for i, rating in enumerate(ratings, 1)}
        metrics |= {"rating": mean, METRIC_MAX_TOKENS_REACHED: float(self._truncated)}
        if self.category:
            metrics[f"{self.category}/rating"] = mean
        logs = {"category": self.category, "verdicts": [text for _, text in verdicts]}
        stop = self.renderer.get_stop_sequences()
        return StepResult.final(mean / MAX_RATING, stop, metrics=metrics, logs=logs)

    async def _ask(self) -> tuple[Observation, StopCondition]:
        question = self.questions[self._num_answers]
        self.messages.append(Message(role="user", content=question))
        prompt = await asyncio.to_thread(self.renderer.build_generation_prompt, self.messages)
        return prompt, self.renderer.get_stop_sequences()

    async def _rate(self, answer: int, end: int) -> tuple[float, str]:
        turns = [m for m in self.messages[: end + 1] if m["role"] != "system"]
        reference = self.references[answer] if answer < len(self.references) else ""
        prompt = Message(role="user", content=judge_prompt(turns, reference or ""))
        try:
            found = await TextJudge(self.judge)([prompt], read_verdict)
        except DataValidationError as error:  # it does not fit into the judge's context
            raise EvalGradingError(f"judge: {error}") from error
        return found.score, found.text


class MTBenchBenchmarkBuilder(BenchmarkBuilder):
    """MT-Bench, with the mean rating of each category."""

    name = "mt_bench"
    multi_turn = True
    requires_judge = True

    def load_rows(self, config: BenchmarkConfig) -> list[Row]:
        """Returns rows with id, category, questions and (possibly empty) references."""
        rows: list[Row] = []
        for row in SOURCE.load(config.data_path):
            # The original file and the Hub dataset have different names for the same columns.
            number: Any = column(row, "question_id", "prompt_id", where=self.name)
            rows.append(
                {
                    "example_id": f"{self.name}_{number}",
                    "category": row.get("category", ""),
                    "questions": list(column(row, "turns", "prompt", where=self.name)),
                    "references": list(row.get("reference") or ()),
                }
            )
        return rows

    def make_envs(self, renderer: Renderer, config: BenchmarkConfig) -> Sequence[Env]:
        """Returns one environment for each conversation."""
        client: Any = config.judge_sampling_client
        judge_renderer: Any = config.judge_renderer
        judge = TinkerMessageCompleter(
            client,
            judge_renderer,
            JUDGE_MAX_TOKENS,
            temperature=0.0,
            context_window=context_of(client),
        )
        return [
            MTBenchEnv(renderer=renderer, judge=judge, system_prompt=config.system_prompt, **row)
            for row in self.load_rows(config)[: config.max_examples]
        ]

    def aggregate(self, rewards: list[float], metrics_list: list[Metrics]) -> BenchmarkResult:
        """Adds the mean ratings, by turn and by category."""
        result = super().aggregate(rewards, metrics_list)
        result.metrics |= mean_by_key(metrics_list, lambda name: name.endswith("rating"))
        return result


register(MTBenchBenchmarkBuilder())
