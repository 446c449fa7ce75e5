"""Batches that both variants train on: token ids and which of them are trained."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError

_RANDOM = re.compile(r"random:(\d+)-(\d+)")


@dataclass(frozen=True)
class Conversation:
    """``tokens`` [T] int64 and ``trained`` [T] bool; the first token is never trained."""

    tokens: np.ndarray
    trained: np.ndarray


@dataclass(frozen=True)
class Conversations:
    """What was read, and a word on anything that was left out or treated specially."""

    rows: list[Conversation]
    notes: list[str]


def is_random(data: str) -> bool:
    """Returns whether a data setting means random tokens; checks its spelling."""
    if not data.startswith("random"):
        return False
    match = _RANDOM.fullmatch(data)
    if match is None or not 2 <= int(match[1]) <= int(match[2]):
        raise ConfigurationError(
            f"data: got {data!r}, expected random:MIN-MAX with 2 <= MIN <= MAX, for example "
            "random:40-400, or the path of a JSONL file"
        )
    return True


def random_conversations(data: str, count: int, vocab: int, seed: int) -> list[Conversation]:
    """``count`` rows of random ids; lengths are log-normal about the geometric mean of MIN and MAX.

    MIN and MAX lie two standard deviations out, where lengths are clipped. The last 30 to 70% of a
    row are trained.
    """
    match = _RANDOM.fullmatch(data)
    assert match is not None, "is_random was not called"
    low, high = math.log(int(match[1])), math.log(int(match[2]))
    rng = np.random.default_rng(seed)
    logs = rng.normal((low + high) / 2, (high - low) / 4, size=count).clip(low, high)
    rows = []
    for length in np.rint(np.exp(logs)).astype(int):
        trained = np.zeros(length, dtype=bool)
        trained[-max(1, round(length * rng.uniform(0.3, 0.7))) :] = True
        trained[0] = False
        rows.append(Conversation(rng.integers(0, vocab, size=length), trained))
    return rows


def cut(rows: Sequence[Conversation], max_length: int) -> Conversations:
    """Cuts rows after ``max_length`` tokens; drops those that have nothing to train on left."""
    shorter = [Conversation(r.tokens[:max_length], r.trained[:max_length]) for r in rows]
    kept = [row for row in shorter if row.trained.any()]
    notes = []
    if long := sum(len(row.tokens) > max_length for row in rows):
        notes.append(f"{long} conversations were cut to {max_length} tokens")
    if dropped := len(rows) - len(kept):
        notes.append(f"{dropped} conversations were dropped: no trained token in max_length")
    return Conversations(kept, notes)


def read_conversations(
    path: Path, tokenizer: Any, count: int, seed: int, max_length: int
) -> Conversations:
    """``count`` conversations of a JSONL file in seeded random order, through the chat template.

    Raises:
        DataFormatError: a row is no conversation; names file and line.
        ConfigurationError: no such file, no chat template, or fewer conversations than needed.
    """
    if not path.is_file():
        raise ConfigurationError(
            f"data: {path} is not a file; give the path of a JSONL file, or random:MIN-MAX"
        )
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigurationError(
            "data: the model's tokenizer has no chat template, which turns conversations into "
            "tokens; choose an instruct model or data=random:40-400"
        )
    lines = path.read_text(encoding="utf-8").splitlines()
    numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
    np.random.default_rng(seed).shuffle(numbers)
    rows, unprefixed, dropped = [], 0, 0
    for number in numbers:
        if len(rows) == count:
            break
        where = f"{path}, line {number}"
        row, prefixed = _tokenize(tokenizer, _messages(lines[number - 1], where), where)
        unprefixed += not prefixed
        short = cut([row], max_length).rows
        rows += short
        dropped += not short
    if len(rows) < count:
        raise ConfigurationError(
            f"data: {path} has {len(rows)} conversations with tokens to train on, but batch_size x "
            f"(warmup + steps) = {count} are needed; lower batch_size or steps, or give more data"
        )
    notes = [f"{dropped} conversations were dropped: nothing to train on"] if dropped else []
    if unprefixed:
        notes.append(
            f"of {unprefixed} conversations only the last answer is trained, because the chat "
            "template rewrites earlier ones"
        )
    return Conversations(rows, notes)


def _messages(line: str, where: str) -> list[dict[str, Any]]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataFormatError(f"{where}: is not JSON: {error}") from error
    if isinstance(row, dict) and {"question", "answer"} <= row.keys():
        return [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and "role" in message for message in messages
    ):
        raise DataFormatError(
            f"{where}: expected an object with 'messages' (a list of objects with 'role' and "
            "'content') or with 'question' and 'answer'"
        )
    if not any(message["role"] == "assistant" for message in messages):
        raise DataFormatError(f"{where}: no message has the role 'assistant', so none is trained")
    return messages


def _tokenize(
    tokenizer: Any, messages: list[dict[str, Any]], where: str
) -> tuple[Conversation, bool]:
    """Tokens and trained mask; False if the template renders earlier answers in another way."""

    def ids(part: list[dict[str, Any]], prompt: bool = False) -> list[int]:
        return tokenizer.apply_chat_template(
            part, tokenize=True, add_generation_prompt=prompt, return_dict=False
        )

    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    messages = messages[: last + 1]
    try:
        full = ids(messages)
        trained = np.zeros(len(full), dtype=bool)
        prefixed = True
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start, end = len(ids(messages[:index], prompt=True)), ids(messages[: index + 1])
            if full[: len(end)] == end:
                trained[start : len(end)] = True
            else:
                prefixed = False
    except Exception as error:  # a template may raise anything
        raise DataFormatError(f"{where}: the chat template refuses it: {error}") from error
    trained[:1] = False
    return Conversation(np.asarray(full, dtype=np.int64), trained), prefixed


def save(path: Path, rows: Sequence[Conversation]) -> None:
    """Writes rows for the worker processes."""
    np.savez(
        path,
        tokens=np.concatenate([row.tokens for row in rows]),
        trained=np.concatenate([row.trained for row in rows]),
        lengths=np.asarray([len(row.tokens) for row in rows]),
    )


def load(path: Path) -> list[Conversation]:
    """Reads what ``save`` wrote."""
    with np.load(path) as file:
        ends = np.cumsum(file["lengths"])[:-1]
        parts = zip(np.split(file["tokens"], ends), np.split(file["trained"], ends), strict=True)
        return [Conversation(tokens, trained) for tokens, trained in parts]
