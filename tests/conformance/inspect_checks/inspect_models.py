"""Scripted and real models under Inspect AI's interface, and tasks for them."""

from __future__ import annotations

import asyncio

import numpy as np
from inspect_ai import Task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.tool import ToolInfo, ToolParam, ToolParams
from tinker import types

from tinker_cookbook.eval.inspect_bridge.evaluators import InspectEvaluatorBuilder
from tinker_cookbook.eval.inspect_bridge.model import InspectAPIFromTinkerSampling

WEATHER = ToolInfo(
    name="get_weather",
    description="Weather of a city.",
    parameters=ToolParams(
        properties={"city": ToolParam(type="string", description="City")}, required=["city"]
    ),
)
CLOCK = ToolInfo(name="clock", description="The time.", parameters=ToolParams())
ASK = [ChatMessageUser(content="What is the weather in Rome?")]


def sequence(tokens: list[int], stop_reason: str) -> types.SampledSequence:
    return types.SampledSequence(
        stop_reason=stop_reason,
        sequence_id="0",
        tokens_np=np.array(tokens, dtype=np.int32),
        logprobs_np=np.full(len(tokens), -0.5, dtype=np.float32),
    )


class Scripted:
    """A sampling client that answers with given texts and remembers its requests."""

    def __init__(self, tokenizer, *answers: str, stop_reason: str = "stop") -> None:
        self.tokenizer, self.answers, self.stop_reason = tokenizer, list(answers), stop_reason
        self.prompts: list[list[int]] = []
        self.params: list[types.SamplingParams] = []

    async def sample(self, prompt, num_samples, sampling_params, **kwargs):
        self.prompts.append(prompt.to_ints())
        self.params.append(sampling_params)
        text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return types.SampleResponse(sequences=[sequence(tokens, self.stop_reason)] * num_samples)

    def text(self, index: int = -1) -> str:
        return self.tokenizer.decode(self.prompts[index])


def ask(api, messages=ASK, tools=(), choice="auto", **config):
    return asyncio.run(api.generate(list(messages), list(tools), choice, GenerateConfig(**config)))


def story_api(client, model: str, **settings):
    return InspectAPIFromTinkerSampling(
        renderer_name="role_colon", model_name=model, sampling_client=client, **settings
    )


def story_task(n: int = 4, **settings) -> Task:
    samples = [Sample(id=i, input=f"Once there was a cat {i}", target="a") for i in range(n)]
    dataset = MemoryDataset(samples, name="cats")
    return Task(dataset=dataset, solver=generate(), **{"scorer": includes(), **settings})


def evaluate(builder: InspectEvaluatorBuilder, client) -> dict[str, float]:
    return asyncio.run(builder()(client))


def builder(model: str, tasks, folder, **settings) -> InspectEvaluatorBuilder:
    fields = {"max_tokens": 12, "temperature": 0.0, "log_dir": str(folder), **settings}
    return InspectEvaluatorBuilder(
        tasks=tasks, renderer_name="role_colon", model_name=model, **fields
    )
