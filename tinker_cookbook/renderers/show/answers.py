"""The answers of a conversation: the prompt of each, what is sampled, and what is read of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.content import ensure_list, message_to_jsonable
from tinker_cookbook.renderers.core.messages import Message
from tinker_cookbook.renderers.core.parse_outcome import ParseTermination
from tinker_cookbook.renderers.core.pieces import flat
from tinker_cookbook.renderers.core.train_on_what import TrainOnWhat
from tinker_cookbook.renderers.show.facts import Fact, count
from tinker_cookbook.renderers.show.tokens import TokenReader

_LAST = TrainOnWhat.LAST_ASSISTANT_MESSAGE


class Answers:
    """Asks the renderer about one message at a time, by what it does at inference."""

    def __init__(
        self, renderer: Renderer, messages: Sequence[Message], reader: TokenReader
    ) -> None:
        self._renderer = renderer
        self._reader = reader
        self._messages = [_without_flag(message) for message in messages]
        self._prompts: dict[int, list[Any]] = {}
        self._samples: dict[int, list[Any]] = {}

    @cached_property
    def indices(self) -> list[int]:
        """Which messages are answers."""
        return [i for i, m in enumerate(self._messages) if m["role"] == "assistant"]

    @cached_property
    def last(self) -> int:
        """Index of the last answer, or of the one to come."""
        return self.indices[-1] if self.indices else len(self._messages)

    def prompt(self, end: int) -> list[Any]:
        """Returns what inference would be given for the answer at ``end``."""
        if end not in self._prompts:
            chunks = self._renderer.build_generation_prompt(self._messages[:end]).chunks
            self._prompts[end] = flat(chunks)
        return self._prompts[end]

    def sampled(self, answer: int) -> list[Any]:
        """Returns what the model says to answer, its stop token included."""
        if answer not in self._samples:
            self._samples[answer] = self._sampled(self._messages[: answer + 1])
        return self._samples[answer]

    def conversation(self) -> list[Any]:
        """Returns all messages as history, nothing trained."""
        messages = self._renderer._normalize(self._messages)
        return flat(self._renderer._example(messages, [False] * len(messages), _LAST)[0].chunks)

    def parsed(self, answer: int) -> Fact:
        """What parse_response reads of the answer as it is sampled."""
        sampled = self.sampled(answer)
        if not all(isinstance(item, int) for item in sampled):
            return Fact("parsed", "nothing: a medium is no token that could be sampled")
        message, how = self._renderer.parse_response(sampled)
        same = True
        if _essence(message) == _essence(self._messages[answer]):
            verdict = "reads the message back"
        elif same := self._says_the_same(message, answer, sampled):
            verdict = "reads another spelling of the message, whose tokens are the same"
        else:
            verdict = "reads something else than the message"
        text = (
            f"of {count(len(sampled), 'token')} {verdict} ({how.value}): "
            f"{json.dumps(message_to_jsonable(message), ensure_ascii=False)}"
        )
        return Fact("parsed", text, same and how is ParseTermination.STOP_SEQUENCE)

    def _says_the_same(self, message: Message, answer: int, sampled: list[Any]) -> bool:
        try:
            return self._sampled([*self._messages[:answer], message]) == sampled
        except RendererError:
            return False

    def _sampled(self, messages: Sequence[Message]) -> list[Any]:
        # The example in which the last message is an answer, and nothing else is trained.
        model_input, weights = self._renderer.build_merged_examples(messages, _LAST)[-1]
        shown = self._reader.read(model_input.chunks, weights.tolist())
        pairs = zip(flat(model_input.chunks), shown, strict=True)
        return [item for item, token in pairs if token.trained]


def _without_flag(message: Message) -> Message:
    """The message without ``trainable``: here it is asked what is sampled, whatever is trained."""
    return Message(**{key: value for key, value in message.items() if key != "trainable"})  # pyright: ignore[reportArgumentType]


def _essence(message: Message) -> Any:
    """What a message says: parts that are not empty, calls without their ids."""
    parts = [dict(part) for part in ensure_list(message["content"]) if part.get("text") != ""]
    calls = [call.function for call in message.get("tool_calls", [])]
    return parts, calls, message.get("unparsed_tool_calls", [])
