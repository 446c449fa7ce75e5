"""Prompts without answers: from the Hub by name, or from local files."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    DataValidationError,
    RendererError,
    nearest,
)
from tinker_cookbook.renderers import Message, Renderer, get_text_content, normalize_messages
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset
from tinker_cookbook.supervised.json_files import json_lines

logger = logging.getLogger(__name__)

HUB_PROMPTS: Mapping[str, str] = {
    "deepmath": "zwhe99/DeepMath-103K",
    "tulu3": "allenai/tulu-3-sft-mixture",
}
"""Names of prompt sets, and the Hub datasets whose ``train`` split they are."""

_FIELDS = ("prompt", "question", "problem")
_EXPECTED = '{"prompt": "…"}, or {"messages": [{"role": "user", "content": "…"}, …]}'
_SLACK_TOKENS = 8  # of a rendered prompt beyond its bytes, for spaces that tokenizers put in


def check_source(name: str) -> None:
    """Raises ``ConfigurationError`` for a name that is neither known nor that of a file."""
    if name not in HUB_PROMPTS and not Path(name).expanduser().is_file():
        raise ConfigurationError(
            f"dataset_name: got {name!r}, which is no file (searched from {Path.cwd()}); expected "
            f"{', '.join(HUB_PROMPTS)}, or a JSONL file of lines like {_EXPECTED}"
            f"{nearest(name, HUB_PROMPTS)}"
        )


def load_prompts(name: str, most: int | None = None, split: str = "train") -> list[list[Message]]:
    """The prompts of a known dataset or a JSONL file, each a conversation that ends with the user.

    Args:
        name: One of ``HUB_PROMPTS``, or a file (also ``.jsonl.gz``).
        most: Stop after so many.
        split: Of a Hub dataset; a file is read whole.

    Raises:
        DataFormatError: A line is no prompt; names file and line.
        DataError: There is no prompt, or the dataset cannot be loaded.
    """
    rows: Iterable[tuple[str, Any]]
    if name in HUB_PROMPTS:
        found = load_hf_dataset(
            HUB_PROMPTS[name],
            split,
            instead="Give prompts of your own with a JSONL file in the place of its name",
        )
        rows = ((f"{name}, row {i}", found[i]) for i in range(len(found)))
    else:
        rows = json_lines(Path(name).expanduser(), f"lines like {_EXPECTED}")
    prompts = [prompt_of(row, where) for where, row in itertools.islice(rows, most)]
    if not prompts:
        raise DataValidationError(f"{name}: got no prompt; expected lines like {_EXPECTED}")
    return prompts


def prompt_of(row: Any, where: str) -> list[Message]:
    """A row as a conversation whose last message is the user's; ``where`` names it in errors.

    Raises:
        DataFormatError: It is none.
    """
    if not isinstance(row, Mapping):
        raise DataFormatError(f"{where}: got {type(row).__name__}, expected {_EXPECTED}")
    if "messages" in row:
        return _of_conversation(row["messages"], where)
    text = next((row[name] for name in _FIELDS if name in row), None)
    if not isinstance(text, str) or not text.strip():
        raise DataFormatError(
            f"{where}: got {text!r} as prompt and the fields {', '.join(map(str, row)) or 'none'}; "
            f"expected {_EXPECTED}"
        )
    return [Message(role="user", content=text)]


def _of_conversation(given: Any, where: str) -> list[Message]:
    if not isinstance(given, list):
        raise DataFormatError(
            f"{where}: messages: got {given!r}, expected a list as in {_EXPECTED}"
        )
    try:
        messages = normalize_messages(given)
    except RendererError as error:
        raise DataFormatError(f"{where}: {error}") from error
    if any(isinstance(m["content"], list) and _has_media(m["content"]) for m in messages):
        raise DataFormatError(f"{where}: got images or audio, expected text as in {_EXPECTED}")
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users or not get_text_content(messages[users[-1]]).strip():
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise DataFormatError(
            f"{where}: got messages of roles {roles}, expected one of the user's with text, which "
            "the student is to answer"
        )
    return messages[: users[-1] + 1]


def _has_media(parts: Sequence[Mapping[str, Any]]) -> bool:
    return any(part["type"] not in ("text", "thinking") for part in parts)


def fitting(
    prompts: Sequence[list[Message]],
    renderer: Renderer,
    prefix: Sequence[Message],
    max_tokens: int | None,
    name: str,
) -> list[list[Message]]:
    """The prompts that have at most ``max_tokens`` when rendered; says how many were left out.

    ``None`` keeps all of them.

    A prompt that is cut in the middle asks for something else, so none is cut.

    Raises:
        DataValidationError: None of them fits.
    """
    if max_tokens is None or not prompts:
        return list(prompts)
    lengths = list(_lengths(prompts, renderer, prefix, max_tokens))
    kept = [prompt for prompt, n in zip(prompts, lengths, strict=True) if n <= max_tokens]
    if not kept:
        raise DataValidationError(
            f"max_prompt_tokens: got {max_tokens}, but the shortest of {len(prompts)} prompts in "
            f"{name} has {min(lengths)} tokens as the student sees it; raise it"
        )
    if len(kept) < len(prompts):
        logger.warning(
            "%s: %d of %d prompts have more than max_prompt_tokens=%d (the longest has %d) and are "
            "left out",
            name,
            len(prompts) - len(kept),
            len(prompts),
            max_tokens,
            max(lengths),
        )
    return kept


def _lengths(
    prompts: Sequence[list[Message]], renderer: Renderer, prefix: Sequence[Message], bound: int
) -> Iterator[int]:
    """The number of tokens of each prompt, where its number of bytes does not settle that it fits.

    A token is a byte at least, so most prompts of a large dataset need not be rendered.
    """
    around = renderer.build_generation_prompt([*prefix, Message(role="user", content="x")]).length
    for prompt in prompts:
        size = around + _SLACK_TOKENS + len(get_text_content(prompt[-1]).encode())
        if len(prompt) == 1 and size <= bound:
            yield 0
        else:
            yield renderer.build_generation_prompt([*prefix, *prompt]).length
