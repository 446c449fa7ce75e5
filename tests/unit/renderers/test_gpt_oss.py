"""gpt-oss: options, tool declarations, the reader, and training where history is not as sampled."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
from families.gpt_oss import CASES, conversations
from family_case import Side
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rendering_cases import body, cut_conversations

from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers import (
    ParseTermination,
    TextPart,
    ThinkingPart,
    ToolCall,
    UnparsedToolCall,
    get_renderer,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

MEDIUM = "gpt_oss_medium_reasoning"
USER = {"role": "user", "content": "Hi"}
CALL = ToolCall(function=ToolCall.FunctionBody(name="f", arguments='{"x": 1}'))
RESULT = {"role": "tool", "content": "20"}
STOP, CALL_END = "<|return|>", "<|call|>"


def thinking(text):
    return ThinkingPart(type="thinking", thinking=text)


def part(text):
    return TextPart(type="text", text=text)


def calling(*content):
    return {"role": "assistant", "content": list(content), "tool_calls": [CALL]}


def checked(number):
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return get_tokenizer(tokenizer_folder("gptoss"))


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return get_renderer(MEDIUM, tokenizer)


@pytest.fixture(scope="module")
def load(tokenizer, shared_dir):
    return lambda case: Side.load(case, tokenizer, shared_dir / "tokenizers")


def prompt_text(renderer, messages):
    return renderer.tokenizer.decode(renderer.build_generation_prompt(messages).to_ints())


def parse(renderer, text):
    return renderer.parse_response(renderer.tokenizer.encode(text, add_special_tokens=False))


# The template


@pytest.mark.parametrize("case", CASES[-2:], ids=lambda case: case.label)
def test_open_calls_with_thinking_equal_the_template(load, case):
    side = load(case)
    beside = "analysis" in case.spec

    @checked(150)
    @given(messages=cut_conversations(conversations(beside, open_thinking=True)))
    def check(messages):
        assert side.tokens(messages) == side.expected(messages)
        assert side.prompt(messages) == side.expected(messages, prompt=True)

    check()


def _with_extras(schema):
    words = st.sampled_from(["Where?", "é", ""])
    extras = st.fixed_dictionaries(
        {}, optional={"description": words, "nullable": st.booleans(), "default": st.just("a")}
    )
    return st.builds(lambda s, e: {**s, **e} if isinstance(s, dict) else s, schema, extras)


_leaves = _with_extras(
    st.sampled_from(
        [
            *[{"type": kind} for kind in ("string", "number", "integer", "boolean", "object")],
            *[{"type": "array"}, {"type": "string", "enum": ["C", "F"]}, {}, True, {"type": "x"}],
            *[{"type": ["string", "null"]}, {"type": ["number"]}, {"type": "string", "enum": []}],
        ]
    )
)


def _nested(inner):
    properties = st.dictionaries(st.sampled_from(["a", "b_c", "items"]), inner, max_size=3)
    required = st.lists(st.sampled_from(["a", "items"]), unique=True)
    return _with_extras(
        st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(lambda variants: {"oneOf": variants}, st.lists(inner, max_size=3))
        | st.builds(
            lambda p, r: {"type": "object", "properties": p, "required": r}, properties, required
        )
        | st.builds(lambda i, v: {"type": i, "oneOf": v}, st.just("integer"), st.lists(inner))
    )


_schemas = st.recursive(_leaves, _nested, max_leaves=6)
_parameters = st.one_of(
    st.just({}),
    st.builds(
        lambda p, r: {"type": "object", "properties": p, **({"required": r} if r else {})},
        st.dictionaries(st.sampled_from(["city", "n", "ort"]), _schemas, max_size=3),
        st.lists(st.sampled_from(["city", "n"]), unique=True),
    ),
)
_tools = st.builds(
    lambda name, text, parameters: {"name": name, "description": text, "parameters": parameters},
    st.sampled_from(["f", "get_weather"]),
    st.sampled_from(["", "Says how.", 'é "x"\nline']),
    _parameters,
)


def test_declared_tools_equal_the_template(load):
    side = load(CASES[1])

    @checked(300)
    @given(tools=st.lists(_tools, min_size=1, max_size=3), system=body)
    def check(tools, system):
        prefix = side.renderer.create_conversation_prefix_with_tools(tools, system)
        with_system = [{"role": "system", "content": system}] if system else []
        declared = [{"type": "function", "function": copy.deepcopy(tool)} for tool in tools]
        assert side.prompt([*prefix, USER]) == side.expected(
            [*with_system, USER], prompt=True, tools=declared
        )

    check()


def test_defaults_that_are_not_text(load):
    side = load(CASES[1])
    values = [None, 1, 0.5, True, "ü", [1, "a"], {"k": None}]
    properties = {f"p{i}": {"type": "number", "default": v} for i, v in enumerate(values)}
    tool = {"name": "f", "description": "d", "parameters": {"properties": properties}}
    declared = {"type": "function", "function": tool}
    for given_tool in (tool, declared):
        prefix = side.renderer.create_conversation_prefix_with_tools([given_tool])
        assert side.prompt([*prefix, USER]) == side.expected([USER], prompt=True, tools=[declared])


# Options


def test_without_system_prompt_the_rest_is_the_same(load, tokenizer):
    side, bare = load(CASES[1]), get_renderer("gpt_oss_no_sysprompt", tokenizer)
    system = len(side.prompt([])) - 2

    @checked(100)
    @given(messages=CASES[1].conversations)
    def check(messages):
        for build in ("build_generation_prompt", "build_supervised_example"):
            whole, short = (getattr(r, build)(messages) for r in (side.renderer, bare))
            whole, short = (x if hasattr(x, "to_ints") else x[0] for x in (whole, short))
            assert short.to_ints() == whole.to_ints()[system:]

    check()


def test_options_are_written(tokenizer):
    spec = "gpt_oss_high_reasoning?model_identity=You%20are%20Bo.&today_date=2026-01-31"
    text = prompt_text(get_renderer(spec, tokenizer), [USER])
    assert text.startswith(
        "<|start|>system<|message|>You are Bo.\nKnowledge cutoff: 2024-06\n"
        "Current date: 2026-01-31\n\nReasoning: high\n\n# Valid channels"
    )
    again = pickle.loads(pickle.dumps(get_renderer(spec, tokenizer)))
    assert prompt_text(again, [USER]) == text


@pytest.mark.parametrize(
    ("option", "error"),
    [
        (
            "reasoning_effort=hihg",
            "reasoning_effort: got 'hihg', expected one of low, medium, high",
        ),
        ("text_before_call=final", "text_before_call: got 'final', expected one of commentary"),
    ],
)
def test_wrong_options_are_refused(tokenizer, option, error):
    with pytest.raises(ConfigurationError, match=error):
        get_renderer(f"{MEDIUM}?{option}", tokenizer)


def test_tools_without_system_prompt_are_declared_alone(tokenizer):
    bare = get_renderer("gpt_oss_no_sysprompt", tokenizer)
    assert bare.create_conversation_prefix_with_tools([], "") == []
    assert bare.create_conversation_prefix_with_tools([], "s") == [
        {"role": "system", "content": "s"}
    ]
    tool = {"name": "f", "description": "d", "parameters": {}}
    prefix = bare.create_conversation_prefix_with_tools([tool], "Be brief.")
    assert prompt_text(bare, [*prefix, USER]) == (
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\n"
        "namespace functions {\n\n// d\ntype f = () => any;\n\n} // namespace functions<|end|>"
        "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    )


# Training


def test_each_trained_answer_has_the_prompt_of_inference(load):
    side = load(CASES[1])

    @checked(100)
    @given(messages=cut_conversations(conversations(False, open_thinking=True)))
    def check(messages):
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        examples = side.renderer.build_supervised_examples(messages, "all_assistant_messages")
        spans = []
        for example, weights in examples:
            tokens, trained = example.to_ints(), [*weights.tolist(), 0.0]
            starts = [i for i, w in enumerate(trained) if w and not (i and trained[i - 1])]
            spans += [(tokens[:i], tokens[i : i + trained[i:].index(0.0)]) for i in starts]
        assert len(spans) == len(answers)
        for i, (prompt, said) in zip(answers, spans, strict=True):
            assert prompt == side.expected(messages[:i], prompt=True)
            alone = {**messages[i], "role": "assistant"}
            assert said == side.expected([USER, alone])[len(side.expected([USER], prompt=True)) :]

    check()


def test_calls_share_an_example_with_their_answer(renderer):
    first = calling(thinking("t"))
    answer = {"role": "assistant", "content": [thinking("u"), part("a")]}
    messages = [USER, first, RESULT, first, RESULT, answer]
    examples = renderer.build_supervised_examples([*messages, *messages])
    assert len(examples) == 1
    both = renderer.build_supervised_examples([*messages, *messages], "all_assistant_messages")
    assert len(both) == 2
    text = renderer.tokenizer.decode(both[0][0].to_ints())
    assert text.count("<|channel|>analysis<|message|>t<|end|>") == 2
    single = renderer.build_supervised_example(messages, "all_assistant_messages")[0]
    assert "<|message|>t<|end|>" not in renderer.tokenizer.decode(single.to_ints())


def test_examples_without_an_answer_and_with_a_trained_question(renderer):
    [(_, weights)] = renderer.build_supervised_examples([USER])
    assert not weights.any()
    trained = [
        {**USER, "trainable": True},
        {"role": "assistant", "content": "a", "trainable": True},
        {**USER, "trainable": True},
    ]
    examples = renderer.build_supervised_examples(trained, "customized")
    assert [int(weights.sum()) for _, weights in examples] == [7, 2]
    whole = renderer.build_supervised_examples(trained, "all_tokens")
    assert all(weights.all() for _, weights in whole)


# The reader


@pytest.mark.parametrize("start", ["", "<|start|>assistant"])
@pytest.mark.parametrize(
    "header",
    [
        " to=functions.f<|channel|>commentary json",
        " to=functions.f<|channel|>commentary <|constrain|>json",
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>commentary to=functions.f ",
        "<|channel|>analysis to=functions.f code",
    ],
)
def test_calls_are_read_with_the_recipient_anywhere(renderer, header, start):
    before = "<|channel|>analysis<|message|>t<|end|><|start|>assistant"
    spelled = '{"x":1, "y": "<|end|>"}'
    call = ToolCall(function=ToolCall.FunctionBody(name="f", arguments=spelled))
    message, how = parse(renderer, f"{start}{header}<|message|>{spelled}{CALL_END}")
    assert how is ParseTermination.STOP_SEQUENCE
    assert message == {"role": "assistant", "content": "", "tool_calls": [call]}
    message, _ = parse(renderer, f"{before}{header}<|message|>{spelled}{CALL_END}")
    assert message == {
        "role": "assistant",
        "content": [thinking("t")],
        "tool_calls": [call],
    }
    assert spelled in prompt_text(renderer, [USER, message, RESULT])


def test_messages_in_a_row(renderer):
    text = (
        "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Wait.<|end|><|start|>assistant<|channel|>analysis<|message|>u<|end|><|start|>assistant"
        "<|channel|>final<|message|>a"
    )
    message, _ = parse(renderer, text + STOP)
    assert message["content"] == [thinking("t"), part("Wait."), thinking("u"), part("a")]
    example, weights = renderer.build_supervised_example([USER, message])
    said = [t for t, w in zip(example.to_ints(), weights.tolist(), strict=True) if w]
    assert renderer.tokenizer.decode(said) == text + STOP
    assert prompt_text(renderer, [USER, message]).endswith(
        "<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>a<|end|><|start|>assistant"
    )


@pytest.mark.parametrize(
    ("response", "content"),
    [
        ("Hello", "Hello"),
        ("", ""),
        ("set x to=5", "set x to=5"),
        ("<|channel|>final", "<|channel|>final"),
        ("<|channel|>foo<|message|>a", "<|channel|>foo<|message|>a"),
        ("<|message|>a", "<|message|>a"),
        ("Hello<|end|><|start|>assistant<|channel|>final<|message|>a", "Helloa"),
        ("<|end|><|end|>", ""),
        ("<|channel|>final<|message|>a<|end|>b", "ab"),
        (
            "<|channel|>final<|message|>a<|end|><|channel|>final<|message|>b",
            "a<|channel|>final<|message|>b",
        ),
        (
            "<|channel|>final<|message|>a<|end|><|start|>user<|message|>b<|end|>",
            "a<|start|>user<|message|>b",
        ),
        ("x" * 1000 + "<|message|>a", "x" * 1000 + "<|message|>a"),
        ("<|channel|>final<|message|>a<|e", "a<|e"),
    ],
)
def test_what_has_no_header_is_text(renderer, response, content):
    message, _ = parse(renderer, response + STOP)
    assert message == {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("raw", "error", "author"),
    [
        (" to=functions.f<|channel|>commentary json<|message|>{", "Expecting", "functions.f"),
        (" to=functions.f<|channel|>commentary json<|message|>[1]", "JSON object", "functions.f"),
        ("<|channel|>analysis to=python code<|message|>print(1)", "to 'python'", "python"),
        ("<|channel|>commentary to=functions.f<|message|>{}<|end|>", "Extra data", "functions.f"),
        ("<|channel|>commentary to=functions.f", "unterminated tool block", "functions.f"),
        ("<|channel|>commentary to=functions.f<|message|>" + "[" * 99_999, "", "functions.f"),
    ],
)
def test_calls_that_cannot_be_read_are_kept_and_written_back(renderer, raw, error, author):
    message, _ = parse(renderer, f"<|start|>assistant{raw}{CALL_END}")
    [call] = message["unparsed_tool_calls"]
    assert error in call.error
    assert call.raw_text == raw
    assert prompt_text(renderer, [USER, message, RESULT]).endswith(
        f"<|start|>assistant{raw}<|call|><|start|>{author} to=assistant<|channel|>commentary"
        '<|message|>"20"<|end|><|start|>assistant'
    )


# Refused, warned of


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([{**calling(), "tool_calls": [CALL, CALL]}], r"messages\[0\].tool_calls: got 2 calls"),
        ([USER, {"role": "system", "content": "s"}], r"messages\[1\].role: got 'system'"),
        ([USER, {"role": "developer", "content": "s"}], r"messages\[1\].role: got 'developer'"),
        ([{"role": "critic", "content": "s"}], r"messages\[0\].role: got 'critic'"),
        ([USER, RESULT], r"messages\[1\].role: got a tool result, expected a tool call before it"),
        ([{"role": "assistant", "content": "a"}, RESULT], "expected a tool call before it"),
        ([{**USER, "tool_calls": [CALL]}], r"messages\[0\].tool_calls: got tool calls by role"),
        ([{**USER, "content": [thinking("t")]}], "cannot write a part of type 'thinking'"),
        (
            [{"role": "assistant", "content": [{"type": "image", "image": "x.png"}]}],
            "cannot write a part of type 'image', expected text or thinking",
        ),
    ],
)
def test_what_the_format_cannot_say_is_refused(renderer, messages, error):
    with pytest.raises(RendererError, match=error):
        renderer.build_generation_prompt(messages)


@pytest.mark.parametrize("arguments", ["", "x", "[1]", '"{}"'])
def test_arguments_that_are_no_object_are_refused(renderer, arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RendererError, match="expected a JSON object"):
        renderer.build_generation_prompt([{**calling(), "tool_calls": [call]}])


def test_text_beside_a_call(renderer, tokenizer):
    both = calling(thinking("t"), part("Wait."))
    assert (
        "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Wait.<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
        '{"x": 1}<|call|>'
    ) in prompt_text(renderer, [USER, both])
    hidden = get_renderer(f"{MEDIUM}?text_before_call=analysis", tokenizer)
    assert "<|channel|>analysis<|message|>Wait.<|end|>" in prompt_text(
        hidden, [USER, calling(part("Wait."))]
    )
    with pytest.raises(RendererError, match="got thinking and text beside a tool call"):
        hidden.build_generation_prompt([USER, both])


def test_a_result_without_its_call_takes_the_name_it_is_given(renderer):
    for name in ("f", "functions.f"):
        text = prompt_text(renderer, [{**RESULT, "name": name}])
        assert text.endswith(
            '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"20"<|end|>'
            "<|start|>assistant"
        )
    unnamed = UnparsedToolCall(raw_text="?", error="e")
    message = {"role": "assistant", "content": "", "unparsed_tool_calls": [unnamed]}
    with pytest.raises(RendererError, match="add the call, or 'name'"):
        renderer.build_generation_prompt([message, RESULT])


def test_headers_in_the_text_of_an_answer_are_warned_of(tokenizer, caplog):
    fresh = get_renderer(MEDIUM, tokenizer)
    message = {"role": "assistant", "content": "<|channel|>final<|message|>a"}
    with caplog.at_level(logging.WARNING):
        fresh.build_supervised_example([USER, message])
        fresh.build_supervised_example([USER, message])
    assert [r.message.count("becomes a header of its own") for r in caplog.records] == [1]
