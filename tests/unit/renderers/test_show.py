"""What ``python -m tinker_cookbook.renderers.show`` says."""

from __future__ import annotations

import copy
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rendering_cases import checked
from rendering_cases import text as any_text
from rich.cells import cell_len
from rich.console import Console

from tinker_cookbook.renderers import TrainOnWhat, get_renderer, normalize_messages
from tinker_cookbook.renderers.qwen3 import Qwen3InstructRenderer
from tinker_cookbook.renderers.show import print_view, sample_conversation
from tinker_cookbook.renderers.show_view import Conversation, show, split_text
from tinker_cookbook.tokenizer_utils import decode_exactly

QUESTION = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello."}


def conversation(*messages):
    return Conversation(normalize_messages(messages), "here")


def fact(view, label):
    return next(f for f in view.facts if f.label == label)


def example_facts(view, label):
    return [f for example in view.examples for f in example.facts if f.label.startswith(label)]


def terminal(view, width=100, max_tokens=600):
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        print_view(view, console, max_tokens)
    return captured.get()


# --- tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "smollm2", "gemma3", "llama3"])
def test_the_text_of_tokens_is_the_decoded_text(make_renderer, family):
    codec = make_renderer("role_colon", family).codec

    @checked(30)
    @given(text=any_text | st.text(alphabet="🦜é\ufffd\u200d🌨️ \n", max_size=12))
    def check(text):
        tokens = codec.encode(text)
        texts = split_text(codec, tokens)
        assert len(texts) == len(tokens)
        assert "".join(texts) == codec.decode(tokens)

    check()


# --- what is said ----------------------------------------------------------------------------


def test_the_example_of_qwen3(make_renderer):
    renderer = make_renderer("qwen3", "qwen3")
    sample = sample_conversation(renderer, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    view = show(renderer, sample)
    made = renderer.build_merged_examples(sample.messages, "all_assistant_messages")
    assert len(view.examples) == len(made) == 2
    for example, (model_input, weights) in zip(view.examples, made, strict=True):
        assert [t.id for t in example.tokens] == model_input.to_ints()
        assert [t.weight for t in example.tokens] == weights.tolist()
        text = "".join(t.text for t in example.tokens)
        assert text == decode_exactly(renderer.tokenizer, model_input.to_ints())
    trained = sum(int(weights.sum()) for _, weights in made)
    assert f"{trained} of them trained" in fact(view, "tokens").text
    assert fact(view, "template").good
    assert fact(view, "prompt").good
    assert "example 2 begins with it" in fact(view, "prompt").text
    assert fact(view, "stops at").text == "<|im_end|> (id 151645)"
    assert fact(view, "extension").text.startswith("does not hold")
    assert "prompt of message 6 does not begin with message 4" in fact(view, "examples").text
    sampled, prompt = fact(view, "examples").rows
    texts = [[t.text for t in tokens] for _, tokens in (sampled, prompt)]
    assert texts[0][:4] == texts[1][:4]
    assert (texts[0][4], texts[1][4]) == ("<think>", "<tool_call>")
    assert all(f.good for f in example_facts(view, "message") + example_facts(view, "parsed"))
    assert len(example_facts(view, "message")) == 3
    assert {t.text for t in view.examples[0].tokens if t.control} == {
        *("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    }


def test_the_example_is_as_rich_as_the_renderer_takes_it(make_renderer):
    def roles(spec, family):
        renderer = make_renderer(spec, family)
        sample = sample_conversation(renderer, TrainOnWhat.LAST_ASSISTANT_MESSAGE)
        return [m["role"] for m in sample.messages], sample.source

    assert roles("qwen3", "qwen3")[0].count("tool") == 1
    assert roles("qwen3", "qwen3")[1] == "the built-in example"
    with_tools, source = roles("qwen2_5", "qwen2_5")
    assert "tool" in with_tools
    assert "without thinking" in source
    assert "tool" not in roles("role_colon", "qwen3")[0]


def test_the_first_difference_from_the_template_is_shown(make_renderer):
    tokenizer = copy.copy(make_renderer("chatml", "qwen3").tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}!<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = get_renderer("chatml?default_system=", tokenizer)
    found = fact(show(renderer, conversation(QUESTION, ANSWER)), "template")
    assert found.good is False
    assert "conversation differs at token 4 of " in found.text
    ours, theirs = found.rows
    assert (ours[0], theirs[0]) == ("renderer", "template")
    assert [tokens[4].text for _, tokens in found.rows] == ["<|im_end|>", "!"]
    shown = terminal(show(renderer, conversation(QUESTION, ANSWER)))
    assert re.search(r"renderer +… │<\|im_start\|>│user│⏎│Hi│<\|im_end\|>", shown)
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    assert "refuses the conversation: never" in template_text(renderer, QUESTION, ANSWER)
    tokenizer.chat_template = None
    found = fact(show(renderer, conversation(QUESTION, ANSWER)), "template")
    assert (found.good, found.text[:4]) == (None, "none")


def template_text(renderer, *messages, **options):
    return fact(show(renderer, conversation(*messages), template_options=options), "template").text


def test_a_prompt_that_the_example_does_not_continue_is_shown(make_renderer):
    class OtherPrompt(Qwen3InstructRenderer):
        def _generation_suffix(self, role):
            return self.codec.constant("<|im_start|>bot\n")

    renderer = OtherPrompt(make_renderer("qwen3", "qwen3").tokenizer)
    view = show(renderer, conversation(QUESTION, ANSWER))
    found = fact(view, "prompt")
    assert found.good is False
    assert "differ at token 7" in found.text
    assert [tokens[4].text for _, tokens in found.rows[1:]] == ["bot", "assistant"]
    assert example_facts(view, "message")[0].good is False
    assert "✗ " in terminal(view)


@pytest.mark.parametrize("what", list(TrainOnWhat))
@pytest.mark.parametrize("spec", ["qwen3", "qwen3_disable_thinking", "role_colon"])
def test_every_choice_of_what_is_trained(make_renderer, spec, what):
    renderer = make_renderer(spec, "qwen3")
    view = show(renderer, sample_conversation(renderer, what), what)
    assert fact(view, "prompt").good is not False
    made = renderer.build_merged_examples(sample_conversation(renderer, what).messages, what)
    assert [[t.weight for t in example.tokens] for example in view.examples] == [
        weights.tolist() for _, weights in made
    ]
    terminal(view)


# --- the terminal ----------------------------------------------------------------------------


def test_the_terminal_keeps_to_its_width_and_steers_nothing(make_renderer):
    nasty = "\x1b[31m red \u202e\u0007 [bold]x[/bold] :smile:\r\n" + "long " * 60
    messages = {"role": "user", "content": nasty}, {"role": "assistant", "content": nasty.strip()}
    view = show(make_renderer("chatml", "qwen3"), conversation(*messages))
    for width in (50, 80, 120):
        shown = terminal(view, width)
        assert not set(shown) & set("\x1b\u202e\u0007\r")
        assert max(cell_len(line) for line in shown.splitlines()[:-1]) <= width
        assert not any(line.endswith(" ") for line in shown.splitlines())
    joined = re.sub(r"[│┃\s]", "", terminal(view))
    assert "[bold]x[/bold]·:smile:" in joined
