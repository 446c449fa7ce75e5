"""Tools that a model can call during an episode.

``@tool`` makes a tool of a function; ``build_agent_tool_env`` makes an environment in which a
model may call tools until it answers; ``docs/tools.md`` explains both.
"""

from tinker_cookbook.tool_use.agent_tool_message_env import (
    AgentToolMessageEnv,
    build_agent_tool_env,
)
from tinker_cookbook.tool_use.episode import ToolCallRecord, ToolEpisode
from tinker_cookbook.tool_use.execution import ToolSettings, ToolUnavailableError
from tinker_cookbook.tool_use.groups import ToolGroupBuilder
from tinker_cookbook.tool_use.recording import ToolJournal
from tinker_cookbook.tool_use.results import error_tool_result, simple_tool_result
from tinker_cookbook.tool_use.tools import FunctionTool, handle_tool_call, tool
from tinker_cookbook.tool_use.types import Tool, ToolInput, ToolResult, ToolSpec
from tinker_cookbook.utils.imports import lazy_exports

__all__ = [
    "AgentToolMessageEnv",
    "FunctionTool",
    "Tool",
    "ToolCallRecord",
    "ToolEpisode",
    "ToolGroupBuilder",
    "ToolInput",
    "ToolJournal",
    "ToolResult",
    "ToolSettings",
    "ToolSpec",
    "ToolUnavailableError",
    "build_agent_tool_env",
    "error_tool_result",
    "handle_tool_call",
    "simple_tool_result",
    "tool",
]

# MCP is a leaf.
__getattr__ = lazy_exports(__name__, dict.fromkeys(("MCPTools", "mcp_tools"), f"{__name__}.mcp"))
