"""Trains a very small model on the format of tool calls, for learning curves on a CPU core.

    python -m recipes.tool_use.tiny_model output=DIR

The model is a Llama of 0.1 million parameters with Qwen's chat format and a vocabulary of only the
words of the task, trained for half a minute on example episodes. In these a look-up uses the right
tool in half of the cases, else the wrong tool, and sums are missing at the same rate.
So the model copies arguments and makes valid calls, but it must learn by RL which calls to make.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.recipes.tiny_models.llama import (
    Row,
    TinyModelSettings,
    new_folder,
    train,
    word_tokenizer,
)
from tinker_cookbook.recipes.tool_use.shop import (
    ITEMS,
    KINDS,
    MAX_NUMBER,
    Question,
    Shop,
    make_questions,
)
from tinker_cookbook.renderers import Message, Renderer, ToolCall, get_renderer
from tinker_cookbook.renderers.core.tool_calls import declare_tools
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import handle_tool_call
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line

RENDERER = "qwen3_instruct"
# A token is the declaration of the tools, a piece of a call, a tag or a word. So a prompt has about
# 20 tokens, and the name of an item is the same token in a question and in a call.
_PIECES = (
    r'# Tools[\s\S]*\{"name": <[^\n]*\n</tool_call>'
    r'|\{"name": "|", "arguments": \{|"item": "|"a": |"b": |"\}\}|\}\}'
    r"|</?\w+>| ?\w+|\n+|[^\w\n]"
)


@chz.chz
class CLIConfig(TinyModelSettings):
    """Settings of the model."""

    num_examples: int = number(3000, "Example episodes", low=1)


async def example_episode(
    question: Question, rng: random.Random, right_share: float = 0.5, told: str | None = None
) -> list[Message]:
    """Returns the messages after the declaration of the tools, wrong calls included.

    Args:
        told: The number of the first look-up, if that is not part of the episode.
    """
    shop = Shop(question.seed)
    tools = {one.name: one for one in shop.tools}
    messages = [Message(role="user", content=question.text)]
    results = [] if told is None else [told]
    for name, arguments in question.calls()[len(results) :]:
        if rng.random() >= right_share:
            if name == "add":
                continue  # the answer is then the number that was looked up last
            name = {"price": "stock", "stock": "price"}[name]
        if name == "add":  # of what was looked up, which may be the wrong numbers
            arguments = {"a": int(results[0]), "b": int(results[1])}
        body = ToolCall.FunctionBody(name=name, arguments=json.dumps(arguments))
        call = ToolCall(function=body)
        result = (await handle_tool_call(tools, call)).messages[0]
        messages += [Message(role="assistant", content="", tool_calls=[call]), result]
        results.append(str(result["content"]))
    return [*messages, Message(role="assistant", content=results[-1])]


def make_tokenizer(folder: Path) -> Any:
    """Writes a tokenizer of all words of the task, and returns it."""
    questions = [Question(kind, (item, item), 0) for kind in KINDS for item in ITEMS]
    texts = [
        declare_tools([one.to_spec() for one in Shop(0).tools], ""),
        *(question.text for question in questions),
        *(json.dumps({"name": "price", "arguments": {"item": item}}) for item in ITEMS),
        '{"name": "stock", "arguments": {"item": "tea"}}',
        '{"name": "add", "arguments": {"a": 1, "b": 2}}',
        '{"error": "no item tea"}',
        "system\nuser\nassistant\n<tool_call>\n</tool_call>\n\n<tool_response></tool_response>",
        *(f"{number}" for number in range(2 * MAX_NUMBER + 1)),
    ]
    texts += map(chr, range(32, 127))
    return word_tokenizer(
        texts,
        _PIECES,
        folder,
        ("<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )


async def make_rows(config: CLIConfig, renderer: Renderer) -> list[Row]:
    """Returns tokens and loss weights of the example episodes."""
    rng = random.Random(config.seed)
    prefix = renderer.create_conversation_prefix_with_tools(
        [one.to_spec() for one in Shop(0).tools]
    )
    rows: list[Row] = []
    for question in make_questions(config.num_examples, config.seed + 1):
        episode = await example_episode(question, rng)
        for tokens, weights in renderer.build_supervised_examples(
            [*prefix, *episode], "all_assistant_messages"
        ):
            rows.append((tokens.to_ints(), weights.tolist()))
    return rows


async def main(config: CLIConfig) -> None:
    """Trains the model and writes it."""
    with new_folder(config.output) as folder:
        tokenizer = make_tokenizer(folder)
        rows = await make_rows(config, get_renderer(RENDERER, get_tokenizer(str(folder))))
        # With an initializer_range of 0.02, which suits large models, the model copies words only
        # after 1,000 steps.
        sizes = {"max_position_embeddings": 512, "initializer_range": 0.1}
        loss = await asyncio.to_thread(train, config, rows, tokenizer, folder, **sizes)
    print_line(
        f"tiny model: {config.num_examples} example episodes, loss of a token {loss:.3f} nats"
    )
    print_line(config.output)


if __name__ == "__main__":
    run_entrypoint(main)
