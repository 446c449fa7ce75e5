"""The renderer: messages to tokens with training weights, sampled tokens back to a message.

A chat format is one subclass with a few hooks. Token ids are those of the model's own chat
template, with two differences:

- The name of a control token in a message (``<|im_end|>``) stays plain text, so that no dataset row
  or tool result can forge a turn. A template joins text before it encodes, so the name becomes that
  token; ``?split_special_tokens=false`` after a renderer's name does the same, with a warning.
- The text of an assistant message is encoded apart from its header, because at inference the model
  continues from the header's tokens. A template would merge the header's line break with white
  space at the beginning of the answer into one token, which no prompt ends with.

The types and functions that subclasses need can be imported from here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.blocks import (
    ReasoningStreamingParser,
    StreamingParser,
)
from tinker_cookbook.renderers.core.codec import (
    TextCodec,
    part_texts_apart,
    split_control_tokens,
    tokens_weights_from_strings_weights,
)
from tinker_cookbook.renderers.core.images import ImageProcessorProtocol, image_to_chunk
from tinker_cookbook.renderers.core.messages import (
    AudioPart,
    Content,
    ContentPart,
    ImagePart,
    Message,
    Role,
    StrictBase,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
    content_to_jsonable,
    ensure_list,
    ensure_text,
    format_content_as_string,
    get_text_content,
    has_thinking,
    message_to_jsonable,
    normalize_messages,
    openai_message,
    parse_think_blocks,
    remove_thinking,
)
from tinker_cookbook.renderers.core.naming import Named
from tinker_cookbook.renderers.core.parsing import (
    PARSE_FAILURE_DETAIL_MAX_CHARS,
    UNTERMINATED_TOOL_BLOCK_ERROR,
    MessageDelta,
    MessageReader,
    ParseFailureKind,
    ParseTermination,
    PlainReader,
    ResponseParser,
    StreamingMessageHeader,
    StreamingTextDelta,
    StreamingThinkingDelta,
    Utf8TokenDecoder,
    classify_parse_failure,
    detect_unterminated_tool_block,
    parse_response_for_stop_token,
    special_token_id,
)
from tinker_cookbook.renderers.core.rendered import (
    Piece,
    RenderCache,
    RenderContext,
    RenderedMessage,
    TrainOnWhat,
    answer_ends,
    example_ends,
    join_pieces,
    join_weighted,
    select_trained,
    token_list,
    weigh,
)
from tinker_cookbook.renderers.core.tool_calls import parse_content_blocks
from tinker_cookbook.tokenizer_utils import special_id

if TYPE_CHECKING:
    import tinker
    import torch

    from tinker_cookbook.tokenizer_utils import Tokenizer

__all__ = [
    "PARSE_FAILURE_DETAIL_MAX_CHARS",
    "UNTERMINATED_TOOL_BLOCK_ERROR",
    "AudioPart",
    "Content",
    "ContentPart",
    "Example",
    "ImagePart",
    "ImageProcessorProtocol",
    "Message",
    "MessageDelta",
    "MessageReader",
    "ParseFailureKind",
    "ParseTermination",
    "ReasoningStreamingParser",
    "RenderContext",
    "RenderedMessage",
    "Renderer",
    "ResponseParser",
    "Role",
    "StreamingMessageHeader",
    "StreamingParser",
    "StreamingTextDelta",
    "StreamingThinkingDelta",
    "StrictBase",
    "TextPart",
    "ThinkingPart",
    "ToolCall",
    "ToolSpec",
    "TrainOnWhat",
    "UnparsedToolCall",
    "UnsupportedToolsError",
    "Utf8TokenDecoder",
    "classify_parse_failure",
    "content_to_jsonable",
    "detect_unterminated_tool_block",
    "ensure_list",
    "ensure_text",
    "format_content_as_string",
    "get_text_content",
    "has_thinking",
    "image_to_chunk",
    "message_to_jsonable",
    "normalize_messages",
    "parse_content_blocks",
    "parse_response_for_stop_token",
    "parse_think_blocks",
    "remove_thinking",
    "select_trained",
    "tokens_weights_from_strings_weights",
]

Messages: TypeAlias = Sequence[Message] | Sequence[Mapping[str, Any]]
Example: TypeAlias = "tuple[tinker.ModelInput, torch.Tensor]"
"""Model input of T tokens and float32 weights [T]: 1 where the token itself is trained on."""


class UnsupportedToolsError(RendererError, NotImplementedError):
    """The chat format declares no tools."""


class Renderer(Named, ABC):
    """Chat format: conversations to tokens, and sampled tokens to messages.

    A subclass needs ``render_message`` and ``stop_token`` (or ``get_stop_sequences``); by default
    ``parse_response`` returns the whole response as text. Keyword-only arguments of a subclass are
    the options of the format. ``spec`` is the registered name with these options, by which
    renderers pickle (see :mod:`tinker_cookbook.renderers.registry`).
    """

    _encodes_with_codec: bool = False
    """Whether all text is encoded by :attr:`codec`, which keeps names of control tokens plain text.
    A subclass that encodes with the tokenizer itself gets messages unchanged."""
    _declared_tokens: frozenset[str] = frozenset()
    """Control tokens that the declaration of tools writes into system messages."""

    _history_as_sampled: bool = False
    """Whether every answer is written in history as it was sampled."""
    _prompt_closes_thinking: bool = False
    """Whether a prompt ends with an empty thinking block."""

    stop_token: str | None = None
    """Special token that ends a message; other formats override :meth:`get_stop_sequences`."""

    merge_text_chunks: bool = True
    """Whether texts of neighbouring parts are encoded as one, as chat templates do."""

    def __init__(self, tokenizer: Tokenizer, image_processor: Any = None) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        # Looked up here, so that the tokenizer of another family raises an error at once.
        self._stop_token_id = (
            None
            if self.stop_token is None
            else special_token_id(tokenizer, self.stop_token, type(self).__name__)
        )

    @cached_property
    def codec(self) -> TextCodec:
        """Encodes and decodes text for this renderer."""
        codec = TextCodec(self.tokenizer)
        codec.splits_control_tokens = self._encodes_with_codec
        codec.encodes_apart = not self.merge_text_chunks
        return codec

    @cached_property
    def _render_cache(self) -> RenderCache:
        return RenderCache()

    @abstractmethod
    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of one message."""

    def get_stop_sequences(self) -> list[str] | list[int]:
        """Returns the stop sequences of a response, for ``SamplingParams(stop=…)``.

        Raises NotImplementedError where the subclass has neither this method nor ``stop_token``.
        """
        if self._stop_token_id is None:
            raise NotImplementedError(
                f"{type(self).__name__} must set stop_token or define get_stop_sequences"
            )
        return [self._stop_token_id]

    def split_special_tokens(self, split: bool) -> None:
        """Sets whether names of control tokens in messages stay plain text."""
        self._encodes_with_codec = self._encodes_with_codec or split
        self.codec.splits_control_tokens = split

    def _generation_suffix(self, role: Role) -> list[int] | None:
        """Returns the tokens after which a message of ``role`` is sampled; None: the header of an
        empty message."""
        return None

    def _get_generation_suffix(self, role: Role, ctx: RenderContext) -> list[int]:
        """Returns :meth:`_generation_suffix` after ``ctx.idx`` messages."""
        suffix = self._generation_suffix(role)
        if suffix is None:
            suffix = token_list(self.render_message(Message(role=role, content=""), ctx).header)
        return suffix

    def _reader(self) -> MessageReader:
        """Returns the parser of response text: tool calls and thinking."""
        return PlainReader()

    @property
    def _bos_tokens(self) -> list[int]:
        return []

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        """Returns the tokens before the first message, for example a default system prompt."""
        return []

    def _last_user_index(self, messages: Sequence[Message]) -> int:
        return max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)

    @property
    def has_extension_property(self) -> bool:
        """Whether the prompt of turn t+1 always begins with prompt and completion of turn t:
        if so, a conversation trains as one sequence; if not, each turn needs a sequence."""
        return self._history_as_sampled

    @property
    def supports_streaming(self) -> bool:
        """Whether :meth:`parse_response_streaming` works: True."""
        return True

    @property
    def disables_thinking(self) -> bool:
        """Whether prompts tell the model to answer without thinking."""
        return self._prompt_closes_thinking

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """Returns the messages that begin a conversation in which the model may call ``tools``."""
        raise UnsupportedToolsError(
            f"{self._name}: this chat format declares no tools; use a renderer with tools, such as "
            "qwen3 or llama3, or describe the tools in a system message of your own"
        )

    def message_reader(self) -> MessageReader:
        """Returns a parser from text to a message, for callers that decode tokens themselves."""
        return self._reader()

    def response_parser(self) -> ResponseParser:
        """Returns a parser for one response; its ``feed`` takes tokens as they are sampled."""
        # Stop sequences of text (role_colon) are found by the parser of the format.
        stops = [stop for stop in self.get_stop_sequences() if isinstance(stop, int)]
        eos = special_id(self.tokenizer, "eos")
        return ResponseParser(self.codec, self._reader(), stops, eos)

    def parse_response(self, response: Sequence[int]) -> tuple[Message, ParseTermination]:
        """Returns the message that the sampled tokens spell, and how the response ended.

        A tool call that cannot be parsed is in ``unparsed_tool_calls``; ``classify_parse_failure``
        returns what is wrong with a response. Raises RendererError for a stop token that occurs
        twice: the response was sampled without the renderer's stop sequences.
        """
        parser = self.response_parser()
        tokens = list(response)
        parser.check_stops(tokens)
        parser.feed(tokens)
        parser.finish()
        return parser.message, parser.termination

    def parse_response_streaming(self, response: Iterable[int]) -> Iterator[MessageDelta]:
        """Yields a header, the content piece by piece, and last the message.

        ``response`` may be a live stream: each token is taken only when it is needed.
        """
        parser = self.response_parser()
        tokens: list[int] = []
        yield StreamingMessageHeader(role="assistant")
        for token in response:
            tokens.append(token)
            yield from parser.feed([token])
        yield from parser.finish()
        # A subclass may override parse_response alone: the last message has to be its own.
        own = type(self).parse_response is not Renderer.parse_response
        yield self.parse_response(tokens)[0] if own else parser.message

    def build_generation_prompt(
        self, messages: Messages, role: Role = "assistant", prefill: str | None = None
    ) -> tinker.ModelInput:
        """Returns the prompt for the next message, of ``role``, that begins with ``prefill``."""
        # A prefill is encoded apart from the prompt, as the model would have sampled it.
        pieces = self._prompt_pieces(self._normalize(messages), role)
        return join_pieces([*pieces, self.codec.encode(prefill or "")])

    def build_supervised_example(
        self,
        messages: Messages,
        train_on_what: TrainOnWhat | str = TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    ) -> Example:
        """Returns the whole conversation as tokens, with a weight for each.

        Without the extension property, earlier turns of the example follow prompts that inference
        never sees; ``build_supervised_examples`` splits the conversation there. Raises
        RendererError for messages that the chat format cannot express.
        """
        what = TrainOnWhat(train_on_what)
        normal = self._conversation(messages, what)
        trained = select_trained(normal, what)
        # Several trained answers in one example follow prompts that differ from those of inference.
        answers = sum(t and m["role"] == "assistant" for t, m in zip(trained, normal, strict=True))
        if answers > 1 and not self.has_extension_property:
            self._warn_once(
                f"{self._name}: {what.value} trains several turns in one example, but history in "
                "this chat format differs from what is sampled; build_supervised_examples returns "
                "one example for each prompt"
            )
        return self._example(normal, trained, what)

    def build_supervised_examples(
        self,
        messages: Messages,
        train_on_what: TrainOnWhat | str = TrainOnWhat.LAST_ASSISTANT_TURN,
    ) -> list[Example]:
        """Returns one example for each trained answer, after the same prompt as at inference.

        With the extension property, and under ``ALL_TOKENS`` (which trains prompts too), it is one
        example for all. Each trained message is in exactly one example.
        """
        return self._split(messages, train_on_what, merge=False)

    def build_merged_examples(
        self,
        messages: Messages,
        train_on_what: TrainOnWhat | str = TrainOnWhat.LAST_ASSISTANT_TURN,
    ) -> list[Example]:
        """Returns the examples of :meth:`build_supervised_examples`, merged where that is possible.

        Answers share an example where the later prompt begins with all tokens up to the earlier
        answer. Datasets train on these. A subclass's own split is not merged.
        """
        # A subclass may override only the official method.
        if type(self).build_supervised_examples is not Renderer.build_supervised_examples:
            return self.build_supervised_examples(messages, TrainOnWhat(train_on_what))
        return self._split(messages, train_on_what, merge=True)

    def _split(
        self, messages: Messages, train_on_what: TrainOnWhat | str, *, merge: bool
    ) -> list[Example]:
        what = TrainOnWhat(train_on_what)
        normal = self._conversation(messages, what)
        trained = select_trained(normal, what)
        if what is TrainOnWhat.ALL_TOKENS:
            return [self._example(normal, trained, what)]
        examples: list[Example] = []
        done = -1
        with self._render_cache.enabled():
            for end in self._example_ends(normal, trained, merge) or [len(normal) - 1]:
                # Each trained message has weight 1 in exactly one example.
                part = [t and done < i for i, t in enumerate(trained[: end + 1])]
                examples.append(self._split_example(normal[: end + 1], part, what))
                done = end
        return examples

    def to_openai_message(self, message: Message) -> dict[str, Any]:
        """Returns the message in the form of the OpenAI API and of chat templates."""
        written = openai_message(message)
        for call in written.get("tool_calls", []):
            function = call["function"]
            function["arguments"] = self._to_openai_tool_arguments(function["arguments"])
        return written

    def _to_openai_tool_arguments(self, arguments: str) -> str | dict[str, Any]:
        """Returns the arguments of a call as the model's template expects them."""
        return arguments

    def _normalize(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Checks messages, splits control-token names, and separates text parts where required."""
        normal = self._with_control_tokens(normalize_messages(messages))
        return normal if self.merge_text_chunks else [part_texts_apart(m) for m in normal]

    def _with_control_tokens(self, normal: list[Message]) -> list[Message]:
        # Control tokens in the declaration of tools stay tokens, as in the template.
        if self._encodes_with_codec and self.codec.splits_control_tokens:
            declared = {"system": self._declared_tokens}
            return [
                split_control_tokens(m, self.codec, i, declared.get(m["role"], frozenset()))
                for i, m in enumerate(normal)
            ]
        if self._encodes_with_codec:
            texts = [get_text_content(m) for m in normal if m["role"] in ("user", "tool")]
            for token in filter(None, map(self.codec.control_token_in, texts)):
                self._warn_once(
                    f"{self._name}: a message of a user or tool contains {token!r}, which becomes "
                    "that control token, as in the model's own chat template; leave out "
                    "'?split_special_tokens=false' after renderer_name to keep such text plain"
                )
        return normal

    def _conversation(
        self, messages: Sequence[Mapping[str, Any]], what: TrainOnWhat
    ) -> list[Message]:
        normal = self._normalize(messages)
        if not normal:
            raise RendererError("messages: got an empty list, expected at least one message")
        # A forgotten train_on_what=customized would train other messages without an error.
        if what is not TrainOnWhat.CUSTOMIZED and any("trainable" in m for m in normal):
            self._warn_once(
                f"messages carry 'trainable', which train_on_what={what.value} does not read; "
                "train_on_what=customized does"
            )
        return normal

    def _render_all(self, messages: Sequence[Message]) -> list[RenderedMessage]:
        last_user_index = self._last_user_index(messages)
        return self._render_cache.render_all(self.render_message, messages, last_user_index)

    def _example_ends(
        self, messages: Sequence[Message], trained: Sequence[bool], merge: bool
    ) -> list[int]:
        """Returns the last message of each example, nothing where one example holds them all."""
        if self.has_extension_property:
            return []
        if not merge:
            return answer_ends(messages, trained)
        return example_ends(self._prompt_pieces, self._answered_pieces, messages, trained)

    def _answered_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """Returns the tokens up to an answer, with which a later prompt has to begin."""
        return self._prompt_pieces(messages, "assistant")[:-1]

    def _prompt_pieces(self, messages: Sequence[Message], role: Role) -> list[Piece]:
        pieces: list[Piece] = [self._bos_tokens, self._conversation_prefix(messages)]
        for rendered in self._render_all(messages):
            pieces += [rendered.header, *rendered.output, rendered.footer]
        last = self._last_user_index(messages)
        # The generation suffix is the header of the message after the last one.
        ctx = RenderContext(
            idx=len(messages),
            is_last=True,
            prev_message=messages[-1] if messages else None,
            last_user_index=last,
            in_last_assistant_turn=True,
        )
        # The suffix is a separate piece: _answered_pieces removes it.
        return [*pieces, self._get_generation_suffix(role, ctx)]

    def _split_example(
        self, messages: Sequence[Message], trained: Sequence[bool], what: TrainOnWhat
    ) -> Example:
        """Returns one of the examples into which a conversation is split."""
        return self._example(messages, trained, what)

    def _example(
        self, messages: Sequence[Message], trained: Sequence[bool], what: TrainOnWhat
    ) -> Example:
        # BOS, inserted prefixes, headers and footers are trained only under ALL_TOKENS.
        rest = float(what is TrainOnWhat.ALL_TOKENS)
        weighted: list[tuple[Piece, float]] = [
            (self._bos_tokens, rest),
            (self._conversation_prefix(messages), rest),
            *weigh(self._render_all(messages), trained, rest),
        ]
        return join_weighted(weighted)
