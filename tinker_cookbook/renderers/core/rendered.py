"""Context of a message in its conversation, rendered messages, and their training weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

from tinker_cookbook.renderers.core.messages import Message, Role
from tinker_cookbook.renderers.core.pieces import Piece, as_chunk, flat, token_list


@dataclass(frozen=True)
class RenderContext:
    """Position and neighbours of a message: everything its tokens may depend on."""

    idx: int
    """Position of the message, from 0."""
    is_last: bool
    prev_message: Message | None = None
    next_message: Message | None = None
    last_user_index: int = -1
    """Index of the last question of the user, -1 without one."""
    in_last_assistant_turn: bool = cast("bool", None)  # None until __post_init__
    """Whether the message belongs to the turn that is being produced. Left out: whether there is
    a question and the message comes after it."""

    def __post_init__(self) -> None:
        if self.in_last_assistant_turn is None:
            after_question = 0 <= self.last_user_index < self.idx
            object.__setattr__(self, "in_last_assistant_turn", after_question)


@dataclass(frozen=True)
class RenderedMessage:
    """The tokens of one message.

    ``header`` precedes what the model writes and ``footer`` follows the stop token: both are
    trained on only under ``TrainOnWhat.ALL_TOKENS``. ``output`` ends with the stop token.
    ``stop_overlap`` is the part of a stop sequence that is also the beginning of the next message's
    header (role_colon's ``User:``). Lists of tokens that are given become chunks of the SDK; None
    stands for no tokens.
    """

    output: Sequence[Piece]
    header: Piece = ()
    footer: Piece = ()
    stop_overlap: Piece = ()

    def __post_init__(self) -> None:
        chunks = [as_chunk(piece) for piece in self.output]
        object.__setattr__(self, "output", chunks)
        for field in ("header", "footer", "stop_overlap"):
            object.__setattr__(self, field, as_chunk(getattr(self, field) or ()))


def context_at(idx: int, messages: Sequence[Message], last_user_index: int) -> RenderContext:
    """Returns the context of message ``idx``."""
    is_last = idx == len(messages) - 1
    return RenderContext(
        idx=idx,
        is_last=is_last,
        prev_message=messages[idx - 1] if idx else None,
        next_message=None if is_last else messages[idx + 1],
        last_user_index=last_user_index,
        in_last_assistant_turn=idx > last_user_index,
    )


def contexts(
    messages: Sequence[Message], last_user_index: int
) -> Iterator[tuple[Message, RenderContext]]:
    """Yields each message with its context."""
    for i, message in enumerate(messages):
        yield message, context_at(i, messages, last_user_index)


class RenderCache:
    """Cache of the rendered messages of one conversation, separate for each thread.

    A conversation that is split is rendered up to each of its answers. What a message becomes
    depends on its context alone, of which the neighbours follow from the place.
    """

    def __init__(self) -> None:
        self._threads = threading.local()

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Caches rendered messages inside the ``with`` block, for one conversation.

        Keys contain ``id(message)``, so the caller must keep the messages alive.
        """
        self._threads.known = {}
        try:
            yield
        finally:
            del self._threads.known

    def render_all(
        self,
        render: Callable[[Message, RenderContext], RenderedMessage],
        messages: Sequence[Message],
        last_user_index: int,
        ends: bool = True,
    ) -> list[RenderedMessage]:
        """Returns the result of ``render`` for each message in its context.

        Without ``ends`` no message ``is_last``: for formats that write the history of a prompt
        otherwise than a whole conversation.
        """
        kept: dict[tuple[int, bool, int, int], RenderedMessage] | None
        kept = getattr(self._threads, "known", None)
        known = {} if kept is None else kept
        found: list[RenderedMessage] = []
        last = len(messages) - 1
        for i, message in enumerate(messages):
            is_last = ends and i == last
            key = (i, is_last, last_user_index, id(message))
            if key not in known:
                ctx = context_at(i, messages, last_user_index)
                known[key] = render(message, ctx if ends else replace(ctx, is_last=False))
            found.append(known[key])
        return found


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


def answer_ends(messages: Sequence[Message], trained: Sequence[bool]) -> list[int]:
    """Returns the index of each trained answer, then that of a last trained message behind them."""
    ends = [i for i, m in enumerate(messages) if trained[i] and m["role"] == "assistant"]
    return with_last_trained(ends, trained)


def with_last_trained(ends: list[int], trained: Sequence[bool]) -> list[int]:
    """Returns ``ends``, and behind them the last trained message where it comes later."""
    last = max((i for i, chosen in enumerate(trained) if chosen), default=-1)
    return [*ends, last] if last > max(ends, default=-1) else ends


def example_ends(
    prompt_pieces: Callable[[Sequence[Message], Role], list[Piece]],
    answered_pieces: Callable[[Sequence[Message]], list[Piece]],
    messages: Sequence[Message],
    trained: Sequence[bool],
) -> list[int]:
    """Returns the last message of each merged example, by comparing tokens, not by rule.

    Trained answers share an example where the later prompt begins with all tokens up to the
    earlier answer: ``answered_pieces`` are the tokens of a conversation that ends with it.
    """
    ends: list[int] = []
    for i, message in enumerate(messages):
        if not (trained[i] and message["role"] == "assistant"):
            continue
        if ends:
            prompt = flat(prompt_pieces(messages[:i], "assistant"))
            answered = flat(answered_pieces(messages[: ends[-1] + 1]))
            if prompt[: len(answered)] == answered:
                ends.pop()
        ends.append(i)
    return with_last_trained(ends, trained)
