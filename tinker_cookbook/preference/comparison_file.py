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
                        ``{"from": "human" | "gpt", "value": …}``
``question``            also ``instruction`` (with ``input``), ``problem`` or ``query``, as prompts
======================  ============================================================================

A row may also have ``system``, ``history``, ``tools`` and ``images`` of its prompt. Rows are read
as those of conversations (``supervised.layouts``), from files of the same formats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import DataFormatError, DataValidationError, RendererError
from tinker_cookbook.preference.comparison import Comparison, LabeledComparison
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.renderers.core.message_keys import REASONING_KEYS
from tinker_cookbook.supervised.conversation_row import (
    checked_messages,
    take_tools,
    tools_of_row,
)
from tinker_cookbook.supervised.json_files import file_rows
from tinker_cookbook.supervised.layouts import (
    CONTEXT,
    INPUTS,
    TOOLS,
    after_system,
    check_columns,
    from_json,
    read_question,
    turn,
    with_media,
)
from tinker_cookbook.supervised.row_datasets import PlacedRows
from tinker_cookbook.supervised.row_images import IMAGE_COLUMNS

EXPECTED = '{"prompt": "…", "chosen": "…", "rejected": "…"}'

_QUESTIONS = ("instruction", "question", "problem", "query")
_PROMPT_KEYS = ("prompt", "prompt_conversation", "conversations", "messages", *_QUESTIONS)
_SIDES = ("chosen", "rejected")
_COMPLETIONS = ("completion_A", "completion_B")


def read_comparison_rows(path: str | Path) -> PlacedRows:
    """Reads a file's rows without parsing them; ``DataError`` if it is missing, empty or not
    readable."""
    file = Path(path).expanduser()
    lines = list(file_rows(file, f"lines like {EXPECTED}"))
    if not lines:
        raise DataValidationError(f"{file}: the file is empty; expected lines like {EXPECTED}")
    return PlacedRows([row for _, row in lines], [place for place, _ in lines])


def comparison_of_row(row: Any) -> LabeledComparison | None:
    """Parses a row in any of the formats above; chosen is A, rejected is B.

    Returns None if two conversations without a prompt first differ at a message that is not an
    answer. Raises DataFormatError for a row that cannot be parsed, or that has a part that would
    be lost.
    """
    if not isinstance(row, Mapping):
        raise DataFormatError(
            f"got a JSON {type(row).__name__}, expected an object like {EXPECTED}"
        )
    try:
        if "comparison" not in row:
            return _pair(row)
        # The format of the official package is a pair with other keys, and a label.
        comparison = row["comparison"]
        if not isinstance(comparison, Mapping):
            raise DataFormatError(
                f"comparison: got {type(comparison).__name__}, expected an object with "
                "prompt_conversation, completion_A and completion_B"
            )
        others = {key: row[key] for key in row.keys() - {"comparison", "label"}}
        pair = _pair({**others, **comparison}, _COMPLETIONS)
        return None if pair is None else replace(pair, label=row.get("label"))
    except RendererError as error:
        raise DataFormatError(str(error)) from error


def _pair(
    row: Mapping[str, Any],
    names: tuple[str, str] = _SIDES,
) -> LabeledComparison | None:
    prompt_key = next((key for key in _PROMPT_KEYS if row.get(key) is not None), None)
    inputs = prompt_key in _QUESTIONS
    context = CONTEXT if prompt_key is not None else CONTEXT[:-1]
    known = (*names, *_PROMPT_KEYS, *context, *TOOLS, *IMAGE_COLUMNS, *(INPUTS if inputs else ()))
    check_columns(row, known)
    for key in REASONING_KEYS:
        if row.get(key):
            raise RendererError(
                f"{key}: got reasoning in a column next to two answers, expected it in the message "
                "that it precedes"
            )
    for key in names:
        if row.get(key) is None:
            got = ", ".join(map(repr, row)) or "none"
            example = f" as in {EXPECTED}" if names == _SIDES else ""
            raise DataFormatError(f"got the keys {got}, expected {key!r}{example}")
    sides = [from_json(row[key]) for key in names]
    # Two texts without a prompt are dialogues in the format of HH.
    if prompt_key is None and all(isinstance(side, str) for side in sides):
        parts = [parse_turns(text, key) for text, key in zip(sides, names, strict=True)]
    else:
        parts = [turn(side, "assistant", key) for side, key in zip(sides, names, strict=True)]
    prompt = [] if prompt_key is None else read_question(row, prompt_key, inputs)
    tools = tools_of_row(row, *map(take_tools, (prompt, *parts)))
    # The images belong to the prompt, and to an answer that repeats it.
    prompt = with_media(row, prompt) if prompt else []
    parts = [with_media(row, part) if _has_prompt(part) else part for part in parts]
    chosen, rejected = (_checked(part, key) for part, key in zip(parts, names, strict=True))
    if prompt_key is None:
        split = _without_prompt(chosen, rejected)
        if split is None:
            return None
        asked, chosen, rejected = split
        asked = _checked(after_system(row, list(asked)), "system")
    else:
        asked = _checked(prompt, prompt_key)
        asked, chosen, rejected = _without_repeated_prompt(asked, chosen, rejected)
    return LabeledComparison(_complete(Comparison(asked, chosen, rejected, tools)), "A")


def _checked(messages: list[Any], place: str) -> list[Message]:
    """Returns normalised messages; raises RendererError that starts with ``place``."""
    try:
        normal = checked_messages(messages)
    except RendererError as error:
        raise RendererError(f"{place}: {error}") from error
    for i, message in enumerate(normal):
        if message.get("trainable") is False and place in (*_SIDES, *_COMPLETIONS):
            raise RendererError(
                f"{place}: messages[{i}]: got trainable: false, but all assistant messages of an "
                "answer are trained; expected it in the prompt"
            )
    return normal


def _has_prompt(answer: list[Any]) -> bool:
    return bool(answer) and answer[0].get("role") in ("user", "system", "developer")


def _without_repeated_prompt(
    prompt: list[Message], chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """Returns the prompt and the answers without it: some rows repeat the prompt in both answers,
    often with a system message or the earlier turns, which the prompt lacks."""
    begins = [side[0]["role"] for side in (chosen, rejected) if side]
    if not {"user", "system", "developer"} & set(begins):
        return prompt, chosen, rejected
    split = _without_prompt(chosen, rejected)
    system = prompt[:1] if prompt and prompt[0]["role"] in ("system", "developer") else []
    if split is not None and _contains(split[0], prompt[len(system) :]):
        first = split[0][0]
        if first["role"] not in ("system", "developer"):
            return [*system, *split[0]], *split[1:]
        if not system or _same(first, system[0]):
            return split
    # Conversations that diverge only at a later question.
    size = len(prompt)
    if all(_contains(side[:size], prompt) for side in (chosen, rejected)):
        return prompt, chosen[size:], rejected[size:]
    raise RendererError(
        "chosen, rejected: got conversations that do not repeat the prompt before an answer; "
        "expected an assistant message first, or the same conversation before both answers"
    )


def _contains(messages: list[Message], part: list[Message]) -> bool:
    """Returns whether ``part`` stands somewhere in the messages."""
    size = len(part)
    return any(
        all(map(_same, messages[start : start + size], part))
        for start in range(len(messages) - size + 1)
    )


def _same(one: Message, other: Message) -> bool:
    """Returns whether two messages are the same up to white space at their ends."""
    texts = get_text_content(one).strip(), get_text_content(other).strip()
    calls = one.get("tool_calls"), other.get("tool_calls")
    return one["role"] == other["role"] and texts[0] == texts[1] and calls[0] == calls[1]


def _without_prompt(
    chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]] | None:
    """Splits two conversations into their common first messages, which are the prompt, and two
    answers; None if they do not diverge at an answer."""
    shortest = min(len(chosen), len(rejected))
    common = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    # Split off the last message as the answer, so that equal answers are counted.
    if chosen == rejected:
        common -= 1
    tails = (chosen[common:], rejected[common:])
    if common < 1 or not all(
        tail and tail[0]["role"] == "assistant" == tail[-1]["role"] for tail in tails
    ):
        return None
    return chosen[:common], *tails


def parse_turns(text: str, place: str = "text") -> list[Message]:
    """Parses a dialogue of ``Human:`` and ``Assistant:``; joins consecutive turns of a speaker."""
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


def _complete(comparison: Comparison) -> Comparison:
    if not comparison.prompt_conversation:
        raise DataFormatError("the prompt: got no message, expected at least one")
    answers = {"chosen (A)": comparison.completion_A, "rejected (B)": comparison.completion_B}
    for name, completion in answers.items():
        if not completion or completion[-1]["role"] != "assistant":
            got = f"one of role {completion[-1]['role']!r}" if completion else "no message"
            raise DataFormatError(f"{name}: got {got} at its end, expected an assistant message")
        if completion[0]["role"] not in ("assistant", "tool"):
            raise DataFormatError(
                f"{name}: got a message of role {completion[0]['role']!r} at its beginning, "
                "expected an answer to the prompt"
            )
    return comparison
