"""Reading files of user code; runs write theirs through ``utils.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, one a line; blank lines are skipped.

    Raises:
        OSError: The file cannot be read.
        json.JSONDecodeError: A line is no JSON. (``utils.jsonl.read_rows`` forgives a torn last
            line, as a run that was killed leaves it.)
    """
    with Path(path).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]
