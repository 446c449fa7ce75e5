"""``/responses`` with the ``openai`` package: items, events, tools and schemas."""

from __future__ import annotations

import json

import openai
import pytest
from pydantic import BaseModel

pytest.importorskip("llguidance", reason="structured output is an extra: pip install llguidance")

INSTRUCTIONS = "You tell stories."
MESSAGES = [
    {"role": "system", "content": INSTRUCTIONS},
    {"role": "user", "content": "Tell me of a dog."},
]
COLON = {"renderer_name": "role_colon"}
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "strict": True,
}


class City(BaseModel):
    model_config = {"extra": "forbid"}

    size: int
    large: bool


def test_a_response_is_the_answer_of_chat(oai, stories_model):
    more = {"model": stories_model, "top_p": 0.9, "extra_body": {"seed": 5, **COLON}}
    chat = oai.chat.completions.create(messages=MESSAGES, max_tokens=30, **more)
    ask = {"max_output_tokens": 30, "instructions": INSTRUCTIONS, **more}
    found = oai.responses.create(input="Tell me of a dog.", **ask)
    assert found.output_text == chat.choices[0].message.content
    assert found.usage.output_tokens == chat.usage.completion_tokens
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Tell me of a dog."}]}]
    assert oai.responses.create(input=parts, **ask).output_text == found.output_text
    events = list(oai.responses.create(input=parts, stream=True, **ask))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == found.output_text == events[-1].response.output_text


def test_a_tool_call_goes_round(oai, scripted_model):
    ask = {
        "model": scripted_model,
        "tools": [ADD],
        "max_output_tokens": 200,
        "extra_body": {"renderer_name": "qwen2_5", "seed": 1},
    }
    found = oai.responses.create(input="1 + 2", tool_choice="required", **ask)
    call = found.output[0]
    assert (call.type, call.name, found.status) == ("function_call", "add", "completed")
    assert 0 <= json.loads(call.arguments)["a"] <= 99
    history = [
        {"role": "user", "content": "1 + 2"},
        *[item.model_dump(exclude_none=True) for item in found.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]
    again = oai.responses.create(input=history, **ask)
    same = oai.chat.completions.create(
        model=scripted_model,
        messages=[
            {"role": "user", "content": "1 + 2"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": item.call_id,
                        "type": "function",
                        "function": {"name": "add", "arguments": item.arguments},
                    }
                    for item in found.output
                ],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "3"},
        ],
        tools=[{"type": "function", "function": {k: v for k, v in ADD.items() if k != "type"}}],
        max_tokens=1,
        extra_body=ask["extra_body"],
    )
    assert again.usage.input_tokens == same.usage.prompt_tokens
    named = {"type": "function", "name": "add"}
    events = list(oai.responses.create(input="1", tool_choice=named, stream=True, **ask))
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(e.arguments).keys() for e in done] == [{"a"}]
    assert events[-1].response.output[0].arguments == done[0].arguments
    with oai.responses.stream(input="1", tool_choice=named, **ask) as stream:
        assert stream.get_final_response().output[0].arguments == done[0].arguments


def test_a_schema_is_parsed(oai, scripted_model):
    for seed in range(3):
        found = oai.responses.parse(
            model=scripted_model,
            input="A city",
            text_format=City,
            max_output_tokens=200,
            include=["message.output_text.logprobs"],
            extra_body={"renderer_name": "qwen2_5", "seed": seed},
        )
        if found.status == "completed":
            assert isinstance(found.output_parsed, City)
        assert found.output[0].content[0].logprobs[0].token == "{"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"reasoning": {"effort": "low"}}, "renderer_name"),
        ({"extra_body": {"n": 3, **COLON}}, "n"),
        ({"input": [{"type": "reasoning", "summary": ["x"]}]}, "input[0].content[0]"),
        ({"text": {"format": {"type": "grammar"}}}, "response_format"),
    ],
)
def test_unsupported_requests_are_refused(oai, stories_model, more, param):
    ask = {"model": stories_model, "input": "Hi", "max_output_tokens": 4, "extra_body": COLON}
    with pytest.raises(openai.BadRequestError) as error:
        oai.responses.create(**{**ask, **more})
    assert error.value.response.json()["error"]["param"] == param
