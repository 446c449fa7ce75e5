"""A very small model that knows the format of tool calls, for learning curves on a CPU core.

    python -m recipes.tool_use.tiny_model output=DIR

It is a Llama of 0.1 million parameters with a vocabulary of the task's own words in Qwen's chat
format, trained for half a minute on example episodes. In them a look-up uses the right tool with
probability ``right_share``, else the other one, and a sum is left out as often. So the model copies
arguments and makes valid calls, but does not know which to make; reinforcement learning teaches it.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.tool_use.shop import (
    ITEMS,
    KINDS,
    MAX_NUMBER,
    Question,
    Shop,
    make_questions,
)
from tinker_cookbook.renderers import Message, Renderer, ToolCall, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import handle_tool_call
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console

RENDERER = "qwen3_instruct"
# A token is the declaration of the tools, a piece of a call, a tag or a word. So a prompt has about
# 20 tokens, and the name of an item is the same token in a question and in a call.
_PIECES = (
    r'# Tools[\s\S]*\{"name": <[^\n]*\n</tool_call>'
    r'|\{"name": "|", "arguments": \{|"item": "|"a": |"b": |"\}\}|\}\}'
    r"|</?\w+>| ?\w+|\n+|[^\w\n]"
)
_SPECIAL = ("<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")


@chz.chz
class CLIConfig:
    """Settings of the model."""

    output: str = chz.field(doc="Folder of the model; it must be empty or absent")
    right_share: float = chz.field(default=0.5, doc="Share of right calls in the examples")
    num_examples: int = chz.field(default=3000, doc="Example episodes")
    steps: int = chz.field(default=400, doc="Training steps")
    batch_size: int = chz.field(default=32, doc="Episodes a step")
    learning_rate: float = chz.field(default=3e-3, doc="Highest learning rate")
    hidden_size: int = chz.field(default=64, doc="Width")
    num_layers: int = chz.field(default=2, doc="Layers")
    seed: int = chz.field(default=0, doc="Seed of examples and weights")

    @chz.validate
    def _check(self) -> None:
        if not 0 <= self.right_share <= 1:
            raise ConfigurationError(f"right_share: got {self.right_share}, expected 0 to 1")
        for name in ("num_examples", "steps", "batch_size", "num_layers"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}: got {getattr(self, name)}, expected at least 1")


async def example_episode(
    question: Question, rng: random.Random, right_share: float
) -> list[Message]:
    """Returns the messages after the declaration of the tools, wrong calls included."""
    shop = Shop(question.seed)
    tools = {one.name: one for one in shop.tools}
    messages = [Message(role="user", content=question.text)]
    results: list[str] = []
    for name, arguments in question.calls():
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
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tinker_cookbook.renderers.core.tool_calls import declare_tools

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
    pieces = sorted({piece for text in texts for piece in re.findall(_PIECES, text)})
    words = [*pieces, *(char for char in map(chr, range(32, 127)) if char not in pieces)]
    vocabulary = {piece: number for number, piece in enumerate([*_SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.save_pretrained(folder)
    return fast


async def make_rows(config: CLIConfig, renderer: Renderer) -> list[tuple[list[int], list[float]]]:
    """Returns tokens and loss weights of the example episodes."""
    rng = random.Random(config.seed)
    prefix = renderer.create_conversation_prefix_with_tools(
        [one.to_spec() for one in Shop(0).tools]
    )
    rows: list[tuple[list[int], list[float]]] = []
    for question in make_questions(config.num_examples, config.seed + 1):
        episode = await example_episode(question, rng, config.right_share)
        for tokens, weights in renderer.build_supervised_examples(
            [*prefix, *episode], "all_assistant_messages"
        ):
            rows.append((tokens.to_ints(), weights.tolist()))
    return rows


def train(config: CLIConfig, folder: Path) -> float:
    """Trains the model, writes it into ``folder``, and returns its mean loss at the end."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = len(make_tokenizer(folder))
    renderer = get_renderer(RENDERER, get_tokenizer(str(folder)))
    rows = asyncio.run(make_rows(config, renderer))
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=config.hidden_size,
            intermediate_size=3 * config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=3,
            pad_token_id=1,
            # 0.02, which suits large models, makes the model copy words only after 1,000 steps.
            initializer_range=0.1,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=config.steps
    )
    rng, losses = random.Random(config.seed), []
    for _ in range(config.steps):
        loss = _loss(model, rng.choices(rows, k=config.batch_size))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    model.save_pretrained(folder)
    last = losses[-100:]
    return sum(last) / len(last)


def _loss(model: Any, batch: Sequence[tuple[list[int], list[float]]]) -> Any:
    """Mean loss of the tokens that the assistant wrote."""
    import torch

    longest = max(len(tokens) for tokens, _ in batch)
    # Padding on the right: no token of an episode sees it.
    tokens = torch.tensor([row + [1] * (longest - len(row)) for row, _ in batch])
    weights = torch.tensor([row + [0.0] * (longest - len(row)) for _, row in batch])
    logits = model(tokens).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    trained = weights[:, 1:].flatten()
    return (losses * trained).sum() / trained.sum()


async def make_model(config: CLIConfig) -> None:
    """Trains the model and writes it."""
    folder = Path(config.output).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"output: {folder} is not empty; expected a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    # Written under another name first: a folder of this name is always complete.
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        loss = await asyncio.to_thread(train, config, Path(unfinished))
        shutil.copytree(unfinished, f"{unfinished}.done")
    Path(f"{unfinished}.done").replace(folder)
    text = (
        f"tiny model: {config.num_examples} example episodes, {config.steps} steps, "
        f"{time.monotonic() - started:.0f} s; loss of a token {loss:.3f} nats\n{folder}"
    )
    get_console().print(text, highlight=False, soft_wrap=True)


main = make_model


if __name__ == "__main__":
    run_entrypoint(main)
