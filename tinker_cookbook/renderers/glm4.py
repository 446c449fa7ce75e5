"""GLM-4.6: ``<|user|>``, a line break, the text, and no token that ends a message.

A message ends where the next one begins, so the model samples the next role's token: an answer ends
with ``<|user|>``, or with ``<|observation|>`` if it calls tools. A supervised example whose last
message is a trained answer therefore ends with that token, which the template leaves out.

Every answer begins with a thinking block, empty without thinking and in earlier turns. White space
around answers is trimmed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.blocks import Block, BlockReader
from tinker_cookbook.renderers.core.checks import check_parts, check_role, leading_thinking
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolCall,
    ToolSpec,
    ensure_text,
    get_text_content,
    system_message,
)
from tinker_cookbook.renderers.core.parsing import MessageReader, special_token_id
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.core.tool_calls import (
    arguments_of,
    as_openai_tool,
    read_bare_arguments,
)
from tinker_cookbook.tokenizer_utils import Tokenizer

# Every conversation of GLM-4 begins with these two tokens in place of BOS.
_PREFIX = "[gMASK]<sop>"
_USER, _ASSISTANT, _RESULTS = "<|user|>", "<|assistant|>", "<|observation|>"
_OPENINGS = {"system": "<|system|>", "user": _USER, "assistant": _ASSISTANT, "tool": _RESULTS}
_NO_THINKING = "/nothink"
_EMPTY_THINKING = "\n<think></think>"
_DECLARATION = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    "{tools}</tools>\n\nFor each function call, output the function name and arguments within the "
    "following XML format:\n<tool_call>{{function-name}}\n<arg_key>{{arg-key-1}}</arg_key>\n"
    "<arg_value>{{arg-value-1}}</arg_value>\n<arg_key>{{arg-key-2}}</arg_key>\n"
    "<arg_value>{{arg-value-2}}</arg_value>\n...\n</tool_call>"
)
# A value ends at the first closing tag that another argument or the end of the call follows.
_ARGUMENT = re.compile(
    r"\s*<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
    r"(?=\s*(?:<arg_key>|\Z))",
    re.DOTALL,
)


class Glm46Renderer(Renderer):
    """GLM-4.6 with thinking and tools.

    ``strip_thinking_from_history=False`` keeps the thinking of earlier turns. Arguments of calls
    have no types: text that is a JSON value is parsed as that value, so the string ``"12"`` becomes
    a number. Thinking must precede the text.
    """

    _encodes_with_codec = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: Any = None,
        *,
        strip_thinking_from_history: bool = True,
    ) -> None:
        super().__init__(tokenizer, image_processor)
        self.strip_thinking_from_history = strip_thinking_from_history
        for token in ("[gMASK]", "<sop>", *_OPENINGS.values()):
            special_token_id(tokenizer, token, type(self).__name__)

    @property
    def has_extension_property(self) -> bool:
        """True where thinking stays in history."""
        return not self.strip_thinking_from_history

    def get_stop_sequences(self) -> list[int]:
        """Returns ``<|user|>`` and ``<|observation|>``, which begin the next message."""
        return [*self.codec.constant(_USER), *self.codec.constant(_RESULTS)]

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; consecutive tool results share a header."""
        role = message["role"]
        check_role(message, ctx.idx, self._name, _OPENINGS)
        if role == "assistant":
            return self._render_answer(message, ctx)
        check_parts(message, ctx.idx, self._name, frozenset({"text"}))
        text, header = ensure_text(message["content"]), self.codec.constant(_OPENINGS[role])
        if role == "user":
            text = self._question(text)
        elif role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if ctx.prev_role == "tool":
                header = []
        return RenderedMessage(header=header, output=[self.codec.encode(f"\n{text}")])

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """Declares tools in a separate system message before that of ``system_prompt``."""
        declared = "".join(
            json.dumps(as_openai_tool(tool), ensure_ascii=False) + "\n" for tool in tools
        )
        declaration = _DECLARATION.format(tools=declared) if tools else ""
        return [*system_message(declaration), *system_message(system_prompt)]

    @property
    def _bos_tokens(self) -> list[int]:
        return self.codec.constant(_PREFIX)

    def _generation_suffix(self, role: Role) -> list[int]:
        return self.codec.constant(_OPENINGS.get(role, f"<|{role}|>"))

    def _reader(self) -> MessageReader:
        return BlockReader((_THINKING, _CALL), skip="\n")

    def _question(self, text: str) -> str:
        return text

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        check_parts(message, ctx.idx, self._name, frozenset({"text", "thinking"}))
        thinking, text = self._split_thinking(message, ctx.idx)
        # The template empties the block of answers before the last question.
        if self.strip_thinking_from_history and not ctx.in_last_assistant_turn:
            thinking = ""
        parts = [text.strip(), *_format_calls(message, ctx.idx)]
        said = "".join(f"\n{part}" for part in parts if part)
        calls = message.get("tool_calls") or message.get("unparsed_tool_calls")
        # The model ends a call with the token of the results that it expects.
        waits = ctx.next_role == "tool" or (ctx.next_role is None and calls)
        header, thought = self._thinking_block(thinking, ctx.idx)
        return RenderedMessage(
            header=self.codec.constant(header),
            output=[self.codec.encode(thought + said)],
            stop_overlap=self.codec.constant(_RESULTS if waits else _USER),
        )

    def _thinking_block(self, thinking: str, idx: int) -> tuple[str, str]:
        """Returns the prompt's part of an answer, and the thinking block that the model writes."""
        return _ASSISTANT, f"\n<think>{thinking}</think>"

    def _split_thinking(self, message: Message, idx: int) -> tuple[str, str]:
        """Returns thinking and text; in a string, thinking is found by its tags."""
        # The template takes thinking from the text before </think>.
        part, text = leading_thinking(message, idx, self._name), get_text_content(message)
        if part is not None:
            return part.strip(), text
        before, closed, _ = text.partition("</think>")
        if not closed:
            return "", text
        return before.split("<think>")[-1].strip(), text.split("</think>")[-1]


class Glm46DisableThinkingRenderer(Glm46Renderer):
    """GLM-4.6 without thinking: questions end with ``/nothink``, prompts with an empty block.

    Thinking in an answer of the last turn raises RendererError; in history it is dropped.
    """

    _prompt_closes_thinking = True

    @property
    def has_extension_property(self) -> bool:
        """True: every answer follows an empty block."""
        return True

    def _generation_suffix(self, role: Role) -> list[int]:
        block = _EMPTY_THINKING if role == "assistant" else ""
        return self.codec.constant(_OPENINGS.get(role, f"<|{role}|>") + block)

    def _question(self, text: str) -> str:
        # The template does not add a second /nothink.
        return text if text.endswith(_NO_THINKING) else text + _NO_THINKING

    def _thinking_block(self, thinking: str, idx: int) -> tuple[str, str]:
        if thinking:
            raise RendererError(
                f"messages[{idx}].content: got thinking, expected an answer without: "
                f"{self._name} tells the model not to think; drop it with "
                "remove_thinking(content), or use glm4_6"
            )
        return _ASSISTANT + _EMPTY_THINKING, ""


def _format_calls(message: Message, idx: int) -> list[str]:
    blocks: list[str] = []
    for i, call in enumerate(message.get("tool_calls", [])):
        where = f"messages[{idx}].tool_calls[{i}].function.arguments"
        arguments = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_spell(value)}</arg_value>\n"
            for key, value in arguments_of(call, where).items()
        )
        blocks.append(f"<tool_call>{call.function.name}\n{arguments}</tool_call>")
    return blocks + [call.raw_text for call in message.get("unparsed_tool_calls", [])]


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read_call(body: str) -> list[ToolCall]:
    """Returns the call in a block; raises ValueError for anything else."""
    name, opened, rest = body.partition("<arg_key>")
    if not name.strip() or "\n" in name.strip():
        raise ValueError(f"tool call: expected a name on the first line, got {name[:100]!r}")
    expected = "<arg_key>…</arg_key> and <arg_value>…</arg_value>"
    arguments = read_bare_arguments(opened + rest, _ARGUMENT, expected)
    return [ToolCall(function=ToolCall.FunctionBody(name=name.strip(), arguments=arguments))]


# The line breaks around blocks belong to the format.
_THINKING = Block("<think>", "</think>", trim="\n", after="\n")
_CALL = Block("<tool_call>", "</tool_call>", read=_read_call, before=("\n",), after="\n")
