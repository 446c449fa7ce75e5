"""The renderer: messages to tokens with training weights, sampled tokens back to a message.

A chat format is written as one subclass with few hooks; this module puts the pieces together.
Token ids are those of the model's own chat template. A special token that stands in a message's
text becomes that special token, as it does there: the template joins text before it encodes, so
data from strangers is to be cleaned before it is rendered.

One difference is on purpose. The text of an assistant message is encoded on its own, apart from
its header, because at inference the model continues from the header's tokens; a template would
merge the header's line break with white space at the beginning of the answer into one token that
the model can never be asked to continue from.
"""

from __future__ import annotations

import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.codec import TextCodec
from tinker_cookbook.renderers.content import get_text_content, has_thinking, normalize_messages
from tinker_cookbook.renderers.messages import Message, Role, ToolSpec
from tinker_cookbook.renderers.pieces import (
    Piece,
    flat,
    join_pieces,
    length,
    spread_weights,
    token_list,
)
from tinker_cookbook.renderers.train_on_what import TrainOnWhat, select_trained
from tinker_cookbook.tokenizer_utils import tokenizer_name

if TYPE_CHECKING:
    import tinker
    import torch

    from tinker_cookbook.tokenizer_utils import Tokenizer

logger = logging.getLogger(__name__)

Example: TypeAlias = "tuple[tinker.ModelInput, torch.Tensor]"
"""Model input of T tokens and float32 weights [T]: 1 where the token itself is trained on."""


class ParseTermination(Enum):
    """How a sampled response ended. True in a condition exactly where it ended properly."""

    STOP_SEQUENCE = "stop_sequence"
    """With the renderer's stop sequence, once and at the end."""
    EOS = "eos"
    """With the tokenizer's end-of-sequence token in place of the stop sequence."""
    MALFORMED = "malformed"
    """Cut off (no stop sequence), or with text after the stop sequence."""

    @property
    def is_stop_sequence(self) -> bool:
        """Whether the response ended with the renderer's stop sequence."""
        return self is ParseTermination.STOP_SEQUENCE

    @property
    def is_clean(self) -> bool:
        """Whether the model ended the response itself."""
        return self is not ParseTermination.MALFORMED

    def __bool__(self) -> bool:
        return self.is_clean


@dataclass(frozen=True)
class RenderContext:
    """Where a message stands in its conversation: what chat formats make it depend on."""

    idx: int
    is_last: bool
    prev_message: Message | None
    next_message: Message | None
    last_user_index: int
    """Index of the last question of the user, -1 without one."""

    @property
    def in_last_assistant_turn(self) -> bool:
        """Whether the message comes after the last question of the user."""
        return self.idx > self.last_user_index


@dataclass(frozen=True)
class RenderedMessage:
    """The tokens of one message.

    ``header`` precedes what the model writes and ``footer`` follows the stop token: both are
    trained on only under ``TrainOnWhat.ALL_TOKENS``. ``output`` ends with the stop token.
    ``stop_overlap`` is the part of a stop sequence that is also the beginning of the next message's
    header (role_colon's ``User:``).
    """

    output: Sequence[Piece]
    header: Piece = ()
    footer: Piece = ()
    stop_overlap: Piece = ()


class Renderer(ABC):
    """Turns conversations into tokens and sampled tokens into messages, for one chat format.

    A subclass's keyword-only arguments are the format's options. ``get_renderer`` makes renderers
    by name; ``spec`` is the name with the options that differ from it, from which an equal renderer
    can be made anywhere. Renderers pickle by it (see :mod:`tinker_cookbook.renderers.registry`).
    """

    spec: str | None = None
    """``name?option=value`` when made by ``get_renderer``."""
    model_name: str | None = None
    restore: Callable[..., Renderer] | None = None
    """Makes it again from its spec; set by ``get_renderer``."""

    def __init__(self, tokenizer: Tokenizer, image_processor: Any = None) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.codec = TextCodec(tokenizer)
        self._warned: set[str] = set()

    # --- what a chat format defines -----------------------------------------------------------

    @abstractmethod
    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of one message."""

    @abstractmethod
    def get_stop_sequences(self) -> list[str] | list[int]:
        """Returns what ends a response: for ``SamplingParams(stop=…)``."""

    @abstractmethod
    def parse_response(self, response: Sequence[int]) -> tuple[Message, ParseTermination]:
        """Returns the message that sampled tokens say, and how they ended. Never raises."""

    @abstractmethod
    def _generation_suffix(self, role: Role) -> list[int]:
        """Returns the tokens after which a message of ``role`` is sampled."""

    def _bos_tokens(self) -> list[int]:
        return []

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        """Returns what comes before the first message (a default system prompt, say)."""
        return []

    def _last_user_index(self, messages: Sequence[Message]) -> int:
        return max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)

    @property
    def has_extension_property(self) -> bool:
        """Whether the prompt of turn t+1 always begins with prompt and completion of turn t.

        Where it holds, a conversation of T tokens trains as one sequence; where it does not, each
        turn needs its own.
        """
        return False

    @property
    def supports_streaming(self) -> bool:
        """Whether :meth:`parse_response_streaming` works."""
        return False

    @property
    def disables_thinking(self) -> bool:
        """Whether prompts tell the model to answer without thinking."""
        return False

    def parse_response_streaming(self, response: Sequence[int]) -> Iterator[Any]:
        """Yields pieces of a response as they can be told apart."""
        raise RendererError(
            f"{self._name}: responses cannot be parsed as a stream; use parse_response"
        )

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """Returns the messages that begin a conversation in which the model may call ``tools``."""
        raise RendererError(
            f"{self._name}: this chat format declares no tools; use a renderer with tools, such as "
            "qwen3 or llama3, or describe the tools in a system message of your own"
        )

    # --- tokens -------------------------------------------------------------------------------

    def build_generation_prompt(
        self,
        messages: Sequence[Message] | Sequence[Mapping[str, Any]],
        role: Role = "assistant",
        prefill: str | None = None,
    ) -> tinker.ModelInput:
        """Returns the prompt for the next message, of ``role``, that begins with ``prefill``."""
        pieces = self._prompt_pieces(normalize_messages(messages), role)
        return join_pieces([*pieces, self.codec.encode(prefill or "")])

    def build_supervised_example(
        self,
        messages: Sequence[Message] | Sequence[Mapping[str, Any]],
        train_on_what: TrainOnWhat | str = TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    ) -> Example:
        """Returns the whole conversation as tokens and the weight of each.

        Raises RendererError for messages that the chat format cannot express. With a renderer
        whose history differs from what was sampled (no extension property), earlier turns of one
        example are trained on prompts that inference never sees: ``build_supervised_examples``
        splits where that would happen.
        """
        what = TrainOnWhat(train_on_what)
        normal = self._conversation(messages, what)
        trained = select_trained(normal, what)
        answers = (m["role"] == "assistant" for m in normal)
        assistants = sum(map(operator.and_, trained, answers))
        if assistants > 1 and not self.has_extension_property:
            self._warn_once(
                f"{self._name}: {what.value} trains several turns in one example, but this "
                "renderer writes history otherwise than it is sampled; build_supervised_examples "
                "gives one example for each prompt"
            )
        return self._example(normal, trained, what)

    def build_supervised_examples(
        self,
        messages: Sequence[Message] | Sequence[Mapping[str, Any]],
        train_on_what: TrainOnWhat | str = TrainOnWhat.LAST_ASSISTANT_TURN,
    ) -> list[Example]:
        """Returns the conversation as few examples whose every trained answer has the prompt that
        inference would give it.

        Each trained message is in exactly one example. Answers share an example where the later
        prompt begins with all tokens up to the earlier answer: always one example for a renderer
        with the extension property. ``ALL_TOKENS`` trains prompts too and is never split.
        """
        what = TrainOnWhat(train_on_what)
        normal = self._conversation(messages, what)
        trained = select_trained(normal, what)
        if self.has_extension_property or what is TrainOnWhat.ALL_TOKENS:
            return [self._example(normal, trained, what)]
        examples: list[Example] = []
        done = -1
        for end in self._example_ends(normal, trained):
            part = [t and done < i for i, t in enumerate(trained[: end + 1])]
            examples.append(self._example(normal[: end + 1], part, what))
            done = end
        return examples or [self._example(normal, trained, what)]

    def to_openai_message(self, message: Message) -> dict[str, Any]:
        """Returns the message as the OpenAI API and chat templates spell it."""
        result: dict[str, Any] = {"role": message["role"], "content": get_text_content(message)}
        content = message["content"]
        if not isinstance(content, str) and has_thinking(content):
            thoughts = (part["thinking"] for part in content if part["type"] == "thinking")
            result["reasoning_content"] = "".join(thoughts)
        if "tool_calls" in message:
            result["tool_calls"] = [
                call.model_dump(exclude_none=True) for call in message["tool_calls"]
            ]
        kept = ("tool_call_id", "name")
        return result | {key: value for key, value in message.items() if key in kept}

    def __reduce__(self) -> tuple[Any, ...]:
        """Says how to make the renderer again: by its spec and the name of its tokenizer."""
        if self.spec is None or self.restore is None:
            raise RendererError(
                f"{type(self).__name__}: cannot be pickled, because it was made without a name; "
                "make it with get_renderer (register_renderer gives a class of your own a name)"
            )
        source = tokenizer_name(self.tokenizer) or self.model_name
        if not source:
            raise RendererError(
                f"{self.spec}: cannot be pickled, because its tokenizer has no name; load it with "
                "get_tokenizer, or give it one with register_tokenizer"
            )
        return self.restore, (self.spec, source, self.image_processor, self.model_name)

    # --- assembly -----------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return self.spec or type(self).__name__

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)

    def _conversation(self, messages: Sequence[Mapping[str, Any]], what: TrainOnWhat) -> Any:
        normal = normalize_messages(messages)
        if not normal:
            raise RendererError("messages: got an empty list, expected at least one message")
        if what is not TrainOnWhat.CUSTOMIZED and any("trainable" in m for m in normal):
            self._warn_once(
                f"messages carry 'trainable', which train_on_what={what.value} does not read; "
                "train_on_what=customized does"
            )
        return normal

    def _render_all(self, messages: Sequence[Message]) -> Iterator[RenderedMessage]:
        last_user_index = self._last_user_index(messages)
        for i, message in enumerate(messages):
            ctx = RenderContext(
                idx=i,
                is_last=i == len(messages) - 1,
                prev_message=messages[i - 1] if i else None,
                next_message=messages[i + 1] if i + 1 < len(messages) else None,
                last_user_index=last_user_index,
            )
            yield self.render_message(message, ctx)

    def _prompt_pieces(self, messages: Sequence[Message], role: Role) -> list[Piece]:
        pieces: list[Piece] = [self._bos_tokens(), self._conversation_prefix(messages)]
        for rendered in self._render_all(messages):
            pieces += [rendered.header, *rendered.output, rendered.footer]
        return [*pieces, self._generation_suffix(role)]

    def _example(
        self, messages: Sequence[Message], trained: Sequence[bool], what: TrainOnWhat
    ) -> Example:
        rest = float(what is TrainOnWhat.ALL_TOKENS)
        weighted: list[tuple[Piece, float]] = [
            (self._bos_tokens(), rest),
            (self._conversation_prefix(messages), rest),
        ]
        overlap: Piece = ()  # end of the previous answer's stop sequence, still to be trained
        for message_trained, rendered in zip(trained, self._render_all(messages), strict=True):
            header = rendered.header
            shared = length(overlap)
            if shared and token_list(header)[:shared] == token_list(overlap):
                weighted.append((overlap, 1.0))
                header = token_list(header)[shared:]
            weight = float(message_trained)
            weighted.append((header, rest))
            weighted += [(piece, weight) for piece in rendered.output]
            weighted.append((rendered.footer, rest))
            overlap = rendered.stop_overlap if message_trained else ()
        weighted.append((overlap, 1.0))
        return join_pieces([piece for piece, _ in weighted]), spread_weights(weighted)

    def _example_ends(self, messages: Sequence[Message], trained: Sequence[bool]) -> list[int]:
        """Returns the last message of each example, by comparing tokens, not by rule."""
        ends: list[int] = []
        answered: list[int] = []
        for i, message in enumerate(messages):
            if not (trained[i] and message["role"] == "assistant"):
                continue
            prompt = flat(self._prompt_pieces(messages[:i], "assistant"))
            if ends and prompt[: len(answered)] == answered:
                ends.pop()
            ends.append(i)
            pieces = self._prompt_pieces(messages[: i + 1], "assistant")
            answered = flat(pieces[:-1])
        last = max((i for i, chosen in enumerate(trained) if chosen), default=-1)
        if last > max(ends, default=-1):
            ends.append(last)
        return ends
