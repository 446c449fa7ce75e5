"""Asks models for a tool call, and shows whether they make one that their renderer can read.

    python -m tinker_cookbook.scripts.test_tool_calling_e2e --model Qwen3-8B
    python -m tinker_cookbook.scripts.test_tool_calling_e2e --backend local --model FOLDER

``--model`` is a part of a name in ``MODEL_CONFIGS``, or any other model: a local folder or a Hub
name. The exit status is 1 if a model fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tinker_cookbook.backends import ServiceClient, connect
from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.renderers import Message, ToolSpec, format_content_as_string, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.command_line.entrypoint import run_program
from tinker_cookbook.utils.imports import tinker

SAMPLE_TOOLS: list[ToolSpec] = [
    {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "Name of the city"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location"],
        },
    },
    {
        "name": "calculate",
        "description": "Returns the value of an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as 2 * (3 + 4)"}},
            "required": ["expression"],
        },
    },
]
MODEL_CONFIGS = [
    {"model_name": "Qwen/Qwen3-8B", "renderer_name": "qwen3"},
    {"model_name": "Qwen/Qwen3.6-35B-A3B", "renderer_name": "qwen3_5_disable_thinking"},
    {"model_name": "Qwen/Qwen3.5-9B", "renderer_name": "qwen3_5_disable_thinking"},
    {"model_name": "deepseek-ai/DeepSeek-V3.1", "renderer_name": "deepseekv3"},
    {"model_name": "moonshotai/Kimi-K2.6", "renderer_name": "kimi_k26_disable_thinking"},
    {"model_name": "openai/gpt-oss-20b", "renderer_name": "gpt_oss_medium_reasoning"},
]
_MAX_TOKENS = 512


def print_result(model_name: str, success: bool, message: Message, raw_response: str) -> None:
    """Prints the calls, the content, and the first characters of the response."""
    print(f"\n{'passed' if success else 'FAILED'}: {model_name}")
    for call in message.get("tool_calls", ()):
        print(f"  call: {call.function.name}({call.function.arguments})")
    for unread in message.get("unparsed_tool_calls", ()):
        print(f"  call that cannot be read: {unread.error}")
    print(f"  content: {format_content_as_string(message['content'])[:200]}")
    print(f"  response: {raw_response[:500]!r}")


async def test_model(
    service_client: ServiceClient | tinker.ServiceClient,
    model_name: str,
    renderer_name: str,
    tools: list[ToolSpec],
    system_prompt: str,
    user_prompt: str,
) -> tuple[bool, Message, str]:
    """Samples one greedy response.

    Returns:
        Whether it ended properly and has a call, the message, and the text of the tokens.
    """
    tokenizer = get_tokenizer(model_name)
    renderer = get_renderer(renderer_name, tokenizer)
    prefix = renderer.create_conversation_prefix_with_tools(tools, system_prompt)
    prompt = renderer.build_generation_prompt([*prefix, {"role": "user", "content": user_prompt}])
    stop = renderer.get_stop_sequences()
    params = tinker.SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, stop=stop)
    client = await service_client.create_sampling_client(base_model=model_name)
    response = await client.sample(prompt=prompt, num_samples=1, sampling_params=params)
    tokens = response.sequences[0].tokens
    message, termination = renderer.parse_response(tokens)
    success = termination.is_clean and bool(message.get("tool_calls"))
    return success, message, str(tokenizer.decode(tokens))


async def main(argv: Sequence[str] | None = None) -> None:
    """Tries the models that the command line names; ``argv``: default ``sys.argv``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="default: all of MODEL_CONFIGS")
    parser.add_argument("--renderer", help="chat format; default: the model's")
    parser.add_argument("--prompt", default="What is the weather in Paris?")
    parser.add_argument("--backend", default="auto", help="auto, local, tinker, or a server's URL")
    given = parser.parse_args(argv)
    wanted: str = given.model or ""
    configs = [config for config in MODEL_CONFIGS if wanted in config["model_name"]]
    if not configs:
        name = get_recommended_renderer_name(wanted)
        configs = [{"model_name": wanted, "renderer_name": name}]
    failed: list[str] = []
    with connect(given.backend) as connection:
        for config in configs:
            model, renderer = config["model_name"], given.renderer or config["renderer_name"]
            prompts = "You are a helpful assistant.", given.prompt
            try:
                success, message, raw = await test_model(
                    connection.service, model, renderer, SAMPLE_TOOLS, *prompts
                )
            except Exception as error:  # such as a model that the server does not have
                print(f"\nFAILED: {model}\n  {type(error).__name__}: {error}")
                success = False
            else:
                print_result(model, success, message, raw)
            failed += [] if success else [model]
    print(f"\n{len(configs) - len(failed)} of {len(configs)} passed")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    run_program(main)
