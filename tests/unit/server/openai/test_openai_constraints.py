"""Parameters that change or constrain the sampling, with the ``openai`` package."""

from __future__ import annotations

import json

import openai
import pytest

pytest.importorskip("llguidance", reason="structured output is an extra: pip install llguidance")
jsonschema = pytest.importorskip("jsonschema")

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["town", "père"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Describe a city."}]
SEEDS = range(4)


def tool(name, schema, strict=None):
    function = {"name": name, "description": "Does it.", "parameters": schema}
    return {
        "type": "function",
        "function": {**function, "strict": strict},
    }


NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [tool("city", CITY, True), tool("double", NUMBERS, True)]
BY_NAME = {"city": CITY, "double": NUMBERS}


@pytest.fixture
def chat(oai, scripted_model):
    """Chat with the model of random and scripted weights, in a format with tool calls."""

    def create(renderer_name="qwen2_5", **more):
        more = {"messages": QUESTION, "max_tokens": 300, **more}
        body = {"renderer_name": renderer_name, **more.pop("extra_body", {})}
        return oai.chat.completions.create(model=scripted_model, extra_body=body, **more)

    return create


def calls_of(found):
    (choice,) = found.choices
    calls = choice.message.tool_calls or []
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), BY_NAME[call.function.name])
    return choice, calls


def refused(error):
    body = error.value.response.json()["error"]
    return error.value.status_code, body["param"], body["message"]


FORMAT = {"type": "json_schema", "json_schema": {"name": "City", "schema": CITY, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_holds_for_random_weights(chat, stream):
    texts = []
    for seed in SEEDS:
        found = chat(response_format=FORMAT, seed=seed, n=2, stream=stream)
        if stream:
            parts = {0: "", 1: ""}
            for chunk in found:
                for choice in chunk.choices:
                    parts[choice.index] += choice.delta.content or ""
            texts += parts.values()
        else:
            assert found.model_extra["sampling_adjustments"] == ["token_mask"]
            assert {choice.finish_reason for choice in found.choices} == {"stop"}
            texts += [choice.message.content for choice in found.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), CITY)
    assert len(set(texts)) == len(texts)


def test_logprobs_of_masked_samples_are_the_models(chat, oai, scripted_model):
    found = chat(response_format=FORMAT, seed=1, logprobs=True, top_logprobs=2)
    content = found.choices[0].logprobs.content
    # The first token is a brace, which the random model would hardly sample.
    assert content[0].token == "{"
    assert content[0].logprob < -1
    assert all(one.top_logprobs[0].logprob >= one.logprob - 1e-5 for one in content)


@pytest.mark.parametrize(
    "renderer_name", ["qwen2_5", "qwen3", "qwen3_disable_thinking", "qwen3_5_disable_thinking"]
)
def test_a_call_is_demanded(chat, renderer_name):
    for seed in SEEDS:
        more = {"tools": TOOLS, "seed": seed, "parallel_tool_calls": False}
        # Thinking of random weights has no end.
        more |= {"logit_bias": {"2": -100}}
        choice, calls = calls_of(chat(renderer_name, tool_choice="required", **more))
        if choice.finish_reason == "length":
            assert renderer_name == "qwen3"
            continue
        assert (choice.finish_reason, choice.message.content, len(calls)) == ("tool_calls", None, 1)
        named = {"type": "function", "function": {"name": "double"}}
        choice, calls = calls_of(chat(renderer_name, tool_choice=named, **more))
        if choice.finish_reason != "length":
            assert [call.function.name for call in calls] == ["double"]


def test_strict_tools_are_constrained_where_the_model_calls(chat):
    """Behind a line break the scripted weights open a call; its name and arguments are masked."""
    called = 0
    for seed in SEEDS:
        choice, calls = calls_of(chat(tools=TOOLS, seed=seed, temperature=0.3))
        called += len(calls)
        assert (
            "<tool_call>" not in (choice.message.content or "") or choice.finish_reason == "length"
        )
    assert called


def test_no_call_is_made_where_none_is_allowed(chat):
    for seed in SEEDS:
        choice, calls = calls_of(chat(tools=TOOLS, tool_choice="none", seed=seed, max_tokens=30))
        assert not calls
        assert "<tool_call>" not in choice.message.content


def test_penalties_bias_and_lengths_have_their_effect(oai, stories_model):
    def create(**more):
        extra = {
            k: more.pop(k)
            for k in [*more]
            if k not in ("presence_penalty", "frequency_penalty", "logit_bias", "stop")
        }
        found = oai.completions.create(
            model=stories_model,
            prompt="Once",
            max_tokens=60,
            temperature=0,
            logprobs=0,
            extra_body=extra,
            **more,
        )
        return found.choices[0]

    plain = create()
    varied = create(presence_penalty=2, frequency_penalty=2).logprobs.tokens
    assert len(set(varied)) > len(set(plain.logprobs.tokens))
    tokens = create(repetition_penalty=10).logprobs.tokens
    assert len(set(tokens)) > 50
    assert set(create(logit_bias={"300": 100}).logprobs.tokens) == {
        tokens_of(oai, stories_model, 300)
    }
    assert create(min_p=1.0).text == plain.text
    short = create(stop=["a"])
    assert len(short.text) < len(plain.text)
    long = create(stop=["a"], min_tokens=20)
    assert len(long.text) > len(short.text)
    assert plain.text.startswith(long.text)
    ended = create(stop_token_ids=list(range(260, 512)))
    assert ended.finish_reason == "stop"


def tokens_of(oai, model, token):
    found = oai.completions.create(
        model=model, prompt=[1, token], max_tokens=1, echo=True, logprobs=0
    )
    return found.choices[0].logprobs.tokens[1]


BAD = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"response_format": BAD}, "response_format", "Invalid type: strin"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "city, double"),
        (
            {"tools": [TOOLS[0], tool("f", {"type": "array", "uniqueItems": True}, True)]},
            "tools[1].function.parameters",
            "uniqueItems",
        ),
        (
            {"tools": TOOLS, "extra_body": {"renderer_name": "role_colon"}},
            "role_colon",
            "declares no tools",
        ),
        (
            {"response_format": FORMAT, "extra_body": {"structured_outputs": {"choice": ["a"]}}},
            "structured_outputs",
            "several constraints",
        ),
        # An empty constraint, as of a client that filters its choices, is not "no constraint".
        *(
            ({"extra_body": {"structured_outputs": of}}, "structured_outputs", words)
            for of, words in (
                ({}, "no constraint"),
                ({"json": {"type": "string", "pattern": "(?!a)b"}}, "has look-around"),
                ({"regex": r"(a)\1"}, "a reference to a group"),
                ({"json": "{"}, "no JSON"),
                ({"json": "[1]"}, "schema: got [1]"),
                ({"choice": []}, "no choice"),
                ({"regex": ""}, "empty regular"),
                ({"json_object": False}, "no constraint"),
            )
        ),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        *(
            (
                {"extra_body": {"stop_token_ids": ids, **more}},
                "stop_token_ids",
                f"token id {ids[-1]}",
            )
            for ids in ([-1], [3, 100000])
            for more in ({}, {"min_tokens": 5})
        ),
        ({"logit_bias": {"5": 200}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": {"100000": 1}}, "logit_bias", "100000"),
        ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
        ({"extra_body": {"min_p": 2}}, "min_p", "from 0 to 1"),
        ({"extra_body": {"min_tokens": 400}}, "min_tokens", "max_tokens=300 at most"),
        ({"reasoning_effort": "low"}, "renderer_name", "no option 'reasoning_effort'"),
        (
            {"extra_body": {"chat_template_kwargs": {"enable_thinkin": True}}},
            "renderer_name",
            "no option 'enable_thinkin'",
        ),
    ],
)
def test_invalid_requests_name_the_field(chat, more, param, words):
    with pytest.raises(openai.BadRequestError) as error:
        chat(**more)
    status, found, message = refused(error)
    assert status == 400
    assert words in message
    assert found == param or param == "role_colon"
