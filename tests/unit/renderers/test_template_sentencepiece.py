"""The renderer derived from the chat template, on a SentencePiece vocabulary."""

from __future__ import annotations

import copy

import pytest
from rendering_cases import ended

from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

QUESTION = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
SENTENCEPIECE = {
    "llama2": "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}",
    "zephyr": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("form", SENTENCEPIECE)
def test_sentencepiece_vocabularies(stories_model, form):
    """A space is put behind control tokens, and none behind other text."""
    tokenizer = copy.copy(get_tokenizer(stories_model))
    tokenizer.chat_template = SENTENCEPIECE[form]
    renderer = get_renderer("template", tokenizer)
    messages = [QUESTION, ANSWER, QUESTION, ANSWER]
    options = {"tokenize": True, "return_dict": False}
    model_input, mask = renderer.build_supervised_example(messages, "all_assistant_messages")
    tokens, weights = model_input.to_ints(), mask.tolist()
    assert tokens == ended(tokenizer, tokenizer.apply_chat_template(messages, **options))
    said = tokenizer.decode([t for t, w in zip(tokens, weights, strict=True) if w])
    assert said.replace(" ", "") == "Because.</s>Because.</s>"
    prompt = renderer.build_generation_prompt(messages[:3]).to_ints()
    assert prompt == tokenizer.apply_chat_template(
        messages[:3], add_generation_prompt=True, **options
    )
    assert tokens[: len(prompt)] == prompt
    assert renderer.get_stop_sequences() == [tokenizer.eos_token_id]
    assert renderer.has_extension_property
