"""Evaluations and sweeps of a folder: the numbers of ``tinker_cookbook.eval`` and of the sweep.

Each function returns a JSON object.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tinker_cookbook.eval.compare import compare
from tinker_cookbook.eval.report import comparison_lines
from tinker_cookbook.eval.run.answers import (
    KEYS,
    METADATA,
    SETTINGS,
    TRAJECTORIES,
    load_result,
    load_trajectories,
    read_json,
    summarize,
    tasks_of,
)
from tinker_cookbook.record.schema import FOLDER
from tinker_cookbook.run.best import lower_is_better
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.run.scan import walk_folders
from tinker_cookbook.sweep.arguments import Point
from tinker_cookbook.sweep.results import best_of, collect, metric_note
from tinker_cookbook.sweep.runs import RECORDS, SweepRun
from tinker_cookbook.view.episodes import number
from tinker_cookbook.view.guard import attempt, reason


def find_folders(root: Path) -> tuple[list[Path], list[Path]]:
    """Returns the sweeps and the evaluations at and below ``root``."""
    sweeps, found = [], []
    for folder, names in walk_folders(root):
        if (folder / RECORDS).is_dir():
            sweeps.append(folder)
        if any((folder / name / TRAJECTORIES).is_file() for name in names):
            found.append(folder)
    return sweeps, found


def evaluation(folder: Path) -> dict[str, Any]:
    """Returns the model and, for each task, the score with its 95% interval and counts."""
    tasks, problem = {}, None
    metadata: dict[str, Any] = {}
    try:
        metadata = read_json(folder / METADATA) or {}
        # The checkpoint; the key of the answers has the folder of the base model.
        path = (read_json(folder / SETTINGS) or {}).get("model_path")
        metadata = {"checkpoint_path": path, **metadata}
        for name in tasks_of(str(folder)):
            # An evaluation that still runs has answers and no result.
            result = load_result(str(folder), name)
            done = result is not None
            result = result or summarize(name, load_trajectories(str(folder), name))
            described = read_rows(folder / name / KEYS)[-1:]
            metadata = {**(described[0] if described else {}), **metadata}
            recorded = (folder / name / FOLDER).is_dir()
            tasks[name] = result.to_dict() | {"done": done, "recorded": recorded}
    except Exception as error:  # of another program
        problem = reason(error)
    files = [*folder.glob(f"*/{TRAJECTORIES}")]
    return {
        "title": folder.name,
        # The description of a key has the model's path and digests of its files.
        "model": str(metadata.get("checkpoint_path") or metadata.get("model") or "").split(" ")[0],
        "tasks": tasks,
        "problem": problem,
        "updated": max((path.stat().st_mtime for path in files), default=0.0),
    }


def answers(task: Path) -> dict[str, Any]:
    """Returns the answers to a task, whose folder is in that of its evaluation."""
    return {
        "answers": [
            {
                "id": row.example_id or str(row.idx),
                "group": row.idx,
                "sample": row.sample,
                "reward": row.reward,
                "error": row.error,
                "truncated": row.truncated,
                "messages": [{"role": turn.role, "content": turn.content} for turn in row.turns],
                "logs": row.logs,
            }
            for row in load_trajectories(str(task.parent), task.name)
        ]
    }


def verdicts(a: Path, b: Path) -> dict[str, Any]:
    """Returns the paired comparison of each task that two evaluations share."""
    try:
        found = compare(str(a), str(b))
    except Exception as error:  # of another program
        return {"tasks": {}, "problem": reason(error)}
    return {
        "tasks": {
            name: asdict(one) | {"lines": comparison_lines(name, one)}
            for name, one in found.items()
        }
    }


def sweep(folder: Path) -> dict[str, Any]:
    """Returns the table of a sweep, as ``results.jsonl`` has it at the end, also while it runs."""
    problems: list[str] = []
    empty: dict[str, Any] = {"rows": [], "swept": []}
    found = attempt(folder.name, lambda: _sweep(folder, problems), empty, problems)
    return found | {"problem": "; ".join(problems)} if problems else found


def _sweep(folder: Path, problems: list[str]) -> dict[str, Any]:
    read = {
        path.stem: attempt(path.name, lambda path=path: _sweep_record(path), None, problems)
        for path in sorted((folder / RECORDS).iterdir())
    }
    records = {name: record for name, record in read.items() if record is not None}
    settings = [one["settings"] for one in records.values()]
    keys = dict.fromkeys(key for one in settings for key in one)
    swept = [key for key in keys if len({one.get(key) for one in settings}) > 1]
    runs = []
    for name, record in records.items():
        values = record["settings"]
        point = Point(name, values, {key: values[key] for key in swept if key in values})
        runs.append(SweepRun(point, record["recipe"], values, folder / name))
        runs[-1].load()
    before = read_rows(folder / "results.jsonl")
    rows = collect(runs, before[0]["metric"] if before else None)
    metric = next((row["metric"] for row in rows), None) or ""
    best = best_of(rows)
    return {
        "rows": [row | {"value": number(row["value"])} for row in rows],
        "swept": swept,
        "metric": metric,
        "lower_is_better": lower_is_better(metric),
        "best": best and best["run"],
        "note": metric and metric_note(metric),
    }


def _sweep_record(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_bytes())
    return {name: record[name] for name in ("recipe", "settings", "done", "seconds")}
