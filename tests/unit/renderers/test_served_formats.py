"""What the OpenAI-compatible endpoint makes of every family's answers, calls and results."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rendering_cases import checked
from test_families import CASES, TOOLS, load  # noqa: F401 - a fixture

from tinker_cookbook.engine.sampling.options import SamplingSettings
from tinker_cookbook.renderers import ToolCall
from tinker_cookbook.renderers.core.messages import ensure_list
from tinker_cookbook.server.openai.completions import ChatChoice, chat_prompt
from tinker_cookbook.server.openai.protocol import CallPolicy, Tool
from tinker_cookbook.server.openai.sampling import SamplingOptions
from tinker_cookbook.server.openai.text import SampledToken

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
calling = pytest.mark.parametrize(
    "case", [case for case in CASES if case.declares_tools is not None], ids=lambda c: c.label
)


def said(renderer: Any, tokens: list[int], cuts: list[int]) -> tuple[dict, dict, str]:
    """The message of an answer, the same put together from its stream, and why it ended."""
    stops = renderer.get_stop_sequences()
    model = SimpleNamespace(codec=renderer.codec, eos_ids=())
    settings = SamplingSettings.of(SimpleNamespace(stop=stops), ())
    options = SamplingOptions(model, settings, 1, None)  # type: ignore[arg-type]
    choice = ChatChoice(0, options, renderer.message_reader(), CallPolicy())
    chunks = choice.begin(None)
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        added = choice.add([SampledToken(token, None) for token in tokens[start:end]])
        chunks += [added] if added else []
    chunks += choice.end("stop")
    streamed: dict[str, Any] = defaultdict(str)
    for chunk in chunks:
        for name, value in chunk["delta"].items():
            streamed[name] = value if name == "tool_calls" else streamed[name] + value
    whole = choice.whole()
    return whole["message"], streamed, whole["finish_reason"]


@each_case
def test_openai_answers_round_trip(load, case):  # noqa: F811
    side = load(case)

    @checked(6)
    @given(answer=case.answers, data=st.data())
    def check(answer, data):
        tokens = side.sampled(answer)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=6)))
        message, streamed, finish = said(side.renderer, tokens, cuts)
        parts = ensure_list(answer["content"])
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        thinking = "".join(part["thinking"] for part in parts if part["type"] == "thinking")
        calls = [call.function for call in answer.get("tool_calls", [])]
        assert finish == ("tool_calls" if calls else "stop")
        assert (message["content"] or "") == streamed["content"] == text
        assert message.get("reasoning_content", "") == streamed["reasoning_content"] == thinking
        for found in (message.get("tool_calls", []), streamed["tool_calls"] or []):
            assert [one["function"]["name"] for one in found] == [one.name for one in calls]
            given_to = [json.loads(one["function"]["arguments"]) for one in found]
            assert given_to == [json.loads(one.arguments) for one in calls]

    check()


@calling
def test_tool_result_prompt_equals_the_template(load, case):  # noqa: F811
    """Tools, question, call and result in OpenAI's form, against the template's tokens."""
    side = load(case)
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    question = {"role": "user", "content": "How is it in Oslo?"}
    call = {"id": "call00001", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "call00001", "content": "Snow."}
    asked = [question, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    declared = [{"type": "function", "function": copy.deepcopy(dict(tool))} for tool in TOOLS]
    inner = [
        question,
        {"role": "assistant", "content": "", "tool_calls": [ToolCall.model_validate(call)]},
        {**result, "name": "get_weather"},
    ]
    expected = side.expected(inner, prompt=True, tools=declared, **case.declares_tools)
    tools = [Tool.model_validate(tool) for tool in declared]
    assert chat_prompt(side.renderer, asked, tools).to_ints() == expected
