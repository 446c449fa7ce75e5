"""Messages, prompts, stop reasons and tools of requests that Inspect makes."""

from __future__ import annotations

import asyncio

import pytest
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentDocument,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import ToolCall, ToolCallError, ToolFunction, tool
from inspect_models import ASK, CLOCK, WEATHER, ask, sequence

from tinker_cookbook.eval.inspect_bridge.model import (
    DEFAULT_MAX_TOKENS,
    convert_inspect_messages,
    get_model_usage,
)
from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers import get_renderer

# Messages


def test_messages_keep_text_reasoning_images_and_calls():
    call = ToolCall(id="c1", function="get_weather", arguments={"city": "Ré"})
    converted = convert_inspect_messages(
        [
            ChatMessageSystem(content="Be brief."),
            ChatMessageUser(content=[ContentText(text="see"), ContentImage(image="data:x")]),
            ChatMessageAssistant(
                content=[ContentReasoning(reasoning="hm"), ContentText(text="ok")],
                tool_calls=[call],
            ),
            ChatMessageTool(content="sunny", tool_call_id="c1", function="get_weather"),
            ChatMessageTool(
                content="", tool_call_id="c2", error=ToolCallError("timeout", "took too long")
            ),
        ]
    )
    assert converted[0] == {"role": "system", "content": "Be brief."}
    assert converted[1]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image", "image": "data:x"},
    ]
    assert converted[2]["content"][0] == {"type": "thinking", "thinking": "hm"}
    assert converted[2]["tool_calls"][0].function.arguments == '{"city": "Ré"}'
    assert converted[3] == {
        "role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "get_weather"
    }  # fmt: skip
    assert converted[4]["content"] == "took too long"


def test_a_part_that_no_format_has_is_an_error():
    document = ChatMessageUser(content=[ContentDocument(document="data:application/pdf;base64,")])
    with pytest.raises(RendererError, match=r"messages\[0\].content\[0\].*document"):
        convert_inspect_messages([document])


def test_usage_counts_the_prompt_once_and_cached_tokens_apart():
    sequences = [sequence([1] * n, "stop") for n in (3, 4)]
    usage = get_model_usage([1] * 10, sequences, cached_prompt_tokens=6)
    counted = usage.input_tokens, usage.input_tokens_cache_read, usage.output_tokens
    assert counted == (4, 6, 7)
    assert usage.total_tokens == 17


# Rendering and stop reasons


def test_the_prompt_is_the_renderers(scripted):
    client, api = scripted("qwen3", "Hello.<|im_end|>")
    ask(api, [ChatMessageSystem(content="Be brief."), *ASK])
    renderer = get_renderer("qwen3", client.tokenizer)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather in Rome?"},
    ]
    assert client.prompts == [renderer.build_generation_prompt(messages).to_ints()]
    params = client.params[0]
    assert (params.max_tokens, params.temperature) == (DEFAULT_MAX_TOKENS, 1.0)
    assert list(params.stop) == renderer.get_stop_sequences()


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("answer", "stopped", "window", "reason"),
    [
        ("It rains.<|im_end|>", "stop", 9999, "stop"),
        ("It rains", "length", 9999, "max_tokens"),
        (f"{CALL}<|im_end|>", "stop", 9999, "tool_calls"),
        ('<tool_call>\n{"name": "get_w', "length", 9999, "max_tokens"),
        ("It rains", "length", None, "model_length"),
    ],
)
def test_stop_reasons_are_true(scripted, answer, stopped, window, reason):
    client, api = scripted("qwen3", answer, stop_reason=stopped)
    if window is None:  # exactly what prompt and answer need
        ask(api)
        window = len(client.prompts[0]) + len(client.tokenizer.encode(answer))
    _, api = scripted("qwen3", answer, stop_reason=stopped, context_window=window)
    assert ask(api).stop_reason == reason


def test_a_prompt_beyond_the_context_says_so_without_a_request(scripted):
    client, api = scripted("qwen3", "x", context_window=5)
    output = ask(api)
    assert (output.stop_reason, client.prompts) == ("model_length", [])
    assert "leave no room in the model's context of 5" in output.error


@pytest.mark.parametrize("keep", [True, False])
def test_reasoning_is_kept_on_request(scripted, keep):
    answer = "<think>\nIt is autumn.\n</think>\n\nIt rains.<|im_end|>"
    _, api = scripted("qwen3", answer, include_reasoning=keep)
    message = ask(api).message
    assert message.text == "It rains."
    kinds = [part.type for part in message.content] if keep else []
    assert kinds == (["reasoning", "text"] if keep else [])
    if keep:
        assert "It is autumn." in message.content[0].reasoning


def test_a_stop_sequence_is_not_part_of_the_text(scripted):
    client, api = scripted("qwen3", "It rains. END of it")
    output = ask(api, stop_seqs=[" END"])
    assert output.completion == "It rains."
    assert list(client.params[0].stop) == [" END", "<|im_end|>"]


def test_settings_that_a_sampling_client_lacks_are_refused(scripted):
    _, api = scripted("qwen3", "x")
    with pytest.raises(ConfigurationError, match="frequency_penalty: got"):
        ask(api, frequency_penalty=0.5)
    with pytest.raises(ConfigurationError, match=r"tool_choice: got .*get_weather"):
        ask(api, tools=[WEATHER], choice=ToolFunction("get_weather"))
    ask(api, frequency_penalty=0.0, best_of=1)


# Tools


def test_tools_are_declared_and_calls_parsed(scripted):
    client, api = scripted("qwen3", f"Let me see.\n{CALL}<|im_end|>")
    output = ask(api, [ChatMessageSystem(content="Be brief."), *ASK], [WEATHER, CLOCK])
    assert "Be brief.\n\n# Tools" in client.text()
    assert '"name": "get_weather"' in client.text()
    assert '"required": ["city"]' in client.text()
    (call,) = output.message.tool_calls
    assert (call.function, call.arguments, call.parse_error) == (
        "get_weather", {"city": "Rome"}, None
    )  # fmt: skip
    assert output.completion == "Let me see."


def test_a_call_that_cannot_be_parsed_is_reported_and_rendered_as_it_was(scripted):
    broken = '<tool_call>\n{"name": "get_weather", "arguments": {city}}\n</tool_call>'
    client, api = scripted("qwen3", f"{broken}<|im_end|>")
    output = ask(api, tools=[WEATHER])
    (call,) = output.message.tool_calls
    assert call.parse_error.startswith("Invalid JSON")
    ask(api, [*ASK, output.message, ChatMessageTool(content="no", tool_call_id=call.id)], [WEATHER])
    assert broken in client.text()


def test_no_tools_are_declared_where_none_may_be_called(scripted):
    client, api = scripted("qwen3", "It rains.<|im_end|>")
    ask(api, tools=[WEATHER], choice="none")
    assert "# Tools" not in client.text()


def test_only_the_first_of_parallel_calls_is_kept_where_they_are_off(scripted):
    _, api = scripted("qwen3", f"{CALL}\n{CALL}<|im_end|>")
    assert len(ask(api, tools=[WEATHER]).message.tool_calls) == 2
    assert len(ask(api, tools=[WEATHER], parallel_tool_calls=False).message.tool_calls) == 1


def test_a_task_with_tools_runs_to_the_answer(scripted, tmp_path):
    @tool
    def get_weather():
        async def execute(city: str):
            """Weather of a city.

            Args:
                city: City
            """
            return f"storm in {city}"

        return execute

    broken = "<tool_call>\nnothing\n</tool_call><|im_end|>"
    client, api = scripted("qwen3", broken, f"{CALL}<|im_end|>", "A storm.<|im_end|>")
    task = Task(
        dataset=[Sample(input="Weather in Rome?", target="storm")],
        solver=[use_tools(get_weather()), generate()],
        scorer=includes(),
    )
    (log,) = asyncio.run(
        eval_async(task, model=Model(api, GenerateConfig()), log_dir=str(tmp_path))
    )
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    assert len(client.prompts) == 3
    assert "storm in Rome" in client.text()
    assert "tool call: expected" in client.text(1) or "Invalid JSON" in client.text(1)
