"""Interface of a tool: its name, its JSON schema, and a method that runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from tinker_cookbook.renderers import Message
from tinker_cookbook.renderers import ToolSpec as ToolSpec


@dataclass
class ToolInput:
    """Input of one call."""

    arguments: dict[str, Any]
    call_id: str | None = None
    """``ToolCall.id``; some chat formats repeat it in the result."""


@dataclass
class ToolResult:
    """Result of one call."""

    messages: list[Message]
    """Messages for the model, usually one of role ``tool``."""
    should_stop: bool = False
    """Whether the episode ends after this call."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Logged as ``env/all/tool/NAME/METRIC``, averaged over the calls of an episode."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Further data for rewards and logs; ``metadata["error"]`` is the type of an error."""

    @property
    def error_type(self) -> str | None:
        """Type of the error, such as ``"tool_not_found"``; ``None`` for a call that succeeded."""
        return self.metadata.get("error")


@runtime_checkable
class Tool(Protocol):
    """Tool that a model can call. Optional attribute: ``settings``, a ``ToolSettings``."""

    @property
    def name(self) -> str:
        """Name in the declaration and in calls."""
        ...

    @property
    def description(self) -> str:
        """Text that tells the model what the tool does."""
        ...

    @property
    def parameters_schema(self) -> dict[str, Any]:
        """JSON schema of the arguments, an object."""
        ...

    async def run(self, input: ToolInput) -> ToolResult:
        """Runs one call."""
        ...

    def to_spec(self) -> ToolSpec:
        """Returns the declaration for ``Renderer.create_conversation_prefix_with_tools``."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters_schema,
        }
