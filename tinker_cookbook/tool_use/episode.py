"""Record of all tool calls of one episode, for rewards and metrics."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.renderers import ToolCall, format_content_as_string
from tinker_cookbook.rl.rollouts.conversation import plain_messages
from tinker_cookbook.rl.types import Metrics
from tinker_cookbook.tool_use.results import ERROR_TYPES
from tinker_cookbook.tool_use.types import Tool, ToolResult


@dataclass(frozen=True)
class ToolCallRecord:
    """One call and its result."""

    name: str
    arguments: dict[str, Any] | None
    """``None`` if the text is not a JSON object."""
    result: ToolResult
    arguments_text: str = ""
    """The arguments as the model wrote them."""

    @property
    def text(self) -> str:
        """Text of the result."""
        contents = (format_content_as_string(m["content"]) for m in self.result.messages)
        return "\n".join(contents)

    @property
    def error_type(self) -> str | None:
        """``None`` for a call that succeeded."""
        return self.result.error_type


@dataclass
class ToolEpisode:
    """Calls of an episode in order, and the tool objects, whose state a reward may read."""

    tools: Sequence[Tool]
    calls: list[ToolCallRecord] = field(default_factory=list)

    def add(self, call: ToolCall, result: ToolResult) -> None:
        """Adds a finished call."""
        try:
            arguments = json.loads(call.function.arguments)
        except (ValueError, RecursionError):
            arguments = None
        valid = arguments if isinstance(arguments, dict) else None
        self.calls.append(
            ToolCallRecord(call.function.name, valid, result, call.function.arguments)
        )

    def rows(self) -> list[dict[str, Any]]:
        """Returns the calls as JSON objects, from which their results can be made again.

        Keys: ``name``, ``arguments`` (as the model wrote them), ``error`` (its type or null), and
        ``messages``, ``should_stop``, ``metrics`` and ``metadata`` of the ``ToolResult``.
        """
        return [
            {
                "name": call.name,
                "arguments": call.arguments_text,
                "error": call.error_type,
                "messages": plain_messages(call.result.messages),
                "should_stop": call.result.should_stop,
                "metrics": call.result.metrics,
                "metadata": call.result.metadata,
            }
            for call in self.calls
        ]

    def metrics(self) -> Metrics:
        """Returns the metrics of the episode, which the loop averages over episodes.

        ``tool/calls``; ``tool/calls/NAME`` for each tool; ``tool/errors`` and its parts
        ``tool/errors/TYPE``, all counts; ``tool/NAME/METRIC``, the mean over the calls that report
        the metric.
        """
        counts = Counter(call.name for call in self.calls)
        errors = Counter(call.error_type for call in self.calls if call.error_type is not None)
        metrics: Metrics = {"tool/calls": len(self.calls), "tool/errors": errors.total()}
        # Zeros are reported too, so that the mean over episodes counts every episode.
        metrics |= {f"tool/calls/{tool.name}": counts[tool.name] for tool in self.tools}
        kinds = sorted(set(errors) | set(ERROR_TYPES))
        metrics |= {f"tool/errors/{kind}": errors[kind] for kind in kinds}
        values: dict[str, list[float]] = defaultdict(list)
        for call in self.calls:
            for name, value in call.result.metrics.items():
                values[f"tool/{call.name}/{name}"].append(float(value))
        return metrics | {name: sum(v) / len(v) for name, v in values.items()}
