"""Rendered messages: their pieces (tokens, images, audio), training weights, and how they join."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any, TypeAlias, cast

import numpy as np

from tinker_cookbook._process import torch_is_left_out
from tinker_cookbook.exceptions import RendererError, nearest
from tinker_cookbook.renderers.core.messages import Message, Role
from tinker_cookbook.utils.imports import tinker, torch

Piece: TypeAlias = "Sequence[int] | tinker.types.ModelInputChunk"
"""A run of tokens, or a chunk of the SDK (an image)."""


def as_chunk(piece: Piece) -> Any:
    """Returns a run of tokens as a chunk of the SDK; a chunk is returned unchanged."""
    if not isinstance(piece, (list, tuple)):
        return piece
    # model_construct skips validation of each token id, which costs as much as encoding.
    return tinker.EncodedTextChunk.model_construct(tokens=list(piece))


def _tokens(piece: Piece) -> Sequence[int] | None:
    """Returns the tokens of a piece of text, None for images and audio."""
    return piece if isinstance(piece, (list, tuple)) else getattr(piece, "tokens", None)


def token_list(piece: Piece) -> list[int]:
    """Returns the tokens of a piece of text; an empty list for images and audio."""
    return list(_tokens(piece) or ())


def length(piece: Piece) -> int:
    """Returns the number of context positions that a piece occupies."""
    tokens = _tokens(piece)
    return cast(Any, piece).length if tokens is None else len(tokens)


def flat(pieces: Sequence[Piece]) -> list[Any]:
    """Returns tokens and media of ``pieces`` in one list, for comparison."""
    out: list[Any] = []
    for piece in pieces:
        tokens = _tokens(piece)
        out.extend([piece] if tokens is None else tokens)
    return out


def runs_of(items: Sequence[Any]) -> list[Piece]:
    """Returns pieces of the tokens and media of a ``flat`` list."""
    runs = groupby(items, lambda item: isinstance(item, int))
    return [one for text, run in runs for one in ([list(run)] if text else run)]


def first_difference(first: Sequence[Any], second: Sequence[Any]) -> int | None:
    """Returns the first index where two sequences differ, None where they are equal."""
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i
    return None if len(first) == len(second) else min(len(first), len(second))


def join_pieces(pieces: Sequence[Piece]) -> tinker.ModelInput:
    """Joins runs of tokens to one chunk each; images and audio keep their chunks."""
    chunks: list[Any] = []
    run: list[int] = []
    for piece in [*pieces, None]:
        tokens = None if piece is None else _tokens(piece)
        if tokens is not None:
            run.extend(tokens)
            continue
        # An image, or the end, completes the run before it.
        if run:
            chunks.append(tinker.EncodedTextChunk(tokens=run))
            run = []
        if piece is not None:
            chunks.append(piece)
    return tinker.ModelInput(chunks=chunks)


def join_weighted(
    weighted: Sequence[tuple[Piece, float]],
) -> tuple[tinker.ModelInput, torch.Tensor]:
    """Joins pieces to a model input of T tokens and float32 weights [T].

    Images and audio have weight 0. The weights are a numpy array in a process without torch
    (``leave_torch_out``).
    """
    values = [0.0 if _tokens(piece) is None else weight for piece, weight in weighted]
    lengths = [length(piece) for piece, _ in weighted]
    spread = np.repeat(np.array(values, dtype=np.float32), lengths)
    weights = cast("Any", spread) if torch_is_left_out() else torch.from_numpy(spread)
    return join_pieces([piece for piece, _ in weighted]), weights


class TrainOnWhat(StrEnum):
    """Which tokens have weight 1; headers and prompt tokens only under ``ALL_TOKENS``."""

    LAST_ASSISTANT_MESSAGE = "last_assistant_message"
    # All assistant messages after the last question, also those before tool results.
    LAST_ASSISTANT_TURN = "last_assistant_turn"
    ALL_ASSISTANT_MESSAGES = "all_assistant_messages"
    ALL_MESSAGES = "all_messages"
    ALL_TOKENS = "all_tokens"  # also headers and text that the chat format inserts
    ALL_USER_AND_SYSTEM_MESSAGES = "all_user_and_system_messages"
    CUSTOMIZED = "customized"  # messages with ``trainable: true``

    @classmethod
    def _missing_(cls, value: object) -> TrainOnWhat | None:
        values = [member.value for member in cls]
        raise RendererError(
            f"train_on_what: got {value!r}, expected one of {', '.join(values)}"
            f"{nearest(str(value), values)}"
        )


def select_trained(messages: Sequence[Message], train_on_what: TrainOnWhat | str) -> list[bool]:
    """Returns for each message whether its output is trained on.

    ``trainable: false`` excludes a message, except under ALL_TOKENS. All are False if nothing is
    selected (no assistant message, for example). Raises RendererError for a ``trainable`` that is
    not a boolean.
    """
    what = TrainOnWhat(train_on_what)
    chosen = _selected(messages, what)
    if what is TrainOnWhat.ALL_TOKENS:
        return chosen
    return [c and m.get("trainable", True) for c, m in zip(chosen, messages, strict=True)]


def _selected(messages: Sequence[Message], what: TrainOnWhat) -> list[bool]:
    for i, message in enumerate(messages):
        if not isinstance(message.get("trainable", False), bool):
            raise RendererError(
                f"messages[{i}].trainable: got {message.get('trainable')!r}, expected true or false"
            )
    roles = [message["role"] for message in messages]
    match what:
        case TrainOnWhat.ALL_TOKENS | TrainOnWhat.ALL_MESSAGES:
            return [True] * len(messages)
        case TrainOnWhat.ALL_ASSISTANT_MESSAGES:
            return [role == "assistant" for role in roles]
        case TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES:
            return [role in ("user", "system") for role in roles]
        case TrainOnWhat.CUSTOMIZED:
            return [message.get("trainable", False) for message in messages]
        case TrainOnWhat.LAST_ASSISTANT_MESSAGE | TrainOnWhat.LAST_ASSISTANT_TURN:
            start = last = max((i for i, r in enumerate(roles) if r == "assistant"), default=-1)
            if what is TrainOnWhat.LAST_ASSISTANT_TURN:
                # The last turn begins after the last question; tool results belong to it.
                earlier = (
                    i for i, r in enumerate(roles[: max(last, 0)]) if r in ("user", "system")
                )
                start = max(earlier, default=-1) + 1
            return [role == "assistant" and start <= i <= last for i, role in enumerate(roles)]


@dataclass(frozen=True)
class RenderContext:
    """Position and neighbours of a message, on which its tokens may depend."""

    idx: int  # position of the message, from 0
    is_last: bool
    prev_message: Message | None = None
    next_message: Message | None = None
    last_user_index: int = -1  # of the last user message, -1 without one
    # Whether the message follows the last user message; by default false without one.
    in_last_assistant_turn: bool = cast("bool", None)  # None until __post_init__

    def __post_init__(self) -> None:
        if self.in_last_assistant_turn is None:
            after_question = 0 <= self.last_user_index < self.idx
            object.__setattr__(self, "in_last_assistant_turn", after_question)

    @property
    def prev_role(self) -> Role | None:
        """Role of the previous message, None at the beginning."""
        return self.prev_message["role"] if self.prev_message else None

    @property
    def next_role(self) -> Role | None:
        """Role of the next message, None at the end."""
        return self.next_message["role"] if self.next_message else None


@dataclass(frozen=True)
class RenderedMessage:
    """Tokens of one message.

    ``output`` is what the model writes, up to and with the stop token. ``header`` precedes it and
    ``footer`` follows it: both are trained only under ``TrainOnWhat.ALL_TOKENS``.
    ``stop_overlap`` is the part of a stop sequence that also begins the next message's header
    (``User:`` of role_colon). Lists of tokens become chunks of the SDK; None means no tokens.
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


class RenderCache:
    """Cache of the rendered messages of one conversation, separate for each thread: a conversation
    that is split is rendered up to each of its answers."""

    def __init__(self) -> None:
        self._threads = threading.local()

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Caches rendered messages inside the ``with`` block, for one conversation."""
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
        """Returns ``render`` of each message in its context; without ``ends`` none ``is_last``."""
        known: dict[tuple[int, bool, int, int], RenderedMessage]
        known = getattr(self._threads, "known", {})
        found: list[RenderedMessage] = []
        for i, message in enumerate(messages):
            # The key has everything that the context depends on within one conversation. The
            # caller keeps the messages alive, so that no two have the same id().
            is_last = ends and i == len(messages) - 1
            key = (i, is_last, last_user_index, id(message))
            if key not in known:
                ctx = RenderContext(
                    idx=i,
                    is_last=is_last,
                    prev_message=messages[i - 1] if i else None,
                    next_message=messages[i + 1] if i + 1 < len(messages) else None,
                    last_user_index=last_user_index,
                    in_last_assistant_turn=i > last_user_index,
                )
                known[key] = render(message, ctx)
            found.append(known[key])
        return found


def weigh(
    rendered: Sequence[RenderedMessage], trained: Sequence[bool], rest: float
) -> Iterator[tuple[Piece, float]]:
    """Yields all pieces with weights: 1 for trained outputs, ``rest`` for headers and footers."""
    overlap: Piece = ()  # end of the previous answer's stop sequence, still to be trained
    for message_trained, message in zip(trained, rendered, strict=True):
        header = message.header
        # The stop sequence of an answer may overlap the header of the next message (role_colon).
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


def with_last_trained(ends: list[int], trained: Sequence[bool]) -> list[int]:
    """Returns ``ends`` and the last trained message if it comes later."""
    last = max((i for i, chosen in enumerate(trained) if chosen), default=-1)
    return [*ends, last] if last > max(ends, default=-1) else ends
