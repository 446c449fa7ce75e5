"""The renderer derived from the chat template: compared with the hand-written ones,
its options, and what it refuses. ``test_families.py`` compares its tokens with the templates'."""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
from families.template import one_call_a_message
from hypothesis import given
from rendering_cases import checked, cut_conversations, dialogues, ended, qwen_conversations, text

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import ParseTermination, TextPart, ThinkingPart, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

QUESTION = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
THOUGHT = {
    "role": "assistant",
    "content": [
        ThinkingPart(type="thinking", thinking="Hm."),
        TextPart(type="text", text="Because."),
    ],
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "look", "arguments": '{"q": "x"}'}}],
}
RESULT = {"role": "tool", "content": "found"}
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def make(shared_dir, tokenizer_folder):
    """``make(spec, family, file)``: a renderer on a vocabulary with one of its templates."""

    def make_renderer(spec, family, file="chat_template.jinja", source=None):
        tokenizer = copy.copy(get_tokenizer(tokenizer_folder(family)))
        path = shared_dir / "tokenizers" / family / file
        tokenizer.chat_template = source or path.read_text(encoding="utf-8")
        return get_renderer(spec, tokenizer)

    return make_renderer


def example(renderer, messages, what):
    tokens, weights = renderer.build_supervised_example(messages, what)
    return tokens.to_ints(), weights.tolist()


def trained(renderer, messages, what="last_assistant_message"):
    tokens, weights = example(renderer, messages, what)
    chosen = [t for t, w in zip(tokens, weights, strict=True) if w]
    return renderer.tokenizer.decode(chosen)


WHATS = [
    "last_assistant_message",
    "last_assistant_turn",
    "all_assistant_messages",
    "all_tokens",
]


@pytest.mark.parametrize(
    ("spec", "family", "file"),
    [
        ("smollm2", "smollm2", "chat_template.jinja"),
        ("chatml", "qwen2_5", "chat_template.jinja"),
        ("qwen3_instruct", "qwen3", "chat_template.qwen3_instruct_2507.jinja"),
        ("llama3", "llama3", "chat_template.llama3.jinja"),
    ],
)
def test_tokens_and_weights_are_those_of_the_hand_written_renderer(make, spec, family, file):
    derived, written = make("template", family, file), make(spec, family, file)
    reply = text if spec == "llama3" else None
    strategy = dialogues(reply=reply) if reply is not None else dialogues()

    @checked(15)
    @given(messages=strategy)
    def check(messages):
        for what in WHATS:
            assert example(derived, messages, what) == example(written, messages, what), what
        prompts = [r.build_generation_prompt(messages).to_ints() for r in (derived, written)]
        assert prompts[0] == prompts[1]

    check()


def test_calls_and_results_are_weighed_as_by_the_hand_written_renderer(make):
    file = "chat_template.qwen3_instruct_2507.jinja"
    derived, written = (make(spec, "qwen3", file) for spec in ("template", "qwen3_instruct"))

    @checked(15)
    @given(messages=cut_conversations(qwen_conversations(thinking=False)))
    def check(messages):
        for what in ("all_assistant_messages", "last_assistant_turn", "all_tokens"):
            assert example(derived, messages, what) == example(written, messages, what)

    check()


@pytest.mark.parametrize("what", ["all_assistant_messages", "last_assistant_turn"])
def test_hybrid_thinking_is_split_as_by_the_hand_written_renderer(make, what):
    derived, written = (make(spec, "qwen3") for spec in ("template", "qwen3"))

    @checked(15)
    @given(messages=cut_conversations(qwen_conversations()))
    def check(messages):
        found = [
            [(m.to_ints(), w.tolist()) for m, w in r.build_supervised_examples(messages, what)]
            for r in (derived, written)
        ]
        if any(m["role"] == "assistant" for m in messages):
            assert found[0] == found[1]

    check()


MARKED = {
    "qwen3": (
        "chat_template.qwen3_instruct_2507.jinja",
        [
            (
                "{{- '<|im_start|>' + message.role + '\\n' + content }}\n        {%- if message.to",
                "{{- '<|im_start|>' + message.role + '\\n' }}{% generation %}{{- content }}"
                "{%- if message.to",
            ),
            (
                "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}",
                "{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}"
                '{%- elif message.role == "tool" %}',
            ),
        ],
    ),
    "gemma3": (
        "chat_template.jinja",
        [
            (
                "{%- if message['content'] is string -%}\n        {{ message['content'] | trim }}",
                "{%- if message['role'] == 'assistant' -%}{% generation %}"
                "{{ message['content'] | trim }}{{ '<end_of_turn>' }}{% endgeneration %}"
                "{%- elif message['content'] is string -%}{{ message['content'] | trim }}",
            ),
            (
                "{{ '<end_of_turn>\n' }}",
                "{{ '' if message['role'] == 'assistant' else '<end_of_turn>' }}{{ '\n' }}",
            ),
        ],
    ),
}


@pytest.mark.parametrize("family", MARKED)
def test_masks_are_those_of_generation_markers(make, shared_dir, family):
    """transformers' own mask, by markers put into the template where the model writes."""
    file, changes = MARKED[family]
    source = (shared_dir / "tokenizers" / family / file).read_text(encoding="utf-8")
    marked = source
    for old, new in changes:
        assert old in marked
        marked = marked.replace(old, new)
    renderer = make("template?split_special_tokens=false", family, file)
    conversations = dialogues() if family == "gemma3" else one_call_a_message(text.map(str.strip))

    @checked(15)
    @given(messages=conversations)
    def check(messages):
        plain = [renderer.to_openai_message(m) for m in messages]
        found = renderer.tokenizer.apply_chat_template(
            plain,
            chat_template=marked,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        tokens, weights = example(renderer, messages, "all_assistant_messages")
        assert tokens == ended(renderer.tokenizer, found["input_ids"])
        assert weights == found["assistant_masks"][: len(tokens)]

    check()


def test_an_answer_rewritten_by_the_template_is_refused_and_split(make):
    renderer = make("template", "qwen3")
    messages = [QUESTION, THOUGHT, QUESTION, THOUGHT]
    assert not renderer.has_extension_property
    assert trained(renderer, messages) == "<think>\nHm.\n</think>\n\nBecause.<|im_end|>"
    with pytest.raises(RendererError, match=r"messages\[1\]: .*use build_supervised_examples"):
        renderer.build_supervised_example(messages, "all_assistant_messages")
    examples = renderer.build_supervised_examples(messages, "all_assistant_messages")
    prompts = [renderer.build_generation_prompt(messages[:i]).to_ints() for i in (1, 3)]
    for (tokens, weights), prompt in zip(examples, prompts, strict=True):
        assert tokens.to_ints()[: len(prompt)] == prompt
        assert weights.tolist().index(1.0) == len(prompt)


def test_an_answer_behind_another_prompt_is_trained_as_the_template_writes_it(make, caplog):
    """R1's prompt opens the thinking, which the template writes into no answer."""
    renderer = make("template", "deepseek_v3", "chat_template.deepseek_v3_trl.jinja")
    assert trained(renderer, [QUESTION, ANSWER]) == "Because.<｜end▁of▁sentence｜>"
    assert "trained as the template writes them" in caplog.text
    assert not renderer.has_extension_property
    with pytest.raises(RendererError, match=r"messages\[1\].content \(thinking\): .* 'Hm.'"):
        renderer.build_supervised_example([QUESTION, THOUGHT])
    # A call whose thinking vanishes from the prompt once there is an answer.
    gpt_oss = make("template?today=2025-08-05", "gptoss")
    call = CALL | {"content": THOUGHT["content"][:1]}
    assert trained(gpt_oss, [QUESTION, call, RESULT, ANSWER]).endswith("Because.<|return|>")
    assert "Hm." not in trained(gpt_oss, [QUESTION, call, RESULT, ANSWER])
    examples = gpt_oss.build_supervised_examples(
        [QUESTION, call, RESULT, ANSWER], "all_assistant_messages"
    )
    assert len(examples) == 2


def test_stops(make):
    assert make("template", "gptoss").get_stop_sequences() == [200002, 200012]
    llama = make("template?stop=<|end_of_text|>,<|eot_id|>", "llama3")
    assert llama.get_stop_sequences() == [128001, 128009]
    with pytest.raises(RendererError, match=r"template\?stop: got 'x y', expected the name of one"):
        make("template?stop=x y", "llama3")
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    bare += "{% if add_generation_prompt %}assistant: {% endif %}"
    renderer = make("template", "qwen3", source=bare)
    assert trained(renderer, [QUESTION, ANSWER]) == "Because.\n<|im_end|>"  # EOS
    assert renderer.parse_response([*renderer.codec.encode("a"), 151645])[1] is (
        ParseTermination.STOP_SEQUENCE
    )
    tokenizer = copy.deepcopy(renderer.tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(RendererError, match="set the stop token"):
        get_renderer("template", tokenizer)


def test_arguments_reach_the_template(make):
    plain = make("template", "qwen3").build_generation_prompt([QUESTION]).to_ints()
    off = make("template?enable_thinking=false", "qwen3")
    prompt = off.build_generation_prompt([QUESTION]).to_ints()
    assert off.tokenizer.decode(prompt[len(plain) :]) == "<think>\n\n</think>\n\n"
    assert off.disables_thinking
    assert trained(off, [QUESTION, ANSWER]) == "Because.<|im_end|>"
    day = make("template?today=2025-08-05&reasoning_effort=low", "gptoss")
    written = day.tokenizer.decode(day.build_generation_prompt([QUESTION]).to_ints())
    assert "Current date: 2025-08-05\n\nReasoning: low" in written
    with pytest.raises(RendererError, match=r"template\?today: got 'x', expected a day"):
        make("template?today=x", "gptoss")


@pytest.mark.parametrize(
    ("family", "messages", "said"),
    [
        ("gemma3", [QUESTION, QUESTION], "refuses roles user, user.*Conversation roles must alt"),
        ("deepseek_v3", [QUESTION, ANSWER, {"role": "critic", "content": "x"}], "messages.2..role"),
        ("smollm2", [QUESTION, THOUGHT], r"messages\[1\].content: .*'thinking'"),
        ("smollm2", [QUESTION, CALL], r"messages\[1\].tool_calls: .*leaves them out"),
        ("llama3", [QUESTION, CALL | {"content": "so"}], r"messages\[1\].content: .*leaves out 's"),
        ("qwen3", [QUESTION | {"tool_calls": CALL["tool_calls"]}], "by role 'user'"),
        (
            "qwen3",
            [QUESTION | {"content": [{"type": "image", "image": "x.png"}]}],
            r"messages\[0\].content\[0\]: got an image, .*renderer_name: got 'template', e",
        ),
    ],
)
def test_unsupported_messages_are_refused(make, family, messages, said):
    with pytest.raises(RendererError, match=said):
        make("template", family).build_supervised_example(messages)


def test_renderings_are_few_and_remembered(make, monkeypatch):
    renderer = make("template", "qwen3")
    made = []
    render = renderer._template.render
    monkeypatch.setattr(
        renderer._template, "render", lambda *a, **k: made.append(1) or render(*a, **k)
    )
    messages = [QUESTION]
    for turn in range(6):
        renderer.build_generation_prompt(messages)
        messages += [ANSWER | {"content": f"Because of {turn}."}, QUESTION]
    # Each turn: its prompt and, once, the text with the answer to the one before.
    assert len(made) <= 2 * 6 + 2


def test_answers_of_long_conversations_are_located_once(make, monkeypatch):
    renderer = make("template", "smollm2")
    # As in a conversation with more texts than this cache has.
    monkeypatch.setattr(
        renderer._template, "render_keys", lru_cache(8)(renderer._template._render_keys)
    )
    renderings = []
    render = renderer._template.render
    monkeypatch.setattr(
        renderer._template, "render", lambda *a, **kw: renderings.append(a) or render(*a, **kw)
    )
    messages = [QUESTION, ANSWER] * 10
    prompt = renderer.build_generation_prompt([*messages, QUESTION]).to_ints()
    before = len(renderings)
    longer = renderer.build_generation_prompt([*messages, QUESTION, ANSWER, QUESTION]).to_ints()
    assert longer[: len(prompt)] == prompt
    assert len(renderings) - before <= 4
