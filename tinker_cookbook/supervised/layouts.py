"""Layouts of chat data: recognised by their columns, and converted to messages.

| layout | columns |
|---|---|
| messages | ``messages`` (or ``conversations``) with ``role`` and ``content``; ``system`` |
| ShareGPT | ``conversations`` (or ``messages``) with ``from`` and ``value``; ``system`` |
| Alpaca | ``instruction``, ``output`` or ``response``; ``input`` or ``context`` |
| prompt/completion | ``prompt`` and ``completion`` or ``response``: texts or lists of messages |
| question/answer | ``question``/``answer``, ``problem``/``solution``, ``query``/``response``; \
``context`` |

The last three may also have ``system``, ``history`` and the answer's reasoning (``reasoning``). All
layouts may have ``images`` (``row_images``), ``tools``, and ``label`` (true or false, as in data
for KTO): rows with false are bad examples and are skipped. Cells may be JSON text, as in CSV files.
Pairs of answers (``preference.comparison_file``) use the same parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

from tinker_cookbook.exceptions import RendererError, nearest
from tinker_cookbook.renderers.core.message_keys import FLAGS, REASONING_KEYS, misspelt
from tinker_cookbook.supervised.row_images import IMAGE_COLUMNS, with_images

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
INPUTS = ("input", "context")
LABEL = "label"
TOOLS = ("tools", "tool_defs", "available_tools")
_OTHER_MEDIA = ("videos", "video", "audios", "audio")
_MEDIA = (*IMAGE_COLUMNS, *_OTHER_MEDIA)
# Columns that hold a part of the conversation, so a layout that does not read them refuses them.
_SYSTEM = ("system", "system_prompt", "system_message")
CONTEXT = (*_SYSTEM, "history")
# Weights of a whole row: 1 is what happens anyway.
_WEIGHTS = ("weight", "weights", "sample_weight", "loss_weight", "loss_scale")


@dataclass(frozen=True)
class Layout:
    """A layout: its columns, and the conversion of its rows to messages."""

    name: str
    columns: tuple[str, ...]
    """Columns that a row must have."""
    optional: tuple[str, ...]
    """Columns that are read if a row has them."""
    read: Callable[[Mapping[str, Any]], list[Any]]

    @cached_property
    def known(self) -> tuple[str, ...]:
        """All columns that are read, tools and images included."""
        return (*self.columns, *self.optional, *TOOLS, *IMAGE_COLUMNS)

    def messages(self, row: Mapping[str, Any]) -> list[Any]:
        """Returns the row's messages before validation; raises RendererError."""
        check_columns(row, self.known)
        return with_media(row, self.read(row))


def check_columns(row: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises RendererError for a column that would change what is trained if it were ignored:
    flags and weights, context that is not among the columns ``known``, and misspelt ones."""
    for name in row.keys() - set(known):
        value, lower = row[name], str(name).lower()
        if value is None or lower in (LABEL, *_MEDIA):
            continue
        if lower in (*_WEIGHTS, *FLAGS, "trainable"):
            if str(value).strip().lower() not in ("1", "1.0", "true"):
                raise RendererError(
                    f"{name}: got {value!r:.80}, but rows have no weights; expected "
                    f"{FLAGS['weight']} in each message, or {LABEL}=false in rows to leave out"
                )
        elif lower in CONTEXT:
            if value:
                raise RendererError(
                    f"{name}: got {value!r:.80} next to {', '.join(known)}, expected it in the "
                    "messages"
                )
        elif meant := misspelt(lower, frozenset(known).difference(row)):
            raise RendererError(
                f"got the column {name!r}, which is not read; did you mean {meant!r}?"
            )


def is_used(name: str, column: str) -> bool:
    """Returns whether a column next to the conversation in ``column`` is read or refused."""
    known, lower = _turns_layout(column, False).known, name.lower()
    others = {LABEL, "functions", "trainable", *_MEDIA, *_WEIGHTS, *FLAGS, *CONTEXT}
    return lower in others or misspelt(lower, frozenset(known)) is not None


def with_media(row: Mapping[str, Any], messages: list[Any]) -> list[Any]:
    """Returns the messages with the images of the row's columns; raises RendererError for other
    media in a column if no message has media."""
    messages = with_images(row, messages)
    media = [name for name in _OTHER_MEDIA if row.get(name)]
    # Without their media, such rows would train on text without its context.
    if media and not any(_has_media(message) for message in messages):
        raise RendererError(
            f"{media[0]}: got media in a separate column, which is not read; expected them as "
            'parts of the content: {"type": "audio", "audio": "FILE"}'
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
        read = (*self.layout.known, *label)
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
    return isinstance(row, Mapping) and _is_false(row.get(LABEL))


def _is_false(value: Any) -> bool:
    # CSV files contain only texts.
    return value is False or (isinstance(value, str) and value.strip().lower() == "false")


def find_layout(row: Mapping[str, Any], column: str | None = None) -> Layout:
    """Returns the layout of a row, or the one of the conversation in ``column``; raises
    RendererError for none or several."""
    # Column formats write null for absent values.
    names = [name for name, value in row.items() if value is not None]
    if column is None and "chosen" in names and "rejected" in names:
        raise RendererError(_PREFERENCES)
    if column is None:
        column = next((name for name in ("messages", "conversations") if name in names), None)
    if column is not None:
        turns = from_json(row[column])
        first = turns[0] if isinstance(turns, Sequence) and turns else None
        is_sharegpt = isinstance(first, Mapping) and "from" in first and "role" not in first
        return _turns_layout(column, is_sharegpt)
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
    known = ("messages", "conversations", *(name for pair in _PAIRS for name in pair))
    hint = next(filter(None, (nearest(str(name), known) for name in names)), "")
    if not hint and any(" " in str(name) for name in names):
        hint = "; the first line of a CSV or TSV file must name the columns"
    raise RendererError(f"got the columns {_list(names)}; {wanted}{hint}")


def _list(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "none"


def _has_media(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type") in ("image", "audio") for part in content
    )


def from_json(value: Any) -> Any:
    """Returns a cell; JSON text of a list of objects, as in CSV files, as that list."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value  # a text that begins with a bracket
    is_list = isinstance(found, list) and found and all(isinstance(one, dict) for one in found)
    return found if is_list else value


def _turns(row: Mapping[str, Any], column: str, example: str) -> Sequence[Any]:
    turns = row[column]
    # The errors of JSON help here, since only a list can be meant.
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = _json(turns, column)
    if isinstance(turns, str) or not isinstance(turns, Sequence) or not turns:
        got = "an empty list" if turns == [] else type(turns).__name__
        raise RendererError(
            f"{column}: got {got}, expected a list that is not empty, as in {example}"
        )
    return turns


def _read_messages(row: Mapping[str, Any], column: str) -> list[Any]:
    example = (
        '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
    )
    return after_system(row, [_plain(message) for message in _turns(row, column, example)])


def _plain(message: Any) -> Any:
    """Converts calls in JSON text to a list."""
    if not isinstance(message, Mapping) or not isinstance(calls := message.get("tool_calls"), str):
        return message
    return {**message, "tool_calls": _json(calls, "tool_calls") if calls.strip() else None}


def _read_sharegpt(row: Mapping[str, Any], column: str) -> list[Any]:
    example = '{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}'
    turns = _turns(row, column, example)
    return after_system(row, [_message(turn, f"{column}[{i}]") for i, turn in enumerate(turns)])


def _message(turn: Any, where: str) -> Any:
    """Returns a turn with ``from`` and ``value`` as a message; others unchanged, if they have a
    role. Raises RendererError."""
    if isinstance(turn, Mapping) and "role" in turn:
        return _plain(turn)
    if not isinstance(turn, Mapping) or "from" not in turn or turn.get("value") is None:
        got = type(turn).__name__
        if isinstance(turn, Mapping):
            null = "value null, " if "value" in turn else ""
            got = null + _list(key for key in turn if key != "value" or not null)
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
        return {**others, "role": "assistant", "content": "", "tool_calls": calls}
    return _plain({**others, "role": role, "content": turn["value"]})


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


def after_system(row: Mapping[str, Any], messages: list[Any]) -> list[Any]:
    """Returns the messages after the row's ``system`` text, which must not contradict them."""
    texts = [row[name] for name in _SYSTEM if row.get(name)]
    if not texts:
        return messages
    text = texts[0]
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    begins = first.get("role") in ("system", "developer")
    if any(other != text for other in (*texts, *([first.get("content")] if begins else ()))):
        raise RendererError(
            f"system: got {text!r:.80} and another system message or column, expected one of them"
        )
    return messages if begins else [{"role": "system", "content": text}, *messages]


def read_question(row: Mapping[str, Any], column: str, inputs: bool) -> list[Any]:
    """Returns the messages before an answer: ``system``, ``history``, and the question in
    ``column``, with the text in ``input`` or ``context`` if ``inputs``."""
    messages: list[Any] = []
    for earlier in _history(row):
        messages += turn(earlier[0], "user", "history") + turn(earlier[1], "assistant", "history")
    extra = [name for name in INPUTS if inputs and row.get(name)]
    asked = row[column]
    if not extra:
        return after_system(row, messages + turn(asked, "user", column))
    if len(extra) > 1:
        raise RendererError(f"got texts in {' and '.join(extra)}, expected one of these columns")
    for name in (column, extra[0]):
        if not isinstance(row[name], str):
            raise RendererError(f"{name}: got {row[name]!r:.80}, expected a text")
    # Some rows have the whole task as the input.
    text = f"{asked}\n\n{row[extra[0]]}" if asked.strip() else row[extra[0]]
    return after_system(row, [*messages, {"role": "user", "content": text}])


def _read_pair(row: Mapping[str, Any], question: str, answer: str, inputs: bool) -> list[Any]:
    """Returns the messages of a question and an answer, after earlier messages."""
    asked, answered = read_question(row, question, inputs), turn(row[answer], "assistant", answer)
    if answered[0].get("role") != "assistant":
        raise RendererError(
            f"{answer}: got a message of role {answered[0].get('role')!r} first, expected the "
            "answer alone; give the whole conversation in a column messages"
        )
    found = {name: row[name] for name in REASONING_KEYS if row.get(name)}
    if found:
        if len(answered) != 1:
            raise RendererError(
                f"{_list(found)}: got reasoning in a column, but {answer} has several messages; "
                "expected it in the message that it precedes"
            )
        answered = [{**answered[0], **found}]
    # Answers inside a prompt are not the completion, so they are not trained on. (Those of
    # ``history`` are.)
    if not isinstance(from_json(row[question]), str) and any(
        isinstance(message, Mapping) and message.get("role") == "assistant" for message in asked
    ):
        asked, answered = _marked(asked, False), _marked(answered, True)
    return asked + answered


def _marked(messages: list[Any], trainable: bool) -> list[Any]:
    return [{"trainable": trainable, **m} if m.get("role") == "assistant" else m for m in messages]


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


def turn(value: Any, role: str, column: str) -> list[Any]:
    """Returns the messages of a cell: a text of ``role``, a message, or a list of messages."""
    value = from_json(value)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    listed = [value] if isinstance(value, Mapping) else value
    if isinstance(listed, Sequence) and all(isinstance(item, Mapping) for item in listed):
        return [
            _message(item, f"{column}[{i}]") if "from" in item else _plain(item)
            for i, item in enumerate(listed)
        ]
    raise RendererError(
        f"{column}: got {value!r:.80}, expected a text or a list of messages with role and content"
    )


@cache
def _turns_layout(column: str, is_sharegpt: bool) -> Layout:
    name, read = ("ShareGPT", _read_sharegpt) if is_sharegpt else ("messages", _read_messages)
    return Layout(name, (column,), _SYSTEM, partial(read, column=column))


def _pair_layout(pair: tuple[str, str], name: str) -> Layout:
    # A prompt is complete; the other layouts have a context in its own column.
    inputs = name != "prompt/completion"
    optional = (*(INPUTS if inputs else ()), *CONTEXT, *REASONING_KEYS)
    question, answer = pair
    read = partial(_read_pair, question=question, answer=answer, inputs=inputs)
    return Layout(name, pair, optional, read)


_PAIR_LAYOUTS = {pair: _pair_layout(pair, name) for pair, name in _PAIRS.items()}
