"""Vocabularies, renderers and vectors for the tests of Mistral's formats.

``mistral_vectors.json`` has 220 random conversations, and the text that mistral-common 1.5.4 gives
with its strictest rules: those for fine-tuning where a conversation ends with an answer, those for
serving elsewhere. A vector is ``[messages, tools, texts]``. A message is ``[role, content]``, a
result has the id of its call behind it, and an answer a list of calls ``[id, name, arguments]``.
``tools`` counts the tools of ``TOOLS`` that are declared. ``texts`` follow ``VERSIONS``: those of
the Tekken vocabulary as they are, those of SentencePiece as the beginning of their SHA-256.
"""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path

import pytest

from tinker_cookbook.renderers import ToolSpec, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

VERSIONS = ("v3_tekken", "v7_tekken", "v3", "v7")
VECTORS = Path(__file__).with_name("mistral_vectors.json")
TOOLS = [
    {
        "name": "f",
        "description": 'the "weather", é',
        "parameters": {"type": "object"},
    },
    {"name": "get-x_2", "description": "", "parameters": {}},
]
V3_TOKENS = [
    *["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
    *["[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
]
V7_TOKENS = ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
ROWS = json.loads(VECTORS.read_text(encoding="utf-8"))
QUESTION = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}
each_version = pytest.mark.parametrize("version", VERSIONS)


def digest(text: str) -> str:
    """Returns what stands for a text of a SentencePiece vocabulary."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def unpacked(row: list) -> dict:
    """Returns a message of the file as the OpenAI API spells it."""
    role, content, *behind = row
    message = {"role": role, "content": content}
    if role == "tool":
        return message | {"tool_call_id": behind[0]}
    calls = [
        {"id": id_, "function": {"name": name, "arguments": arguments}}
        for id_, name, arguments in (behind[0] if behind else [])
    ]
    return message | ({"tool_calls": calls} if calls else {})


@pytest.fixture(scope="module")
def stand_in(tokenizer_folder, stories_model):
    """``stand_in("llama3", …)``: a vocabulary with Mistral's control tokens."""
    made = {}

    def make(family="llama3", tokens=(*V3_TOKENS, *V7_TOKENS)):
        if (family, tuple(tokens)) not in made:
            folder = stories_model if family == "stories" else tokenizer_folder(family)
            tokenizer = copy.deepcopy(get_tokenizer(folder))
            tokenizer.add_special_tokens({"additional_special_tokens": [*tokens]})
            tokenizer.chat_template = None
            made[family, tuple(tokens)] = tokenizer
        return made[family, tuple(tokens)]

    return make


@pytest.fixture(scope="module")
def renderers(stand_in):
    return {v: get_renderer(f"mistral?version={v}", stand_in()) for v in VERSIONS}


def conversation(renderer, row):
    messages = [unpacked(message) for message in row[0]]
    declared = renderer.create_conversation_prefix_with_tools(
        [ToolSpec(**tool) for tool in TOOLS[: row[1]]]
    )
    return [*declared, *messages]


def tokens_of(renderer, messages, what="last_assistant_message"):
    return renderer.build_supervised_example(messages, what)[0].to_ints()


def text_of(renderer, messages):
    return renderer.codec.decode(tokens_of(renderer, messages))


def prompt_text(renderer, messages, **options):
    return renderer.codec.decode(renderer.build_generation_prompt(messages, **options).to_ints())


def expected(row, version):
    return row[2][VERSIONS.index(version)]


def rows(version):
    """The library's vectors, but for tools without a question in v7: it leaves the tools out."""
    for row in ROWS:
        if row[1] == 0 or version.startswith("v3") or "user" in (m[0] for m in row[0]):
            yield row


def as_vector(text, version):
    return text if version.endswith("tekken") else digest(text)
