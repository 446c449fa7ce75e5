"""The SDFT paper's evaluations: letters of science questions, actions of tool use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.utils.imports import tinker

SCIENCE_SYSTEM_PROMPT_THINKING = (
    "Given a question and four options, please select the right answer. Think step by step, then "
    "output ONLY the letter (A, B, C, or D) as your final answer."
)
_INPUT = re.compile(r"Action Input:\s*(\{.*?\})", re.DOTALL)


def extract_xml_answer(text: str) -> str:
    """Returns what ``<answer>`` holds, else the letter of the text after the thinking.

    The letter of "The answer is X", else one that stands alone in a line, else the last one that
    is a word; the whole text if there is none.
    """
    if "<answer>" in text:
        return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    said = text.rpartition("</think>")[2]
    lines = [line.strip() for line in said.strip().split("\n")]
    found = (
        re.findall(r"[Tt]he answer is\s*([A-D])", said)[:1]
        or [line for line in lines if line in tuple("ABCD")][:1]
        or re.findall(r"\b([A-D])\b", said)[-1:]
    )
    return found[0] if found else text.strip()


def evaluate_science_correctness(responses: list[str], answers: list[str]) -> list[int]:
    """Returns 1 for each response with the right letter, else 0."""
    return [int(extract_xml_answer(r) == a) for r, a in zip(responses, answers, strict=True)]


def extract_actions(text: str) -> list[str]:
    """Returns the names after ``Action:``."""
    return re.findall(r"Action:\s*(\w+)", text)


def extract_action_inputs(text: str) -> dict[str, Any]:
    """Returns the objects after ``Action Input:`` as one; what is no JSON is left out."""
    return _merged(_INPUT.findall(text))


def _merged(objects: Sequence[str]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for text in objects:
        with contextlib.suppress(ValueError, TypeError):
            merged.update(json.loads(text))
    return merged


def evaluate_tooluse_correctness(
    responses: list[str], golden_answers: list[list[dict[str, str]]]
) -> list[int]:
    """Returns 1 for each response with all actions, in any order, and all inputs; else 0."""
    return [
        int(
            Counter(extract_actions(response)) == Counter(item["Action"] for item in golden)
            and extract_action_inputs(response)
            == _merged([item["Action_Input"] for item in golden if "Action_Input" in item])
        )
        for response, golden in zip(responses, golden_answers, strict=True)
    ]


async def _greedy_texts(
    client: SamplingClient,
    renderer: Renderer,
    prompts: Sequence[Sequence[Message]],
    max_tokens: int,
) -> list[str]:
    params = tinker.SamplingParams(
        max_tokens=max_tokens, temperature=0.0, stop=renderer.get_stop_sequences()
    )
    rendered = [renderer.build_generation_prompt(list(prompt)) for prompt in prompts]
    # Submitted before the first is awaited, so that the backend batches them.
    futures = [client.sample(prompt=p, num_samples=1, sampling_params=params) for p in rendered]
    responses = await asyncio.gather(*futures)
    return [str(renderer.tokenizer.decode(r.sequences[0].tokens)) for r in responses]


def _metrics(name: str, scores: list[int]) -> dict[str, float]:
    return {
        f"{name}/accuracy": sum(scores) / len(scores) if scores else 0.0,
        f"{name}/num_correct": float(sum(scores)),
        f"{name}/num_total": float(len(scores)),
    }


class SciKnowEvalEvaluator(SamplingClientEvaluator):
    """Accuracy of greedy answers to science questions; ``prompts`` are messages."""

    def __init__(
        self,
        prompts: Sequence[Sequence[Message]],
        answers: list[str],
        renderer: Renderer,
        max_tokens: int = 2048,
        system_prompt_override: str | None = None,
    ) -> None:
        self.prompts, self.answers = prompts, answers
        self.renderer, self.max_tokens = renderer, max_tokens
        self.system_prompt_override = system_prompt_override

    def _messages(self, prompt: Sequence[Message]) -> list[Message]:
        messages = list(prompt)
        if self.system_prompt_override is None:
            return messages
        rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
        return [{"role": "system", "content": self.system_prompt_override}, *rest]

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Returns ``sciknoweval/accuracy`` and its counts."""
        prompts = [self._messages(prompt) for prompt in self.prompts]
        texts = await _greedy_texts(sampling_client, self.renderer, prompts, self.max_tokens)
        return _metrics("sciknoweval", evaluate_science_correctness(texts, self.answers))


class ToolUseEvaluator(SamplingClientEvaluator):
    """Accuracy of the actions of greedy answers; ``prompts`` are texts."""

    def __init__(
        self,
        prompts: list[str],
        golden_answers: list[list[dict[str, str]]],
        renderer: Renderer,
        max_tokens: int = 1024,
    ) -> None:
        self.prompts, self.golden_answers = prompts, golden_answers
        self.renderer, self.max_tokens = renderer, max_tokens

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Returns ``tooluse/accuracy`` and its counts."""
        prompts = [[Message(role="user", content=prompt)] for prompt in self.prompts]
        texts = await _greedy_texts(sampling_client, self.renderer, prompts, self.max_tokens)
        return _metrics("tooluse", evaluate_tooluse_correctness(texts, self.golden_answers))
