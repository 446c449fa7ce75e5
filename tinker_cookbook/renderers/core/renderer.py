"""The renderer: messages to tokens with training weights, sampled tokens back to a message."""

from __future__ import annotations

import logging
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers.core.answer_form import AnswerForm, CallForm, answer_form_of
from tinker_cookbook.renderers.core.blocks import Block, BlockReader
from tinker_cookbook.renderers.core.checks import TEXT, check_caller, check_parts
from tinker_cookbook.renderers.core.codec import TextCodec, part_texts_apart, split_control_tokens
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolSpec,
    normalize_messages,
    openai_message,
)
from tinker_cookbook.renderers.core.parsing import (
    MessageDelta,
    MessageReader,
    ParseTermination,
    ResponseParser,
    StreamingMessageHeader,
    special_token_id,
)
from tinker_cookbook.renderers.core.rendered import (
    Piece,
    RenderCache,
    RenderContext,
    RenderedMessage,
    TrainOnWhat,
    flat,
    join_pieces,
    join_weighted,
    select_trained,
    token_list,
    weigh,
    with_last_trained,
)
from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer, special_id, tokenizer_name
from tinker_cookbook.utils.imports import tinker, torch
from tinker_cookbook.utils.user_classes import overrides

Messages: TypeAlias = Sequence[Message] | Sequence[Mapping[str, Any]]
Example: TypeAlias = "tuple[tinker.ModelInput, torch.Tensor]"
"""Model input of T tokens and float32 weights [T]: 1 where the token itself is trained on."""

logger = logging.getLogger(__name__)


class UnsupportedToolsError(RendererError, NotImplementedError):
    """The chat format declares no tools."""


class RendererPicklingError(RendererError, pickle.PicklingError):
    """Renderer without a registered name, which cannot be pickled."""


@dataclass(eq=False, repr=False)
class Renderer(ABC):
    """Chat format: conversations to tokens, and sampled tokens to messages.

    A subclass needs ``render_message`` and ``stop_token`` (or ``get_stop_sequences``). The other
    class attributes describe the format. Keyword-only fields of a subclass that is a dataclass, or
    keyword-only arguments of its ``__init__``, are the options of the format. A subclass need not
    call ``super().__init__`` if it sets ``tokenizer``.
    """

    tokenizer: Tokenizer
    image_processor: Any = None

    # What describes the format.
    stop_token: ClassVar[str | None] = None  # ends a message; else see get_stop_sequences
    _special_tokens: ClassVar[tuple[str, ...]] = ()  # further ones that the vocabulary must have
    _bos: ClassVar[str] = ""  # text at the beginning of every conversation
    _roles: ClassVar[Collection[str]] = ()  # roles that the format has; empty: any
    _answer_parts: ClassVar[frozenset[str]] = TEXT  # parts that an assistant message may have
    _context_parts: ClassVar[frozenset[str]] = TEXT  # parts that other messages may have
    _blocks: ClassVar[tuple[Block, ...]] = ()  # thinking and tool calls in responses
    _inside: ClassVar[Block | None] = None  # the block that a prompt opens
    _call_form: ClassVar[CallForm | None] = None  # calls in ``_blocks`` as JSON need none
    _samples_thinking: ClassVar[bool] = True  # whether the model itself writes thinking blocks
    _prompt_opening: ClassVar[str] = ""  # beginning of an answer that is part of the prompt
    _history_as_sampled: ClassVar[bool] = False  # whether history has answers as they were sampled
    # Control tokens that the declaration of tools writes into system messages.
    _declared_tokens: ClassVar[frozenset[str]] = frozenset()
    # Whether all text is encoded by the codec, which keeps names of control tokens plain text. A
    # subclass that encodes with the tokenizer itself gets messages unchanged.
    _encodes_with_codec = False

    # Options of several formats: whether answers of earlier turns lose their thinking, and whether
    # texts of neighbouring parts are encoded as one, as chat templates do.
    strip_thinking_from_history = True
    merge_text_chunks = True
    # Options whose default depends on the day, such as the date: ``spec`` holds them, so that the
    # restored renderer has the same values.
    resolved_options = MappingProxyType[str, Any]({})

    # Whether prompts tell the model to answer without thinking, as an empty block does.
    disables_thinking = False
    supports_streaming = True  # of parse_response_streaming; official subclasses set it

    # ``get_renderer``, which the package sets.
    _by_name: ClassVar[Callable[..., Renderer]]

    # ``get_renderer`` sets these.
    _renderer_name: str | None = field(default=None, init=False)
    _model_name: str | None = field(default=None, init=False)
    _has_image_processor = False
    _stop_token_id = None  # of a subclass that does not call ``super().__init__``

    def __post_init__(self) -> None:
        # Look up tokens now, so that the tokenizer of another family raises an error at once.
        name = type(self).__name__
        if isinstance(self.image_processor, bool):
            # The second positional argument of some classes of the official cookbook.
            raise RendererError(
                f"{name}: got {self.image_processor} as image_processor; pass "
                f"strip_thinking_from_history={self.image_processor} by its name"
            )
        if self.stop_token is not None:
            self._stop_token_id = special_token_id(self.tokenizer, self.stop_token)
        for token in self._special_tokens:
            special_token_id(self.tokenizer, token)

    @cached_property
    def codec(self) -> TextCodec:
        """Encodes and decodes text for this renderer."""
        codec = TextCodec(self.tokenizer)
        codec.splits_control_tokens = self._encodes_with_codec
        codec.encodes_apart = not self.merge_text_chunks
        return codec

    @property
    def spec(self) -> str | None:
        """``name?option=value`` of a renderer by ``get_renderer``, None for others."""
        return self._renderer_name

    @property
    def model_name(self) -> str | None:
        """Name of the model, by default the tokenizer's name; None without ``get_renderer``."""
        return self._model_name

    @property
    def _name(self) -> str:
        return self.spec or type(self).__name__

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the spec and the name of the tokenizer instead of the vocabulary."""
        if self.spec is None:
            raise RendererPicklingError(
                f"{type(self).__name__}: cannot be pickled, because its name is not set; make it "
                "with get_renderer (register_renderer gives a class of your own a name), or set "
                "_renderer_name and _model_name"
            )
        source = tokenizer_name(self.tokenizer) or self.model_name
        if not source:
            raise RendererPicklingError(
                f"{self.spec}: cannot be pickled, because its tokenizer has no name; load it with "
                "get_tokenizer, or give it one with register_tokenizer"
            )
        return _restore, (self.spec, source, self.image_processor, self.model_name)

    @abstractmethod
    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of one message."""

    def get_stop_sequences(self) -> list[str] | list[int]:
        """Returns the stop sequences of a response, for ``SamplingParams(stop=…)``; raises
        NotImplementedError where the subclass has neither this method nor ``stop_token``."""
        if self._stop_token_id is None:
            raise NotImplementedError(
                f"{type(self).__name__} must set stop_token or define get_stop_sequences"
            )
        return [self._stop_token_id]

    def split_special_tokens(self, split: bool) -> None:
        """Sets whether names of control tokens in messages stay plain text."""
        self._encodes_with_codec = self._encodes_with_codec or split
        self.codec.splits_control_tokens = split

    def _check(self, message: Message, idx: int) -> None:
        """Raises RendererError for a role, calls or a part that the format cannot express."""
        role = message["role"]
        if self._roles and role not in self._roles:
            raise RendererError(
                f"messages[{idx}].role: got {role!r}, expected one of {', '.join(self._roles)}: "
                f"{self._name} has no form for others"
            )
        check_caller(message, idx)
        check_parts(message, idx, self._name, self._allowed_parts(role), self.model_name)

    def _allowed_parts(self, role: Role) -> frozenset[str]:
        return self._answer_parts if role == "assistant" else self._context_parts

    def _header(self, role: Role) -> str | None:
        """Returns the text before a message of ``role``; None: the text before an empty message."""
        return None

    def _generation_suffix(self, role: Role) -> list[int] | None:
        """Returns the tokens after which a message of ``role`` is sampled, if the role decides."""
        header = self._header(role)
        opening = self._prompt_opening if role == "assistant" else ""
        return None if header is None else self.codec.constant(header + opening)

    def _get_generation_suffix(self, role: Role, ctx: RenderContext) -> list[int]:
        """Returns the tokens after which a message of ``role`` is sampled at ``ctx.idx``."""
        suffix = self._generation_suffix(role)
        if suffix is None:
            suffix = token_list(self.render_message(Message(role=role, content=""), ctx).header)
        return suffix

    def _reader(self) -> MessageReader:
        """Returns the parser of response text."""
        return BlockReader(self._blocks, self._inside)

    @property
    def _bos_tokens(self) -> list[int]:
        return self.codec.constant(self._bos) if self._bos else []

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        """Returns the tokens before the first message, for example a default system prompt."""
        return []

    def compact_thinking(self, every: int) -> None:
        """Removes the thinking of all earlier answers after each ``every`` answers, and keeps it
        in between; raises ConfigurationError where the format has no thinking to remove.

        The prompt of the answer after a removal begins a new sequence; the others extend the one
        before.
        """
        raise ConfigurationError(
            f"compact_thinking_every: {self._name} has no thinking in its history that could be "
            "removed; leave the option out"
        )

    def _history_end(self, messages: Sequence[Message]) -> int:
        """Returns the index up to which answers lose their thinking, where the format has any."""
        return self._last_user_index(messages)

    def _last_user_index(self, messages: Sequence[Message]) -> int:
        return max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)

    @property
    def has_extension_property(self) -> bool:
        """Whether the prompt of turn t+1 always begins with prompt and completion of turn t:
        if so, a conversation trains as one sequence; if not, each turn needs a sequence."""
        return self._history_as_sampled or not self.strip_thinking_from_history

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """Returns the messages that begin a conversation in which the model may call ``tools``;
        raises UnsupportedToolsError where the chat format declares none."""
        return self._declare_tools(tools, system_prompt)

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        raise UnsupportedToolsError(
            f"{self._name}: this chat format declares no tools; use a renderer with tools, such as "
            "qwen3 or llama3, or describe the tools in a system message of your own"
        )

    def message_reader(self) -> MessageReader:
        """Returns a parser from text to a message, for callers that decode tokens themselves."""
        return self._reader()

    def answer_form(self) -> AnswerForm:
        """Returns what surrounds text and calls in an answer, for constrained sampling."""
        thinks = self._samples_thinking and not self.disables_thinking
        return answer_form_of(self._reader(), self._call_form, thinks)

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
        return self.response_parser().parse(response)

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
        overridden = overrides(self, Renderer, "parse_response")
        yield self.parse_response(tokens)[0] if overridden else parser.message

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
        normal, trained, what = self._select(messages, train_on_what)
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
        answer. Datasets train on these. The split of a subclass is not merged.
        """
        if overrides(self, Renderer, "build_supervised_examples"):
            return self.build_supervised_examples(messages, TrainOnWhat(train_on_what))
        return self._split(messages, train_on_what, merge=True)

    def _split(
        self, messages: Messages, train_on_what: TrainOnWhat | str, *, merge: bool
    ) -> list[Example]:
        normal, trained, what = self._select(messages, train_on_what)
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
        """Checks messages, marks names of control tokens, and separates texts where required."""
        normal = normalize_messages(messages)
        if self._encodes_with_codec and self.codec.splits_control_tokens:
            # Control tokens in the declaration of tools stay tokens, as in the template.
            kept = {"system": self._declared_tokens}
            normal = [
                split_control_tokens(m, self.codec, i, kept.get(m["role"], frozenset()))
                for i, m in enumerate(normal)
            ]
        return normal if self.merge_text_chunks else [part_texts_apart(m) for m in normal]

    def _select(
        self, messages: Messages, train_on_what: TrainOnWhat | str
    ) -> tuple[list[Message], list[bool], TrainOnWhat]:
        """Returns the normalised messages, and for each whether it is trained on."""
        what = TrainOnWhat(train_on_what)
        normal = self._normalize(messages)
        if not normal:
            raise RendererError("messages: got an empty list, expected at least one message")
        trained = select_trained(normal, what)
        # A forgotten train_on_what=customized would train other messages without an error.
        if any(m.get("trainable") and not t for m, t in zip(normal, trained, strict=True)):
            self._warn_once(
                f"a message has trainable: true, but train_on_what={what.value} does not select "
                "it; train_on_what=customized does"
            )
        return normal, trained, what

    @cached_property
    def _render_cache(self) -> RenderCache:
        return RenderCache()

    def _render_all(self, messages: Sequence[Message]) -> list[RenderedMessage]:
        end = self._history_end(messages)
        return self._render_cache.render_all(self.render_message, messages, end)

    def _example_ends(
        self, messages: Sequence[Message], trained: Sequence[bool], merge: bool
    ) -> list[int]:
        """Returns the last message of each example, nothing where one example holds them all."""
        if self.has_extension_property:
            return []
        ends: list[int] = []
        for i, message in enumerate(messages):
            if not (trained[i] and message["role"] == "assistant"):
                continue
            # Merge if the prompt of this answer begins with all tokens up to the previous one.
            if ends and merge:
                prompt = flat(self._prompt_pieces(messages[:i], "assistant"))
                answered = flat(self._answered_pieces(messages[: ends[-1] + 1]))
                if prompt[: len(answered)] == answered:
                    ends.pop()
            ends.append(i)
        return with_last_trained(ends, trained)

    def _answered_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """Returns the tokens up to an answer, with which a later prompt has to begin."""
        return self._prompt_pieces(messages, "assistant")[:-1]

    def _prompt_pieces(self, messages: Sequence[Message], role: Role) -> list[Piece]:
        pieces: list[Piece] = [self._bos_tokens, self._conversation_prefix(messages)]
        for rendered in self._render_all(messages):
            pieces += [rendered.header, *rendered.output, rendered.footer]
        # The generation suffix is the header of the message after the last one.
        ctx = RenderContext(
            idx=len(messages),
            is_last=True,
            prev_message=messages[-1] if messages else None,
            last_user_index=self._history_end(messages),
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

    @cached_property
    def _warned(self) -> set[str]:
        return set()

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)


def _restore(spec: str, source: str, image_processor: Any, model_name: str | None) -> Renderer:
    return Renderer._by_name(spec, get_tokenizer(source), image_processor, model_name)
