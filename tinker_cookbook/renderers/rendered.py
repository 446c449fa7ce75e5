"""What a chat format says of one message: its place in the conversation, and its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tinker_cookbook.renderers.messages import Message, Role
from tinker_cookbook.renderers.pieces import Piece, flat, token_list


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


def contexts(
    messages: Sequence[Message], last_user_index: int
) -> Iterator[tuple[Message, RenderContext]]:
    """Yields each message with its context."""
    for i, message in enumerate(messages):
        yield (
            message,
            RenderContext(
                idx=i,
                is_last=i == len(messages) - 1,
                prev_message=messages[i - 1] if i else None,
                next_message=messages[i + 1] if i + 1 < len(messages) else None,
                last_user_index=last_user_index,
            ),
        )


def weigh(
    rendered: Sequence[RenderedMessage], trained: Sequence[bool], rest: float
) -> Iterator[tuple[Piece, float]]:
    """Yields the pieces of all messages with their weights: 1 for the output of trained ones,
    ``rest`` for headers and footers."""
    overlap: Piece = ()  # end of the previous answer's stop sequence, still to be trained
    for message_trained, message in zip(trained, rendered, strict=True):
        header = message.header
        if overlap and (shared := token_list(overlap)) == token_list(header)[: len(shared)]:
            yield overlap, 1.0
            header = token_list(header)[len(shared) :]
        yield header, rest
        weight = float(message_trained)
        for piece in message.output:
            yield piece, weight
        yield message.footer, rest
        overlap = message.stop_overlap if message_trained else ()
    yield overlap, 1.0


def example_ends(
    prompt_pieces: Callable[[Sequence[Message], Role], list[Piece]],
    messages: Sequence[Message],
    trained: Sequence[bool],
) -> list[int]:
    """Returns the last message of each example, by comparing tokens, not by rule.

    Trained answers share an example where the later prompt begins with all tokens up to the
    earlier answer. ``prompt_pieces(messages, role)`` ends with what opens a message of the role.
    """
    ends: list[int] = []
    for i, message in enumerate(messages):
        if not (trained[i] and message["role"] == "assistant"):
            continue
        if ends:
            prompt = flat(prompt_pieces(messages[:i], "assistant"))
            answered = flat(prompt_pieces(messages[: ends[-1] + 1], "assistant")[:-1])
            if prompt[: len(answered)] == answered:
                ends.pop()
        ends.append(i)
    last = max((i for i, chosen in enumerate(trained) if chosen), default=-1)
    if last > max(ends, default=-1):
        ends.append(last)
    return ends
