"""Which messages of a conversation a supervised example trains on."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from tinker_cookbook.exceptions import RendererError, nearest
from tinker_cookbook.renderers.core.messages import Message


class TrainOnWhat(StrEnum):
    """Which tokens get weight 1. Headers and prompt tokens get it only under ``ALL_TOKENS``."""

    LAST_ASSISTANT_MESSAGE = "last_assistant_message"
    """The last message of role assistant."""
    LAST_ASSISTANT_TURN = "last_assistant_turn"
    """The assistant messages of the last turn: between tool results back to the last question."""
    ALL_ASSISTANT_MESSAGES = "all_assistant_messages"
    ALL_MESSAGES = "all_messages"
    ALL_TOKENS = "all_tokens"
    """Every token, headers and what the chat format inserts included."""
    ALL_USER_AND_SYSTEM_MESSAGES = "all_user_and_system_messages"
    CUSTOMIZED = "customized"
    """Messages with ``trainable: true``; a message without the key is not trained on."""

    @classmethod
    def _missing_(cls, value: object) -> TrainOnWhat | None:
        values = [member.value for member in cls]
        raise RendererError(
            f"train_on_what: got {value!r}, expected one of {', '.join(values)}"
            f"{nearest(str(value), values)}"
        )


def select_trained(messages: Sequence[Message], train_on_what: TrainOnWhat | str) -> list[bool]:
    """Returns for each message whether its output is trained on.

    A conversation in which nothing is selected (no assistant message, say) gives all False; the
    caller decides whether to drop it. Raises RendererError for a ``trainable`` that is no boolean.
    """
    what = TrainOnWhat(train_on_what)
    roles = [message["role"] for message in messages]
    match what:
        case TrainOnWhat.ALL_TOKENS | TrainOnWhat.ALL_MESSAGES:
            return [True] * len(messages)
        case TrainOnWhat.ALL_ASSISTANT_MESSAGES:
            return [role == "assistant" for role in roles]
        case TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES:
            return [role in ("user", "system") for role in roles]
        case TrainOnWhat.CUSTOMIZED:
            return [_trainable(message, i) for i, message in enumerate(messages)]
        case TrainOnWhat.LAST_ASSISTANT_MESSAGE | TrainOnWhat.LAST_ASSISTANT_TURN:
            last = _last_index(roles, {"assistant"}, len(roles))
            turn_start = _last_index(roles, {"user", "system"}, last) + 1
            start = turn_start if what is TrainOnWhat.LAST_ASSISTANT_TURN else last
            return [role == "assistant" and start <= i <= last for i, role in enumerate(roles)]


def _last_index(roles: Sequence[str], wanted: set[str], before: int) -> int:
    return max((i for i, role in enumerate(roles[: max(before, 0)]) if role in wanted), default=-1)


def _trainable(message: Message, index: int) -> bool:
    value = message.get("trainable", False)
    if not isinstance(value, bool):
        raise RendererError(f"messages[{index}].trainable: got {value!r}, expected true or false")
    return value
