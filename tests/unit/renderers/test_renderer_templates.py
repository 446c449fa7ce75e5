"""Token ids of every renderer equal those of the chat template it stands for."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from rendering_cases import (
    answer,
    dialogues,
    openai,
    qwen_conversations,
    template_ids,
)

examples = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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


def test_special_tokens_in_text_become_tokens_as_in_the_template(make_renderer):
    renderer = make_renderer("smollm2?split_special_tokens=false", "smollm2")
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
