"""The page and the data of all runs of a folder in one HTML file."""

from __future__ import annotations

import base64
import gzip
import json
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.record.read import Record
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.view import data, files
from tinker_cookbook.view.page import page_html


def write_report(folder: Path, out: Path) -> Path:
    """Writes ``out`` and returns it; raises ``ConfigurationError`` if it cannot be written."""
    runs = data.Runs(folder)
    parts = [_element("runs", {}, listed := runs.list())]
    for row in listed["runs"]:
        name = row["name"]
        path = runs.path_of(name)
        parts.append(_element("run", {"name": name}, run := runs.run(name)))
        for kind in run["has"]:
            every = getattr(files, kind)(path, every=True)
            parts.append(_element(kind, {"name": name}, every))
        problems: set[str] = set()
        for step, splits in Record(path).steps().items():
            for split in splits:
                place = {"name": name, "step": step, "split": split}
                found = data.episodes(path, step, split)
                parts.append(_element("episodes", place, found))
                if "episodes" in found:
                    problems |= {one["problem"] for one in found["episodes"] if one["problem"]}
                    parts.append(_element("group", place, data.groups(path, step, split)))
        for key in problems:
            parts.append(
                _element("problem", {"name": name, "problem": key}, data.problem(path, key))
            )
    _write(out, page_html("".join(parts))[0])
    return out


def write_chart(step: int, spans: list[dict[str, Any]], out: Path) -> None:
    """Writes the timeline of one step as a page of its own.

    ``spans`` have ``name``, ``wall_start`` and ``wall_end`` in seconds.
    """
    run = {"name": "run", "title": f"Step {step}", "has": ["timing"]}
    shown = {"steps": [step], "spans": {step: files.spans_of(spans)}}
    parts = [_element("run", {"name": "run"}, run), _element("timing", {"name": "run"}, shown)]
    _write(out, page_html("".join(parts), "run=run&tab=timing&only=1")[0])


def _write(out: Path, html: str) -> None:
    try:
        write_atomically(out.resolve(), html.encode())
    except OSError as error:
        raise ConfigurationError(f"out: {out} cannot be written: {error.strerror}") from error


def _element(path: str, parameters: dict[str, Any], content: Any) -> str:
    """Returns an element with the answer to a request, compressed: the page reads it on demand."""
    packed = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)
    # Base64 and the percent signs of an address have no character that ends an element.
    address = escape(f"{path}?{urlencode(parameters)}")
    return f'<script type="x" data-path="{address}">{base64.b64encode(packed).decode()}</script>\n'
