"""Chat loop of verifiers 0.4 in this process.

The library's own ``null`` harness starts a program with its packages for each rollout, which takes
seconds. This harness makes the same calls in this process until a reply has no tool call: it calls
the model through the interception server and tools through MCP.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import openai
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

HARNESS_ID = "tinker_cookbook_chat"

# The library imports a harness by its id, and an id with dots only from its own package.
sys.modules.setdefault(HARNESS_ID, sys.modules[__name__])


class ChatHarnessConfig(HarnessConfig):
    """Settings of every harness; it adds none."""


class ChatHarness(Harness[ChatHarnessConfig]):
    """Conversation of the model with the task's tools, as the library's ``null`` harness has it."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        """Runs the conversation until a reply without a tool call."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = []
        if system:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url} for name, url in mcp_urls.items()}
        # No retries: a repeated call would be a second sample for the same turn.
        async with (
            openai.AsyncOpenAI(
                base_url=endpoint, api_key=secret, max_retries=0, timeout=None
            ) as client,
            AsyncExitStack() as stack,
        ):
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            declared: dict[str, Any] = {"tools": tools} if tools else {}
            while True:
                try:
                    completion = await client.chat.completions.create(
                        model=ctx.model, messages=messages, **declared
                    )
                except openai.APIStatusError as error:
                    # A limit or a @stop of the task refuses the turn: an expected end.
                    if trace.stop_condition is not None:
                        return ProgramResult(0, "", "")
                    return ProgramResult(1, "", f"{type(error).__name__}: {error}")
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return ProgramResult(0, "", "")
                for call in message.tool_calls:
                    content = await _result_of(call, dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def _result_of(call: Any, dispatch: dict[str, Any], connections: dict[str, Any]) -> Any:
    """Returns the result of a tool call, or the error as text if the call fails."""
    name = call.function.name
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: invalid JSON in tool arguments ({error}); send the call again"
    if not isinstance(arguments, dict):
        return f"error: tool arguments: got {type(arguments).__name__}, expected a JSON object"
    if name not in dispatch:
        return f"error: unknown tool {name!r}"
    return await call_mcp(connections, dispatch, name, arguments)


__all__ = ["ChatHarness", "ChatHarnessConfig"]
