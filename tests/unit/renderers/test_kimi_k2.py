"""Kimi K2, what the shared checks leave out: ids of calls, the default prompt, last answers."""

from __future__ import annotations

import copy

import pytest
from families.kimi_k2 import TOKENS
from rendering_cases import thought

from tinker_cookbook.renderers import (
    ToolCall,
    TrainOnWhat,
    get_renderer,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

QUESTION = {"role": "user", "content": "Hi"}
PROMPT = "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
CALL = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"


@pytest.fixture(scope="module")
def kimi(tokenizer_folder):
    """``kimi(spec)``: a renderer on a vocabulary with Kimi's control tokens."""
    tokenizer = copy.deepcopy(get_tokenizer(tokenizer_folder("qwen3")))
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    return lambda spec: get_renderer(spec, tokenizer)


def text_of(renderer, model_input):
    return renderer.tokenizer.decode(model_input.to_ints(), skip_special_tokens=False)


def prompt_text(renderer, messages):
    return text_of(renderer, renderer.build_generation_prompt(messages))


def example_text(renderer, messages):
    return text_of(renderer, renderer.build_supervised_example(messages)[0])


def call(name="f", call_id=None):
    return ToolCall(function=ToolCall.FunctionBody(name=name, arguments="{}"), id=call_id)


def result(text, **more):
    return {"role": "tool", "content": text, **more}


def test_a_chain_keeps_its_thinking_until_it_is_answered(kimi):
    renderer = kimi("kimi_k2")
    chain = [QUESTION, thought("A", tool_calls=[call()]), result("1")]
    answered = [*chain, thought("B", "Hello")]
    assert "<think>A</think>" in prompt_text(renderer, chain)
    assert example_text(renderer, answered).startswith(prompt_text(renderer, chain))
    assert example_text(renderer, answered).endswith("<think>B</think>Hello<|im_end|>")
    later = prompt_text(renderer, [*answered, QUESTION])
    assert later.count("<think></think>") == 2
    kept = kimi("kimi_k2?strip_thinking_from_history=false")
    assert prompt_text(kept, [*answered, QUESTION]).startswith(example_text(renderer, answered))
    assert kept.has_extension_property
    what = TrainOnWhat.ALL_ASSISTANT_MESSAGES
    assert len(renderer.build_merged_examples(answered, what)) == 1
    assert len(renderer.build_merged_examples([*answered, *answered], what)) == 2


def test_ids_that_the_model_has_written_stay(kimi):
    renderer = kimi("kimi_k2_instruct")
    calls = [call(call_id="functions.f:7"), call("g", "call_x"), call("h")]
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [result("2", tool_call_id="call_x"), result("1"), result("3"), result("4")]
    written = prompt_text(renderer, [QUESTION, asked, *results])
    for call_id in ("functions.f:7", "functions.g:1", "functions.h:2"):
        assert CALL.format(call_id, "{}") in written
    assert written.count("## Return of functions.g:1\n2<|im_end|>") == 1
    order = [line.split("\n")[0] for line in written.split("## Return of ")[1:]]
    assert order == ["functions.g:1", "functions.f:7", "functions.h:2", "functions.unknown:3"]
