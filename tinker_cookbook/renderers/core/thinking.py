"""Thinking of answers: how it is taken apart, and which answers may be trained.

A model may sample thinking anywhere. A prompt has every sampled answer, with thinking that the
format has no place for in tags. A *trained* answer of that kind raises RendererError, because the
format never asks for its tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from urllib.parse import parse_qsl, quote, urlencode

from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers.core.messages import END_THINK, THINK, Message, has_thinking
from tinker_cookbook.renderers.core.rendered import TrainOnWhat
from tinker_cookbook.renderers.core.renderer import Example, Renderer


def thinking_and_rest(message: Message, keeps: bool = True) -> tuple[str | None, str]:
    """Returns the thinking part before the text, None without one, and the rest as text.

    The rest has other thinking parts in tags, without ``keeps`` none.
    """
    content = message["content"]
    if isinstance(content, str):
        return None, content
    first = str(content[0]["thinking"]) if content and content[0]["type"] == "thinking" else None
    rest = ""
    for part in content if first is None else content[1:]:
        if part["type"] == "text":
            rest += part["text"]
        elif part["type"] == "thinking" and keeps:
            rest += f"{THINK}{part['thinking']}{END_THINK}"
    return first, rest


def split_thinking(message: Message, keeps: bool = True) -> tuple[str, str]:
    """Returns thinking and text of an answer; in a string, thinking is found by its tags.

    Without ``keeps``, thinking behind the text is left out.
    """
    part, text = thinking_and_rest(message, keeps)
    before, closed, _ = text.partition(END_THINK)
    given = not isinstance(message["content"], str) and has_thinking(message["content"])
    if given or not closed:
        return part or "", text
    # As in the templates: thinking is between the last <think> and the first </think>, and white
    # space around it and a line break before the text belong to the format.
    return before.split(THINK)[-1].strip("\n"), text.split(END_THINK)[-1].lstrip("\n")


def check_leading(message: Message, idx: int, name: str) -> None:
    """Raises RendererError for thinking behind the text, for which the format has no form."""
    content = message["content"]
    kinds = [] if isinstance(content, str) else [part["type"] for part in content]
    if "thinking" in kinds[1:]:
        raise RendererError(
            f"messages[{idx}].content: got parts {', '.join(kinds)}, expected at most one "
            f"thinking part, before the text: {name} has no form for others"
        )


class ChecksTrainedAnswers(Renderer):
    """Mixin of a format that can write in a prompt what it does not train."""

    def _example(
        self, messages: Sequence[Message], trained: Sequence[bool], what: TrainOnWhat
    ) -> Example:
        # all_tokens trains the text as it is in a prompt.
        for i, message in enumerate(messages if what is not TrainOnWhat.ALL_TOKENS else ()):
            if trained[i] and message["role"] == "assistant":
                self._check_trained(messages, i)
        return super()._example(messages, trained, what)

    @abstractmethod
    def _check_trained(self, messages: Sequence[Message], idx: int) -> None:
        """Raises RendererError for a trained answer for which the format has no form."""


class LeadingThinking(ChecksTrainedAnswers):
    """Mixin of a format whose answers have thinking only at the beginning."""

    _compact_thinking_every = 0

    def compact_thinking(self, every: int) -> None:
        """Removes the thinking of all earlier answers after each ``every`` answers."""
        if type(every) is not int or every < 1:
            raise ConfigurationError(
                f"compact_thinking_every: got {every!r}, expected the number of answers after "
                "which thinking is removed, 1 or more"
            )
        if self.disables_thinking:
            super().compact_thinking(every)
        self._compact_thinking_every = every
        if self.spec is not None:  # from which a pickle or a checkpoint rebuilds the renderer
            base, _, query = self.spec.partition("?")
            options = {**dict(parse_qsl(query)), "compact_thinking_every": every}
            self._renderer_name = f"{base}?{urlencode(options, quote_via=quote)}"
        self.strip_thinking_from_history = True

    def _history_end(self, messages: Sequence[Message]) -> int:
        every = self._compact_thinking_every
        if not every:
            return super()._history_end(messages)
        # The last message is the answer to be sampled, or precedes it.
        answers = [i for i, m in enumerate(messages[:-1]) if m["role"] == "assistant"]
        removed = len(answers) // every * every
        # The message after the last of them, because some formats keep the one at this index.
        return answers[removed - 1] + 1 if removed else -1

    def _check_trained(self, messages: Sequence[Message], idx: int) -> None:
        check_leading(messages[idx], idx, self._name)
        # History drops the thinking anyway.
        is_history = idx <= self._history_end(messages) and self.strip_thinking_from_history
        if self.disables_thinking and not is_history and self._thinking_of(messages[idx]).strip():
            raise RendererError(
                f"messages[{idx}].content: got thinking, expected an answer without: the prompt of "
                f"{self._name} closes the think block; drop it with remove_thinking(content), or "
                f"use {self._name.partition('_disable')[0]}"
            )

    def _thinking_of(self, message: Message) -> str:
        """Returns the thinking that the format writes before the text of an answer."""
        return thinking_and_rest(message)[0] or ""
