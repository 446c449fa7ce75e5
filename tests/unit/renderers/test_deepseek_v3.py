"""DeepSeek, what the shared checks leave out: last answers, histories, options, refusals."""

from __future__ import annotations

import pytest
from families.deepseek_v3 import CASES, conversations, up_to_a_user
from family_case import Side
from hypothesis import given
from rendering_cases import checked

from tinker_cookbook.renderers import (
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolSpec,
)

QUESTION = {"role": "user", "content": "Hi"}
RESULT = {"role": "tool", "content": "1"}
THOUGHT = {
    "role": "assistant",
    "content": [
        ThinkingPart(type="thinking", thinking="hm"),
        TextPart(type="text", text="Hello"),
    ],
}


def call(name="f", arguments="{}"):
    return ToolCall(function=ToolCall.FunctionBody(name=name, arguments=arguments))


def called(*calls):
    return {"role": "assistant", "content": "", "tool_calls": [*calls]}


def text_of(renderer, model_input):
    tokens = model_input.to_ints()
    return renderer.tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.fixture
def shown(make_renderer):
    """``shown(spec, messages)``: the example as text; ``prompt=True`` gives the prompt."""

    def show(spec, messages, prompt=False, vocabulary="deepseek_v3_1"):
        renderer = make_renderer(spec, vocabulary)
        if prompt:
            return text_of(renderer, renderer.build_generation_prompt(messages))
        return text_of(renderer, renderer.build_supervised_example(messages)[0])

    return show


@pytest.mark.parametrize("case", [case for case in CASES if "3_thinking" in case.spec][:1])
def test_histories_with_results_equal_the_template(case, shared_dir, make_renderer):
    """The shared checks ask for the prompt behind each message, which results have none of."""
    side = Side.load(
        case,
        make_renderer("deepseekv3", "deepseek_v3_1").tokenizer,
        shared_dir / "tokenizers",
        split_special_tokens=False,
    )

    @checked(60)
    @given(messages=up_to_a_user(conversations(thinking="none part tags")))
    def check(messages):
        assert side.tokens(messages) == side.expected(messages)
        assert side.prompt(messages) == side.expected(messages, prompt=True)

    check()


def test_thinking_is_dropped_without_thinking(shown, caplog):
    answers = [THOUGHT, {"role": "assistant", "content": "<think>hm</think>Hello"}]
    for answer in answers:
        shown_history = shown("deepseekv3", [QUESTION, answer, QUESTION])
        assert "<｜Assistant｜></think>Hello<｜end▁of▁sentence｜>" in shown_history
        assert shown("deepseekv3", [QUESTION, answer]).endswith(
            "<｜Assistant｜></think>Hello<｜end▁of▁sentence｜>"
        )
        assert "the thinking of an answer is left out" in caplog.text


def test_thinking_around_tools(shown):
    """With thinking: a call keeps it, an answer to results has no block that a prompt opens."""
    result = {"role": "tool", "content": "1"}
    asked = [QUESTION, called(call()), result]
    assert "<｜Assistant｜></think><｜tool▁calls▁begin｜>" in shown("deepseekv3_thinking", asked)
    assert shown("deepseekv3_thinking", asked, prompt=True).endswith("<｜tool▁output▁end｜>")
    answered = shown("deepseekv3_thinking", [*asked, THOUGHT])
    assert "<｜tool▁output▁end｜><think>hm</think>Hello<｜end▁of▁sentence｜>" in answered
    plain = {"role": "assistant", "content": "Hello"}
    assert "<｜tool▁output▁end｜>Hello<｜end" in shown("deepseekv3_thinking", [*asked, plain])
    thought = {**called(call()), "content": THOUGHT["content"]}
    text = shown("deepseekv3_thinking", [QUESTION, thought, result])
    assert "<｜Assistant｜><think>hm</think>Hello<｜tool▁calls▁begin｜>" in text


def test_tools_are_declared_as_the_model_card_says(make_renderer):
    tool = ToolSpec(name="f", description="é", parameters={"type": "object"})
    renderer = make_renderer("deepseekv3", "deepseek_v3_1")
    (message,) = renderer.create_conversation_prefix_with_tools([tool], "Be brief.")
    assert message["content"].startswith(
        "Be brief.\n\n## Tools\nYou have access to the following tools:\n\n### f\n"
        'Description: é\n\nParameters: {"type": "object"}\n\nIMPORTANT: ALWAYS adhere'
    )
    assert "<｜tool▁call▁end｜>{{additional_tool_calls}}<｜tool▁calls▁end｜>" in message["content"]
    assert renderer.create_conversation_prefix_with_tools([], "x")[0]["content"] == "x"
    thinking = make_renderer("deepseekv3_thinking", "deepseek_v3_1")
    assert thinking.create_conversation_prefix_with_tools([tool], "Be brief.") == [message]


def test_a_merged_call_follows_the_prompt_from_which_it_is_sampled(make_renderer):
    renderer = make_renderer("deepseekv3_thinking", "deepseek_v3_1")
    messages = [QUESTION, called(call()), RESULT, {"role": "assistant", "content": "Hello"}]
    split, merged = (
        [text_of(renderer, example) for example, _ in build(messages, "all_assistant_messages")]
        for build in (renderer.build_supervised_examples, renderer.build_merged_examples)
    )
    # History closes the thinking that the prompt of the call opens.
    assert merged == split
    assert "<｜Assistant｜><think></think>" in merged[0]
