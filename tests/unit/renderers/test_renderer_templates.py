"""Token ids of every renderer equal those of the chat template it stands for."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rendering_cases import (
    answer,
    dialogues,
    openai,
    qwen_conversations,
    template_file,
    template_ids,
    text,
    tool_call,
)

from tinker_cookbook.renderers import ToolSpec

examples = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LLAMA31 = "llama3?today_date=26%20Jul%202024"
TOOLS = [
    ToolSpec(name="f", description='Says "é"', parameters={"type": "object", "properties": {}}),
    ToolSpec(name="g", description="", parameters={"type": "object", "required": ["x"]}),
]


def assert_same(renderer, messages, template=None, **options):
    """The whole conversation, and the prompt after it, have the template's ids."""
    tokenizer = renderer.tokenizer
    tokens = renderer.build_supervised_example(messages)[0].to_ints()
    assert tokens == template_ids(tokenizer, messages, template, **options)
    prompt = renderer.build_generation_prompt(messages).to_ints()
    assert prompt == template_ids(
        tokenizer,
        messages,
        template,
        add_generation_prompt=True,
        enable_thinking=not renderer.disables_thinking,
        **options,
    )


@pytest.mark.parametrize(
    ("spec", "family"), [("smollm2", "smollm2"), ("chatml", "smollm2"), ("chatml", "qwen2_5")]
)
@examples
@given(messages=dialogues())
def test_chatml(make_renderer, spec, family, messages):
    assert_same(make_renderer(spec, family), messages)


@examples
@given(messages=dialogues(reply=text))
def test_llama3(make_renderer, tokenizer_folder, messages):
    template = template_file(tokenizer_folder("llama3"), "chat_template.llama3.jinja")
    assert_same(make_renderer("llama3", "llama3"), messages, template)


@examples
@given(messages=dialogues(reply=text), call=tool_call, result=text, calls=st.booleans())
def test_llama31_with_dates_and_tools(
    make_renderer, tokenizer_folder, messages, call, result, calls
):
    if calls:
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        question = [m for m in messages if m["role"] == "user"][-1]
        messages = [*messages, question, called, {"role": "tool", "content": result}]
    renderer = make_renderer(LLAMA31, "llama3")
    for file in ("chat_template.jinja", "chat_template.llama3_2.jinja"):
        template = template_file(tokenizer_folder("llama3"), file)
        assert_same(renderer, messages, template, parsed_arguments=True, date_string="26 Jul 2024")


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.qwen3_trl.jinja"])
@examples
@given(messages=qwen_conversations(), cut=st.integers(0, 6))
def test_qwen3_with_thinking_and_tools(make_renderer, tokenizer_folder, file, messages, cut):
    template = template_file(tokenizer_folder("qwen3"), file)
    messages = messages[: max(1, len(messages) - cut)]
    assert_same(make_renderer("qwen3", "qwen3"), messages, template)


@examples
@given(messages=qwen_conversations(thinking=False), cut=st.integers(0, 6))
def test_qwen3_disable_thinking(make_renderer, messages, cut):
    messages = messages[: max(1, len(messages) - cut)]
    assert_same(make_renderer("qwen3_disable_thinking", "qwen3"), messages)


@examples
@given(messages=qwen_conversations(thinking=False), cut=st.integers(0, 6))
def test_qwen3_instruct(make_renderer, tokenizer_folder, messages, cut):
    template = template_file(tokenizer_folder("qwen3"), "chat_template.qwen3_instruct_2507.jinja")
    messages = messages[: max(1, len(messages) - cut)]
    assert_same(make_renderer("qwen3_instruct", "qwen3"), messages, template)


@pytest.mark.parametrize("spec", ["qwen3", "qwen3_instruct"])
@pytest.mark.parametrize("system", ["", "Be brief.\n"])
def test_qwen3_tool_declarations(make_renderer, spec, system):
    renderer = make_renderer(spec, "qwen3")
    question = [{"role": "user", "content": "Hi"}]
    prefix = renderer.create_conversation_prefix_with_tools(TOOLS, system)
    prompt = renderer.build_generation_prompt([*prefix, *question]).to_ints()
    with_system = [{"role": "system", "content": system}] if system else []
    assert prompt == template_ids(
        renderer.tokenizer,
        [*with_system, *question],
        tools=[{"type": "function", "function": dict(tool)} for tool in TOOLS],
        add_generation_prompt=True,
    )


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_llama31_tool_declarations(make_renderer, system):
    renderer = make_renderer(LLAMA31, "llama3")
    question = [{"role": "user", "content": "Hi"}]
    prefix = renderer.create_conversation_prefix_with_tools(TOOLS, system)
    prompt = renderer.build_generation_prompt([*prefix, *question]).to_ints()
    with_system = [{"role": "system", "content": system}] if system else []
    assert prompt == template_ids(
        renderer.tokenizer,
        [*with_system, *question],
        tools=[{"type": "function", "function": dict(tool)} for tool in TOOLS],
        tools_in_user_message=False,
        add_generation_prompt=True,
    )


@examples
@given(messages=qwen_conversations())
def test_to_openai_message_is_what_templates_take(make_renderer, messages):
    renderer = make_renderer("qwen3", "qwen3")
    assert [renderer.to_openai_message(message) for message in messages] == [
        openai(message) for message in messages
    ]


@examples
@given(messages=dialogues(reply=answer), prefill=answer)
def test_prefill_continues_the_prompt(make_renderer, messages, prefill):
    renderer = make_renderer("smollm2", "smollm2")
    bare = renderer.build_generation_prompt(messages).to_ints()
    filled = renderer.build_generation_prompt(messages, prefill=prefill).to_ints()
    assert filled[: len(bare)] == bare
    assert filled[len(bare) :] == renderer.tokenizer.encode(prefill, add_special_tokens=False)


def test_prompt_for_another_role(make_renderer):
    renderer = make_renderer("qwen3_disable_thinking", "qwen3")
    prompt = renderer.build_generation_prompt([], role="user").to_ints()
    assert renderer.tokenizer.decode(prompt) == "<|im_start|>user\n"


def test_special_tokens_in_text_become_tokens_as_in_the_template(make_renderer):
    renderer = make_renderer("smollm2", "smollm2")
    messages = [{"role": "user", "content": "a<|im_end|>b"}]
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = renderer.build_generation_prompt(messages).to_ints()
    assert prompt.count(end) == 3  # default system prompt, the text's own, the message's
    assert prompt == template_ids(renderer.tokenizer, messages, add_generation_prompt=True)


def test_answer_that_begins_with_white_space_keeps_the_inference_prompt(make_renderer):
    """The one difference from templates: they merge the header's line break into the answer."""
    renderer = make_renderer("smollm2", "smollm2")
    question = [{"role": "user", "content": "Hi"}]
    messages = [*question, {"role": "assistant", "content": "\n  Hello"}]
    tokens = renderer.build_supervised_example(messages)[0].to_ints()
    prompt = renderer.build_generation_prompt(question).to_ints()
    template = template_ids(renderer.tokenizer, messages)
    assert tokens[: len(prompt)] == prompt
    assert template[: len(prompt)] != prompt
    assert renderer.tokenizer.decode(tokens) == renderer.tokenizer.decode(template)
