"""gpt-oss: options, tool declarations, the reader, and training where history is not as sampled."""

from __future__ import annotations

import copy
import pickle
import re
from datetime import date

import pytest
from families.gpt_oss import CASES, conversations
from family_case import Side
from gpt_oss_cases import (
    MEDIUM,
    USER,
    prompt_text,
)
from hypothesis import given
from hypothesis import strategies as st
from rendering_cases import body, checked, cut_conversations

from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers import GptOssRenderer, ToolCall, get_renderer, gpt_oss
from tinker_cookbook.tokenizer_utils import get_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return get_tokenizer(tokenizer_folder("gptoss"))


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return get_renderer(MEDIUM, tokenizer)


@pytest.fixture(scope="module")
def load(tokenizer, shared_dir):
    return lambda case: Side.load(
        case, tokenizer, shared_dir / "tokenizers", split_special_tokens=False
    )


# The template


def test_open_calls_with_thinking_equal_the_template(load):
    side = load(CASES[-1])

    @checked(50)
    @given(messages=cut_conversations(conversations(open_thinking=True)))
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

    @checked(80)
    @given(tools=st.lists(_tools, min_size=1, max_size=3), system=body)
    def check(tools, system):
        prefix = side.renderer.create_conversation_prefix_with_tools(tools, system)
        with_system = [{"role": "system", "content": system}] if system else []
        declared = [{"type": "function", "function": copy.deepcopy(tool)} for tool in tools]
        assert side.prompt([*prefix, USER]) == side.expected(
            [*with_system, USER], prompt=True, tools=declared
        )

    check()


# Options


@pytest.mark.parametrize(
    ("option", "error"),
    [
        (
            "reasoning_effort=hihg",
            "reasoning_effort: got 'hihg', expected one of low, medium, high",
        ),
        ("tool_format=x", "tool_format: got 'x', expected one of harmony, template"),
    ],
)
def test_invalid_options_are_refused(tokenizer, option, error):
    with pytest.raises(ConfigurationError, match=error):
        get_renderer(f"{MEDIUM}&{option}", tokenizer)


def test_the_date_is_resolved_once(tokenizer, monkeypatch):
    class Later(date):
        @classmethod
        def today(cls):
            return cls(2031, 5, 6)

    made = get_renderer("gpt_oss_low_reasoning", tokenizer)
    assert made.spec == f"gpt_oss_low_reasoning?current_date={date.today().isoformat()}"
    own = GptOssRenderer(tokenizer, use_system_prompt=True, reasoning_effort="low")
    before = prompt_text(made, [USER])
    assert prompt_text(own, [USER]) == before
    monkeypatch.setattr(gpt_oss, "date", Later)
    assert "2031-05-06" in prompt_text(get_renderer("gpt_oss_low_reasoning", tokenizer), [USER])
    again = pickle.loads(pickle.dumps(made))
    assert again.spec == made.spec
    assert prompt_text(again, [USER]) == before


def test_calls_and_results_as_harmony_writes_them(tokenizer):
    renderer = get_renderer("gpt_oss_no_sysprompt", tokenizer)
    two = [ToolCall(function=ToolCall.FunctionBody(name=n, arguments='{"x":1}')) for n in "fg"]
    result = {"role": "tool", "name": "f", "content": '{"t": 20}'}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": two}, result]
    assert prompt_text(renderer, messages) == (
        "<|start|>user<|message|>Hi<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"x":1}'
        "<|call|>"
        '<|start|>assistant to=functions.g<|channel|>commentary <|constrain|>json<|message|>{"x":1}'
        "<|call|>"
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>{"t": 20}<|end|>'
        "<|start|>assistant"
    )
    as_template = get_renderer("gpt_oss_no_sysprompt?tool_format=template", tokenizer)
    with pytest.raises(RendererError, match="got 2 calls, expected one"):
        as_template.build_generation_prompt(messages)


@pytest.mark.parametrize(
    ("results", "authors"),
    [
        ([{}, {}], ["f", "g"]),
        ([{"tool_call_id": "2"}, {"tool_call_id": "1"}], ["g", "f"]),
        ([{"name": "g"}, {"name": "f"}], ["g", "f"]),
        ([{"name": "g", "tool_call_id": "1"}, {"tool_call_id": "unknown"}], ["f", "g"]),
        ([{}, {"name": "unknown"}, {}], ["f", "g", "g"]),
    ],
)
def test_each_result_has_the_name_of_its_call(tokenizer, results, authors):
    renderer = get_renderer("gpt_oss_no_sysprompt", tokenizer)
    calls = [{"id": i, "function": {"name": n, "arguments": "{}"}} for i, n in ("1f", "2g")]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    messages += [{"role": "tool", "content": "x", **result} for result in results]
    written = re.findall(r"functions\.(\w) to=assistant", prompt_text(renderer, messages))
    assert written == authors
