"""A small language model that can read search results, made from generated episodes.

    python -m recipes.search_tool.small_model model_path=FOLDER

A Llama of 0.8 million parameters with a tokenizer for the words of the example data. It is trained
from random weights on episodes about invented worlds other than the example's, so it copies answers
out of documents and knows none by heart. Only some of the episodes are right: in the others the
model answers without a search, searches for the wrong name, misreads the document, stops before the
second search, or leaves ``Answer:`` out. Reinforcement learning has to find out which ones pay.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.search_tool.corpus import Corpus
from tinker_cookbook.recipes.search_tool.questions import EXAMPLE_DOCUMENTS
from tinker_cookbook.recipes.search_tool.retrieval import SearchIndex, build_index
from tinker_cookbook.recipes.search_tool.search_env import SEARCH_TASK_INSTRUCTIONS, TOOL_RENDERER
from tinker_cookbook.recipes.search_tool.tools import LocalSearchTool, format_results, shown
from tinker_cookbook.recipes.search_tool.world import Question, World, make_world
from tinker_cookbook.renderers import (
    Message,
    Renderer,
    ToolCall,
    TrainOnWhat,
    get_renderer,
    get_text_content,
)
from tinker_cookbook.renderers.core.tool_calls import declare_tools
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line

SMALL = "small"
"""Value of ``model_name`` that stands for this model."""
_ROOT = Path("/tmp/tinker-examples")
_FIRST_WORLD = 1000
"""Seed of the first world of the episodes; the others follow. The example's is another one."""
_VOCABULARY = 1600
_WORD = r"\d{2}| ?\p{L}+|\n+|[^\p{L}\d]|\d"
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
N_RESULTS = 2
"""Documents of a search in the episodes; the model has seen no other number."""


@chz.chz
class CLIConfig:
    """Settings of the small model."""

    model_path: str = chz.field(doc="New folder to write the model to")
    num_steps: int = chz.field(default=450, doc="Steps of training")
    batch_size: int = chz.field(default=32, doc="Episodes a step")
    num_worlds: int = chz.field(default=12, doc="Invented worlds; each has 588 questions")
    right_share: float = chz.field(default=0.3, doc="Share of the episodes that are right")
    learning_rate: float = chz.field(default=3e-3, doc="Peak learning rate of AdamW")
    hidden_size: int = chz.field(default=128, doc="Width of the model")
    num_layers: int = chz.field(default=3, doc="Layers of the model")
    seed: int = chz.field(default=0, doc="Seed of weights and episodes")


def episodes(
    worlds: list[World], right_share: float, rng: random.Random
) -> Iterator[list[Message]]:
    """Yields a conversation, without the system message, for each question of each world."""
    for world in worlds:
        index = build_index(Corpus(world.documents, len(world.documents), 0))
        for question in world.questions:
            other = rng.choice(world.questions)
            yield _episode(question, other, index, rng.random() < right_share, rng)


def _episode(
    question: Question, other: Question, index: SearchIndex, right: bool, rng: random.Random
) -> list[Message]:
    messages = [Message(role="user", content=question.text)]
    queries, answer, form = list(question.queries), question.answer, "Answer: {}"
    if not right:
        fault = rng.choice(("guess", "query", "early", "form"))
        if fault == "guess":
            queries, answer = [], other.answer
        elif fault == "query":
            queries[0] = other.queries[0]
        elif fault == "early" and len(queries) > 1:
            queries = queries[:1]
        else:
            form = rng.choice(("It is {}.", "{}"))
    found: list[str] = []
    for query in queries:
        found = [shown(hit.document) for hit in index.search(query, N_RESULTS)]
        arguments = json.dumps({"query_list": [query]})
        call = ToolCall(function=ToolCall.FunctionBody(name="search", arguments=arguments))
        messages.append(Message(role="assistant", content="", tool_calls=[call]))
        messages.append(
            Message(role="tool", content=format_results([query], [found]), name="search")
        )
    # An episode that did not find the answer ends with another word of what it found.
    text = " ".join(found)
    if queries and answer not in text:
        answer = rng.choice(
            [w.strip(".,") for w in text.split() if w[0].isupper() or w[0].isdigit()]
        )
    messages.append(Message(role="assistant", content=form.format(answer)))
    return messages


def make_tokenizer(texts: list[str], phrases: list[str], folder: Path) -> Any:
    """Writes a byte-level BPE tokenizer, with a token for each word and for each of ``phrases``."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # What every episode repeats is one token: it costs nothing, and the sequences become short.
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    made.chat_template = _CHATML
    made.save_pretrained(folder)
    return made


def _phrases(system: str) -> list[str]:
    return [
        system,
        '<tool_call>\n{"name": "search", "arguments": {"query_list": ["',
        '"]}}\n</tool_call>',
        "<tool_response>\n",
        "\n</tool_response>",
        "Query: ",
        *(f"\nDocument {i}:\n" for i in range(1, 4)),
        "Answer:",
    ]


def _texts(conversations: list[list[Message]], queries: set[str]) -> list[str]:
    """Returns what the tokenizer is made from."""
    texts = [get_text_content(message) for messages in conversations for message in messages]
    # At the beginning of a query a word has no space before it; it should be one token there too.
    texts += sorted(queries) * 20
    # Roles are in every header.
    return texts + ["system\n", "user\n", "assistant\n"] * 500


def rendered(
    renderer: Renderer, conversations: list[list[Message]], prefix: list[Message]
) -> list[tuple[list[int], list[float]]]:
    """Returns tokens and weights of each conversation; every answer of the model is trained."""
    found = []
    for messages in conversations:
        example = renderer.build_supervised_example(
            [*prefix, *messages], TrainOnWhat.ALL_ASSISTANT_MESSAGES
        )
        found.append((example[0].to_ints(), example[1].tolist()))
    return found


def fit(
    config: CLIConfig, examples: list[tuple[list[int], list[float]]], folder: Path, size: int
) -> float:
    """Trains a model from random weights and writes it; returns the mean loss of the last steps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=config.hidden_size,
            intermediate_size=3 * config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=_SPECIAL.index("<|im_end|>"),
            tie_word_embeddings=True,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.01)
    warmup = 30
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / warmup) * (1 - 0.95 * step / config.num_steps),
    )
    rng = random.Random(config.seed)
    order: list[int] = []
    losses: list[float] = []
    started = time.monotonic()
    for step in range(config.num_steps):
        if len(order) < config.batch_size:
            order += rng.sample(range(len(examples)), len(examples))
        batch = [examples[order.pop()] for _ in range(config.batch_size)]
        length = max(len(tokens) for tokens, _ in batch)
        tokens_BL = torch.tensor([tokens + [1] * (length - len(tokens)) for tokens, _ in batch])
        weights_BL = torch.tensor([w + [0.0] * (length - len(w)) for _, w in batch])
        mask_BL = torch.tensor([[1] * len(w) + [0] * (length - len(w)) for _, w in batch])
        logits_BLV = model(tokens_BL, attention_mask=mask_BL).logits[:, :-1]
        nll_BL = torch.nn.functional.cross_entropy(
            logits_BLV.transpose(1, 2), tokens_BL[:, 1:], reduction="none"
        )
        # Texts of documents count a little too: their names repeat, which teaches to copy.
        weights_BL = weights_BL[:, 1:] + 0.1 * mask_BL[:, 1:]
        loss = (nll_BL * weights_BL).sum() / weights_BL.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == config.num_steps - 1:
            recent = losses[-50:]
            print_line(
                f"step {step + 1}/{config.num_steps}  loss {sum(recent) / len(recent):.3f}  "
                f"{time.monotonic() - started:.0f} s"
            )
    model.save_pretrained(folder)
    return sum(losses[-50:]) / len(losses[-50:])


def make_small_model(config: CLIConfig) -> float:
    """Makes episodes, tokenizer and model; returns the loss at the end of training.

    The folder appears whole: an interrupted run leaves nothing at ``model_path``.

    Raises:
        ConfigurationError: ``model_path`` exists.
    """
    path = Path(config.model_path).expanduser()
    if path.exists():
        raise ConfigurationError(f"model_path: got {path}, which exists; expected a new folder")
    worlds = [make_world(_FIRST_WORLD + i) for i in range(config.num_worlds)]
    conversations = list(episodes(worlds, config.right_share, random.Random(config.seed)))
    search = LocalSearchTool(str(EXAMPLE_DOCUMENTS)).search
    queries = {query for question in worlds[0].questions for query in question.queries}
    # Renderers write the declaration; here only its text is needed, to make it one token.
    system = declare_tools([search.to_spec()], SEARCH_TASK_INSTRUCTIONS)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.mkdir(parents=True)
    try:
        tokenizer = make_tokenizer(_texts(conversations, queries), _phrases(system), part)
        renderer = get_renderer(TOOL_RENDERER, tokenizer)
        prefix = renderer.create_conversation_prefix_with_tools(
            [search.to_spec()], SEARCH_TASK_INSTRUCTIONS
        )
        examples = rendered(renderer, conversations, prefix)
        print_line(
            f"{len(examples)} episodes about {config.num_worlds} worlds, {len(tokenizer)} tokens"
        )
        loss = fit(config, examples, part, len(tokenizer))
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return loss


def small_model_path() -> Path:
    """Returns the folder of the small model with default settings; makes it the first time."""
    config = CLIConfig(model_path="")
    search = LocalSearchTool(str(EXAMPLE_DOCUMENTS)).search
    # Another version of the settings, the instructions or the tool needs another model.
    made_from = json.dumps([chz.asdict(config), SEARCH_TASK_INSTRUCTIONS, search.to_spec()])
    tag = hashlib.sha256(made_from.encode()).hexdigest()[:8]
    # By the beginning and end of its name the folder has the chat format of Qwen3-Instruct.
    path = _ROOT / f"qwen3-format-search-{tag}-instruct"
    if not path.exists():
        print_line(f"making the small model, once: {path}")
        make_small_model(chz.replace(config, model_path=str(path)))
    return path


def main(config: CLIConfig) -> None:
    """Makes the model and prints where it is."""
    loss = make_small_model(config)
    print_line(f"loss {loss:.3f}; model_name={config.model_path} renderer_name={TOOL_RENDERER}")


if __name__ == "__main__":
    run_entrypoint(main)
