"""Masks of JSON and tool calls: whatever random tokens a mask allows, the answer is valid."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.renderers.core.arguments import typed_arguments
from tinker_cookbook.structured_output import (
    AnswerRule,
    answer_mask,
    choice_mask,
    json_rule,
    json_schema_mask,
    regex_mask,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

pytest.importorskip("llguidance", reason="structured output is an extra: pip install llguidance")
jsonschema = pytest.importorskip("jsonschema")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", "日本"]}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/Next"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
    "$defs": {
        "Next": {
            "type": "object",
            "properties": {"id": {"type": "boolean"}},
            "additionalProperties": False,
        }
    },
}
FLAG = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
TOOLS = {"add-person": PERSON, "set_flag": FLAG}


def walk(mask, tokenizer, seed, most=300, likely=()):
    """Random tokens of those that the mask allows; ``likely`` are taken more often."""
    rng, state, tokens = np.random.default_rng(seed), mask.start(), []
    likely = np.unique(np.asarray(likely, dtype=int))
    likely = likely[likely < len(tokenizer)]
    while not state.finished and len(tokens) < most:
        bits = np.unpackbits(state.allowed(), bitorder="little")[: len(tokenizer)]
        allowed, often = np.flatnonzero(bits), likely[bits[likely] == 1]
        tokens.append(int(rng.choice(often if len(often) and rng.random() < 0.2 else allowed)))
        state.add(tokens[-1])
    return tokens, state.finished


def test_json_of_any_vocabulary_is_valid(tokenizer_folder, stories_model):
    """A vocabulary of 512 SentencePiece tokens with bytes, and a byte-level BPE."""
    for folder in (stories_model, tokenizer_folder("smollm2")):
        tokenizer = get_tokenizer(folder)
        mask = json_schema_mask(tokenizer, PERSON)
        for seed in range(10):
            tokens, ended = walk(mask, tokenizer, seed)
            assert ended
            assert tokens[-1] == tokenizer.eos_token_id
            text = tokenizer.decode(tokens[:-1])
            value = json.loads(text)
            jsonschema.validate(value, PERSON)
            assert text == json.dumps(value, ensure_ascii=False)


def test_a_regular_expression_and_a_choice(tokenizer_folder):
    tokenizer = get_tokenizer(tokenizer_folder("smollm2"))
    date, words = regex_mask(tokenizer, r"\d{4}-\d\d/[a-c]"), choice_mask(tokenizer, ["yes", "né"])
    for seed in range(5):
        tokens, _ = walk(date, tokenizer, seed)
        text = tokenizer.decode(tokens[:-1])
        assert (text[4], text[7], len(text)) == ("-", "/", 9)
        tokens, _ = walk(words, tokenizer, seed)
        assert tokenizer.decode(tokens[:-1]) in ("yes", "né")


FORMATS = [
    ("qwen2_5", "smollm2"),  # tags that are no tokens of the vocabulary
    pytest.param("qwen3", "qwen3", marks=pytest.mark.slow),
    pytest.param("qwen3_5", "qwen3", marks=pytest.mark.slow),
    pytest.param("template", "qwen3", marks=pytest.mark.slow),
    pytest.param("llama3", "llama3", marks=pytest.mark.slow),
    pytest.param("deepseekv3", "deepseek_v3_1", marks=pytest.mark.slow),
    pytest.param("gpt_oss_low_reasoning", "gptoss", marks=pytest.mark.slow),
]
"""Each vocabulary takes the library 1 to 7 s; slow: 5 to 10 s each."""


def made(name, family, tokenizer_folder):
    tokenizer = get_tokenizer(tokenizer_folder(family))
    return get_renderer(name, tokenizer), tokenizer


def check_calls(message, tools=TOOLS):
    for call in message.get("tool_calls", []):
        arguments, schema = call.function.arguments, tools[call.function.name]
        # Of Qwen3.5's calls, whose arguments have no types; no others change.
        jsonschema.validate(json.loads(typed_arguments(arguments, schema)), schema)
    assert not message.get("unparsed_tool_calls")
    return len(message.get("tool_calls", []))


@pytest.mark.parametrize(("name", "family"), FORMATS)
def test_answers_are_read_back_as_what_was_demanded(name, family, tokenizer_folder):
    renderer, tokenizer = made(name, family, tokenizer_folder)
    likely = [*tokenizer.get_added_vocab().values()]
    tools = list(TOOLS.items())
    # Large vocabularies take seconds for each answer.
    few = 8 if family == "smollm2" else 3

    def answers(rule, count=few):
        for seed in range(count):
            tokens, ended = walk(answer_mask(renderer, rule), tokenizer, seed, 400, likely)
            if ended:  # thinking and free text have no end
                yield renderer.parse_response(tokens)[0]

    def text_of(message):
        content = message["content"]
        parts = [] if isinstance(content, str) else [p for p in content if p["type"] == "text"]
        return content if isinstance(content, str) else "".join(part["text"] for part in parts)

    found = list(answers(AnswerRule(json_rule(PERSON))))
    assert found
    for message in found:
        jsonschema.validate(json.loads(text_of(message)), PERSON)
    found = list(answers(AnswerRule(tools=tools, tool_use="required", parallel=False)))
    assert found
    assert all(check_calls(message) == 1 for message in found)
    assert all(not text_of(message).strip() for message in found)
    assert all(
        check_calls(m) == 0 for m in answers(AnswerRule(tools=tools, tool_use="none"), few - 2)
    )
    counts = [check_calls(m) for m in answers(AnswerRule(tools=tools))]
    assert counts
    for message in answers(AnswerRule(json_rule(FLAG), tools), few - 2):
        if not check_calls(message):
            jsonschema.validate(json.loads(text_of(message)), FLAG)
