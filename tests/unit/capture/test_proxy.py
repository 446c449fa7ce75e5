"""The proxy's two chat APIs over a real chat format (about 3 s)."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import openai
import pytest

pytest.importorskip("aiohttp")

from aiohttp.test_utils import TestClient, TestServer

from tinker_cookbook.capture import current_scope
from tinker_cookbook.capture.proxy import ProxyDeps, make_app
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.image_processing_utils import image_to_data_uri
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
OPENAI_TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
]
OPENAI_TURNS = [
    {"role": "system", "content": "Be brief.\n\nBe kind."},
    {"role": "user", "content": "Add one."},
    {
        "role": "assistant",
        "content": "Yes.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "one"},
    {"role": "user", "content": "Now two."},
]
ANTHROPIC = {
    "model": "claude",
    "max_tokens": 50,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "thinking": {"type": "adaptive"},
    "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Add one."}]},
        {"role": "system", "content": "Be kind."},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Yes."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
                {"type": "text", "text": "Now two."},
            ],
        },
    ],
}


class Sampler:
    """Answers with ``text``; keeps the calls with their scopes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.text, self.calls, self.error = tokenizer, "", [], None

    async def sample(self, prompt, num_samples, sampling_params):
        self.calls.append((dict(current_scope()), prompt.to_ints(), sampling_params))
        if self.error:
            raise self.error
        tokens = self.tokenizer.encode(self.text, add_special_tokens=False)
        stop = "stop" if self.text.endswith("<|im_end|>") else "length"
        return SimpleNamespace(sequences=[SimpleNamespace(tokens=tokens, stop_reason=stop)])


@pytest.fixture
def sampler(tokenizer_folder):
    return Sampler(get_tokenizer(tokenizer_folder("qwen2_5")))


def serve(sampler, use, **options):
    """Runs ``use(client)`` against the proxy."""

    async def run():
        renderer = get_renderer("qwen2_5", sampler.tokenizer)
        app = make_app(ProxyDeps(renderer, sampler, "tiny", 7), **options)
        async with TestClient(TestServer(app)) as client:
            return await use(client)

    return asyncio.run(run())


async def anthropic_message(client, body):
    """The message of a response; a streamed one is put together from its events."""
    response = await client.post("/r/run/r1/iter/3/x/y/v1/messages", json=body)
    if not body.get("stream"):
        return await response.json()
    message, parts = {}, {}
    for block in (await response.text()).strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            parts[event["index"]] = [event["content_block"], ""]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            parts[event["index"]][1] += delta.get("text") or delta.get("partial_json")
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    message["content"] = [
        block | ({"text": text} if block["type"] == "text" else {"input": json.loads(text)})
        for block, text in parts.values()
    ]
    return message


async def openai_message(client, stream):
    url = str(client.make_url("/r/run/r1/iter/3/x/y/v1"))
    ask = {"model": "claude", "messages": OPENAI_TURNS, "tools": OPENAI_TOOLS, "max_tokens": 50}
    async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as oai:
        if not stream:
            return await oai.chat.completions.create(**ask)
        options = {"stream_options": {"include_usage": True}}
        async with oai.chat.completions.stream(**ask, **options) as chunks:
            return await chunks.get_final_completion()


@pytest.mark.parametrize("stream", [False, True])
def test_both_apis_give_one_prompt_and_one_answer(sampler, stream):
    sampler.text = f"Sure.\n{CALL}<|im_end|>"

    async def use(client):
        message = await anthropic_message(client, {**ANTHROPIC, "stream": stream})
        return message, await openai_message(client, stream)

    message, completion = serve(sampler, use)
    text, call = message["content"]
    choice = completion.choices[0]
    (its_call,) = choice.message.tool_calls
    assert text["text"] == choice.message.content == "Sure."
    assert (call["name"], call["input"]) == ("add", {"a": 2})
    assert (its_call.function.name, its_call.function.arguments) == ("add", '{"a": 2}')
    assert (message["stop_reason"], choice.finish_reason) == ("tool_use", "tool_calls")
    assert message["model"] == completion.model == "tiny"
    # The prompt is that of the model's own template, which needs arguments as an object.
    function = {"function": {"name": "add", "arguments": {"a": 1}}}
    turns = [{**m, "tool_calls": [function]} if "tool_calls" in m else m for m in OPENAI_TURNS]
    template = sampler.tokenizer.apply_chat_template
    options = {"tools": OPENAI_TOOLS, "add_generation_prompt": True, "return_dict": False}
    expected = template(turns, **options)
    scope = {"requested_model": "claude", "run_id": "r1", "iteration": 3, "x": "y"}
    for call_scope, prompt, params in sampler.calls:
        assert (call_scope, prompt, params.max_tokens) == (scope, expected, 50)
    counts = len(expected), len(sampler.tokenizer.encode(sampler.text))
    assert tuple(message["usage"].values()) == counts
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == counts


def test_how_answers_end(sampler):
    hi = {"messages": [{"role": "user", "content": "Hi"}]}
    tools = {"tools": ANTHROPIC["tools"]}
    broken = "<tool_call>\nnot JSON\n</tool_call>"
    cases = [
        ("Hello.<|im_end|>", {}, "end_turn", "Hello."),
        ("Hel", {}, "max_tokens", "Hel"),
        (f"No.{CALL}<|im_end|>", tools | {"tool_choice": {"type": "none"}}, "end_turn", "No."),
        (f"{broken}<|im_end|>", tools, "end_turn", broken),
    ]

    async def use(client):
        for text, more, reason, expected in cases:
            sampler.text = text
            message = await anthropic_message(client, {**hi, **more})
            (block,) = message["content"]
            assert (message["stop_reason"], block["text"]) == (reason, expected), text
            assert sampler.calls[-1][2].max_tokens == 7

    serve(sampler, use)


ASK = {"messages": [{"role": "user", "content": "Hi"}]}
TOO_LONG = "prompt: 9 tokens leave no room in the model's context of 8; shorten the prompt"
REFUSED = [
    ("messages", {"mcp_servers": [{}]}, None, 400, "mcp_servers"),
    ("messages", {"tools": [{"type": "bash_1", "name": "b"}]}, None, 400, "tools[0]"),
    ("messages", {"stop_sequences": ["x"]}, None, 400, "stop_sequences"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, None, 400,
     "messages[0].content[0]"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, None, 400,
     "messages[0].content[0]: got a part of type 'image'"),
    ("messages", {"max_tokens": 0}, None, 400, "max_tokens"),
    ("messages", {}, DataValidationError(TOO_LONG), 400, "prompt is too long"),
    ("messages", {}, RuntimeError("secret"), 500, "the server failed"),
    ("chat/completions", {}, RuntimeError("secret"), 500, "the server failed"),
    ("chat/completions", {"response_format": {"type": "text"}}, None, 400, "response_format"),
    ("chat/completions", {"min_p": 0.1}, None, 400, "min_p"),
    ("chat/completions", {"unheard_of": 1}, None, 400, "unheard_of"),
    ("chat/completions", {"tools": OPENAI_TOOLS, "tool_choice": "required"}, None, 400,
     "tool_choice"),
]  # fmt: skip


def test_unsupported_requests_are_refused(sampler):
    async def use(client):
        for path, more, error, status, said in REFUSED:
            sampler.error = error
            response = await client.post(f"/v1/{path}", json={**ASK, **more})
            body = await response.json()
            assert (response.status, said in body["error"]["message"]) == (status, True), body
            assert ("type" in body) == (path == "messages")
        sampler.error = None
        # aiohttp's own limit is 1 MiB.
        large = {**ASK, "metadata": {"x": "a" * (2 << 20)}}
        assert (await client.post("/r/self/x/v1/messages", json=large)).status == 200

    serve(sampler, use)


def test_chat_takes_images_as_data_urls(vision_tokenizer):
    image = pytest.importorskip("PIL.Image").new("RGB", (64, 48), "red")
    renderer = get_renderer("qwen3_vl_instruct", get_tokenizer(vision_tokenizer))
    prompts = []

    async def sample(prompt, **_):
        prompts.append(prompt)
        tokens = renderer.tokenizer.encode("Red.<|im_end|>")
        return SimpleNamespace(sequences=[SimpleNamespace(tokens=tokens, stop_reason="stop")])

    async def run():
        app = make_app(ProxyDeps(renderer, SimpleNamespace(sample=sample), "tiny", 7))
        parts = [{"type": "image_url", "image_url": {"url": image_to_data_uri(image)}}]
        async with TestClient(TestServer(app)) as client:
            body = {"messages": [{"role": "user", "content": parts}]}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status == 200, await response.text()

    asyncio.run(run())
    assert [chunk.type for chunk in prompts[0].chunks] == ["encoded_text", "image", "encoded_text"]


def test_a_request_needs_the_token(sampler):
    async def use(client):
        statuses = []
        for headers in (
            {},
            {"x-api-key": "wrong"},
            {"x-api-key": "schlüssel"},
            {"x-api-key": "k"},
            {"Authorization": "Bearer k"},
        ):
            response = await client.post("/v1/messages", json=ASK, headers=headers)
            statuses.append(response.status)
        assert statuses == [401, 401, 401, 200, 200]
        assert (await client.get("/healthz")).status == 200

    serve(sampler, use, auth_token="k")
