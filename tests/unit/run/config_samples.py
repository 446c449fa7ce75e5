"""Config classes for the round-trip tests: importable by name, as a recipe's would be."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chz


class Shape(enum.StrEnum):
    LAST = "last_assistant_message"
    ALL = "all_assistant_messages"


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


def double(x: int) -> int:
    return 2 * x


class Tools:
    @classmethod
    def make(cls) -> Tools:
        return cls()


@chz.chz
class Builder:
    batch_size: int = 4


@chz.chz
class FileBuilder(Builder):
    file_path: str = "a.jsonl"
    shape: Shape | None = None


@chz.chz
class HubBuilder(Builder):
    file_path: str = "a.jsonl"
    shape: Shape | None = None


@dataclasses.dataclass(frozen=True)
class Retry:
    times: int = 3
    levels: tuple[Level, ...] = ()


@chz.chz
class Run:
    learning_rate: float = 1e-4
    log_path: str = chz.field(default="~/x", munger=lambda _, s: str(Path(s).expanduser()))
    dataset_builder: Builder
    evaluators: list[Builder] = chz.field(default_factory=list)
    nested: list[list[Builder | None]] = chz.field(default_factory=list)
    by_name: dict[str, Any] = chz.field(default_factory=dict)
    renderer_name: str | None = None
    level: Level = Level.LOW
    map_fn: Callable[..., Any] | None = None
    retry: Retry | None = None
    out_dir: Path | None = None
    odd: Any = None
