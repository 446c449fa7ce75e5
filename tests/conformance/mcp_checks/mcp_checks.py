"""Tools of MCP servers; run in environments with mcp 1.x and 2.x by ``test_mcp.py``."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import ToolCall
from tinker_cookbook.tool_use import (
    ToolGroupBuilder,
    ToolUnavailableError,
    handle_tool_call,
    mcp_tools,
)

SERVER = Path(__file__).with_name("shop_server.py")
COMMAND = [sys.executable, str(SERVER)]


def load_server():
    spec = importlib.util.spec_from_file_location("shop_server", SERVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.server


async def called(tools, name, arguments="{}"):
    body = ToolCall.FunctionBody(name=name, arguments=arguments)
    result = await handle_tool_call({one.name: one for one in tools}, ToolCall(function=body))
    return result.messages[0]["content"], result.error_type


def alive(pid) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_an_object_becomes_tools():
    async def main():
        async with await mcp_tools(load_server(), only=["price"], prefix="shop_") as tools:
            (one,) = tools
            spec = one.to_spec()
            assert (spec["name"], spec["description"]) == ("shop_price", "Price of an item.")
            assert spec["parameters"]["properties"]["item"]["type"] == "string"
            assert spec["parameters"]["required"] == ["item"]
            assert await called(tools, "shop_price", '{"item": "tea", "count": 2}') == ("6", None)
            for wrong in ('{"item": "salt"}', '{"count": 2}'):
                text, kind = await called(tools, "shop_price", wrong)
                assert kind == "execution_failed"
                assert "price" in text

    asyncio.run(main())


def test_a_command_is_started_used_from_other_loops_and_ended():
    tools = asyncio.run(mcp_tools(COMMAND))
    pid, _ = asyncio.run(called(tools, "pid"))
    assert alive(pid)
    assert asyncio.run(called(tools, "count")) == ("1", None)

    async def many():
        return await asyncio.gather(*(called(tools, "count") for _ in range(20)))

    assert sorted(int(text) for text, _ in asyncio.run(many())) == list(range(2, 22))
    text, kind = asyncio.run(called(tools, "big"))
    assert len(text) < 17_000
    assert kind is None
    asyncio.run(tools.close())
    asyncio.run(tools.close())
    assert not alive(pid)
    text, kind = asyncio.run(called(tools, "count"))
    assert kind == "unavailable"
    assert "is closed" in text


def test_a_server_that_dies_or_hangs_gives_a_clear_result_and_is_started_again():
    async def main():
        async with await mcp_tools(COMMAND, timeout_seconds=30) as tools:
            first, _ = await called(tools, "pid")
            began = time.monotonic()
            # One call kills the server while another waits for it.
            waiting, died = await asyncio.gather(called(tools, "hang"), called(tools, "die"))
            assert time.monotonic() - began < 20
            for text, kind in (waiting, died):
                assert kind == "unavailable"
                assert "shop_server.py ended during the call" in text
                assert "the shop is on fire" in text
            second, kind = await called(tools, "pid")
            assert kind is None
            assert second != first
            os.kill(int(second), 9)  # between two calls
            texts = [await called(tools, "pid") for _ in range(2)]
            assert texts[1][1] is None
        async with await mcp_tools(COMMAND, timeout_seconds=0.3) as tools:
            assert (await called(tools, "hang"))[1] == "timed_out"
            assert (await called(tools, "count")) == ("1", None)  # the same server goes on

    asyncio.run(main())


def test_a_server_that_does_not_start():
    with pytest.raises(ToolUnavailableError, match=r"did not start.*no database"):
        asyncio.run(mcp_tools([*COMMAND, "broken"]))
    with pytest.raises(ToolUnavailableError, match=r"no answer within 1 s"):
        asyncio.run(
            mcp_tools(
                [sys.executable, "-c", "import time; time.sleep(60)"], start_timeout_seconds=1
            )
        )
    with pytest.raises(ConfigurationError, match="source: got 'no-such-program x'"):
        asyncio.run(mcp_tools("no-such-program x"))
    with pytest.raises(ConfigurationError, match="no tool 'pric'; did you mean 'price'"):
        asyncio.run(mcp_tools(load_server(), only=["pric"]))


class NoRenderer:
    """The part of a renderer that a group needs before its first prompt."""

    def create_conversation_prefix_with_tools(self, tools, system_prompt=""):
        return [{"role": "system", "content": ", ".join(tool["name"] for tool in tools)}]


def test_a_group_shares_one_server_and_ends_it():
    builder = ToolGroupBuilder(
        NoRenderer(),
        [{"role": "user", "content": "go"}],
        lambda history: (0.0, {}),
        group_size=3,
        mcp=[COMMAND],
    )

    async def main():
        envs = await builder.make_envs()
        assert len(envs) == 3
        system = envs[0].message_env.initial_messages[0]["content"]
        assert system == "price, count, pid, big, die, hang"
        again = await builder.make_env(1)
        counts = [await called(env.message_env.tools, "count") for env in [*envs, again]]
        assert [text for text, _ in counts] == ["1", "2", "3", "4"]
        pid, _ = await called(again.message_env.tools, "pid")
        await builder.cleanup()
        return pid

    assert not alive(asyncio.run(main()))
