"""Masks of tool calls in every chat format, on one vocabulary of bytes (5 s)."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.renderers.core.arguments import BareArguments, typed_arguments
from tinker_cookbook.structured_output import AnswerRule, GrammarError, answer_mask

pytest.importorskip("llguidance", reason="structured output is an extra: pip install llguidance")
jsonschema = pytest.importorskip("jsonschema")

CONTROL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_user|>", "<|im_assistant|>",
    "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
    "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>", "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>",
    "<|return|>", "<|call|>", "<|end|>",
]  # fmt: skip
TAGS = [
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "｜DSML｜",
]  # fmt: skip
"""Tokens of their own in some vocabularies only."""


@cache
def tokenizer(tags_are_tokens=True):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<unk>", *letters])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokens = CONTROL + (TAGS if tags_are_tokens else [])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>", additional_special_tokens=tokens
    )


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "code": {"type": "string", "pattern": "^[0-9]{3}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "size": {"type": "number", "minimum": -1, "maximum": 2},
        "kind": {"enum": ["town", "père", 7, "7", None]},
        "alive": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 3}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"enum": ["a", "</parameter>"]}, "maxItems": 2},
        "next": {"$ref": "#/$defs/Next"},
        "either": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    },
    "required": ["name", "code", "age", "size", "kind", "alive", "note", "tags"],
    "additionalProperties": False,
    "$defs": {
        "Next": {
            "type": "object",
            "properties": {"id": {"type": "boolean"}},
            "additionalProperties": False,
        }
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"add-person": PERSON, "now": NOTHING}
FORMATS = [
    "kimi_k2", "kimi_k2_instruct", "kimi_k25", "kimi_k26_disable_thinking", "mistral?version=v3",
    "mistral?version=v7", "mistral?version=v7_tekken", "deepseekv3", "deepseekv3_thinking",
    "llama3", "gpt_oss_low_reasoning",
]  # fmt: skip
TAGGED = [
    "qwen3", "qwen3_disable_thinking", "qwen3_5", "qwen3_5_disable_thinking",
    "qwen3_8_low_reasoning", "nemotron3", "nemotron3_disable_thinking", "nemotron3_ultra",
    "glm4_6", "glm4_6_disable_thinking", "deepseekv4_1_disable_thinking", "deepseekv4_1",
]  # fmt: skip


@pytest.fixture
def renderer(name, tags_are_tokens):
    return get_renderer(name, tokenizer(tags_are_tokens))


each_format = pytest.mark.parametrize(
    ("name", "tags_are_tokens"),
    [(name, True) for name in FORMATS + TAGGED] + [(name, False) for name in TAGGED],
)


def begin(renderer, mask):
    """The state behind thinking, and its tokens: the mask leaves thinking without end."""
    state, form = mask.start(), renderer.answer_form()
    if form.thinking is None:
        return state, []
    opening, closing = form.thinking
    tokens = renderer.codec.encode(f"{'' if form.opened else opening}hm{closing}")
    for token in tokens:
        state.add(token)
    return state, list(tokens)


def walk(renderer, mask, seed, most=2000):
    """Random tokens of those that the mask allows."""
    rng = np.random.default_rng(seed)
    state, tokens = begin(renderer, mask)
    while not state.finished and len(tokens) < most:
        allowed = np.flatnonzero(np.unpackbits(state.allowed(), bitorder="little"))
        tokens.append(int(rng.choice(allowed[allowed < len(renderer.tokenizer)])))
        state.add(tokens[-1])
    assert state.finished
    return renderer.parse_response(tokens)[0]


def checked_calls(renderer, message, tools=TOOLS):
    """The names of calls whose arguments are valid by the schemas of their tools."""
    # JSON has numbers such as 1e400, which no program can write again.
    unread = [one.error for one in message.get("unparsed_tool_calls", [])]
    assert all("beyond a float" in error for error in unread), message
    form = renderer.answer_form().calls.arguments
    for call in message.get("tool_calls", []):
        arguments, schema = call.function.arguments, tools[call.function.name]
        if form is not None and not form.typed:
            arguments = typed_arguments(arguments, schema)
        jsonschema.validate(json.loads(arguments), schema)
    return [call.function.name for call in message.get("tool_calls", [])]


@each_format
def test_random_calls_are_valid(name, renderer):
    rule = AnswerRule(tools=list(TOOLS.items()), tool_use="required", parallel=False)
    mask = answer_mask(renderer, rule)
    found = [checked_calls(renderer, walk(renderer, mask, seed)) for seed in range(4)]
    assert {len(names) for names in found} == {1}
    assert {names[0] for names in found} == set(TOOLS)


def sampled_tokens(renderer, answer):
    question = {"role": "user", "content": "Add Zoë."}
    model_input, weights = renderer.build_supervised_example([question, answer])
    return [t for t, w in zip(model_input.to_ints(), weights.tolist(), strict=True) if w]


def read_all(state, tokens):
    """Whether the tokens are a whole answer; GrammarError for one that is not allowed."""
    for token in tokens:
        state.add(token)
    return state.finished


ARGUMENTS = {"name": "Zoë <b>", "code": "012", "age": 3, "size": 0.5, "kind": "7", "alive": True,
             "note": None, "tags": ["a"], "next": {"id": True}}  # fmt: skip


@each_format
def test_calls_as_the_renderer_writes_them_are_allowed(name, renderer):
    """With thinking and without, two calls, and text before them where the format has that."""
    made = [("add-person", json.dumps(ARGUMENTS, ensure_ascii=False)), ("now", "{}")]
    form = renderer.answer_form()
    calls = [
        {"type": "function", "id": f"call{i:05}", "function": {"name": name, "arguments": text}}
        for i, (name, text) in enumerate(made[: 1 if form.calls.separator is None else 2])
    ]
    thinking = [{"type": "thinking", "thinking": "Who?"}] if form.thinking is not None else []
    words = [{"type": "text", "text": "Sure. <b> {"}]
    one_of_both = name.startswith(("mistral?version=v3", "llama3", "gpt_oss"))
    for content in (thinking, words) if one_of_both else (thinking, [*thinking, *words]):
        answer = {"role": "assistant", "content": content or "", "tool_calls": calls}
        if content == words and one_of_both:
            del answer["tool_calls"]
        rule = AnswerRule(tools=list(TOOLS.items()))
        tokens = sampled_tokens(renderer, answer)
        assert read_all(answer_mask(renderer, rule).start(), tokens)
        # A call, or an answer without one, is what the other policies forbid.
        other = "none" if "tool_calls" in answer else "required"
        rule = AnswerRule(None, list(TOOLS.items()), other)
        with pytest.raises(GrammarError, match="token_mask"):
            read_all(answer_mask(renderer, rule).start(), tokens)


XML = "qwen3_5_disable_thinking"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "format": "date"}, "f: x: got a string of format 'date'"),
        ({"enum": ["</parameter>"]}, "which ends an argument"),
        ({"description": "any", "not": {}}, "without a type"),
        ({"$ref": "#/$defs/None"}, "not in the schema"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        # What would be left out, since strings have no quotes here.
        ({"enum": ["a", "b1"], "pattern": "1"}, "x: got the keyword pattern next to enum"),
        ({"type": "string", "not": {"const": "a"}}, "x: got the keyword not"),
        ({"type": "string", "allOf": [{"maxLength": 2}]}, "x: got the keyword allOf"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 2}, "keyword maxLength"),
        ({"$ref": "#/$defs/S", "maxLength": 1}, "keyword maxLength"),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "without a type"),
        ({"type": "array", "items": {"$ref": "#"}}, "'#' within a value"),
        ({"$ref": "#/$defs/Loop"}, "alternatives without end"),
        ({"type": "string", "minLength": "x"}, "which JSON Schema forbids"),
        ({"enum": [1], "type": "string"}, "without a possible value"),
        ({"enum": []}, "without a possible value"),
        ({"enum": ["a<|im_end|>"]}, "in a constant or a name"),
    ],
)
def test_a_schema_without_a_form_is_refused(schema, words):
    renderer = get_renderer(XML, tokenizer())
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "null"}]}
    definitions = {"S": {"type": "string"}, "Loop": loop}
    whole = {"type": "object", "properties": {"x": schema}, "$defs": definitions}
    with pytest.raises(GrammarError, match=words):
        answer_mask(renderer, AnswerRule(tools=[("f", whole)]))


UNIONS = {
    "text": {"type": ["string", "integer"], "maximum": 3, "maxLength": 2},
    "list": {"anyOf": [{"type": "string", "maxLength": 3},
                       {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    "one": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}, {"const": 5}]},
    "kind": {"type": "string", "enum": ["a", 1]},
    "flag": {"type": "boolean", "enum": [True]},
    "both": {"type": "string", "pattern": "a$", "minLength": 2, "maxLength": 3},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [XML, "glm4_6_disable_thinking", "deepseekv4_1_disable_thinking", "kimi_k2"]
)
def test_random_calls_fit_alternatives(name):
    """Where strings have no quotes, one that reads as a number or a list is not allowed."""
    schema = {"type": "object", "properties": UNIONS, "required": [*UNIONS]}
    renderer = get_renderer(name, tokenizer())
    rule = AnswerRule(tools=[("f", schema)], tool_use="required", parallel=False)
    mask = answer_mask(renderer, rule)
    for seed in range(15):
        checked_calls(renderer, walk(renderer, mask, seed), {"f": schema})


@pytest.mark.parametrize("text", ["", "a\nb", "\n", "12", "[1, 2", "true", "<parameter=x>", " x "])
@pytest.mark.parametrize("name", [XML, "glm4_6_disable_thinking", "deepseekv4_1_disable_thinking"])
def test_any_text_may_be_a_string(name, text):
    """Also text that reads as another type, which the schema decides."""
    renderer = get_renderer(name, tokenizer())
    schema = {"type": "object", "properties": {"x": {"type": "string"}, "y": {}}, "required": ["x"]}
    arguments = json.dumps({"x": text, "y": "z"})
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    tokens = sampled_tokens(renderer, {"role": "assistant", "content": "", "tool_calls": [call]})
    rule = AnswerRule(tools=[("f", schema)], tool_use="required")
    assert read_all(answer_mask(renderer, rule).start(), tokens)
    (found,) = renderer.parse_response(tokens)[0]["tool_calls"]
    assert json.loads(typed_arguments(found.function.arguments, schema)) == {"x": text, "y": "z"}


def test_arguments_take_the_types_of_the_schema():
    properties = {
        "text": {"type": "string"},
        "whole": {"type": "integer"},
        "number": {"type": ["number", "null"]},
        "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "kind": {"enum": ["1", 2]},
        "list": {"$ref": "#/$defs/List"},
        "all": {"allOf": [{"$ref": "#/$defs/Text"}], "description": "d"},
        "id": {"type": "integer"},
    }
    definitions = {"List": {"type": "array"}, "Text": {"type": "string"}}
    schema = {"properties": properties, "$defs": definitions}
    given = {"text": "12", "whole": "-0", "number": "1.50", "flag": "true", "kind": "1",
             "list": "x", "more": "3", "all": "12", "id": "9007199254740993"}  # fmt: skip
    assert json.loads(typed_arguments(BareArguments(given), schema)) == {
        "text": "12", "whole": 0, "number": 1.5, "flag": True, "kind": "1", "list": "x", "more": 3,
        "all": "12", "id": 9007199254740993,
    }  # fmt: skip
