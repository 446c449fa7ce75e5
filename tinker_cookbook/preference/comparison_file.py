"""Reads comparisons from local files in common formats.

======================  ============================================================================
``comparison, label``   ``{"comparison": {"prompt_conversation": […], "completion_A": […],
                        "completion_B": […]}, "label": "A" | "B" | "Tie"}``
``prompt``              ``{"prompt": …, "chosen": …, "rejected": …}``: each a text, a message or
                        a list of messages; answers may repeat the prompt. Instead of
                        ``prompt`` a row may have ``prompt_conversation`` or ``messages``.
no prompt               ``{"chosen": […], "rejected": […]}``: two conversations; their common
                        first messages are the prompt. Texts have the format of Anthropic's
                        hh-rlhf, ``"\\n\\nHuman: …\\n\\nAssistant: …"``.
``conversations``       LLaMA-Factory: ``{"conversations": […], "chosen": …, "rejected": …}`` of
                        ``{"from": "human" | "gpt", "value": …}``, optionally ``"system": …``
======================  ============================================================================

Files are JSON lines (also gzipped), JSON arrays or parquet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import DataFormatError, DataValidationError, RendererError, nearest
from tinker_cookbook.preference.comparison import Comparison, LabeledComparison
from tinker_cookbook.renderers import Message, normalize_messages
from tinker_cookbook.renderers.core.checks import check_roles
from tinker_cookbook.supervised.json_files import json_lines, load_local_rows

EXPECTED = '{"prompt": "…", "chosen": "…", "rejected": "…"}'

_PROMPT_KEYS = ("prompt", "prompt_conversation", "conversations", "messages")
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "system": "system"}


@dataclass(frozen=True)
class PlacedRows:
    """Rows with their source positions (``FILE:LINE``), for error messages."""

    rows: Sequence[Any]
    places: Sequence[str]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Any:
        return self.rows[index]

    def take(self, indices: Sequence[int]) -> PlacedRows:
        """Selects the rows at ``indices``."""
        return PlacedRows([self.rows[i] for i in indices], [self.places[i] for i in indices])


def read_comparison_rows(path: str | Path) -> PlacedRows:
    """Reads a file's rows without parsing them; ``DataError`` if it is missing, empty or not
    JSON."""
    file = Path(path).expanduser()
    if file.suffix in (".json", ".parquet") and file.exists():
        rows = load_local_rows(file, "train")
        placed = PlacedRows(rows, [f"{file}[{i}]" for i in range(len(rows))])
    else:
        lines = list(json_lines(file, f"lines like {EXPECTED}"))
        placed = PlacedRows([row for _, row in lines], [place for place, _ in lines])
    if not len(placed):
        raise DataValidationError(f"{file}: the file is empty; expected lines like {EXPECTED}")
    return placed


def comparison_of_row(row: Any) -> LabeledComparison | None:
    """Parses a row in any of the formats above; chosen is A, rejected is B.

    Returns None if two conversations without a prompt first differ at a message that is not an
    answer. Raises DataFormatError for a row that cannot be parsed.
    """
    if not isinstance(row, Mapping):
        raise DataFormatError(
            f"got a JSON {type(row).__name__}, expected an object like {EXPECTED}"
        )
    # Check the official package's format first: it has its own keys.
    if "comparison" in row:
        return _labeled(row)
    for key in ("chosen", "rejected"):
        if row.get(key) is None:
            got = ", ".join(map(repr, row)) or "none"
            known = (*_PROMPT_KEYS, "chosen", "rejected", "comparison", "label")
            hint = nearest(key, [name for name in row if name not in known])
            raise DataFormatError(f"got the keys {got}, expected {key!r}{hint} as in {EXPECTED}")
    prompt_key = next((key for key in _PROMPT_KEYS if row.get(key) is not None), None)
    # HH files have two complete dialogues as texts and no prompt: the common prefix is the prompt.
    sides = row["chosen"], row["rejected"]
    # Two texts without a prompt are dialogues in the format of HH.
    if prompt_key is None and all(isinstance(side, str) for side in sides):
        return _without_prompt(parse_turns(sides[0], "chosen"), parse_turns(sides[1], "rejected"))
    chosen = _messages(sides[0], "assistant", "chosen")
    rejected = _messages(sides[1], "assistant", "rejected")
    if prompt_key is None:
        return _without_prompt(chosen, rejected)
    prompt = _messages(row[prompt_key], "user", prompt_key)
    if row.get("system") is not None:
        prompt = [*_messages(row["system"], "system", "system"), *prompt]
    # Remove a repeated prompt from the answers.
    size = len(prompt)
    if all(len(side) > size and side[:size] == prompt for side in (chosen, rejected)):
        chosen, rejected = chosen[size:], rejected[size:]
    return LabeledComparison(_checked(Comparison(prompt, chosen, rejected)), "A")


def _labeled(row: Mapping[str, Any]) -> LabeledComparison:
    """Parses the first format, that of the official package."""
    comparison = row["comparison"]
    if not isinstance(comparison, Mapping):
        raise DataFormatError(
            f"comparison: got {type(comparison).__name__}, expected an object with "
            "prompt_conversation, completion_A and completion_B"
        )
    parts: list[list[Message]] = []
    for key in ("prompt_conversation", "completion_A", "completion_B"):
        if comparison.get(key) is None:
            raise DataFormatError(
                f"comparison: got the keys {', '.join(map(repr, comparison)) or 'none'}, "
                f"expected {key!r}"
            )
        role = "user" if key == "prompt_conversation" else "assistant"
        parts.append(_messages(comparison[key], role, f"comparison.{key}"))
    label: Any = row.get("label")
    return LabeledComparison(_checked(Comparison(*parts)), label)


def _without_prompt(chosen: list[Message], rejected: list[Message]) -> LabeledComparison | None:
    """Splits two conversations; None if they do not diverge at an answer."""
    # The common first messages are the prompt.
    shortest = min(len(chosen), len(rejected))
    common = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    if (
        chosen == rejected
    ):  # split off the last message as the answer, so that equal answers are counted
        common -= 1
    tails = (chosen[common:], rejected[common:])
    if common < 1 or not all(
        tail and tail[0]["role"] == "assistant" == tail[-1]["role"] for tail in tails
    ):
        return None
    return LabeledComparison(Comparison(chosen[:common], *tails), "A")


def parse_turns(text: str, place: str = "text") -> list[Message]:
    """Parses a dialogue ``"\
    \
    Human: …\
    \
    Assistant: …"``; joins consecutive turns of one speaker."""
    first, *rest = re.split(r"(?:^|\n\n)(Human|Assistant):", text)
    if first.strip() or not rest:
        raise DataFormatError(
            f"{place}: got a text that begins {text[:40]!r}, expected a dialogue that begins "
            f"'\\n\\nHuman: …', or else a separate 'prompt', as in {EXPECTED}"
        )
    turns: list[Message] = []
    for speaker, text in zip(rest[::2], rest[1::2], strict=True):
        role = "user" if speaker == "Human" else "assistant"
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] = f"{turns[-1]['content']}\n\n{text.strip()}".strip()
        else:
            turns.append({"role": role, "content": text.strip()})
    return turns


def _messages(value: Any, role: str, place: str) -> list[Message]:
    """Converts a text of ``role``, a message or a list of messages to a list of messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    listed = [value] if isinstance(value, Mapping) else value
    try:
        messages = normalize_messages([_from_value(message, place) for message in listed])
        check_roles(messages)
        return messages
    except TypeError:
        raise DataFormatError(
            f"{place}: got {type(value).__name__}, expected a text, a message or a list of messages"
        ) from None
    except RendererError as error:
        raise DataFormatError(f"{place}: {error}") from error


def _from_value(message: Any, place: str) -> Any:
    """Converts a message like ``{"from", "value"}``; returns others unchanged."""
    if not isinstance(message, Mapping) or "from" not in message or "role" in message:
        return message
    if message["from"] not in _ROLES:
        raise DataFormatError(
            f"{place}: from: got {message['from']!r}, expected one of {', '.join(_ROLES)}"
            f"{nearest(str(message['from']), _ROLES)}"
        )
    return {"role": _ROLES[message["from"]], "content": message.get("value")}


def _checked(comparison: Comparison) -> Comparison:
    if not comparison.prompt_conversation:
        raise DataFormatError("the prompt: got no message, expected at least one")
    answers = {"chosen (A)": comparison.completion_A, "rejected (B)": comparison.completion_B}
    for name, completion in answers.items():
        if not completion or completion[-1]["role"] != "assistant":
            got = f"one of role {completion[-1]['role']!r}" if completion else "no message"
            raise DataFormatError(f"{name}: got {got} at its end, expected an assistant message")
    return comparison
