"""Qwen2.5: ChatML with tools and a default system prompt."""

from __future__ import annotations

from collections.abc import Sequence

from tinker_cookbook.renderers.core.chatml import END, START
from tinker_cookbook.renderers.core.messages import Message, ToolSpec
from tinker_cookbook.renderers.qwen3 import Qwen3InstructRenderer

QWEN2_5_SYSTEM_PROMPT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


class Qwen2_5Renderer(Qwen3InstructRenderer):  # noqa: N801 - the model's version is part of its name
    """Qwen2.5-*-Instruct: the format of Qwen3-2507 after a default system prompt."""

    _parts = frozenset({"text"})

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """Declares tools in the system message, by default after the default prompt."""
        return super().create_conversation_prefix_with_tools(
            tools, system_prompt or QWEN2_5_SYSTEM_PROMPT
        )

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        if not messages or messages[0]["role"] == "system":
            return []
        return self.codec.constant(f"{START}system\n{QWEN2_5_SYSTEM_PROMPT}{END}\n")
