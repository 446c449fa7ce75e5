"""Groups of episodes with tools, some of which may come from MCP servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.leaves import load_leaf
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.types import Env, EnvGroupBuilder
from tinker_cookbook.tool_use.agent_tool_message_env import RewardFn, build_agent_tool_env
from tinker_cookbook.tool_use.types import Tool


@dataclass
class ToolGroupBuilder(EnvGroupBuilder):
    """A group of episodes on the same question.

    Attributes:
        renderer: Renderer with tools; it declares them before ``messages``.
        messages: First messages of the conversation.
        reward_fn: See ``build_agent_tool_env``.
        group_size: Number of episodes.
        tools: Called for each episode, so that each has its own state.
        mcp: Sources of ``mcp_tools``; the group opens one connection to each and closes it.
        mcp_options: Arguments of ``mcp_tools``.
        system_prompt: Text of the system message, in addition to the tool declarations.
        options: Further arguments of ``build_agent_tool_env``.
        tags: Tags of the group's metrics.
    """

    renderer: Renderer
    messages: Sequence[Message]
    reward_fn: RewardFn
    group_size: int
    tools: Callable[[], Sequence[Tool]] = list
    mcp: Sequence[Any] = ()
    mcp_options: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._open: list[Any] = []

    async def make_envs(self) -> Sequence[Env]:
        """Connects to the servers and returns all episodes."""
        try:
            for source in self.mcp:
                mcp = load_leaf("tool_use.mcp", "mcp")
                self._open.append(await mcp.mcp_tools(source, **self.mcp_options))
        except BaseException:
            await self.cleanup()
            raise
        return [await self.make_env(i) for i in range(self.group_size)]

    async def make_env(self, index: int) -> Env:
        """Returns one episode; it uses the group's connections."""
        tools = [*self.tools(), *(tool for opened in self._open for tool in opened)]
        specs = [tool.to_spec() for tool in tools]
        prefix = self.renderer.create_conversation_prefix_with_tools(specs, self.system_prompt)
        messages = [*prefix, *self.messages]
        return build_agent_tool_env(self.renderer, tools, messages, self.reward_fn, **self.options)

    async def cleanup(self) -> None:
        """Closes the connections."""
        opened, self._open = self._open, []
        for tools in opened:
            await tools.close()

    def logging_tags(self) -> list[str]:
        """Returns the tags."""
        return list(self.tags)
