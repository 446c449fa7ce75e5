"""A dataset of conversations, as a builder's settings ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.renderers import Message, Renderer, normalize_messages
from tinker_cookbook.renderers.core.roles import check_roles
from tinker_cookbook.supervised.data import (
    Rows,
    SupervisedDatasetFromHFDataset,
    conversation_to_data,
)
from tinker_cookbook.supervised.tool_rows import tools_of_row, with_tools
from tinker_cookbook.supervised.types import ChatDatasetBuilder

if TYPE_CHECKING:
    import tinker


def chat_dataset(
    builder: ChatDatasetBuilder, rows: Rows, batch_size: int, message_field: str | None = None
) -> SupervisedDatasetFromHFDataset:
    """Batches of ``rows``: conversations, or objects with the conversation in ``message_field``."""
    max_length = builder.common_config.max_length

    def to_data(row: Any) -> list[tinker.Datum]:
        # Looked up here, so that rows can be counted and listed before a tokenizer is there.
        renderer, train_on_what = builder.renderer, builder.train_on_what
        conversation = row if message_field is None else _conversation(row, message_field, renderer)
        return conversation_to_data(conversation, renderer, max_length, train_on_what)

    return SupervisedDatasetFromHFDataset(rows, batch_size, flatmap_fn=to_data)


def _conversation(row: Any, message_field: str, renderer: Renderer) -> list[Message]:
    messages = normalize_messages(_field(row, message_field))
    check_roles(messages)
    return with_tools(messages, tools_of_row(row), renderer)


def _field(row: Any, name: str) -> Any:
    if name not in row:
        raise DataFormatError(
            f"message_field: got {name!r}, expected one of the row's fields: {', '.join(row)}"
        )
    return row[name]
