"""A conversation with messages in it that its owner does not know of."""

from __future__ import annotations

from collections.abc import Sequence

from tinker_cookbook.renderers import Message


class History:
    """What an environment says the conversation is, and what was put in from outside.

    A message from outside stays behind the message after which it came, so that the prompt of a
    later turn begins with that of an earlier one. Where the environment shortens its conversation
    (a compaction) to less than that, the message goes with it.
    """

    def __init__(self) -> None:
        self.own: list[Message] = []
        """The environment's conversation."""
        self._outside: list[tuple[int, Message]] = []  # length of `own` when it came, in order

    def update(self, own: Sequence[Message]) -> None:
        """Takes the environment's conversation as it is now."""
        self.own = list(own)
        self._outside = [(at, message) for at, message in self._outside if at <= len(self.own)]

    def add(self, messages: Sequence[Message]) -> None:
        """Puts messages from outside at the end."""
        self._outside += [(len(self.own), message) for message in messages]

    @property
    def seen(self) -> list[Message]:
        """All of it, in the order in which it was said."""
        merged: list[Message] = []
        waiting = list(self._outside)
        for i, message in enumerate([*self.own, None]):
            while waiting and waiting[0][0] == i:
                merged.append(waiting.pop(0)[1])
            if message is not None:
                merged.append(message)
        return merged
