"""A small evaluator of your own, to copy: questions, a grader and the share of right answers.

``python -m tinker_cookbook.eval.custom_evaluators`` runs it on a model of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import tinker

from tinker_cookbook import renderers
from tinker_cookbook.backends.protocols import SamplingClient
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.tokenizer_utils import get_tokenizer

QA_DATASET = [
    {"input": "What is the capital of France?", "output": "Paris"},
    {"input": "What is the capital of Germany?", "output": "Berlin"},
    {"input": "What is the capital of Italy?", "output": "Rome"},
]
_MODEL = "Qwen/Qwen3.5-9B"


def grader_fn(response: str, target: str) -> bool:
    """Returns whether the response mentions the target, in any case."""
    return target.lower() in response.lower()


class CustomEvaluator(SamplingClientEvaluator):
    """Accuracy on questions of one turn.

    Args:
        dataset: Rows with ``input`` and ``output``.
        grader_fn: Called with the response, without thinking, and ``output``.
        model_name: Model with the tokenizer.
        renderer_name: Chat format.
    """

    def __init__(
        self,
        dataset: Sequence[Mapping[str, str]],
        grader_fn: Callable[[str, str], bool],
        model_name: str,
        renderer_name: str,
    ) -> None:
        self.dataset, self.grader_fn = dataset, grader_fn
        tokenizer = get_tokenizer(model_name)
        self.renderer = renderers.get_renderer(name=renderer_name, tokenizer=tokenizer)

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Returns ``accuracy``, 0 for no rows; samples all answers at once."""
        right = await asyncio.gather(*(self._grade(sampling_client, row) for row in self.dataset))
        return {"accuracy": sum(right) / len(right) if right else 0.0}

    async def _grade(self, client: SamplingClient, row: Mapping[str, str]) -> bool:
        question = renderers.Message(role="user", content=row["input"])
        response = await client.sample(
            prompt=self.renderer.build_generation_prompt([question]),
            num_samples=1,
            sampling_params=tinker.SamplingParams(
                max_tokens=100,
                temperature=0.7,
                top_p=1.0,
                stop=self.renderer.get_stop_sequences(),
            ),
        )
        message, _ = self.renderer.parse_response(response.sequences[0].tokens)
        return self.grader_fn(renderers.get_text_content(message), row["output"])


async def main() -> None:
    """Prints the metrics of ``Qwen/Qwen3.5-9B`` on ``QA_DATASET``."""
    evaluator = CustomEvaluator(QA_DATASET, grader_fn, _MODEL, "qwen3_5_disable_thinking")
    client = await tinker.ServiceClient().create_sampling_client(base_model=_MODEL)
    print(await evaluator(client))


if __name__ == "__main__":
    asyncio.run(main())
