"""Renderers of the package tml-renderers as renderers of this package."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers.core.messages import Message, Role, ToolSpec, system_message
from tinker_cookbook.renderers.core.parsing import (
    ContentDelta,
    MessageReader,
    ParseTermination,
    ResponseParser,
)
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage, TrainOnWhat
from tinker_cookbook.renderers.core.renderer import Example, Messages, Renderer
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool
from tinker_cookbook.tokenizer_utils import (
    SupportsTmlTokenizer,
    TmlTokenizer,
    Tokenizer,
    ensure_tml_renderers_importable,
)
from tinker_cookbook.utils.imports import tinker

if TYPE_CHECKING:
    from tml_renderers import chat as tml_chat
    from tml_renderers import renderer as tml_renderer

TmlRenderInput: TypeAlias = (
    "Sequence[tml_chat.Message] | Sequence[tml_chat.OpenAIMessage] | tml_chat.MessageList"
)
"""A conversation of tml-renderers' own messages."""

_TORCH = (2, 10)


class TmlRenderersRenderer(Renderer):
    """A renderer of tml-renderers, for messages of this package and for its own.

    A subclass makes the renderer of tml-renderers and names the exceptions of its parser.
    ``parse_response_streaming`` yields all content at the end. Text and media of a message are
    encoded by tml-renderers, which keeps names of control tokens plain text.
    """

    supports_streaming = False
    renderer_name: str = ""
    """Name of the renderer, for errors."""

    def __init__(self, tokenizer: Tokenizer, image_processor: Any = None) -> None:
        super().__init__(tokenizer, image_processor)
        _validate_torch_version()
        ensure_tml_renderers_importable()
        if not isinstance(tokenizer, SupportsTmlTokenizer):
            raise ConfigurationError(
                f"tokenizer: got {type(tokenizer).__name__}, but {type(self).__name__} needs one "
                "of tml-renderers; get_tokenizer('thinkingmachines/Inkling') returns one"
            )
        self._tml_tokenizer = tokenizer.tml_tokenizer
        self._tml_renderer = self._build_tml_renderer(self._tml_tokenizer)

    @abstractmethod
    def _build_tml_renderer(self, tml_tokenizer: TmlTokenizer) -> tml_renderer.Renderer:
        """Returns the renderer of tml-renderers."""

    @abstractmethod
    def _parse_error_types(self) -> tuple[type[Exception], ...]:
        """Returns the exceptions that the parser of tml-renderers raises."""

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Raises NotImplementedError: tml-renderers renders whole conversations."""
        raise NotImplementedError(
            f"{type(self).__name__}: tml-renderers renders whole conversations; use "
            "build_generation_prompt or build_supervised_example"
        )

    def build_generation_prompt(
        self,
        messages: Messages | TmlRenderInput,
        role: Role = "assistant",
        prefill: str | None = None,
    ) -> tinker.ModelInput:
        """Returns the prompt for the next answer; another role and a prefill are refused."""
        self._check_prompt(role, prefill)
        spans, _ = self._tml_renderer.render_for_completion(_messages_to_render_input(messages))
        return _model_input(spans)

    def build_supervised_examples(
        self,
        messages: Messages | TmlRenderInput,
        train_on_what: TrainOnWhat | str = TrainOnWhat.LAST_ASSISTANT_TURN,
    ) -> list[Example]:
        """Returns the examples of tml-renderers, which trains answers only."""
        source = _cookbook_messages_to_sft_input(messages, train_on_what, self.renderer_name)
        return self._examples(_native_messages(source))

    def build_supervised_example(
        self,
        messages: Messages | TmlRenderInput,
        train_on_what: TrainOnWhat | str = TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    ) -> Example:
        """Returns the example; raises NotImplementedError where tml-renderers makes several."""
        return self._single_example(self.build_supervised_examples(messages, train_on_what))

    def get_stop_sequences(self) -> list[int]:
        """Returns the tokens that end an answer."""
        stop = self._tml_renderer.stop()
        assert isinstance(stop, list)
        return cast("list[int]", stop)

    def parse_response(self, response: Sequence[int]) -> tuple[Message, ParseTermination]:
        """Returns the message that the sampled tokens spell, and how the response ended.

        A response that tml-renderers cannot parse is text, and MALFORMED.
        """
        text = Message(role="assistant", content=self.codec.decode(list(response)))
        try:
            parsed = self._completion_parser().parse_tokens(list(response))
            kind = import_module("tml_renderers.chat").ModelEndSampling
            content = [message for message in parsed if not isinstance(message.content, kind)]
            message = _last_message(content) or text
        except (*self._parse_error_types(), ValueError):
            return text, ParseTermination.MALFORMED
        is_clean = self._response_stopped(list(response), len(content) < len(parsed))
        how = ParseTermination.STOP_SEQUENCE if is_clean else ParseTermination.MALFORMED
        return message, how

    def response_parser(self) -> ResponseParser:
        """Returns a parser whose ``feed`` only collects: tml-renderers parses whole responses."""
        return _WholeResponse(self)

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """Returns the system prompt, and a message ``tool_declare`` with the tools as JSON."""
        declared = json.dumps([as_openai_tool(tool) for tool in tools], separators=(",", ":"))
        declaration = [Message(role="tool_declare", content=declared)] if tools else []
        return [*system_message(system_prompt), *declaration]

    def _check_prompt(self, role: Role, prefill: str | None) -> None:
        if role != "assistant":
            raise NotImplementedError(
                f"role: got {role!r}, but {self.renderer_name} only supports 'assistant'"
            )
        if prefill is not None:
            raise NotImplementedError(
                f"prefill: {self.renderer_name} does not accept partial assistant messages; give "
                "complete messages, and the model begins a new one"
            )

    def _examples(self, messages: TmlRenderInput) -> list[Example]:
        convert = import_module(
            "tml_renderers.tinker"
        ).training_example_to_tinker_model_input_and_weights
        examples = map(convert, self._tml_renderer.render_for_sft(messages))
        return [
            (tokens, torch.tensor(weights, dtype=torch.float32)) for tokens, weights in examples
        ]

    def _single_example(self, examples: list[Example]) -> Example:
        if len(examples) != 1:
            raise NotImplementedError(
                f"{self.renderer_name}: got {len(examples)} examples, expected one; use "
                "build_supervised_examples"
            )
        return examples[0]

    def _response_stopped(self, response: list[int], saw_end: bool) -> bool:
        """Returns whether the model ended its answer; ``saw_end``: the parser found its end."""
        return saw_end

    def _completion_parser(self) -> tml_renderer.Parser:
        return self._tml_renderer.render_for_completion([])[1]


class _WholeResponse(ResponseParser):
    """Parser that collects tokens and parses them at the end."""

    def __init__(self, renderer: TmlRenderersRenderer) -> None:
        super().__init__(renderer.codec, MessageReader(), (), None)
        self._renderer = renderer
        self._tokens: list[int] = []

    def feed(self, tokens: Sequence[int]) -> list[ContentDelta]:
        """Collects tokens; no content is certain yet."""
        self._tokens.extend(tokens)
        return []

    def finish(self) -> list[ContentDelta]:
        """Parses the response and returns its text and thinking."""
        content = self.message["content"]
        deltas: list[ContentDelta] = []
        for part in [{"text": content}] if isinstance(content, str) else content:
            deltas += self._reader.add_text(str(part.get("text", "")))
            deltas += self._reader.add_thinking(str(part.get("thinking", "")))
        return deltas

    @property
    def message(self) -> Message:
        """The message of the tokens so far."""
        return self._renderer.parse_response(self._tokens)[0]

    @property
    def termination(self) -> ParseTermination:
        """How the tokens so far ended."""
        return self._renderer.parse_response(self._tokens)[1]


def _validate_torch_version() -> None:
    found = torch.__version__
    if tuple(int(part) for part in found.partition("+")[0].split(".")[:2]) < _TORCH:
        raise RuntimeError(
            f"tml-renderers requires PyTorch 2.10 or newer; found {found}: pip install -U torch"
        )


def _is_native(messages: object) -> bool:
    chat = import_module("tml_renderers.chat")
    if isinstance(messages, chat.MessageList):
        return True
    kinds = (chat.Message, chat.OpenAIMessage)
    return isinstance(messages, Sequence) and all(isinstance(m, kinds) for m in messages)


def _messages_to_render_input(messages: Messages | TmlRenderInput) -> TmlRenderInput:
    if _is_native(messages):
        return cast("TmlRenderInput", messages)
    from tinker_cookbook.third_party import tml_renderers_compat

    try:
        return tml_renderers_compat.tinker_messages_to_message_list(cast("list[Message]", messages))
    except ValueError as error:
        raise RendererError(f"messages: tml-renderers cannot read them: {error}") from error


def _cookbook_messages_to_sft_input(
    messages: Messages | TmlRenderInput, train_on_what: TrainOnWhat | str, renderer_name: str
) -> TmlRenderInput:
    what = TrainOnWhat(train_on_what)
    if _is_native(messages):
        if what is not TrainOnWhat.ALL_ASSISTANT_MESSAGES:
            raise NotImplementedError(
                f"train_on_what: got {what.value!r}, but {renderer_name} has selective "
                "train_on_what only for messages of this package; expected "
                f"{TrainOnWhat.ALL_ASSISTANT_MESSAGES.value!r} with those of tml-renderers"
            )
        return cast("TmlRenderInput", messages)
    from tinker_cookbook.third_party import tml_renderers_compat

    try:
        return tml_renderers_compat.tinker_messages_to_sft_message_list(
            cast("list[Message]", messages), what
        )
    except ValueError as error:
        raise RendererError(f"messages: tml-renderers cannot read them: {error}") from error


def _native_messages(messages: TmlRenderInput) -> list[tml_chat.Message]:
    """Returns the messages with ``ModelEndSampling`` behind each answer, which trains the model to
    end it."""
    chat = import_module("tml_renderers.chat")
    given = cast(Any, messages)
    native: list[Any] = []
    for message in given.messages if isinstance(given, chat.MessageList) else given:
        native += message.to_messages() if isinstance(message, chat.OpenAIMessage) else [message]
    model, ended = chat.AuthorKind.Model, []
    for i, message in enumerate(native):
        ended.append(message)
        # An answer may consist of several messages: thinking, text, calls.
        goes_on = i + 1 < len(native) and native[i + 1].author.kind == model
        has_end = isinstance(message.content, chat.ModelEndSampling)
        if message.author.kind == model and not goes_on and not has_end:
            ended.append(chat.Message(chat.ModelEndSampling(), chat.Author(model)))
    return ended


def _model_input(spans: Sequence[tml_chat.TokenSpan]) -> tinker.ModelInput:
    return import_module("tml_renderers.tinker").token_spans_to_tinker_model_input(spans)


def _last_message(parsed: list[tml_chat.Message]) -> Message | None:
    from tinker_cookbook.third_party.tml_renderers_compat import message_list_to_tinker_messages

    chat = import_module("tml_renderers.chat")
    messages = message_list_to_tinker_messages(chat.MessageList(parsed)) if parsed else []
    return messages[-1] if messages else None
