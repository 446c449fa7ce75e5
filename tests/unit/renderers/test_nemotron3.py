"""Nemotron 3 beyond its cases: what is weighed, options, declarations, refusals."""

from __future__ import annotations

import copy
import json

import pytest
from families.nemotron3 import SUPER, any_order, parsed
from hypothesis import HealthCheck, given, settings
from rendering_cases import calling, ended, thought

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import (
    ParseTermination,
    ToolSpec,
    get_renderer,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

QUESTION = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def nemotron(tokenizer_folder):
    tokenizer = get_tokenizer(tokenizer_folder("qwen3"))
    return lambda spec="nemotron3": get_renderer(spec, tokenizer)


@pytest.fixture(scope="module")
def template(shared_dir):
    return (shared_dir / "tokenizers" / SUPER).read_text(encoding="utf-8")


def trained_text(renderer, messages):
    example, weights = renderer.build_supervised_example(messages)
    pairs = zip(example.to_ints(), weights.tolist(), strict=True)
    return renderer.codec.decode([token for token, weight in pairs if weight])


def expected(renderer, template, messages, **options):
    ids = renderer.tokenizer.apply_chat_template(
        [parsed(copy.deepcopy(message)) for message in messages],
        chat_template=template,
        return_dict=False,
        **options,
    )
    return ids if options.get("add_generation_prompt") else ended(renderer.tokenizer, ids)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(messages=any_order())
def test_preserved_history_equals_the_template_without_thinking_too(nemotron, template, messages):
    renderer = nemotron("nemotron3_preserve_thinking?split_special_tokens=false")
    options = {"truncate_history_thinking": False}
    tokens = renderer.build_supervised_example(messages)[0].to_ints()
    assert tokens == expected(renderer, template, messages, **options)


@pytest.mark.parametrize(
    "arguments",
    [
        {"a": {"b": [1, None, "é"]}, "c": 1.5, "d": None, "e": True, "f": "", "g": []},
        {"text": "two\nlines <b>x</b> </parameter> and on"},
    ],
)
def test_arguments_of_every_kind_equal_the_template_and_come_back(nemotron, template, arguments):
    renderer = nemotron()
    message = {**thought("a", ""), "tool_calls": calling("f", arguments)["tool_calls"]}
    tokens = renderer.build_supervised_example([QUESTION, message])[0].to_ints()
    assert tokens == expected(renderer, template, [QUESTION, message])
    said = trained_text(renderer, [QUESTION, message])
    back, how = renderer.parse_response(renderer.codec.encode(said))
    assert how is ParseTermination.STOP_SEQUENCE
    assert json.loads(back["tool_calls"][0].function.arguments) == arguments


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "object"},
        {
            "type": "object",
            "properties": {
                "a": {"type": ["string", "null"], "title": "A", "minimum": 0.5, "strict": True},
                "b": {"items": {"type": "integer"}, "description": " x\n"},
            },
            "required": [],
            "additionalProperties": False,
            "$defs": {"é": {"type": "string"}},
        },
    ],
)
def test_declarations_of_every_kind_equal_the_template(nemotron, template, parameters):
    renderer = nemotron()
    tool = ToolSpec(name="f", description=" Does\n", parameters=parameters)
    declared = {"type": "function", "function": {**copy.deepcopy(dict(tool)), "strict": True}}
    prefix = renderer.create_conversation_prefix_with_tools([declared], "Be brief.")
    system = {"role": "system", "content": "Be brief."}
    options = {"add_generation_prompt": True}
    assert renderer.build_generation_prompt([*prefix, QUESTION]).to_ints() == expected(
        renderer, template, [system, QUESTION], tools=[declared], **options
    )


def test_without_thinking_history_loses_it_and_an_answer_with_it_is_not_trained(nemotron):
    renderer = nemotron("nemotron3_disable_thinking")
    messages = [QUESTION, thought("a", "A"), QUESTION]
    text = renderer.codec.decode(renderer.build_generation_prompt(messages).to_ints())
    assert text.count("<think></think>") == 2
    assert "a\n" not in text.split("assistant", 1)[1].split("<|im_end|>")[0].removeprefix("\n")
    with pytest.raises(RendererError, match=r"messages\[1\].content: got thinking"):
        renderer.build_supervised_example(messages[:2])
    # As context, between calls of the last turn, it is written as the template does.
    asked = [QUESTION, {**calling("f", {}), **thought("a", "A")}, {"role": "tool", "content": "1"}]
    prompt = renderer.codec.decode(renderer.build_generation_prompt(asked).to_ints())
    assert "<think>\na\n</think>\nA\n<tool_call>" in prompt
