"""gpt-oss: messages on channels, the format that OpenAI calls harmony.

A message is ``<|start|>role<|channel|>channel<|message|>text<|end|>``. The assistant thinks on the
channel ``analysis``, calls tools and writes text between calls on ``commentary``, and answers on
``final``. The system message has the model's identity, the date and the reasoning effort; the
user's system prompt is the developer message after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, RendererError, nearest
from tinker_cookbook.renderers.core.checks import check_caller, check_parts
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolSpec,
    ensure_text,
    get_text_content,
    system_message,
)
from tinker_cookbook.renderers.core.parsing import MessageReader, special_token_id
from tinker_cookbook.renderers.core.rendered import (
    Piece,
    RenderContext,
    RenderedMessage,
    TrainOnWhat,
    join_weighted,
    weigh,
)
from tinker_cookbook.renderers.core.renderer import Example, Renderer
from tinker_cookbook.renderers.harmony import (
    ASSISTANT,
    CALL,
    CHANNEL,
    END,
    FUNCTIONS,
    MESSAGE,
    NAMESPACE_CLOSE,
    NAMESPACE_OPEN,
    RETURN,
    START,
    HarmonyReader,
    called_tool,
    calls_tool,
    declare_functions,
    is_answer,
    tag_in,
    to_json,
    write_answer,
    write_call,
)
from tinker_cookbook.tokenizer_utils import Tokenizer

MODEL_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_EFFORTS = ("low", "medium", "high")
_TEXT_BEFORE_CALL = ("commentary", "analysis")
_TOOL_FORMATS = ("harmony", "template")
_INSTRUCTIONS = "# Instructions\n\n"
_TOOLS_LINE = "Calls to these tools must go to the commentary channel: 'functions'."


class GptOssRenderer(Renderer):
    """gpt-oss (harmony): the system message, the channels, tool calls and their results.

    - ``use_system_prompt`` inserts the system message. Without it, declared tools still need a
      system message with the line on the commentary channel.
    - ``reasoning_effort``: low, medium or high; set if and only if there is a system message.
    - ``current_date`` of the system message (``2026-01-31``), by default today. ``spec`` holds the
      date, so that a resumed run has the same prompts on another day.
    - ``model_identity``: the first line of the system message.
    - ``tool_format``: ``harmony`` follows OpenAI's description of the format, with
      ``<|constrain|>json`` before arguments and verbatim results. ``template`` follows the model's
      chat template: ``json`` alone, and results as JSON strings.
    - ``text_before_call``: the channel of text beside a tool call. ``commentary`` is harmony's
      preamble, which is parsed as text; ``analysis`` is what the template writes.

    Thinking is written as by the template: before the last answer, and before calls that no answer
    has followed yet. The last answer ends with ``<|return|>``, earlier ones with ``<|end|>``. One
    example of calls and their answer therefore lacks the thinking before the calls;
    ``build_supervised_examples`` renders each trained answer after the prompt of inference.

    Several calls in a message are written one after the other, each with its ``<|call|>``; the
    template drops all but the first, so ``tool_format=template`` raises RendererError, as do later
    system and developer messages and unknown roles. Thinking and text beside a call, and text
    between thinking, follow harmony where the template raises. ``arguments`` must be a JSON object
    and are verbatim.
    """

    _encodes_with_codec = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        use_system_prompt: bool = False,
        reasoning_effort: str | None = None,
        current_date: str | None = None,
        *,
        image_processor: Any = None,
        model_identity: str = MODEL_IDENTITY,
        tool_format: str = "harmony",
        text_before_call: str = "commentary",
    ) -> None:
        super().__init__(tokenizer, image_processor)
        if use_system_prompt != (reasoning_effort is not None):
            raise ConfigurationError(
                f"reasoning_effort: got {reasoning_effort!r} with use_system_prompt="
                f"{use_system_prompt}; expected one of {', '.join(_EFFORTS)} with the system "
                "prompt, which it is written in, and None without"
            )
        if reasoning_effort is not None:
            _check_option("reasoning_effort", reasoning_effort, _EFFORTS)
        _check_option("tool_format", tool_format, _TOOL_FORMATS)
        _check_option("text_before_call", text_before_call, _TEXT_BEFORE_CALL)
        self.use_system_prompt = use_system_prompt
        self.reasoning_effort = reasoning_effort
        self.current_date = current_date
        # The date of the day becomes part of the spec, so that prompts stay the same.
        if use_system_prompt and current_date is None:
            self.current_date = date.today().isoformat()
            self.resolved_options = {"current_date": self.current_date}
        self._tool_format = tool_format
        self._stops = [special_token_id(tokenizer, t, type(self).__name__) for t in (RETURN, CALL)]
        self._text_before_call = text_before_call
        self._system = (
            f"{model_identity}\nKnowledge cutoff: 2024-06\n"
            f"Current date: {self.current_date}\n\nReasoning: {reasoning_effort}\n\n"
            "# Valid channels: analysis, commentary, final. "
            "Channel must be included for every message."
            if use_system_prompt
            else ""
        )

    def get_stop_sequences(self) -> list[int]:
        """Returns ``<|return|>``, which ends an answer, and ``<|call|>``, which ends a call."""
        return list(self._stops)

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """Returns the developer message that declares ``tools``, in its final form.

        The renderer recognises it by its text and adds the line on calls to the system message.
        """
        if not tools:
            return system_message(system_prompt)
        before = f"{_INSTRUCTIONS}{system_prompt}\n\n" if system_prompt else ""
        return [Message(role="developer", content=before + declare_functions(tools))]

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; an assistant message may become several of harmony."""
        role = message["role"]
        if role == "assistant":
            return self._render_answer(message, ctx)
        check_parts(message, ctx.idx, self._name, frozenset({"text"}))
        check_caller(message, ctx.idx)
        text = ensure_text(message["content"])
        if role == "user":
            return self._framed(role, text)
        if role == "tool":
            # The chat template dumps a result as a JSON string.
            result = to_json(text) if self._tool_format == "template" else text
            return self._framed(self._author(message, ctx.idx), result)
        if role in ("system", "developer") and ctx.idx == 0:
            if _declares_tools(message):
                return self._framed("developer", text)
            whole = f"{_INSTRUCTIONS}{text}\n\n"
            return self._framed("developer", whole) if text else RenderedMessage(output=[])
        raise RendererError(
            f"messages[{ctx.idx}].role: got {role!r}, expected user, assistant or tool, or system "
            f"or developer as the first message: {self._name} has no form for others; join "
            "instructions to the first message"
        )

    def _split_example(
        self, messages: Sequence[Message], trained: Sequence[bool], what: TrainOnWhat
    ) -> Example:
        # Calls share an example with their answer, with the thinking that the prompt had.
        return join_weighted(self._sampled(messages, trained))

    def _answered_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        return [piece for piece, _ in self._sampled(messages, [False] * len(messages))]

    def _sampled(
        self, messages: Sequence[Message], trained: Sequence[bool]
    ) -> list[tuple[Piece, float]]:
        """Returns the last message as it is sampled, after the prompt of inference."""
        rendered = self._render(messages, self._last_user_index(messages[:-1]))
        return [(self._conversation_prefix(messages), 0.0), *weigh(rendered, trained, 0.0)]

    def _render(
        self, messages: Sequence[Message], last_answer: int, prompt: bool = False
    ) -> list[RenderedMessage]:
        return self._render_cache.render_all(self.render_message, messages, last_answer, not prompt)

    def _prompt_pieces(self, messages: Sequence[Message], role: Role) -> list[Piece]:
        # In a prompt all messages are history, also the last one.
        pieces: list[Piece] = [self._conversation_prefix(messages)]
        for rendered in self._render(messages, self._last_user_index(messages), prompt=True):
            pieces += [rendered.header, *rendered.output, rendered.footer]
        return [*pieces, self._generation_suffix(role)]

    def _last_user_index(self, messages: Sequence[Message]) -> int:
        """Returns the last answer without calls, up to which thinking is history."""
        return max((i for i, m in enumerate(messages) if is_answer(m)), default=-1)

    def _reader(self) -> MessageReader:
        return HarmonyReader()

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        # The line on the commentary channel is needed only with tools.
        line = _TOOLS_LINE if messages and _declares_tools(messages[0]) else ""
        text = "\n".join(part for part in (self._system, line) if part)
        return self.codec.constant(f"{START}system{MESSAGE}{text}{END}") if text else []

    def _generation_suffix(self, role: Role) -> list[int]:
        return self.codec.constant(ASSISTANT if role == "assistant" else f"{START}{role}{MESSAGE}")

    def _normalize(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        # The author of a tool result is the tool that was called last.
        normal = super()._normalize(messages)
        called: str | None = None
        for i, message in enumerate(normal):
            if message["role"] == "assistant":
                called = called_tool(message)
            elif message["role"] == "tool":
                own = message.get("name")
                # Without a call before it, the result needs a name of its own.
                author = called or (FUNCTIONS + own.removeprefix(FUNCTIONS) if own else None)
                if author:
                    normal[i] = Message(**{**message, "name": author})
        return normal

    def _author(self, message: Message, idx: int) -> str:
        name = message.get("name")
        if not name:
            raise RendererError(
                f"messages[{idx}].role: got a tool result, expected a tool call before it: "
                f"{self._name} writes the tool's name; add the call, or 'name' to the result"
            )
        return f"{name} to=assistant{CHANNEL}commentary"

    def _framed(self, author: str, text: str) -> RenderedMessage:
        return RenderedMessage(
            header=self.codec.encode(f"{START}{author}{MESSAGE}"),
            output=[self.codec.encode(f"{text}{END}")],
        )

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        check_parts(message, ctx.idx, self._name, frozenset({"text", "thinking"}))
        if tag := tag_in(message):
            self._warn_once(
                f"{self._name}: the text of an assistant message contains {tag!r}, which becomes a "
                "header of its own; give thinking as a part of type 'thinking', text as 'text'"
            )
        if calls_tool(message):
            # Thinking before a call is history once an answer follows.
            text = write_call(
                message,
                ctx.idx,
                thinks=ctx.in_last_assistant_turn,
                text_as_thinking=self._text_before_call == "analysis",
                as_template=self._tool_format == "template",
            )
        else:
            text = write_answer(message, last=ctx.is_last, thinks=ctx.is_last)
        return RenderedMessage(
            header=self.codec.constant(ASSISTANT), output=[self.codec.encode(text)]
        )


def make_gpt_oss(
    tokenizer: Tokenizer,
    image_processor: Any = None,
    *,
    use_system_prompt: bool = True,
    reasoning_effort: str | None = None,
    current_date: str | None = None,
    today_date: str | None = None,
    model_identity: str = MODEL_IDENTITY,
    tool_format: str = "harmony",
    text_before_call: str = "commentary",
) -> GptOssRenderer:
    """Returns the renderer of a name; ``today_date`` is the former name of ``current_date``."""
    if use_system_prompt and reasoning_effort is None:
        reasoning_effort = "medium"
    return GptOssRenderer(
        tokenizer,
        use_system_prompt,
        reasoning_effort,
        current_date or today_date,
        image_processor=image_processor,
        model_identity=model_identity,
        tool_format=tool_format,
        text_before_call=text_before_call,
    )


def _declares_tools(message: Message) -> bool:
    """Returns whether ``create_conversation_prefix_with_tools`` returned the message."""
    if message["role"] != "developer":
        return False
    text = get_text_content(message)
    begins = text.startswith((_INSTRUCTIONS, NAMESPACE_OPEN))
    return begins and NAMESPACE_OPEN in text and text.endswith(NAMESPACE_CLOSE)


def _check_option(name: str, value: str, expected: Sequence[str]) -> None:
    if value not in expected:
        raise ConfigurationError(
            f"{name}: got {value!r}, expected one of {', '.join(expected)}"
            f"{nearest(str(value), expected)}"
        )
