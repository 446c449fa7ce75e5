"""Trains a small language model on generated search episodes.

    python -m recipes.search_tool.small_model output=FOLDER

The model is a Llama of 0.8 million parameters with a tokenizer for the words of the example data.
It is trained from random weights on episodes about other invented worlds than the example's, so it
can copy answers from documents but has not memorised any. Only some of the episodes are right: in
the others the model answers without a search, searches for the wrong name, misreads the document,
stops before the second search, or leaves ``Answer:`` out. Reinforcement learning has to find out
which of these are rewarded.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.recipes.search_tool.corpus import Corpus
from tinker_cookbook.recipes.search_tool.questions import EXAMPLE_DOCUMENTS
from tinker_cookbook.recipes.search_tool.retrieval import SearchIndex, build_index
from tinker_cookbook.recipes.search_tool.search_env import SEARCH_TASK_INSTRUCTIONS, TOOL_RENDERER
from tinker_cookbook.recipes.search_tool.tools import LocalSearchTool, format_results, shown
from tinker_cookbook.recipes.search_tool.world import Question, World, make_world
from tinker_cookbook.recipes.tiny_llama import Row, TinyModelSettings, new_folder, train
from tinker_cookbook.renderers import (
    Message,
    Renderer,
    ToolCall,
    TrainOnWhat,
    get_renderer,
    get_text_content,
)
from tinker_cookbook.renderers.core.tool_calls import declare_tools
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line

SMALL = "small"
"""Value of ``model_name`` that selects this model."""
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
class CLIConfig(TinyModelSettings):
    """Settings of the small model."""

    steps: int = number(450, "Training steps", low=1)
    num_worlds: int = number(12, "Invented worlds; each has 588 questions", low=1)
    right_share: float = chz.field(default=0.3, doc="Share of the episodes that are right")
    hidden_size: int = number(128, "Width", low=4)
    num_layers: int = number(3, "Layers", low=1)


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
    # An episode that did not find the answer ends with another word of the found text.
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
) -> list[Row]:
    """Returns tokens and weights of each conversation; every answer of the model is trained."""
    rows: list[Row] = []
    for messages in conversations:
        tokens, weights = renderer.build_supervised_example(
            [*prefix, *messages], TrainOnWhat.ALL_ASSISTANT_MESSAGES
        )
        # Texts of documents count a little too: their names repeat, which teaches to copy.
        rows.append((tokens.to_ints(), (weights + 0.1).tolist()))
    return rows


def make_small_model(config: CLIConfig) -> float:
    """Makes episodes, tokenizer and model; returns the loss at the end of training.

    Raises:
        ConfigurationError: ``output`` is not empty.
    """
    worlds = [make_world(_FIRST_WORLD + i) for i in range(config.num_worlds)]
    search = LocalSearchTool(str(EXAMPLE_DOCUMENTS)).search
    queries = {query for question in worlds[0].questions for query in question.queries}
    # Renderers write the declaration; here only its text is needed, to make it one token.
    system = declare_tools([search.to_spec()], SEARCH_TASK_INSTRUCTIONS)
    with new_folder(config.output) as folder:
        conversations = list(episodes(worlds, config.right_share, random.Random(config.seed)))
        tokenizer = make_tokenizer(_texts(conversations, queries), _phrases(system), folder)
        renderer = get_renderer(TOOL_RENDERER, tokenizer)
        prefix = renderer.create_conversation_prefix_with_tools(
            [search.to_spec()], SEARCH_TASK_INSTRUCTIONS
        )
        rows = rendered(renderer, conversations, prefix)
        print_line(
            f"{len(rows)} episodes about {config.num_worlds} worlds, {len(tokenizer)} tokens"
        )
        return train(config, rows, tokenizer, folder, tie_word_embeddings=True)


def small_model_path() -> Path:
    """Returns the folder of the small model with default settings; creates it on first use."""
    config = CLIConfig(output="")
    search = LocalSearchTool(str(EXAMPLE_DOCUMENTS)).search
    # Another version of the settings, the instructions or the tool needs another model.
    made_from = json.dumps([chz.asdict(config), SEARCH_TASK_INSTRUCTIONS, search.to_spec()])
    tag = hashlib.sha256(made_from.encode()).hexdigest()[:8]
    # By the beginning and end of its name the folder has the chat format of Qwen3-Instruct.
    path = _ROOT / f"qwen3-format-search-{tag}-instruct"
    if not path.exists():
        print_line(f"making the small model, once: {path}")
        make_small_model(chz.replace(config, output=str(path)))
    return path


def main(config: CLIConfig) -> None:
    """Makes the model and prints where it is."""
    loss = make_small_model(config)
    print_line(f"loss {loss:.3f}; model_name={config.output} renderer_name={TOOL_RENDERER}")


if __name__ == "__main__":
    run_entrypoint(main)
