"""The recipe's questions, reward and tiny model's data (under 2 s)."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from recipes.tool_use import tiny_model
from recipes.tool_use.shop import (
    KINDS,
    Shop,
    ShopDatasetBuilder,
    make_questions,
    reward,
)
from tinker_cookbook.renderers import ToolCall, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import AgentToolMessageEnv


def answered(question, calls, text):
    """Reward and metrics of an episode with these calls and this answer."""

    async def graded(history, episode):
        return await reward(question, 0.2, history, episode)

    env = AgentToolMessageEnv(Shop(question.seed).tools, [], 9, graded)

    async def run():
        for name, arguments in calls:
            body = ToolCall.FunctionBody(name=name, arguments=json.dumps(arguments))
            call = ToolCall(function=body)
            await env.step({"role": "assistant", "content": "", "tool_calls": [call]})
        return await env.step({"role": "assistant", "content": text})

    step = asyncio.run(run())
    return step.reward, step.metrics["right_calls"]


@pytest.mark.parametrize("question", make_questions(3, 0), ids=KINDS)
def test_gold_episodes_get_the_whole_reward_and_others_do_not(question):
    calls, right = question.calls(), str(question.answer())
    assert answered(question, calls, right) == (1.2, 1.0)
    assert answered(question, calls, f"It is {right}.") == (1.2, 1.0)
    assert answered(question, calls, "0") == (pytest.approx(0.2), 1.0)
    assert answered(question, [], right) == (1.0, 0.0)
    # A call that is repeated, or of no use, counts against the share of right calls.
    assert answered(question, [*calls, calls[0]], right)[1] < 1
    wrong = [("price", {"item": "nothing"})]
    assert answered(question, [*calls, *wrong], right)[1] < 1
    assert answered(question, wrong, "0") == (0.0, 0.0)


def test_the_tiny_models_tokenizer_has_every_word_of_its_examples(tmp_path):
    tiny_model.make_tokenizer(tmp_path)
    renderer = get_renderer(tiny_model.RENDERER, get_tokenizer(str(tmp_path)))
    config = tiny_model.CLIConfig(output="unused", num_examples=60)
    rows = asyncio.run(tiny_model.make_rows(config, renderer))
    unknown = renderer.tokenizer.convert_tokens_to_ids("<unk>")
    assert not any(unknown in tokens for tokens, _ in rows)
    assert all(sum(weights) > 0 for _, weights in rows)
    # The examples are what the recipe's environments read.
    question = make_questions(1, 3)[0]
    messages = asyncio.run(tiny_model.example_episode(question, random.Random(0), 1.0))
    assert messages[-1]["content"] == str(question.answer())

    builder = ShopDatasetBuilder(
        model_name_for_tokenizer=str(tmp_path),
        renderer_name=tiny_model.RENDERER,
        batch_size=3,
        group_size=2,
        n_batches=2,
        num_test=3,
    )

    async def prompts():
        train, test = await builder()
        (env,) = await test.get_batch(0)[0].make_envs()
        return len(train), (await env.initial_observation())[0].length

    batches, length = asyncio.run(prompts())
    assert batches == 2
    assert 15 < length < 30
