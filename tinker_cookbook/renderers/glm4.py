"""GLM-4.6: ``<|user|>``, a line break, the text, and no token that ends a message. GLM-5.3, which
writes no line breaks, is in ``glm5_3``.

A message ends where the next one begins, so the model samples the next role's token: an answer ends
with ``<|user|>``, or with ``<|observation|>`` if it calls tools. A supervised example whose last
message is a trained answer therefore ends with that token, which the template leaves out.

Every answer begins with a thinking block, empty without thinking and in earlier turns. White space
around answers is trimmed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinker_cookbook.renderers.core.answer_form import AnswerForm, ArgumentForm, CallForm
from tinker_cookbook.renderers.core.arguments import to_json
from tinker_cookbook.renderers.core.blocks import Block, BlockReader
from tinker_cookbook.renderers.core.checks import TEXT_AND_THINKING
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolCall,
    ToolSpec,
    ensure_text,
    system_message,
)
from tinker_cookbook.renderers.core.parsing import MessageReader
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.core.thinking import LeadingThinking, split_thinking
from tinker_cookbook.renderers.core.tool_calls import (
    calls_with_arguments,
    json_tools,
    read_bare_arguments,
    tags_end,
    tool_call,
)

_USER, _ASSISTANT, _RESULTS = "<|user|>", "<|assistant|>", "<|observation|>"
_OPENINGS = {"system": "<|system|>", "user": _USER, "assistant": _ASSISTANT, "tool": _RESULTS}


def declare_tools(functions: str, gap: str) -> str:
    """Returns the system text that declares ``functions``, JSON lines, with ``gap`` as in calls."""
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        f"{functions}\n</tools>\n\nFor each function call, output the function name and arguments "
        f"within the following XML format:\n<tool_call>{{function-name}}{gap}"
        f"<arg_key>{{arg-key-1}}</arg_key>{gap}<arg_value>{{arg-value-1}}</arg_value>{gap}"
        f"<arg_key>{{arg-key-2}}</arg_key>{gap}<arg_value>{{arg-value-2}}</arg_value>{gap}"
        f"...{gap}</tool_call>"
    )


# A value ends at the first closing tag that another argument or the end of the call follows.
_ARGUMENT = re.compile(
    r"\s*+<arg_key>(?>(?P<name>.*?)</arg_key>)\s*+<arg_value>(?P<value>.*?)</arg_value>"
    r"(?=\s*+(?:<arg_key>|\Z))",
    re.DOTALL,
)


def _call_form(gap: str) -> CallForm:
    """Returns the form of a call with ``gap`` between its parts."""
    return CallForm(
        before="<tool_call>",
        between=gap,
        after="</tool_call>",
        separator=gap,
        arguments=ArgumentForm(
            before="<arg_key>",
            between=f"</arg_key>{gap}<arg_value>",
            after=f"</arg_value>{gap}",
            marks=("</arg_value>", "</tool_call>"),
            string_between=f"</arg_key>{gap}<arg_value>",
        ),
        marker="<tool_call>",
    )


def _read_call(body: str) -> list[ToolCall]:
    """Returns the call in a block; raises ValueError for anything else."""
    name, opened, rest = body.partition("<arg_key>")
    if not name.strip() or "\n" in name.strip():
        raise ValueError(f"tool call: expected a name on the first line, got {name[:100]!r}")
    expected = "<arg_key>…</arg_key> and <arg_value>…</arg_value>"
    return [tool_call(name.strip(), read_bare_arguments(opened + rest, _ARGUMENT, expected))]


def calls_block(gap: str) -> Block:
    """Returns the block of a call with ``gap`` around it."""
    return Block(
        "<tool_call>",
        "</tool_call>",
        read=_read_call,
        before=(gap,) if gap else (),
        after=gap,
        find_end=tags_end("</tool_call>", ("<arg_value>", "</arg_value>")),
    )


@dataclass(eq=False, repr=False, kw_only=True)
class Glm46Renderer(LeadingThinking):
    """GLM-4.6 with thinking and tools.

    ``strip_thinking_from_history=False`` keeps the thinking of earlier turns. Arguments of calls
    have no types: text that is a JSON value is parsed as that value, so the string ``"12"`` becomes
    a number; tools and the server take the type from the declared schema. Thinking must precede the
    text of a trained answer.
    """

    strip_thinking_from_history: bool = True

    _encodes_with_codec = True
    _special_tokens = ("[gMASK]", "<sop>", *_OPENINGS.values())
    _bos = "[gMASK]<sop>"
    _roles = tuple(_OPENINGS)
    _answer_parts = TEXT_AND_THINKING
    # The line breaks around blocks belong to the format.
    _blocks = (Block("<think>", "</think>", trim="\n", after="\n"), calls_block("\n"))
    _gap = "\n"
    """Text between the parts of a message."""
    _question_end = ""
    """Text that ends every question."""

    def get_stop_sequences(self) -> list[int]:
        """Returns ``<|user|>`` and ``<|observation|>``, which begin the next message."""
        return [*self.codec.constant(_USER), *self.codec.constant(_RESULTS)]

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; consecutive tool results share a header."""
        self._check(message, ctx.idx)
        role = message["role"]
        if role == "assistant":
            return self._render_answer(message, ctx)
        text, header = ensure_text(message["content"]), _OPENINGS[role]
        if role == "user" and not text.endswith(self._question_end):
            text += self._question_end  # the template does not add it twice
        elif role == "tool":
            text = f"<tool_response>{self._gap}{text}{self._gap}</tool_response>"
            header = "" if ctx.prev_role == "tool" else header
        return RenderedMessage(
            header=self.codec.constant(header), output=[self.codec.encode(f"{self._gap}{text}")]
        )

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Declares tools in a separate system message before that of ``system_prompt``."""
        declaration = declare_tools(json_tools(tools), self._gap) if tools else ""
        return [*system_message(declaration), *system_message(system_prompt)]

    def _header(self, role: Role) -> str:
        return _OPENINGS.get(role, f"<|{role}|>")

    def _reader(self) -> MessageReader:
        # The format has a line break before the first block or the text.
        return BlockReader(self._blocks, self._inside, skip=self._gap)

    def answer_form(self) -> AnswerForm:
        """Returns the form, whose parts begin with a line break."""
        gap = self._gap
        form = replace(super().answer_form(), leading=gap, calls=_call_form(gap))
        if form.thinking is None:
            return form
        opening, closing = form.thinking
        return replace(form, thinking=(f"{gap}{opening}", closing))

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        keeps = ctx.in_last_assistant_turn or not self.strip_thinking_from_history
        thinking, text = self._thinking_and_text(message, keeps)
        # The template empties the block of answers before the last question.
        thinking = thinking if keeps else ""
        gap = self._gap
        calls = [
            f"<tool_call>{call.function.name}{gap}"
            + "".join(
                f"<arg_key>{key}</arg_key>{gap}<arg_value>{_spell(value)}</arg_value>{gap}"
                for key, value in arguments.items()
            )
            + "</tool_call>"
            for call, arguments in calls_with_arguments(message, ctx.idx)
        ]
        # Unparsed calls are verbatim, because the model sampled them.
        calls += [call.raw_text for call in message.get("unparsed_tool_calls", [])]
        block = self._thinking_block(thinking)
        answer = "".join(f"{gap}{part}" for part in (text.strip(), *calls) if part)
        # The model ends a call with the token of the results that it expects.
        waits = ctx.next_role == "tool" or (ctx.next_role is None and calls)
        return RenderedMessage(
            # What the prompt contains already is header and not trained.
            header=self.codec.constant(_ASSISTANT + self._prompt_opening),
            output=[self.codec.encode(block + answer)],
            # The token that begins the next message is the stop token, so it is trained.
            stop_overlap=self.codec.constant(_RESULTS if waits else _USER),
        )

    def _thinking_of(self, message: Message) -> str:
        return self._thinking_and_text(message)[0]

    def _thinking_and_text(self, message: Message, keeps: bool = True) -> tuple[str, str]:
        thinking, text = split_thinking(message, keeps)
        return thinking.strip(), text

    def _thinking_block(self, thinking: str) -> str:
        """Returns the thinking block that the model writes."""
        return f"\n<think>{thinking}</think>"


class Glm46DisableThinkingRenderer(Glm46Renderer):
    """GLM-4.6 without thinking: questions end with ``/nothink``, prompts with an empty block.

    Thinking in a trained answer raises RendererError; in history it is dropped.
    """

    _question_end = "/nothink"
    _prompt_opening = "\n<think></think>"
    disables_thinking = True
    _history_as_sampled = True  # every answer follows an empty block

    def _thinking_block(self, thinking: str) -> str:
        # The header contains the empty block; a model may think all the same.
        return super()._thinking_block(thinking) if thinking else ""


def _spell(value: object) -> str:
    # Strings are bare, other values JSON.
    return value if isinstance(value, str) else to_json(value)
