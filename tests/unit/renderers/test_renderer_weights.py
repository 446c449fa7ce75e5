"""Which tokens are trained on, how conversations are split, and the extension property."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from rendering_cases import dialogues, qwen_conversations, scan_answers, untagged

from tinker_cookbook.renderers import ThinkingPart, ToolCall, TrainOnWhat
from tinker_cookbook.renderers.qwen3 import Qwen3Renderer
from tinker_cookbook.supervised.data import conversation_to_data

examples = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
plain = untagged.map(lambda t: t.strip() or "x")
CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "A2"},
    {"role": "tool", "content": "T"},
    {"role": "assistant", "content": "A3"},
]
FRAMES = {
    "smollm2": ("smollm2", "<|im_start|>assistant\n", "<|im_end|>"),
    "qwen3_instruct": ("qwen3", "<|im_start|>assistant\n", "<|im_end|>"),
    "llama3": ("llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
}


def trained_text(renderer, messages, what):
    model_input, weights = renderer.build_supervised_example(messages, what)
    assert weights.dtype == torch.float32
    assert weights.shape == (model_input.length,)
    assert set(weights.tolist()) <= {0.0, 1.0}
    return [
        renderer.tokenizer.decode(token)
        for token, weight in zip(model_input.to_ints(), weights.tolist(), strict=True)
        if weight
    ]


@pytest.mark.parametrize("spec", FRAMES)
@examples
@given(messages=dialogues(user=plain, reply=plain, system=plain, ends_with_answer=True))
def test_weights_of_all_answers_by_scanning_ids(make_renderer, spec, messages):
    family, opening, closing = FRAMES[spec]
    renderer = make_renderer(spec, family)
    model_input, weights = renderer.build_supervised_example(messages, "all_assistant_messages")
    encode = renderer.tokenizer.encode
    opening_ids = encode(opening, add_special_tokens=False)
    closing_id = renderer.tokenizer.convert_tokens_to_ids(closing)
    assert weights.tolist() == scan_answers(model_input.to_ints(), opening_ids, closing_id)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("last_assistant_message", "A3|"),
        ("last_assistant_turn", "A2|A3|"),
        ("all_assistant_messages", "A1|A2|A3|"),
        ("all_messages", "S|one|A1|two|A2|T|A3|"),
        ("all_user_and_system_messages", "S|one|two|"),
    ],
)
def test_each_train_on_what(make_renderer, what, expected):
    renderer = make_renderer("smollm2", "smollm2")
    trained = "".join(trained_text(renderer, CONVERSATION, what))
    assert trained == expected.replace("|", "<|im_end|>")
    assert trained == "".join(trained_text(renderer, CONVERSATION, TrainOnWhat(what)))


def test_white_space_that_merges_with_the_header_is_not_trained(make_renderer):
    renderer = make_renderer("smollm2", "smollm2")
    messages = [{"role": "user", "content": "  Hi"}]
    assert trained_text(renderer, messages, "all_messages") == [" Hi", "<|im_end|>"]
    tokens = renderer.build_supervised_example(messages)[0].to_ints()
    assert "\n " in [renderer.tokenizer.decode(token) for token in tokens]


def test_role_colon_trains_the_stop_sequence_of_every_answer(make_renderer):
    messages = [m for m in CONVERSATION if m["role"] != "tool"][:-1]
    renderer = make_renderer("role_colon", "llama3")
    trained = trained_text(renderer, messages, "all_assistant_messages")
    assert "".join(trained) == " A1\n\nUser: A2\n\nUser:"
    tokens = renderer.build_supervised_example(messages)[0].to_ints()
    assert renderer.tokenizer.decode(tokens) == (
        "<|begin_of_text|>System: S\n\nUser: one\n\nAssistant: A1\n\nUser: two\n\n"
        "Assistant: A2\n\nUser:"
    )


def thinking_turn(question, thought, reply):
    content = [ThinkingPart(type="thinking", thinking=thought), {"type": "text", "text": reply}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": content}]


@pytest.mark.parametrize("what", ["all_assistant_messages", "last_assistant_turn", "all_messages"])
@pytest.mark.parametrize("build", ["build_supervised_examples", "build_merged_examples"])
@examples
@given(messages=qwen_conversations())
def test_split_examples_train_on_inference_prompts(make_renderer, build, what, messages):
    renderer = make_renderer("qwen3", "qwen3")
    split = getattr(renderer, build)(messages, what)
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if what == "last_assistant_turn":
        last_question = max(i for i, m in enumerate(messages) if m["role"] == "user")
        answers = [i for i in answers if i > last_question]
    unseen = {i: renderer.build_generation_prompt(messages[:i]).to_ints() for i in answers}
    for model_input, weights in split:
        tokens, weights = model_input.to_ints(), weights.tolist()
        for i in list(unseen):
            start = len(unseen[i])
            if tokens[:start] == unseen[i] and weights[start : start + 1] == [1.0]:
                del unseen[i]
    assert not unseen  # each answer is trained behind the prompt that inference gives it
    if what != "all_messages":
        single = [renderer.build_supervised_example(messages[: i + 1])[1].sum() for i in answers]
        assert sum(w.sum() for _, w in split) == sum(single)  # … and exactly once


def test_turns_that_extend_share_an_example(make_renderer):
    call = ToolCall(function=ToolCall.FunctionBody(name="f", arguments="{}"))
    first = [*thinking_turn("q", "t1", ""), {"role": "tool", "content": "r"}]
    first[1]["tool_calls"] = [call]
    answer = thinking_turn("", "t2", "a")[1]
    messages = [*first, answer, *thinking_turn("next", "t3", "b")]
    renderer = make_renderer("qwen3", "qwen3")
    what = "all_assistant_messages"
    split = renderer.build_merged_examples(messages, what)
    assert len(split) == 2
    apart = renderer.build_supervised_examples(messages, what)
    assert [m.to_ints() for m, _ in apart[1:]] == [m.to_ints() for m, _ in split]
    assert sum(w.sum() for _, w in apart) == sum(w.sum() for _, w in split)
    for (model_input, weights), end in zip(apart, (1, 3, 5), strict=True):
        prompt = renderer.build_generation_prompt(messages[:end]).to_ints()
        assert model_input.to_ints()[: len(prompt)] == prompt
        assert weights.tolist().index(1.0) == len(prompt)
    decode = renderer.tokenizer.decode
    trained = [
        "".join(decode(t) for t, w in zip(m.to_ints(), ws, strict=True) if w) for m, ws in split
    ]
    assert [("t1" in t, "t2" in t, "t3" in t) for t in trained] == [
        (True, True, False),
        (False, False, True),
    ]


def test_datasets_follow_a_subclass_that_splits_in_its_own_way(make_renderer):
    class Own(Qwen3Renderer):
        def build_supervised_examples(self, messages, train_on_what="last_assistant_turn"):
            return [self.build_supervised_example(messages[:2])]

    renderer = Own(make_renderer("qwen3", "qwen3").tokenizer)
    messages = [*thinking_turn("q", "t", "a"), *thinking_turn("q", "t", "a")]
    assert len(conversation_to_data(messages, renderer, None)) == 1


def test_training_several_turns_unsplit_warns(make_renderer, caplog):
    messages = [*thinking_turn("q", "t", "a"), *thinking_turn("q", "t", "a")]
    make_renderer("qwen3", "qwen3").build_supervised_example(messages, "all_assistant_messages")
    assert "build_supervised_examples returns one example for each prompt" in caplog.text


def test_rendering_is_fast(make_renderer):
    renderer = make_renderer("qwen3", "qwen3")
    turn = [
        {"role": "user", "content": "How many eggs are left over on each day? " * 3},
        {"role": "assistant", "content": "She sells 9 eggs a day at $2, which makes $18. " * 3},
    ]
    renderer.build_supervised_example(turn)
    start, tokens = time.process_time(), 0
    for _ in range(20):
        tokens += renderer.build_supervised_example(turn * 20)[0].length
    assert tokens / (time.process_time() - start) > 20_000
