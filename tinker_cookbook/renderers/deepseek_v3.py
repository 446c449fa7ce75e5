"""DeepSeek V3 and V3.1: ``<｜User｜>`` text ``<｜Assistant｜>`` text ``<｜end▁of▁sentence｜>``.

``deepseekv3`` is V3.1 told not to think: the answer follows ``<｜Assistant｜></think>``, in history
as in prompts. ``deepseekv3_thinking`` opens the prompt with ``<think>``. The option ``version=3``
is the format of V3, whose vocabulary has no tokens for thinking; with thinking it is the format of
R1. V3.2, which calls tools in another form, is in ``deepseek_v3_2``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.answer_form import AnswerForm, CallForm
from tinker_cookbook.renderers.core.arguments import arguments_text, to_json
from tinker_cookbook.renderers.core.blocks import Block, BlockReader
from tinker_cookbook.renderers.core.checks import TEXT_AND_THINKING
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolCall,
    ToolSpec,
    ensure_text,
    get_text_content,
    system_message,
)
from tinker_cookbook.renderers.core.parsing import MessageReader, MissingTokenError
from tinker_cookbook.renderers.core.rendered import Piece, RenderContext, RenderedMessage
from tinker_cookbook.renderers.core.thinking import LeadingThinking, thinking_and_rest
from tinker_cookbook.renderers.core.tool_calls import (
    as_openai_tool,
    json_before,
    json_end,
    read_calls_in_row,
    tool_call,
)
from tinker_cookbook.tokenizer_utils import Tokenizer

BOS, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_RESULTS, _END_RESULTS = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
_RESULT, _END_RESULT = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
_INSTRUCTIONS = (
    f"IMPORTANT: ALWAYS adhere to this exact format for tool use:\n{CALLS}{_CALL}tool_call_name"
    f"{_SEPARATOR}tool_call_arguments{_END_CALL}{{{{additional_tool_calls}}}}{END_CALLS}\n\nWhere:\n\n"
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters "
    "Schema\n- For multiple tool calls, chain them directly without separators or spaces"
)


Calls = tuple[Block, Callable[[Message, int], str]]
"""Form of tool calls: the block to parse, and the function that writes the calls of a message; its
second argument is the index of the message, for errors."""


def _calls(before: str, between: str, after: str, separator: str = "") -> tuple[Calls, CallForm]:
    """Returns the form with these texts around a call's name and its arguments."""
    start, middle, end, gap = map(re.escape, (before, between, after, separator))
    # The separator is optional, since none follows the last call.
    pattern = re.compile(
        f"{start}([^<\\n]+){middle}({json_before(after)}){end}(?:{gap})?", re.DOTALL
    )

    def call_of(found: re.Match[str]) -> ToolCall:
        return tool_call(found[1], arguments_text(found[2]))

    def read(body: str) -> list[ToolCall]:
        return read_calls_in_row(body, pattern, call_of)

    def write(message: Message, idx: int) -> str:
        calls = separator.join(
            f"{before}{call.function.name}{between}{call.function.arguments}{after}"
            for call in message.get("tool_calls", [])
        )
        block = f"{CALLS}{calls}{END_CALLS}" if calls else ""
        # Unparsed calls are verbatim, because the model sampled them.
        return block + "".join(call.raw_text for call in message.get("unparsed_tool_calls", []))

    form = CallForm(
        before,
        between,
        after,
        begin=CALLS,
        end=END_CALLS,
        separator=separator,
        marker=CALLS,
    )
    return (Block(CALLS, END_CALLS, read=read, find_end=json_end(END_CALLS)), write), form


@dataclass(frozen=True)
class Version:
    """Differences between versions of the format."""

    calls: Calls
    call_form: CallForm
    think: str = THINK  # opens thinking in prompts
    end_think: str = END_THINK  # between thinking and answer
    no_thinking: str = END_THINK  # after the assistant's token if there is no thinking
    white: str = ""  # white space around sampled thinking
    results: tuple[str, str, str] = ("", "", "")  # before, between and after consecutive results
    # What opens an answer, by the role of the message before it (None: the beginning); after other
    # roles an answer continues the message before it.
    openings: Mapping[str | None, str] = field(default_factory=lambda: {"user": ASSISTANT})
    # At which closing tag in a string the template splits thinking from the answer.
    splits_at: Literal["first", "last"] | None = None


_V3 = Version(
    *_calls(f"{_CALL}function{_SEPARATOR}", "\n```json\n", f"\n```{_END_CALL}", "\n"),
    think=f"{THINK}\n",
    end_think=f"\n{END_THINK}\n\n",
    no_thinking="",
    results=(_RESULTS, "\n", _END_RESULTS),
    openings=dict.fromkeys(("user", "assistant", "system", None), ASSISTANT),
)
_R1 = replace(_V3, white="\n", results=(_RESULTS, "", _END_RESULTS), splits_at="last")
_V3_1 = Version(*_calls(_CALL, _SEPARATOR, _END_CALL), splits_at="first")


class DeepSeekV3Renderer(LeadingThinking):
    """DeepSeek V3.1 without thinking; ``version=3`` is V3, which has no thinking. By default the
    vocabulary decides.

    Thinking is dropped, in the last turn with a warning. In text without tool calls, text before
    ``</think>`` is thinking, as in V3.1's template. A system message after other messages raises
    RendererError: the template moves it to the beginning, which changes earlier prompts.
    ``system_role_as_user`` renders it as a user message.

    V3.1's template does not declare tools, so the declaration in its model card is used. V3's
    template leaves out or repeats the tokens around several calls and results, and drops text next
    to calls: here every call and result is opened and closed once.
    """

    _encodes_with_codec = True
    stop_token = END
    _bos = BOS
    _answer_parts = TEXT_AND_THINKING
    # Control tokens in the declarations of tools.
    _declared_tokens = frozenset(
        {CALLS, END_CALLS, _CALL, _END_CALL, _SEPARATOR, "\uff5cDSML\uff5c"}
    )
    _thinking = False
    # Versions by name: without thinking, and with.
    _versions: ClassVar[Mapping[str, tuple[Version, Version]]] = {
        "3.1": (_V3_1, _V3_1),
        "3": (_V3, _R1),
    }

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
        thinks = THINK in tokenizer.get_vocab()
        if version is None:  # only the vocabulary of V3 has no <think> token
            version = "3.1" if thinks else "3"
        if version not in self._versions:
            raise RendererError(
                f"version: got {version!r}, expected one of {', '.join(self._versions)}; for V3.2 "
                "use deepseekv3_2"
            )
        if version != "3" and not thinks:
            raise MissingTokenError(
                f"the chat format needs the special token {THINK!r}, which "
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} does not have; for "
                "the vocabulary of DeepSeek V3 use 'deepseekv3?version=3'"
            )
        self._version = self._versions[version][self._thinking]
        self.disables_thinking = not self._thinking and bool(self._version.no_thinking)

    @property
    def has_extension_property(self) -> bool:
        """True without thinking, and where thinking stays in history."""
        return not (self._thinking and self.strip_thinking_from_history)

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; each system message after the first begins with a blank
        line."""
        self._check(message, ctx.idx)
        role, before = message["role"], ctx.prev_role
        roles = ("system", "user", "assistant", "tool")
        if role not in roles or (role == "system" and before not in (None, "system")):
            where = " before all others" if role == "system" else ""
            raise RendererError(
                f"messages[{ctx.idx}].role: got {role!r}, expected one of {', '.join(roles)}"
                f"{where}: {self._name} has no form for others"
            )
        if role == "assistant":
            return self._render_answer(message, ctx)
        text = ensure_text(message["content"])
        if role == "tool":
            return self._render_result(text, ctx)
        # The template joins system messages by a blank line; a system message has no header.
        header = USER if role == "user" else "\n\n" if before else ""
        return RenderedMessage(header=self.codec.constant(header), output=[self.codec.encode(text)])

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Declares tools after the system prompt, as in the model card of V3.1."""
        if not tools:
            return system_message(system_prompt)
        # Only V3.1 has a format for declarations, in its model card.
        if self._version is not _V3_1:
            raise RendererError(
                f"{self._name}: V3 and R1 declare no tools; use deepseekv3 or "
                "deepseekv3_2_thinking, or describe the tools in a system message of your own"
            )
        declared = ""
        for tool in tools:
            function = as_openai_tool(tool)["function"]
            declared += (
                f"### {function['name']}\nDescription: {function.get('description', '')}\n\n"
                f"Parameters: {to_json(function['parameters'])}\n\n"
            )
        title = "## Tools\nYou have access to the following tools:"
        text = f"{system_prompt}\n\n{title}\n\n{declared}{_INSTRUCTIONS}"
        return [Message(role="system", content=text)]

    def _reader(self) -> MessageReader:
        calls, white = self._version.calls[0], self._version.white
        if not self._thinking:
            return BlockReader((calls,))
        thinking = Block(THINK, END_THINK, trim=white, after=white)
        # The prompt has opened the block, so a response begins inside it.
        return BlockReader((thinking, calls), inside=thinking)

    def answer_form(self) -> AnswerForm:
        """Returns the form, with the calls of the version."""
        return replace(super().answer_form(), calls=self._version.call_form)

    def _prompt_pieces(self, messages: Sequence[Message], role: Role) -> list[Piece]:
        # The header of the next message depends on the one before it: render an empty one.
        *rendered, following = self._render_all([*messages, Message(role=role, content="")])
        return [*self._pieces(rendered), following.header]

    def _answered_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        # The answer is the last message here, because history may have it in another form.
        return self._pieces(self._render_all(messages))

    def _pieces(self, rendered: Sequence[RenderedMessage]) -> list[Piece]:
        return [self._bos_tokens, *(p for m in rendered for p in (m.header, *m.output, m.footer))]

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
            # A system message at the beginning has a form; only later ones become questions.
            Message(**{**message, "role": "user"}) if i and message["role"] == "system" else message
            for i, message in enumerate(normal)
        ]

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        version, strips = self._version, self.strip_thinking_from_history
        keeps = self._thinking and (ctx.in_last_assistant_turn or not strips)
        given, text = thinking_and_rest(message, keeps)
        thinking = given or ""
        # In text without calls and results, the template treats everything before a tag as
        # thinking.
        plain = not message.get("tool_calls") and ctx.prev_role != "tool"
        plain = plain and text == get_text_content(message)  # no thinking part behind the text
        if version.splits_at and plain and END_THINK in text:
            at = text.find(END_THINK) if version.splits_at == "first" else text.rfind(END_THINK)
            thinking += text[:at].removeprefix(THINK).strip(version.white)
            text = text[at + len(END_THINK) :]
        writes = keeps
        if version is _V3_1 and strips and message.get("tool_calls"):
            # The template closes thinking before a call in history.
            writes = writes and (bool(thinking) or ctx.is_last)
        # Thinking belongs to the block that the prompt has opened. After tool results the prompt
        # opens none: then both tags are text.
        opening = version.openings.get(ctx.prev_role)
        header = ""
        # The prompt contains the opening of the block, so it is header and not trained.
        if opening is not None and writes:
            header, text = opening + version.think, thinking + version.end_think + text
        elif opening is not None:
            header = opening + version.no_thinking
        elif thinking and writes:
            text = f"{version.think}{thinking}{version.end_think}{text}"
        if thinking and not self._thinking and ctx.in_last_assistant_turn:
            self._warn_once(
                f"{self._name}: the thinking of an answer is left out, because the prompt closes "
                "it before the answer begins; to train on it, use deepseekv3_thinking"
            )
        # The stop token is sampled, so it is trained with the answer.
        text += version.calls[1](message, ctx.idx) + END
        return RenderedMessage(header=self.codec.constant(header), output=[self.codec.encode(text)])

    def _thinking_of(self, message: Message) -> str:
        return ""  # without thinking, that of a trained answer is left out with a warning

    def _render_result(self, text: str, ctx: RenderContext) -> RenderedMessage:
        # V3 writes tokens around consecutive results, V3.1 does not.
        opening, between, closing = self._version.results
        before = between if ctx.prev_role == "tool" else opening
        after = "" if ctx.next_role == "tool" else closing
        return RenderedMessage(
            header=self.codec.constant(before + _RESULT),
            output=[self.codec.encode(text)],
            footer=self.codec.constant(_END_RESULT + after),
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


def make_deepseek_v3(
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


def make_deepseek_v3_thinking(
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
