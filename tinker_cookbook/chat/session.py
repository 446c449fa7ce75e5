"""State of a chat: a history per model, the system prompt, and the last turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tinker_cookbook.chat.answers import Answer, ChatModel, SamplingChoices, Show
from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.renderers import Message
from tinker_cookbook.renderers.core.messages import (
    Content,
    message_to_jsonable,
    system_message,
)
from tinker_cookbook.run.jsonl import encode_row, ends_incomplete, read_rows
from tinker_cookbook.run.paths import local_path, write_atomically

# Share of the context that stays free for an answer.
_ANSWER_SHARE = 4


@dataclass(frozen=True)
class Fitted:
    """Prompt messages that fit into the context, and the number of dropped messages."""

    messages: list[Message]
    max_tokens: int
    dropped: int


def fit_context(
    model: ChatModel, system: Sequence[Message], history: Sequence[Message], max_tokens: int
) -> Fitted:
    """Drops the oldest turns until prompt and answer fit into the model's context.

    ``max_tokens`` are reserved for the answer, at most a quarter of the context. The last message
    is always kept: raises ``DataError`` if it does not fit alone.
    """
    context, dropped = model.context_length, 0
    while True:
        messages = [*system, *history[dropped:]]
        length = model.prompt(messages).length
        if context is None or length + min(max_tokens, context // _ANSWER_SHARE) <= context:
            room = max_tokens if context is None else min(max_tokens, context - length)
            return Fitted(messages, room, dropped)
        # A turn is a user message and the answer to it.
        following = (i for i in range(dropped + 1, len(history)) if history[i]["role"] == "user")
        after = next(following, None)
        if after is not None:
            dropped = after
        elif length < context:  # a short answer is better than no answer
            return Fitted(messages, context - length, dropped)
        else:
            raise DataError(
                f"this message and the system prompt have {length:,} tokens, but the context of "
                f"{model.label} has {context:,}; shorten it"
            )


@dataclass
class ChatSession:
    """Conversation with one or several models that answer the same user messages.

    ``note`` is called with texts for the user.
    """

    models: Sequence[ChatModel]
    choices: SamplingChoices
    note: Callable[[str], None]
    system_prompt: str = ""
    histories: list[list[Message]] = field(init=False)
    turns: list[list[Answer]] = field(default_factory=list, init=False)
    """The answers of the models in each turn."""

    def __post_init__(self) -> None:
        self.histories = [[] for _ in self.models]
        self._num_sampled = 0
        self._dropped = [0] * len(self.models)

    async def send(
        self,
        content: Content,
        show: Callable[[int], Show],
        done: Callable[[int, Answer], None] = lambda index, answer: None,
    ) -> list[Answer]:
        """Samples the answers to a message, and adds both to the histories.

        ``show(i)`` gets the pieces of the answer of model i, and ``done(i, answer)`` its end.
        Cancelling the task ends the answers early. After an error, or if nothing was sampled before
        an interruption, the histories are unchanged.
        """
        message = Message(role="user", content=content)
        system = system_message(self.system_prompt)
        fitted: list[Fitted] = []
        for model, history in zip(self.models, self.histories, strict=True):
            turns = [*history, message]
            fitted.append(fit_context(model, system, turns, self.choices.max_tokens))
        self._note_dropped(fitted)
        seed = self.choices.seed
        # Use a new seed for each answer, or /retry would repeat the same answer.
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
            # Cancelled answers return the tokens sampled so far.
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        # Read all results, since asyncio reports errors that are never read.
        errors = [error for task in tasks if (error := task.exception()) is not None]
        if errors:
            raise errors[0]
        answers = [task.result() for task in tasks]
        if all(answer.is_empty for answer in answers):
            return answers
        self.turns.append(answers)
        for history, one in zip(self.histories, answers, strict=True):
            history += [message, one.message]
        return answers

    def undo(self) -> Content:
        """Removes the last turn and returns the user's message; DataError if there is none."""
        if not self.turns:
            raise DataError("the conversation is empty: there is no turn to remove")
        self.turns.pop()
        content = self.histories[0][-2]["content"]
        for history in self.histories:
            del history[-2:]
        return content

    def reset(self) -> None:
        """Starts a new conversation with the same system prompt."""
        self.histories = [[] for _ in self.models]
        self.turns, self._dropped = [], [0] * len(self.models)

    def save(self, file: str) -> str:
        """Adds the conversation to a JSONL file of messages, one row per model.

        Replaces earlier rows of this conversation. Its tokens go to the folder ``FILE.tokens``.
        Returns a sentence that describes the result.
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
        # The file is rewritten, and an incomplete line would be lost. This command writes none.
        if ends_incomplete(path):
            raise DataError(
                f"/save: {path}: the last line is not a JSON object; choose a new file or a JSONL "
                "file of conversations"
            )
        rows = [row for row in read_rows(path) if not any(_continues(row, one) for one in new)]
        rows += new
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, b"".join(map(encode_row, rows)))
        except OSError as error:
            raise ConfigurationError(
                f"/save: {path} cannot be written: {error.strerror or error}; choose another file"
            ) from error
        from tinker_cookbook.chat.saved_tokens import write_tokens  # only a saved chat needs it

        for index, model in enumerate(self.models):
            # Several models may have several vocabularies.
            name = f"{path.name}.tokens" + (f"-{index + 1}" if index else "")
            messages, answers = new[index]["messages"], [turn[index] for turn in self.turns]
            number = len(rows) - len(new) + index
            write_tokens(path.with_name(name), number, messages, answers, model.model)
        # A model trained on a truncated answer learns to stop there.
        count = sum(one.ending != "stop" for answers in self.turns for one in answers)
        warning = f"; {count} of its answers were truncated or stopped" if count else ""
        number = f"{len(rows)} conversation{'s' * (len(rows) > 1)}"
        return f"saved to {path}, which has {number} now{warning}"

    def _note_dropped(self, fitted: Sequence[Fitted]) -> None:
        for i, (model, one) in enumerate(zip(self.models, fitted, strict=True)):
            if one.dropped > self._dropped[i]:
                self.note(
                    f"{model.label}: the conversation exceeds the context of "
                    f"{model.context_length:,} tokens; the oldest {one.dropped} messages were "
                    "dropped from the prompt"
                )
            self._dropped[i] = one.dropped


def _continues(row: dict[str, Any], new: dict[str, Any]) -> bool:
    """Returns whether ``new`` is the conversation of ``row``, possibly extended."""
    messages = row.get("messages")
    same = isinstance(messages, list) and messages == new["messages"][: len(messages)]
    return same and row.get("model") == new["model"]
