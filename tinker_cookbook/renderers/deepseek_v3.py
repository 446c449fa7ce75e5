"""DeepSeek V3 and V3.1: ``<｜User｜>`` text ``<｜Assistant｜>`` text ``<｜end▁of▁sentence｜>``.

``deepseekv3`` is V3.1 told not to think: the answer follows ``<｜Assistant｜></think>``, in history
as in prompts. ``deepseekv3_thinking`` opens the prompt with ``<think>``. The option ``version=3``
is the format of V3, whose vocabulary has no tokens for thinking; with thinking it is that of R1.
V3.2, which calls tools in another form, is in ``deepseek_v3_2``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.blocks import Block, BlockReader
from tinker_cookbook.renderers.core.checks import check_caller, check_parts, leading_thinking
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolCall,
    ToolSpec,
    ensure_text,
    get_text_content,
    system_message,
)
from tinker_cookbook.renderers.core.parsing import MessageReader
from tinker_cookbook.renderers.core.rendered import (
    Piece,
    RenderContext,
    RenderedMessage,
    token_list,
)
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool, read_calls_in_row
from tinker_cookbook.tokenizer_utils import Tokenizer

THINK, END_THINK = "<think>", "</think>"
CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
RESULT, END_RESULT = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
_CALL, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_RESULTS, _END_RESULTS = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
DECLARED = frozenset({CALLS, END_CALLS, _CALL, _END_CALL, _SEPARATOR, "\uff5cDSML\uff5c"})
"""Control tokens in the declarations of tools."""
_INSTRUCTIONS = (
    f"IMPORTANT: ALWAYS adhere to this exact format for tool use:\n{CALLS}{_CALL}tool_call_name"
    f"{_SEPARATOR}tool_call_arguments{_END_CALL}{{{{additional_tool_calls}}}}{END_CALLS}\n\nWhere:\n\n"
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters "
    "Schema\n- For multiple tool calls, chain them directly without separators or spaces"
)


@dataclass(frozen=True)
class Version:
    """Differences between versions of the format."""

    think: str
    """Opens thinking in prompts."""
    end_think: str
    """Between thinking and answer."""
    no_thinking: str
    """Follows the assistant's token where there is no thinking."""
    call: tuple[str, str, str, str] = ("", "", "", "")
    """Text before the name, between name and arguments, after them, and between calls."""
    results: tuple[str, str, str] = ("", "", "")
    """Text before, between and after consecutive results."""
    opens_after: tuple[str | None, ...] = ("user",)
    """Roles after which an answer begins with ``<｜Assistant｜>``; None is the beginning."""

    def calls_text(self, message: Message) -> str:
        """Returns the calls of a message as text, with arguments verbatim."""
        before, between, behind, separator = self.call
        calls = [
            f"{before}{call.function.name}{between}{call.function.arguments}{behind}"
            for call in message.get("tool_calls", [])
        ]
        blocks = [f"{CALLS}{separator.join(calls)}{END_CALLS}"] if calls else []
        return "".join([*blocks, *(c.raw_text for c in message.get("unparsed_tool_calls", []))])

    def read_calls(self, body: str) -> list[ToolCall]:
        """Returns the calls in a block; raises ValueError for anything else."""
        before, between, behind, separator = map(re.escape, self.call)
        pattern = f"{before}([^<\\n]+){between}(.*?){behind}(?:{separator})?"
        return read_calls_in_row(body, re.compile(pattern, re.DOTALL), _call_of)


V3_1 = Version(
    THINK, END_THINK, END_THINK, call=(_CALL, _SEPARATOR, _END_CALL, ""), opens_after=("user",)
)
V3 = Version(
    f"{THINK}\n",
    f"\n{END_THINK}\n\n",
    "",
    call=(f"{_CALL}function{_SEPARATOR}", "\n```json\n", f"\n```{_END_CALL}", "\n"),
    results=(_RESULTS, "\n", _END_RESULTS),
    opens_after=("user", "assistant", "system", None),
)
R1 = Version(V3.think, V3.end_think, "", V3.call, (_RESULTS, "", _END_RESULTS), V3.opens_after)
VERSIONS = {"3.1": (V3_1, V3_1), "3": (V3, R1)}
"""Versions by name: without thinking, and with."""


def _call_of(found: re.Match[str]) -> ToolCall:
    check_arguments(found[2])
    return ToolCall(function=ToolCall.FunctionBody(name=found[1], arguments=found[2]))


def check_arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a call; raises ValueError unless they are a JSON object."""
    try:
        arguments = json.loads(text)
    except RecursionError as error:
        raise ValueError("arguments: the JSON is nested too deeply") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments: got {text[:80]!r}, expected a JSON object")
    return arguments


def declare_tools(tools: Sequence[ToolSpec], system_prompt: str) -> str:
    """Returns the system text that declares tools as in the model card of V3.1."""
    declared = "".join(_declare(as_openai_tool(tool)["function"]) for tool in tools)
    title = "## Tools\nYou have access to the following tools:"
    return f"{system_prompt}\n\n{title}\n\n{declared}{_INSTRUCTIONS}"


def _declare(function: dict[str, Any]) -> str:
    parameters = json.dumps(function["parameters"], ensure_ascii=False)
    description = function.get("description", "")
    return f"### {function['name']}\nDescription: {description}\n\nParameters: {parameters}\n\n"


BOS, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_ROLES = ("system", "user", "assistant", "tool")


class DeepSeekV3Renderer(Renderer):
    """DeepSeek V3.1 without thinking; ``version=3`` is V3, which has no thinking. By default the
    vocabulary decides.

    Thinking is dropped, in the last turn with a warning. In text without tool calls, text before
    ``</think>`` is thinking, as in V3.1's template. A system message after other messages raises
    RendererError: the template moves it to the beginning, which changes earlier prompts.
    ``system_role_as_user`` renders it as a user message.

    V3.1's template has no declaration of tools, so that of its model card is used. V3's template
    leaves out or repeats the tokens around several calls and results, and drops text beside calls:
    here every call and result is opened and closed once.
    """

    _encodes_with_codec = True
    stop_token = END
    _declared_tokens = DECLARED
    _thinking = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        system_role_as_user: bool = False,
        strip_thinking_from_history: bool = True,
        *,
        image_processor: Any = None,
        version: str | None = None,
    ) -> None:
        super().__init__(tokenizer, image_processor)
        self.system_role_as_user = system_role_as_user
        self.strip_thinking_from_history = strip_thinking_from_history
        if version is None:  # only the vocabulary of V3 has no <think> token
            version = "3.1" if THINK in tokenizer.get_vocab() else "3"
        if version not in VERSIONS:
            raise RendererError(
                f"version: got {version!r}, expected one of {', '.join(VERSIONS)}; for V3.2 use "
                "deepseekv3_2"
            )
        self._set_version(VERSIONS[version][self._thinking], version)

    def _set_version(self, version: Version, name: str) -> None:
        self._version = version
        if name != "3" and THINK not in self.tokenizer.get_vocab():
            raise RendererError(
                f"renderer_name: {type(self).__name__} needs the special token {THINK!r}, which "
                f"the tokenizer {getattr(self.tokenizer, 'name_or_path', '')!r} does not have; for "
                "the vocabulary of DeepSeek V3 use 'deepseekv3?version=3'"
            )

    @property
    def has_extension_property(self) -> bool:
        """True without thinking, and where thinking stays in history."""
        return not (self._thinking and self.strip_thinking_from_history)

    @property
    def disables_thinking(self) -> bool:
        """Whether the prompt ends with ``</think>``."""
        return not self._thinking and bool(self._version.no_thinking)

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; each system message after the first begins with a blank
        line."""
        role, before = message["role"], ctx.prev_role
        if role not in _ROLES or (role == "system" and before not in (None, "system")):
            where = " before all others" if role == "system" else ""
            raise RendererError(
                f"messages[{ctx.idx}].role: got {role!r}, expected one of {', '.join(_ROLES)}"
                f"{where}: {self._name} has no form for others"
            )
        # Only answers may have thinking; no role may have images.
        parts = {"text", "thinking"} if role == "assistant" else {"text"}
        check_parts(message, ctx.idx, self._name, frozenset(parts))
        if role == "assistant":
            return self._render_answer(message, ctx)
        check_caller(message, ctx.idx)
        text = ensure_text(message["content"])
        if role == "tool":
            return self._render_result(text, ctx)
        # The template joins system messages by a blank line; a system message has no header.
        header = USER if role == "user" else "\n\n" if before else ""
        return RenderedMessage(header=self.codec.constant(header), output=[self.codec.encode(text)])

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """Declares tools after the system prompt, as in the model card of V3.1."""
        if not tools:
            return system_message(system_prompt)
        if self._version is not V3_1:
            raise RendererError(
                f"{self._name}: V3 and R1 declare no tools; use deepseekv3 or "
                "deepseekv3_2_thinking, or describe the tools in a system message of your own"
            )
        return [Message(role="system", content=declare_tools(tools, system_prompt))]

    def _reader(self) -> MessageReader:
        calls = Block(CALLS, END_CALLS, read=self._version.read_calls)
        if not self._thinking:
            return BlockReader((calls,))
        # R1 writes line breaks around thinking, V3.1 does not.
        white = "\n" if self._version is R1 else ""
        thinking = Block(THINK, END_THINK, trim=white, after=white)
        return BlockReader((thinking, calls), inside=thinking)

    @property
    def _bos_tokens(self) -> list[int]:
        return self.codec.constant(BOS)

    def _generation_suffix(self, role: Role) -> list[int]:
        return token_list(self._prompt_pieces([], role)[-1])

    def _prompt_pieces(self, messages: Sequence[Message], role: Role) -> list[Piece]:
        # The header of the next message depends on the one before it: render an empty one.
        *rendered, following = self._render_all([*messages, Message(role=role, content="")])
        pieces = [piece for m in rendered for piece in (m.header, *m.output, m.footer)]
        return [self._bos_tokens, *pieces, following.header]

    def _render_all(self, messages: Sequence[Message]) -> list[RenderedMessage]:
        # System messages are encoded in one piece, as the template joins them; a token that spans
        # two of them belongs to the former.
        rendered = super()._render_all(messages)
        roles = [message["role"] for message in messages]
        count = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
        if count < 2:
            return rendered
        texts = [ensure_text(message["content"]) for message in messages[:count]]
        tokens, end = self.codec.encode("\n\n".join(texts)), 0
        for i in range(count):
            start, end = end, max(end, len(self.codec.encode("\n\n".join(texts[: i + 1]))))
            rendered[i] = RenderedMessage(output=[tokens[start : end if i + 1 < count else None]])
        return rendered

    def _normalize(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        normal = super()._normalize(messages)
        if not self.system_role_as_user:
            return normal
        return [
            Message(**{**message, "role": "user"}) if i and message["role"] == "system" else message
            for i, message in enumerate(normal)
        ]

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        thinking, text = self._split_thinking(message, ctx)
        opening = self._opening(ctx)
        strips = self.strip_thinking_from_history
        writes = self._thinking and (ctx.in_last_assistant_turn or not strips)
        if self._version is V3_1 and strips and message.get("tool_calls"):
            # The template closes thinking before a call in history.
            writes = writes and (bool(thinking) or ctx.is_last)
        # Thinking belongs to the block that the prompt has opened.
        in_place = writes and opening is not None
        version = self._version
        if thinking and writes and not in_place:
            # After tool results the prompt opens no thinking block: both tags are text.
            text = f"{version.think}{thinking}{version.end_think}{text}"
        elif thinking and not writes and not self._thinking and ctx.in_last_assistant_turn:
            self._warn_once(
                f"{self._name}: the thinking of an answer is left out, because the prompt closes "
                "it before the answer begins; to train on it, use deepseekv3_thinking"
            )
        header, answer = "", text
        if opening is not None:
            header = opening + (version.think if in_place else version.no_thinking)
        if in_place:
            answer = thinking + version.end_think + text
        output = self.codec.encode(answer + self._calls_text(message, ctx.idx) + END)
        return RenderedMessage(header=self.codec.constant(header), output=[output])

    def _opening(self, ctx: RenderContext) -> str | None:
        """Returns what opens an answer, None where it continues the message before it."""
        return ASSISTANT if ctx.prev_role in self._version.opens_after else None

    def _split_thinking(self, message: Message, ctx: RenderContext) -> tuple[str, str]:
        thinking = leading_thinking(message, ctx.idx, self._name) or ""
        text = get_text_content(message)
        if message.get("tool_calls") or ctx.prev_role == "tool" or END_THINK not in text:
            return thinking, text
        return self._split_text(thinking, text)

    def _split_text(self, thinking: str, text: str) -> tuple[str, str]:
        """Splits thinking from an answer's text at the tags where the template does."""
        if self._version is V3:
            return thinking, text
        # R1's template splits at the last closing tag, V3.1's at the first.
        at = text.rfind(END_THINK) if self._version is R1 else text.find(END_THINK)
        before, after = text[:at].removeprefix(THINK), text[at + len(END_THINK) :]
        return thinking + before.strip("\n" if self._version is R1 else ""), after

    def _calls_text(self, message: Message, idx: int) -> str:
        """Returns the calls of a message as text; ``idx`` is its index, for errors."""
        return self._version.calls_text(message)

    def _render_result(self, text: str, ctx: RenderContext) -> RenderedMessage:
        opening, between, closing = self._version.results
        before = between if ctx.prev_role == "tool" else opening
        after = "" if ctx.next_role == "tool" else closing
        return RenderedMessage(
            header=self.codec.constant(before + RESULT),
            output=[self.codec.encode(text)],
            footer=self.codec.constant(END_RESULT + after),
        )


class DeepSeekV3ThinkingRenderer(DeepSeekV3Renderer):
    """DeepSeek V3.1 with thinking; ``version=3`` is R1.

    An answer of the last turn follows ``<｜Assistant｜><think>``, as it is sampled; the template
    renders every answer as history. ``strip_thinking_from_history=False`` renders all answers like
    that, so that the extension property holds. Prompts after tool results open no thinking block;
    thinking there is written between both tags before the text.
    """

    _thinking = True


DeepSeekV3DisableThinkingRenderer = DeepSeekV3Renderer


def deepseek_v3(
    tokenizer: Tokenizer,
    image_processor: Any = None,
    *,
    version: str | None = None,
    system_role_as_user: bool = False,
) -> DeepSeekV3Renderer:
    """Returns the renderer without thinking, for :func:`get_renderer`."""
    return DeepSeekV3Renderer(
        tokenizer, system_role_as_user, image_processor=image_processor, version=version
    )


def deepseek_v3_thinking(
    tokenizer: Tokenizer,
    image_processor: Any = None,
    *,
    version: str | None = None,
    system_role_as_user: bool = False,
    strip_thinking_from_history: bool = True,
) -> DeepSeekV3ThinkingRenderer:
    """Returns the renderer with thinking, for :func:`get_renderer`."""
    return DeepSeekV3ThinkingRenderer(
        tokenizer,
        system_role_as_user,
        strip_thinking_from_history,
        image_processor=image_processor,
        version=version,
    )
