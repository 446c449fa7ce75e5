"""GLM-5.3: the messages of GLM-4.6 without line breaks, and a reasoning effort.

Prompts begin with the effort, and open the thinking block: the format cannot disable thinking.
Answers of the history keep theirs. The results of several calls are in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.renderers.core.arguments import to_json
from tinker_cookbook.renderers.core.blocks import Block
from tinker_cookbook.renderers.core.messages import (
    END_THINK,
    THINK,
    Message,
    ToolSpec,
    system_message,
)
from tinker_cookbook.renderers.core.thinking import thinking_and_rest
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool, results_in_call_order
from tinker_cookbook.renderers.glm4 import Glm46Renderer, calls_block, declare_tools

_END = "<|endoftext|>"
_THINKING = Block(THINK, END_THINK)


@dataclass(eq=False, repr=False, kw_only=True)
class Glm5_3Renderer(Glm46Renderer):  # noqa: N801 - the public name
    """GLM-5.3 with the maximum reasoning effort.

    ``strip_thinking_from_history=True`` empties the thinking of earlier turns. Arguments of calls
    have no types, as in GLM-4.6.
    """

    strip_thinking_from_history: bool = False

    reasoning_effort = "Max"
    _special_tokens = (*Glm46Renderer._special_tokens, _END, THINK, END_THINK)
    _gap = ""
    _blocks = (_THINKING, calls_block(""))
    _inside = _THINKING
    _prompt_opening = THINK

    def get_stop_sequences(self) -> list[int]:
        """Returns the tokens that begin the next message, and ``<|endoftext|>``."""
        return [*super().get_stop_sequences(), *self.codec.constant(_END)]

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Declares tools in a separate system message before that of ``system_prompt``."""
        functions = [as_openai_tool(tool)["function"] for tool in tools]
        # Fields for the API, which the template leaves out.
        lines = [
            to_json({k: v for k, v in function.items() if k not in ("strict", "defer_loading")})
            for function in functions
            if not function.get("defer_loading")
        ]
        declaration = "\n" + declare_tools("\n".join(lines), self._gap) if tools else ""
        return [*system_message(declaration), *system_message(system_prompt)]

    @property
    def _bos_tokens(self) -> list[int]:
        effort = f"<|system|>Reasoning Effort: {self.reasoning_effort}"
        return self.codec.constant(self._bos + effort)

    def _normalize(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        return results_in_call_order(super()._normalize(messages))

    def _thinking_and_text(self, message: Message, keeps: bool = True) -> tuple[str, str]:
        part, text = thinking_and_rest(message, keeps)
        if isinstance(message["content"], str) and END_THINK in text:
            # As in the template: white space around thinking in tags is part of it.
            return text.split(END_THINK)[0].split(THINK)[-1], text.split(END_THINK)[-1]
        return part or "", text

    def _thinking_block(self, thinking: str) -> str:
        # The prompt contains the opening tag.
        return f"{thinking}{END_THINK}"


class Glm5_3HighReasoningRenderer(Glm5_3Renderer):  # noqa: N801 - the public name
    """GLM-5.3 with high reasoning effort."""

    reasoning_effort = "High"


class Glm5_3LowReasoningRenderer(Glm5_3Renderer):  # noqa: N801 - the public name
    """GLM-5.3 with low reasoning effort."""

    reasoning_effort = "Low"
