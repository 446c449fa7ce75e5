"""Spans and trees of a run, which are files that the official cookbook writes too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tinker_cookbook.run.paths import SPANS_FILE
from tinker_cookbook.view.guard import attempt

_STEP = re.compile(rb'\{"step": ?(\d+),')
_TREE = "_logtree.json"
_MAX_BYTES = 4_000_000
"""Of more spans or trees a report has the last ones."""


def has_files(path: Path) -> list[str]:
    """Returns which of ``timing`` and ``tree`` a run has."""
    has = {
        "timing": (path / SPANS_FILE).is_file(),
        "tree": next(path.glob(f"iteration_*/*{_TREE}"), None) is not None,
    }
    return [name for name, found in has.items() if found]


def timing(path: Path, step: int | None = None, every: bool = False) -> dict[str, Any]:
    """Returns the steps with spans, and the spans of ``step`` (default: the last) or of ``every``
    one that a report can hold, in seconds from the first one's start."""
    lines: dict[int, bytes] = {}
    with (path / SPANS_FILE).open("rb") as file:
        for line in file:
            # A resumed run writes a step again; a line that a crash cut off has no end.
            if (found := _STEP.match(line)) and line.endswith(b"\n"):
                lines[int(found[1])] = line
    steps = sorted(lines)
    if every:
        steps = _last({one: len(lines[one]) for one in steps})
    wanted = steps if every else [step if step in lines else steps[-1]] if steps else []
    return {
        "steps": steps,
        # A line of another program has no spans.
        "spans": {
            one: attempt("", lambda one=one: spans_of(json.loads(lines[one])["spans"]), [], [])
            for one in wanted
        },
    }


def spans_of(spans: list[dict[str, Any]]) -> list[list[Any]]:
    """Returns the name, start and end of spans, by start."""
    shown = [[one["name"], round(one["wall_start"], 4), round(one["wall_end"], 4)] for one in spans]
    return sorted(shown, key=lambda span: span[1])


def tree(path: Path, file: str | None = None, every: bool = False) -> dict[str, Any]:
    """Returns the names of the trees (``iteration_000002/train``), and the tree of ``file``
    (default: the last of training) or of ``every`` one that a report can hold."""
    found = sorted(path.glob(f"iteration_*/*{_TREE}"))
    files = {str(one.relative_to(path)).removesuffix(_TREE): one for one in found}
    if every:
        sizes = {name: one.stat().st_size for name, one in files.items()}
        files = {str(name): files[name] for name in _last(sizes)}
    last = max(files, key=lambda name: (name.endswith("/train"), name), default=None)
    wanted = list(files) if every else [one for one in [file or last] if one in files]
    return {
        "files": list(files),
        "trees": {name: _tree(files[name]) for name in wanted},
    }


def _tree(file: Path) -> dict[str, Any]:
    problems: list[str] = []
    read = attempt(file.name, lambda: json.loads(file.read_text("utf-8")), None, problems)
    root = read.get("root") if isinstance(read, dict) else None
    if isinstance(root, dict) and isinstance(root.get("children"), list):
        return {"root": root}
    return {"root": {"children": problems or [f"{file.name}: is no tree of logtree"]}}


def _last(sizes: dict[Any, int]) -> list[Any]:
    """Returns the last keys whose sizes are at most ``_MAX_BYTES`` together, in order."""
    kept, total = list[Any](), 0
    for key, size in reversed(sizes.items()):
        total += size
        if total > _MAX_BYTES:
            break
        kept.insert(0, key)
    return kept
