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
from tinker_cookbook.renderers import harmony
from tinker_cookbook.renderers.core.answer_form import AnswerForm, CallForm
from tinker_cookbook.renderers.core.arguments import to_json
from tinker_cookbook.renderers.core.checks import TEXT_AND_THINKING
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
from tinker_cookbook.tokenizer_utils import Tokenizer

MODEL_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_INSTRUCTIONS = "# Instructions\n\n"


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

    Text next to a tool call is on the channel ``commentary``, harmony's preamble, which is parsed
    as text; the template writes it as thinking.

    Thinking is written as by the template: before the last answer, and before calls that no answer
    has followed yet. The last answer ends with ``<|return|>``, earlier ones with ``<|end|>``. One
    example of calls and their answer therefore lacks the thinking before the calls;
    ``build_supervised_examples`` renders each trained answer after the prompt of inference.

    Several calls in a message are written consecutively, each with its ``<|call|>``; the
    template drops all but the first, so ``tool_format=template`` raises RendererError, as do later
    system and developer messages and unknown roles. Thinking and text next to a call, and text
    between thinking, follow harmony where the template raises. ``arguments`` must be a JSON object
    and are verbatim. A tool result has the name of its call, which is found by ``tool_call_id``, by
    ``name`` or by order.
    """

    system_prompt_content = (
        f"{MODEL_IDENTITY}\nKnowledge cutoff: 2024-06\n"
        "Current date: {current_date}\n\nReasoning: {reasoning_effort}\n\n"
        "# Valid channels: analysis, commentary, final. "
        "Channel must be included for every message."
    )
    """Text of the system prompt, which a subclass may replace."""
    use_system_prompt: bool = False
    reasoning_effort: str | None = None
    current_date: str | None = None

    _encodes_with_codec = True
    _answer_parts = TEXT_AND_THINKING

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
    ) -> None:
        super().__init__(tokenizer, image_processor)
        efforts = ("low", "medium", "high")
        if use_system_prompt != (reasoning_effort is not None):
            raise ConfigurationError(
                f"reasoning_effort: got {reasoning_effort!r} with use_system_prompt="
                f"{use_system_prompt}; expected one of {', '.join(efforts)} with the system "
                "prompt, which it is written in, and None without"
            )
        for name, value, expected in (
            ("reasoning_effort", reasoning_effort, efforts),
            ("tool_format", tool_format, ("harmony", "template")),
        ):
            if value is not None and value not in expected:
                raise ConfigurationError(
                    f"{name}: got {value!r}, expected one of {', '.join(expected)}"
                    f"{nearest(str(value), expected)}"
                )
        self.use_system_prompt = use_system_prompt
        self.reasoning_effort = reasoning_effort
        self.current_date = current_date
        # The date of the day becomes part of the spec, so that prompts stay the same.
        if use_system_prompt and current_date is None:
            self.current_date = date.today().isoformat()
            self.resolved_options = {"current_date": self.current_date}
        self._as_template = tool_format == "template"
        # <|end|> does not stop sampling: after thinking another message follows.
        self._stops = [special_token_id(tokenizer, t) for t in (harmony.RETURN, harmony.CALL)]
        self._system = ""
        if use_system_prompt:
            text = self.system_prompt_content.format(
                current_date=self.current_date, reasoning_effort=reasoning_effort
            )
            self._system = text.replace(MODEL_IDENTITY, model_identity, 1)

    def get_stop_sequences(self) -> list[int]:
        """Returns ``<|return|>``, which ends an answer, and ``<|call|>``, which ends a call."""
        return list(self._stops)

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Returns the developer message that declares ``tools``, in its final form.

        The renderer recognises it by its text and adds the line on calls to the system message.
        """
        if not tools:
            return system_message(system_prompt)
        before = f"{_INSTRUCTIONS}{system_prompt}\n\n" if system_prompt else ""
        return [Message(role="developer", content=before + harmony.declare_functions(tools))]

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; an assistant message may become several of harmony."""
        self._check(message, ctx.idx)
        role = author = message["role"]
        if role == "assistant":
            return self._render_answer(message, ctx)
        text = ensure_text(message["content"])
        if role == "tool":
            if not message.get("name"):
                raise RendererError(
                    f"messages[{ctx.idx}].role: got a tool result, expected a tool call before it: "
                    f"{self._name} writes the tool's name; add the call, or 'name' to the result"
                )
            # A result is a message from the tool to the assistant.
            author = f"{message.get('name')} to=assistant{harmony.CHANNEL}commentary"
            # The chat template dumps a result as a JSON string.
            text = to_json(text) if self._as_template else text
        # The system message belongs to the format, so instructions are the developer's.
        elif role in ("system", "developer") and ctx.idx == 0:
            author = "developer"
            if not text:
                return RenderedMessage(output=[])
            # A declaration of tools has its headings already.
            if not _declares_tools(message):
                text = f"{_INSTRUCTIONS}{text}\n\n"
        elif role != "user":
            raise RendererError(
                f"messages[{ctx.idx}].role: got {role!r}, expected user, assistant or tool, or "
                f"system or developer as the first message: {self._name} has no form for others; "
                "join instructions to the first message"
            )
        return RenderedMessage(
            header=self.codec.encode(f"{harmony.START}{author}{harmony.MESSAGE}"),
            output=[self.codec.encode(f"{text}{harmony.END}")],
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
        # Without the last message: its turn is not history yet and keeps its thinking.
        last_answer = self._last_user_index(messages[:-1])
        rendered = self._render_cache.render_all(self.render_message, messages, last_answer)
        return [(self._conversation_prefix(messages), 0.0), *weigh(rendered, trained, 0.0)]

    def _prompt_pieces(self, messages: Sequence[Message], role: Role) -> list[Piece]:
        # In a prompt all messages are history, also the last one.
        pieces: list[Piece] = [self._conversation_prefix(messages)]
        last = self._last_user_index(messages)
        for rendered in self._render_cache.render_all(self.render_message, messages, last, False):
            pieces += [rendered.header, *rendered.output, rendered.footer]
        return [*pieces, self.codec.constant(self._header(role))]

    def _last_user_index(self, messages: Sequence[Message]) -> int:
        """Returns the last answer without calls, up to which thinking is history."""
        return max((i for i, m in enumerate(messages) if harmony.is_answer(m)), default=-1)

    def _reader(self) -> MessageReader:
        return harmony.HarmonyReader()

    def answer_form(self) -> AnswerForm:
        """Returns the channels: thinking on ``analysis``, text on ``final``, one call."""
        channel = f"{harmony.CHANNEL}{{}}{harmony.MESSAGE}".format
        kind = "json" if self._as_template else "<|constrain|>json"
        return AnswerForm(
            thinking=(channel("analysis"), harmony.END + harmony.ASSISTANT),
            text=channel("final"),
            calls=CallForm(
                f" to={harmony.FUNCTIONS}", channel(f"commentary {kind}"), separator=None
            ),
        )

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        text = self._system
        if messages and _declares_tools(messages[0]):
            # The system message has to name the channel of calls, even if it has no other text.
            line = "Calls to these tools must go to the commentary channel: 'functions'."
            text = f"{text}\n{line}" if text else line
        return (
            self.codec.constant(f"{harmony.START}system{harmony.MESSAGE}{text}{harmony.END}")
            if text
            else []
        )

    def _header(self, role: Role) -> str:
        return (
            harmony.ASSISTANT if role == "assistant" else f"{harmony.START}{role}{harmony.MESSAGE}"
        )

    def _normalize(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        # The author of a tool result is the called tool.
        return harmony.name_results(super()._normalize(messages))

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        if harmony.calls_tool(message):
            # Thinking before a call is history once an answer follows.
            text = harmony.write_call(
                message,
                ctx.idx,
                thinks=ctx.in_last_assistant_turn,
                as_template=self._as_template,
            )
        else:
            # The last answer ends with <|return|> as it is sampled, earlier ones with <|end|>.
            text = harmony.write_answer(message, last=ctx.is_last, thinks=ctx.is_last)
        return RenderedMessage(
            header=self.codec.constant(harmony.ASSISTANT), output=[self.codec.encode(text)]
        )


def _declares_tools(message: Message) -> bool:
    """Returns whether ``create_conversation_prefix_with_tools`` returned the message."""
    if message["role"] != "developer":
        return False
    text = get_text_content(message)
    begins = text.startswith((_INSTRUCTIONS, harmony.NAMESPACE_OPEN))
    return begins and harmony.NAMESPACE_OPEN in text and text.endswith(harmony.NAMESPACE_CLOSE)
