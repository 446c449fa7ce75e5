"""State of a chat: a history for each model, the system prompt, and what a turn changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tinker_cookbook.chat.answers import Answer, ChatModel, SamplingChoices, Show
from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.renderers import Message
from tinker_cookbook.renderers.core.messages import (
    get_text_content,
    message_to_jsonable,
    system_message,
)
from tinker_cookbook.utils.run_folder.jsonl import encode_row, read_rows
from tinker_cookbook.utils.run_folder.paths import local_path, write_atomically

# The share of the context that stays free for an answer of max_tokens.
_ANSWER_SHARE = 4


@dataclass(frozen=True)
class Fitted:
    """Prompt messages that fit into the context, and how many messages were left out."""

    messages: list[Message]
    max_tokens: int
    dropped: int


def fit_context(
    model: ChatModel, system: Sequence[Message], history: Sequence[Message], max_tokens: int
) -> Fitted:
    """Leaves out the oldest turns until prompt and answer fit into the model's context.

    An answer keeps ``max_tokens``, or a quarter of the context if that is less. The last message
    always stays: raises ``DataError`` if it does not fit alone.
    """
    context, dropped = model.context_length, 0
    while True:
        messages = [*system, *history[dropped:]]
        length = model.prompt(messages).length
        if context is None or length + min(max_tokens, context // _ANSWER_SHARE) <= context:
            room = max_tokens if context is None else min(max_tokens, context - length)
            return Fitted(messages, room, dropped)
        # A turn is a message of the user and the answer to it.
        following = (i for i in range(dropped + 1, len(history)) if history[i]["role"] == "user")
        after = next(following, None)
        if after is not None:
            dropped = after
        elif length < context:  # a short answer is better than none
            return Fitted(messages, context - length, dropped)
        else:
            raise DataError(
                f"this message and the system prompt have {length:,} tokens, but the context of "
                f"{model.label} has {context:,}; shorten it"
            )


@dataclass
class ChatSession:
    """Conversation with one or several models, which answer the same messages of the user.

    ``note`` is called with texts for the user.
    """

    models: Sequence[ChatModel]
    choices: SamplingChoices
    note: Callable[[str], None]
    system_prompt: str = ""
    histories: list[list[Message]] = field(init=False)
    answers: list[Answer] = field(default_factory=list, init=False)
    """The last answer of each model."""

    def __post_init__(self) -> None:
        self.histories = [[] for _ in self.models]
        self._num_sampled = 0
        self._unfinished: list[Message] = []  # answers that were cut or stopped
        self._dropped = [0] * len(self.models)

    async def send(
        self,
        text: str,
        show: Callable[[int], Show],
        done: Callable[[int, Answer], None] = lambda index, answer: None,
    ) -> list[Answer]:
        """Returns the answers to a message; both are then part of the histories.

        ``show(i)`` gets the pieces of the answer of model i, and ``done(i, answer)`` its end.
        Cancelling the task ends the answers early. After an error, or if nothing was sampled before
        an interruption, the histories are unchanged.
        """
        message = Message(role="user", content=text)
        system = system_message(self.system_prompt)
        fitted: list[Fitted] = []
        for model, history in zip(self.models, self.histories, strict=True):
            turns = [*history, message]
            fitted.append(fit_context(model, system, turns, self.choices.max_tokens))
        self._note_dropped(fitted)
        seed = self.choices.seed
        # Each answer has another seed, or /retry would sample the same one again.
        seed = None if seed is None else seed + self._num_sampled
        self._num_sampled += 1

        async def answer(index: int) -> Answer:
            choices = replace(self.choices, max_tokens=fitted[index].max_tokens, seed=seed)
            model = self.models[index]
            answer = await model.answer(fitted[index].messages, choices, show(index))
            done(index, answer)
            return answer

        tasks = [asyncio.create_task(answer(i)) for i in range(len(self.models))]
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            # Cancelled answers return what was sampled.
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        # All are read, since asyncio reports an error that was never read.
        errors = [error for task in tasks if (error := task.exception()) is not None]
        if errors:
            raise errors[0]
        answers = [task.result() for task in tasks]
        if all(answer.is_empty for answer in answers):
            return answers
        self.answers = answers
        for history, one in zip(self.histories, answers, strict=True):
            history += [message, one.message]
            if one.ending != "stop":
                self._unfinished.append(one.message)
        return answers

    def undo(self) -> str:
        """Removes the last turn and returns the user's message; DataError if there is none."""
        texts = {self._pop(history) for history in self.histories if history}
        if not texts:
            raise DataError("the conversation is empty: there is no turn to take back")
        self.answers = []
        return texts.pop()

    def reset(self) -> None:
        """Begins a new conversation with the same system prompt."""
        self.histories = [[] for _ in self.models]
        self.answers, self._dropped = [], [0] * len(self.models)

    def save(self, file: str) -> str:
        """Adds the conversation to a JSONL file of messages, a row for each model.

        Rows that this conversation continues are replaced. Returns a sentence on what was written.
        Raises ``ConfigurationError`` if the file cannot be written, and ``DataError`` if there is
        nothing to save.
        """
        if not any(self.histories):
            raise DataError("the conversation is empty: there is nothing to save")
        path = local_path(file, "/save")
        system = system_message(self.system_prompt)
        new: list[dict[str, Any]] = []
        for model, history in zip(self.models, self.histories, strict=True):
            messages = [message_to_jsonable(message) for message in [*system, *history]]
            new.append({"messages": messages, "model": model.model.name})
        kept = [row for row in read_rows(path) if not any(_continues(row, one) for one in new)]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, b"".join(map(encode_row, [*kept, *new])))
        except OSError as error:
            raise ConfigurationError(
                f"/save: {path} cannot be written: {error.strerror or error}; choose another file"
            ) from error
        rows = f"{len(kept) + len(new)} conversation{'s' if len(kept) + len(new) > 1 else ''}"
        saved = [message for history in self.histories for message in history]
        count = sum(any(message is one for one in self._unfinished) for message in saved)
        # A model that trains on half an answer learns to end there.
        warning = f"; {count} of its answers were cut or stopped (/retry, /undo)" if count else ""
        return f"saved to {path}, which has {rows} now{warning}"

    def _pop(self, history: list[Message]) -> str:
        history.pop()
        return get_text_content(history.pop())

    def _note_dropped(self, fitted: Sequence[Fitted]) -> None:
        for i, (model, one) in enumerate(zip(self.models, fitted, strict=True)):
            if one.dropped > self._dropped[i]:
                self.note(
                    f"{model.label}: the conversation exceeds the context of "
                    f"{model.context_length:,} tokens; the oldest {one.dropped} messages are left "
                    "out of the prompt"
                )
            self._dropped[i] = one.dropped


def _continues(row: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether ``new`` is the same conversation as ``row``, or a longer one."""
    messages = row.get("messages")
    same = isinstance(messages, list) and messages == new["messages"][: len(messages)]
    return same and row.get("model") == new["model"]
