"""The page and the data of all runs of a folder in one HTML file."""

from __future__ import annotations

import base64
import gzip
import logging
from collections.abc import Iterator
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.record.read import Record
from tinker_cookbook.record.write import record_file
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.view import data, episodes, evaluations, files
from tinker_cookbook.view.guard import as_json, attempt
from tinker_cookbook.view.page import page_html

logger = logging.getLogger(__name__)

FILE = "report.html"
MAX_RECORD_BYTES = 4_000_000
"""Size of the record's files of a run whose episodes go into a report."""
MAX_IMAGE_BYTES = 4_000_000
_COMPARED = 5
"""Evaluations of which each pair is compared in a report."""


def write_report(folder: Path, out: Path) -> Path:
    """Writes ``out`` and returns it; raises ``ConfigurationError`` if it cannot be written."""
    runs = data.Runs(folder)
    listed = runs.list()
    parts, problems = [_element("runs", {}, listed)], list[str]()
    for row in listed["runs"]:
        parts += attempt(
            row["name"], lambda name=row["name"]: _run_elements(runs, name), [], problems
        )
    for name in listed["sweeps"]:
        parts.append(_element("sweep", {"name": name}, evaluations.sweep(runs.path_of(name))))
    parts += _evaluation_elements(runs, listed["evaluations"], problems)
    for one in problems:
        logger.warning("not in the report: %s", one)
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


def _run_elements(runs: data.Runs, name: str) -> list[str]:
    path, run, problems = runs.path_of(name), runs.run(name), list[str]()
    wanted = {one["step"] for c in run["causes"] for one in c["evidence"]}
    steps = attempt("record", lambda: _steps_that_fit(path, wanted), {}, problems)
    if len(steps) < len(run["record"]):
        run["left_out"] = (
            f"This file has the episodes of {len(steps)} of {len(run['record'])} steps. "
            f"All are in the run: python -m tinker_cookbook.view {path}"
        )
    run["record"] = {str(step): splits for step, splits in steps.items()}
    parts = list[str]()
    for kind in run["has"]:
        content = attempt(
            kind, lambda kind=kind: getattr(files, kind)(path, every=True), {}, problems
        )
        parts.append(_element(kind, {"name": name}, content))
    asked, images_left = episodes.Problems(path), MAX_IMAGE_BYTES

    def add(place: dict[str, Any]) -> None:
        nonlocal images_left
        step, split = place["step"], place["split"]
        rows = episodes.read(path, step, split)
        if rows and "group" not in rows[0]:
            parts.append(_element("episodes", place, episodes.examples(path, rows)))
            return
        found = episodes.groups(path, rows, with_images=images_left > 0)
        images_left -= sum(len(p) for one in found.values() for p in one["pictures"].values())
        listed = _element("episodes", place, episodes.listing(path, rows))
        parts.extend((listed, _element("group", place, found)))
        asked.add(step, split, rows)

    for step, splits in steps.items():
        for split in splits:
            place, before = {"name": name, "step": step, "split": split}, len(problems)
            attempt(f"step {step}, {split}", lambda place=place: add(place), None, problems)
            if len(problems) > before:
                content = {"episodes": [], "problem": problems[-1]}
                parts.append(_element("episodes", place, content))
    parts.append(_element("problem", {"name": name}, asked.result()))
    run["problem"] = "; ".join(filter(None, (run["problem"], *problems))) or None
    return [_element("run", {"name": name}, run), *parts]


def _steps_that_fit(path: Path, wanted: set[int]) -> dict[int, list[str]]:
    """Returns all steps of a record; of a large one those ``wanted``, and others at intervals."""
    steps = Record(path).steps()
    sizes = {
        step: sum(record_file(path, step, split).stat().st_size for split in splits)
        for step, splits in steps.items()
    }
    every, kept = 1, set(steps)
    while sum(sizes[step] for step in kept) > MAX_RECORD_BYTES and every < len(steps):
        every *= 2
        # Counted from the end, because the last step is the one that people look at first.
        kept = {*[*steps][::-every], *wanted} & steps.keys()
    return {step: splits for step, splits in steps.items() if step in kept}


def _evaluation_elements(
    runs: data.Runs, listed: list[dict[str, Any]], problems: list[str]
) -> Iterator[str]:
    for one in listed:
        for task, result in one["tasks"].items():
            place = f"{one['name']}/{task}"
            if result["recorded"]:
                yield from attempt(
                    place, lambda name=place: _run_elements(runs, name), [], problems
                )
            content = attempt(
                place, lambda name=place: evaluations.answers(runs.path_of(name)), {}, problems
            )
            yield _element("answers", {"name": one["name"], "task": task}, content)
    for a, b in combinations([one["name"] for one in listed[:_COMPARED]], 2):
        for first, second in ((a, b), (b, a)):
            content = evaluations.verdicts(runs.path_of(first), runs.path_of(second))
            yield _element("verdicts", {"a": first, "b": second}, content)


def _element(path: str, parameters: dict[str, Any], content: Any) -> str:
    """Returns an element with the answer to a request, compressed: the page reads it on demand."""
    packed = gzip.compress(as_json(content).encode(), 6, mtime=0)
    # Base64 and the percent signs of an address have no character that ends an element.
    address = escape(f"{path}?{urlencode(parameters, errors='replace')}")
    return f'<script type="x" data-path="{address}">{base64.b64encode(packed).decode()}</script>\n'
