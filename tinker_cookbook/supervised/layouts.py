"""Layouts of chat data: recognised by their columns, and converted to messages.

| layout | columns |
|---|---|
| messages | ``messages`` (or ``conversations``) with ``role`` and ``content`` |
| ShareGPT | ``conversations`` with ``from`` and ``value``; ``system`` |
| Alpaca | ``instruction``, ``output`` or ``response``; ``input`` or ``context``, ``system``, \
``history`` |
| prompt/completion | ``prompt`` and ``completion`` or ``response``: texts or lists of messages |
| question/answer | ``question``/``answer``, ``problem``/``solution``, ``query``/``response`` |

All layouts may have ``tools``, and ``label`` (true or false, as in data for KTO): rows with false
are bad examples and are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.exceptions import RendererError, nearest

EXPECTED_COLUMNS = (
    "messages; conversations; instruction and output (Alpaca); prompt and completion; question "
    "and answer"
)
_PREFERENCES = (
    "got the columns chosen and rejected, which are pairs of a better and a worse answer; expected "
    "one answer per row; recipes.preference.dpo.train trains on pairs"
)

_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "bing", "bard"), "assistant"),
    "system": "system",
    **dict.fromkeys(("observation", "tool", "tool_response", "function_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
# Question and answer columns, by the name of their layout.
_PAIRS = {
    ("instruction", "output"): "Alpaca",
    ("instruction", "response"): "Alpaca",
    ("prompt", "completion"): "prompt/completion",
    ("prompt", "response"): "prompt/completion",
    ("question", "answer"): "question/answer",
    ("problem", "solution"): "question/answer",
    ("query", "response"): "question/answer",
}
_INPUTS = ("input", "context")
LABEL = "label"
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")


@dataclass(frozen=True)
class Layout:
    """A layout: its columns, and the conversion of its rows to messages."""

    name: str
    columns: tuple[str, ...]
    """Columns that a row must have."""
    optional: tuple[str, ...]
    """Columns that are read if a row has them."""
    read: Callable[[Mapping[str, Any]], list[Any]]

    def messages(self, row: Mapping[str, Any]) -> list[Any]:
        """Returns the row's messages before validation; raises RendererError."""
        messages = self.read(row)
        media = [name for name in _MEDIA if row.get(name)]
        # Without their images, such rows would train on text without its context.
        if media and not any(_has_media(message) for message in messages):
            raise RendererError(
                f"{media[0]}: got media in a separate column, which is not read; expected them as "
                'parts of the content: {"type": "image", "image": "FILE"}'
            )
        return messages


@dataclass
class ColumnsTaken:
    """Columns of a dataset that were read, for a message to the user."""

    layout: Layout | None = None
    seen: dict[str, None] = field(default_factory=dict)
    num_rows: int = 0
    num_unwanted: int = 0
    """Rows with label false, not counted in ``num_rows``."""

    def layout_of(self, row: Mapping[str, Any]) -> Layout:
        """Returns the layout of a row, the same for all of them; raises RendererError."""
        found = find_layout(row)
        if self.layout is None:
            self.layout = found
        elif (found.name, found.columns) != (self.layout.name, self.layout.columns):
            raise RendererError(
                f"got the columns {_list(row)} ({found.name} layout), but earlier rows have "
                f"{_list(self.layout.columns)} ({self.layout.name} layout); expected one "
                "layout per dataset: put them into separate files, or write messages in all rows"
            )
        self.seen.update(dict.fromkeys(key for key, value in row.items() if value is not None))
        return self.layout

    def line(self, name: str) -> str:
        """Returns the message: rows, layout, columns read, and ignored columns."""
        if self.layout is None:
            return f"{name}: {self.num_rows:,} rows"
        label = (LABEL,) if self.num_unwanted else ()
        read = (*self.layout.columns, *self.layout.optional, "tools", *label)
        taken = [column for column in read if column in self.seen]
        unread = [column for column in self.seen if column not in read]
        return (
            f"{name}: {self.num_rows:,} rows, {self.layout.name} layout, columns {_list(taken)}"
            + (f" (not read: {_list(unread)})" if unread else "")
            + (f"; {self.num_unwanted:,} rows with label false skipped" if label else "")
        )


def is_unwanted(row: Any) -> bool:
    """Returns whether the row's ``label`` is false: an example of what a model should not answer.

    Labels of other types are class names, without this meaning.
    """
    label = row.get(LABEL) if isinstance(row, Mapping) else None
    # CSV files contain only texts.
    return label is False or (isinstance(label, str) and label.strip().lower() == "false")


def find_layout(row: Mapping[str, Any]) -> Layout:
    """Returns the layout of a row; raises RendererError for none or several."""
    # Column formats write null for absent values.
    names = [name for name, value in row.items() if value is not None]
    if "chosen" in names and "rejected" in names:
        raise RendererError(_PREFERENCES)
    if "messages" in names:
        return _MESSAGES
    if "conversations" in names:
        turns = row["conversations"]
        first = turns[0] if isinstance(turns, Sequence) and turns else None
        return _ROLES if isinstance(first, Mapping) and "role" in first else _SHAREGPT
    found = [pair for pair in _PAIRS if set(pair) <= set(names)]
    if len(found) == 1:
        return _PAIR_LAYOUTS[found[0]]
    wanted = f"expected one of these layouts: {EXPECTED_COLUMNS}"
    if found:
        both = " and ".join("/".join(pair) for pair in found)
        raise RendererError(
            f"got the columns {_list(row)}, of which {both} are questions and answers; {wanted}. "
            "Remove or rename the other columns"
        )
    hint = nearest("messages", names)
    raise RendererError(f"got the columns {_list(row)}; {wanted}{hint}")


def _list(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(map(str, names)) or "none"


def _has_media(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type") in ("image", "audio") for part in content
    )


def _read_messages(row: Mapping[str, Any], column: str = "messages") -> list[Any]:
    """Returns messages unchanged, except for text in ``value`` of parts (LLaMA-Factory)."""
    messages = row[column]
    # A column of JSON text, as in CSV files.
    if isinstance(messages, str) and messages.lstrip().startswith("["):
        messages = _json(messages, column)
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        got = "an empty list" if messages == [] else type(messages).__name__
        raise RendererError(
            f'{column}: got {got}, expected a list that is not empty, as in {{"messages": '
            '[{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
        )
    return [_with_plain_parts(message) for message in messages]


def _with_plain_parts(message: Any) -> Any:
    """Converts a message with ``value`` in its parts to the usual parts and tool calls."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list) or not all(
        isinstance(part, Mapping) and isinstance(part.get("value"), str) for part in parts
    ):
        return message
    content, calls = list[Any](), list[Any]()
    for part in parts:
        if part["type"] == "tool_call":
            calls += _calls(part["value"], "content")
        elif part["type"] == "reasoning":
            content.append({"type": "thinking", "thinking": part["value"]})
        else:
            content.append({"type": part["type"], part["type"]: part["value"]})
    plain = {**message, "content": content or ("" if calls else content)}
    return {**plain, "tool_calls": calls} if calls else plain


def _read_sharegpt(row: Mapping[str, Any]) -> list[Any]:
    turns = row["conversations"]
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = _json(turns, "conversations")
    if isinstance(turns, str) or not isinstance(turns, Sequence) or not turns:
        got = "an empty list" if turns == [] else type(turns).__name__
        raise RendererError(
            f'conversations: got {got}, expected a list such as [{{"from": "human", "value": '
            '"…"}, {"from": "gpt", "value": "…"}]'
        )
    messages = _system(row)
    for i, turn in enumerate(turns):
        where = f"conversations[{i}]"
        if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
            got = _list(turn) if isinstance(turn, Mapping) else type(turn).__name__
            raise RendererError(f"{where}: got {got}, expected an object with from and value")
        role = _SHAREGPT_ROLES.get(str(turn["from"]).lower())
        if role is None:
            raise RendererError(
                f"{where}.from: got {turn['from']!r}, expected one of {_list(_SHAREGPT_ROLES)}"
                f"{nearest(str(turn['from']), _SHAREGPT_ROLES)}"
            )
        # Keep other keys, so that keys that affect training (weight) are refused.
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        if role == "call":
            calls = _calls(turn["value"], f"{where}.value")
            messages.append({**others, "role": "assistant", "content": "", "tool_calls": calls})
        else:
            text = "" if turn["value"] is None else turn["value"]
            messages.append({**others, "role": role, "content": text})
    return messages


def _calls(text: Any, where: str) -> list[dict[str, Any]]:
    """Returns tool calls written as JSON ``{"name": …, "arguments": {…}}``, or a list of them."""
    value = _json(text, where) if isinstance(text, str) else text
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise RendererError(
                f'{where}: got {text!r}, expected a call as JSON: {{"name": …, "arguments": …}}'
            )
    return [
        {"function": {"name": call["name"], "arguments": call.get("arguments") or {}}}
        for call in calls
    ]


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RendererError(
            f"{where}: got a text that is not JSON ({error}): {text[:80]!r}"
        ) from error


def _system(row: Mapping[str, Any]) -> list[Any]:
    text = row.get("system")
    return [{"role": "system", "content": text}] if text else []


def _read_pair(
    row: Mapping[str, Any], question: str, answer: str, optional: tuple[str, ...]
) -> list[Any]:
    """Returns the messages of a question and an answer, after earlier messages."""
    messages = _system(row) if "system" in optional else []
    for earlier in _history(row) if "history" in optional else ():
        messages += _turn(earlier[0], "user", "history") + _turn(earlier[1], "assistant", "history")
    asked = row[question]
    extra = next((row[name] for name in _INPUTS if name in optional and row.get(name)), None)
    if extra is not None:
        asked = f"{asked}\n\n{extra}"
    return messages + _turn(asked, "user", question) + _turn(row[answer], "assistant", answer)


def _history(row: Mapping[str, Any]) -> Sequence[Any]:
    """Returns earlier pairs of question and answer; a CSV file has them as JSON."""
    value = row.get("history") or []
    pairs = _json(value, "history") if isinstance(value, str) else value
    if not isinstance(pairs, Sequence) or any(
        isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2 for pair in pairs
    ):
        raise RendererError(
            f"history: got {value!r:.80}, expected pairs of a question and its answer"
        )
    return pairs


def _turn(value: Any, role: str, column: str) -> list[Any]:
    """Returns the messages of a cell: a text of ``role``, or a list of messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value):
        return list(value)
    raise RendererError(
        f"{column}: got {value!r:.80}, expected a text or a list of messages with role and content"
    )


_MESSAGES = Layout("messages", ("messages",), (), _read_messages)
_ROLES = Layout(
    "messages", ("conversations",), (), lambda row: _read_messages(row, "conversations")
)
_SHAREGPT = Layout("ShareGPT", ("conversations",), ("system",), _read_sharegpt)


def _pair_layout(pair: tuple[str, str], name: str) -> Layout:
    optional = (*_INPUTS, "system", "history") if name == "Alpaca" else ("system",)
    return Layout(name, pair, optional, lambda row: _read_pair(row, *pair, optional))


_PAIR_LAYOUTS = {pair: _pair_layout(pair, name) for pair, name in _PAIRS.items()}
