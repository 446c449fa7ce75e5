"""Mistral: ``[INST]`` question ``[/INST]`` answer ``</s>``, after Mistral's chat encoding.

The formats are tokenizer versions v3 and v7, each for a SentencePiece vocabulary, where every text
after a control token begins with a space, and for the byte-level vocabulary Tekken, without it:

- ``v3``: Mistral 7B v0.3, Mixtral 8x22B, Mistral Small 2409, Mistral Large 2407, Codestral
- ``v3_tekken``: Mistral Nemo, Ministral 8B
- ``v7``: Mistral Large 2411
- ``v7_tekken``: Mistral Small 3 (2501) and 3.1 (2503)

In v3 the system prompt precedes the text of the *last* question, in v7 it is a message. In both,
tools are declared before the last question. Later versions (v11, v13: Mistral Small 3.2, Magistral,
Ministral 3) have another form of calls; use ``template`` for them.

Where chat templates differ from Mistral's library, the library is the reference:

- Consecutive user texts, answers and text parts are joined by a blank line, unless ``trainable``
  differs.
- Trailing spaces of an answer are dropped. JSON of arguments and results is dumped again.
- A result without text is an empty JSON object, ``{}``.
- RendererError: roles out of order, a result with the id of no call, and in v3 an answer with both
  text and calls.
- Names of control tokens in a text are always plain text; ``split_special_tokens`` has no effect.
  Such a name is split after its first character, so its tokens may differ from a vocabulary
  without the name.

Differences from the library: an answer without text is only ``</s>``, in v7 an answer may have
text and calls, and a call without an id of nine letters or digits gets its number in the
conversation (``000000000``, ``000000001``), as does its result. Arguments that are no JSON raise
RendererError (the library writes a string). The number of results, and names of tools, are not
checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, RendererError, nearest
from tinker_cookbook.renderers import mistral_messages
from tinker_cookbook.renderers.core.answer_form import AnswerForm, CallForm
from tinker_cookbook.renderers.core.arguments import to_json
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolSpec,
    ensure_text,
    system_message,
)
from tinker_cookbook.renderers.core.parsing import (
    ContentDelta,
    MarkedTextReader,
    MessageReader,
    special_token_id,
    unread,
)
from tinker_cookbook.renderers.core.rendered import (
    RenderContext,
    RenderedMessage,
    token_list,
)
from tinker_cookbook.renderers.core.thinking import ChecksTrainedAnswers
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.imports import tinker

VERSIONS = ("v3", "v3_tekken", "v7", "v7_tekken")
_BOS, _END = "<s>", "</s>"
_INST, _END_INST = "[INST]", "[/INST]"
_TOOLS, _END_TOOLS = "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"
_CALLS = "[TOOL_CALLS]"
_RESULT, _END_RESULT = "[TOOL_RESULTS]", "[/TOOL_RESULTS]"
_SYSTEM, _END_SYSTEM, _CONTENT = "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"
_V3_TOKENS = (_BOS, _END, _INST, _END_INST, _TOOLS, _END_TOOLS, _CALLS, _RESULT, _END_RESULT)
_V7_TOKENS = (*_V3_TOKENS, _SYSTEM, _END_SYSTEM, _CONTENT)


@dataclass(eq=False, repr=False, kw_only=True)
class MistralRenderer(ChecksTrainedAnswers):
    """Mistral's formats v3 and v7: tools, no thinking, no images.

    ``version`` is one of :data:`VERSIONS`, by default the tokenizer's: v7 if its chat template (or,
    without one, its vocabulary) has ``[SYSTEM_PROMPT]``, Tekken if its vocabulary is
    byte-level. With a SentencePiece version a response begins with the space of its first token,
    which is dropped, also in a response that continues a prefill.

    The extension property does not hold, because tools, and in v3 the system prompt, move to the
    last question. Without them the prompts extend each other, which ``build_merged_examples`` finds
    by comparing tokens.
    """

    version: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.codec.splits_control_tokens = True  # for _plain, whatever the option is
        if self.version is not None and self.version not in VERSIONS:
            raise ConfigurationError(
                f"version: got {self.version!r}, expected one of {', '.join(VERSIONS)}"
                f"{nearest(str(self.version), VERSIONS)}"
            )
        if self.version is None:
            template = str(getattr(self.tokenizer, "chat_template", None) or "")
            v7 = _SYSTEM in template
            if _INST not in template:
                v7 = _has_token(self.tokenizer, _SYSTEM)
            # Byte-level vocabularies have another symbol for a space.
            tekken = "" if _has_token(self.tokenizer, "\u2581") else "_tekken"
            self.version = ("v7" if v7 else "v3") + tekken
        self._v7 = self.version.startswith("v7")
        self._space = "" if self.version.endswith("tekken") else " "
        needed = _V7_TOKENS if self._v7 else _V3_TOKENS
        # A missing token raises here instead of at the first message.
        self._ids = {token: special_token_id(self.tokenizer, token) for token in needed}

    def get_stop_sequences(self) -> list[int]:
        """Returns ``</s>``."""
        return [self._ids[_END]]

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Declares tools in a message of role ``available_tools``, rendered before the last
        question."""
        declared = [mistral_messages.declare(tools)] if tools else []
        return [*declared, *system_message(system_prompt)]

    def build_generation_prompt(
        self,
        messages: Sequence[Message] | Sequence[Mapping[str, Any]],
        role: Role = "assistant",
        prefill: str | None = None,
    ) -> tinker.ModelInput:
        """Returns the prompt for the next message; a prefill begins with the version's space."""
        return super().build_generation_prompt(messages, role, self._spaced(prefill or ""))

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; tools, and in v3 the system prompt, have none, because
        they belong to the last question."""
        role, text = message["role"], ensure_text(message["content"])
        if role == "user":
            return self._question(text, "")
        if role == "assistant":
            return self._answer(message, text, ctx.idx)
        if role == "system" and self._v7:
            return self._between(_SYSTEM, self._text(text), _END_SYSTEM)
        if role != "tool":
            return RenderedMessage(output=[])
        call_id, value = message.get("tool_call_id", ""), mistral_messages.result_value(text)
        if not self._v7:
            entry = {"content": value, "call_id": call_id}
            body = to_json(entry)
            return self._between(_RESULT, self._text(body), _END_RESULT)
        # v7 writes the id before [TOOL_CONTENT], v3 as a field of the JSON result.
        # A result that is no JSON stays text.
        body = text if value is text else to_json(value)
        result = self._between(_RESULT, self._text(body), _END_RESULT)
        header = [*token_list(result.header), *self._text(call_id), self._ids[_CONTENT]]
        return RenderedMessage(result.output, header)

    def _reader(self) -> MessageReader:
        return _TextThenCalls(_CALLS, self._space)

    def answer_form(self) -> AnswerForm:
        """Returns the form: text, or a list of calls."""
        calls = CallForm(
            before='{"name": "',
            between='", "arguments": ',
            call_id='/(, "id": "[a-zA-Z0-9]{9}")?/',
            after="}",
            begin=f"{_CALLS}{self._space}[",
            end="]",
            separator=", ",
            marker=_CALLS,
        )
        return AnswerForm(text=self._space, calls=calls)

    @property
    def _bos_tokens(self) -> list[int]:
        return [self._ids[_BOS]]

    def _generation_suffix(self, role: Role) -> list[int]:
        # An answer follows [/INST] directly, without a header.
        if role in ("assistant", "user"):
            return [self._ids[_INST]] if role == "user" else []
        raise RendererError(
            f"role: got {role!r}, expected assistant or user: {self._name} opens no other message"
        )

    def _normalize(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        return mistral_messages.prepare(super()._normalize(messages), self._name)

    def split_special_tokens(self, split: bool) -> None:
        """Has no effect: names of control tokens are always plain text."""

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        # In v3 a conversation begins with a question, if necessary an empty one. Tools and system
        # messages are written elsewhere.
        roles = [
            m["role"] for m in messages if m["role"] not in ("system", mistral_messages.TOOLS_ROLE)
        ]
        if self._v7 or roles[:1] == ["user"]:
            return []
        # With a question, tools and system prompt are written there.
        system, tools = ("", "") if "user" in roles else self._before_last_question(messages)
        inserted = self._question(system, tools)
        return [t for piece in (inserted.header, *inserted.output) for t in token_list(piece)]

    def _render_all(self, messages: Sequence[Message]) -> list[RenderedMessage]:
        rendered = super()._render_all(messages)
        last = self._last_user_index(messages)
        if last >= 0:
            system, tools = self._before_last_question(messages)
            text = ensure_text(messages[last]["content"])
            # Tools, and in v3 the system prompt, move to the last question: it is rendered again.
            rendered[last] = self._question(system + text, tools)
        return rendered

    def _before_last_question(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Returns the text of v3 before the last question, and the declared tools."""
        texts = {
            role: [text for m in messages if m["role"] == role and (text := str(m["content"]))]
            for role in ("system", mistral_messages.TOOLS_ROLE)
        }
        system = "" if self._v7 else "".join(f"{text}\n\n" for text in texts["system"])
        return system, "".join(texts[mistral_messages.TOOLS_ROLE])

    def _question(self, text: str, tools: str) -> RenderedMessage:
        ids = self._ids
        declared = [ids[_TOOLS], *self._text(tools), ids[_END_TOOLS]] if tools else []
        question = self._between(_INST, self._text(text), _END_INST)
        return RenderedMessage(
            header=[*declared, *token_list(question.header)], output=question.output
        )

    def _between(self, opening: str, text: Sequence[int], closing: str) -> RenderedMessage:
        return RenderedMessage(header=[self._ids[opening]], output=[[*text, self._ids[closing]]])

    def _answer(self, message: Message, text: str, idx: int) -> RenderedMessage:
        calls = message.get("tool_calls", [])
        # Mistral's library strips trailing spaces of an answer.
        text = text.rstrip(" ")
        tokens = self._text(text)
        if calls:
            tokens += [self._ids[_CALLS], *self._text(mistral_messages.calls_text(calls, idx))]
        for call in message.get("unparsed_tool_calls", []):
            # What precedes [TOOL_CALLS] in an unparsed call is text; each part after it is a call.
            before, *bodies = call.raw_text.split(_CALLS)
            tokens += self._plain(before)
            for body in bodies:  # as the model wrote it, with its space
                tokens += [self._ids[_CALLS], *self._plain(body)]
        return RenderedMessage([[*tokens, self._ids[_END]]])

    def _check_trained(self, messages: Sequence[Message], idx: int) -> None:
        message = messages[idx]
        if str(message["content"]).rstrip(" ") and message.get("tool_calls") and not self._v7:
            raise RendererError(
                f"messages[{idx}].content: got text and tool calls, expected one of them: "
                f"{self._name} ({self.version}) has no form for both; leave the text out"
            )

    def _text(self, text: str) -> list[int]:
        return self._plain(self._spaced(text))

    def _spaced(self, text: str) -> str:
        # SentencePiece versions begin each text after a control token with a space.
        return f"{self._space}{text}" if text else ""

    def _plain(self, text: str) -> list[int]:
        # Names of control tokens stay text, whatever the option is.
        return [*self.codec.encode(self.codec.split_control_tokens(text))]


class _TextThenCalls(MarkedTextReader):
    """Parser of text up to ``[TOOL_CALLS]``; the calls are parsed at the end."""

    def finish(self) -> list[ContentDelta]:
        """Flushes the buffer: text, or calls."""
        if self._rest is None:
            return self.add_text(self._buffer)
        try:
            self.calls += mistral_messages.read_calls(self._rest)
        except ValueError as error:
            self.unparsed.append(unread(f"{_CALLS}{self._rest}", error))
        return []


def _has_token(tokenizer: Tokenizer, token: str) -> bool:
    # Unknown tokens have the id of <unk>.
    found = tokenizer.convert_tokens_to_ids(token)
    return isinstance(found, int) and found != getattr(tokenizer, "unk_token_id", None)
