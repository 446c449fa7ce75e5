"""Helpers of benchmarks: prompts, ids, extraction of answers."""

from __future__ import annotations

import hashlib
import json

from tinker_cookbook.eval.benchmarks._extraction import extract_python_code
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.grading.letters import extract_mcq_answer
from tinker_cookbook.grading.numbers import check_gsm8k, extract_gsm8k_answer, extract_number
from tinker_cookbook.grading.texts import extract_boxed, extract_final_answer
from tinker_cookbook.renderers import Message
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

__all__ = [
    "build_messages",
    "check_gsm8k",
    "extract_boxed",
    "extract_final_answer",
    "extract_gsm8k_answer",
    "extract_mcq_answer",
    "extract_number",
    "extract_python_code",
    "format_mcq_choices",
    "make_example_id",
    "parse_kwargs",
]


def build_messages(user_content: str, system_prompt: str | None = None) -> list[Message]:
    """Returns a user message, after a system message if there is a prompt."""
    system = [Message(role="system", content=system_prompt)] if system_prompt else []
    return [*system, Message(role="user", content=user_content)]


def make_example_id(prefix: str, seed_text: str) -> str:
    """Returns ``PREFIX_`` and 12 hexadecimal digits of the MD5 hash of ``seed_text``."""
    return f"{prefix}_{hashlib.md5(seed_text.encode(), usedforsecurity=False).hexdigest()[:12]}"


def format_mcq_choices(choices: list[str]) -> str:
    """Returns one line for each choice: ``(A) first``, ``(B) second``, …"""
    return "\n".join(f"({chr(ord('A') + i)}) {choice}" for i, choice in enumerate(choices))


def parse_kwargs(raw_kwargs: list, instruction_ids: list | None = None) -> list[dict]:
    """Returns the arguments of instructions as dictionaries without unset values.

    An entry may be a dictionary, JSON text or None. Missing entries are ``{}`` if there are more
    ``instruction_ids``.

    Raises:
        DataFormatError: an entry is not one of these.
    """
    parsed: list[dict] = []
    for entry in raw_kwargs:
        try:
            value = json.loads(entry) if isinstance(entry, str) else entry or {}
        except ValueError as error:
            raise DataFormatError(f"kwargs: got {entry!r}, expected JSON ({error})") from error
        if not isinstance(value, dict):
            raise DataFormatError(f"kwargs: got {entry!r}, expected an object of arguments")
        # The Hub's columns have every argument for every instruction, with None for unused ones.
        parsed.append({key: x for key, x in value.items() if x is not None})
    return parsed + [{} for _ in range(len(instruction_ids or ()) - len(parsed))]
