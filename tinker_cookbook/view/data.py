"""What the page shows, read from the files of the runs; nothing is written.

Each function returns a JSON object. The server answers with it, and a report has all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.record.read import Record
from tinker_cookbook.record.vocabulary import token_texts
from tinker_cookbook.run.best import METRICS, lower_is_better
from tinker_cookbook.run.jsonl import Row
from tinker_cookbook.run.scan import RunFolder, find_run_folders, read_run_folder
from tinker_cookbook.view.causes import add_evidence, find_causes
from tinker_cookbook.view.files import has_files

if TYPE_CHECKING:
    import pyarrow as pa

_EPISODE = [
    "group", "member", "turn", "weights_step", "answer", "datum",
    "episode_reward", "episode_advantage", "episode_stop_reason", "tags", "problem",
]  # fmt: skip


@dataclass
class Runs:
    """The runs at and below ``folder``."""

    folder: Path
    _read: dict[Path, tuple[float, RunFolder]] = field(default_factory=dict)

    @cached_property
    def root(self) -> Path:
        """The folder, resolved; raises ``ConfigurationError`` if there is none."""
        path = self.folder.expanduser().resolve()
        if not path.is_dir():
            raise ConfigurationError(f"folder: got {str(self.folder)!r}, there is no such folder")
        return path

    def list(self) -> dict[str, Any]:
        """Returns a row for each run, the one that changed last first."""
        runs = [self._run(path) for path in find_run_folders([self.root])]
        runs.sort(key=lambda run: -run.updated)
        return {"folder": str(self.root), "runs": [self._row(run) for run in runs]}

    def run(self, name: str) -> dict[str, Any]:
        """Returns the settings, the metrics by name, and the steps with a record of a run."""
        run = self._run(self.path_of(name))
        return self._row(run) | {
            "config": flat(run.config),
            "metrics": metrics_of(run.rows),
            "record": {str(step): splits for step, splits in Record(run.path).steps().items()},
            "causes": self._causes(run),
            "has": has_files(run.path),
            "error": run.error,
            "problem": run.problem,
        }

    @staticmethod
    def _causes(run: RunFolder) -> list[dict[str, Any]]:
        causes, record = find_causes(run.rows, run.config), Record(run.path)
        for cause in causes:
            add_evidence(cause, record)
        return [vars(cause) for cause in causes]

    def path_of(self, name: str) -> Path:
        """Returns the folder of a run of the list; raises ``KeyError`` for another name."""
        path = (self.root / name).resolve()
        if not path.is_relative_to(self.root) or not path.is_dir():
            raise KeyError(name)
        return path

    def _run(self, path: Path) -> RunFolder:
        # Read again only if a file changed: a page asks every few seconds.
        probe = RunFolder(path)
        updated = probe.updated
        known = self._read.get(path)
        if known is None or known[0] != updated or known[1].holder is not None:
            self._read[path] = known = (updated, read_run_folder(path))
        return known[1]

    def _row(self, run: RunFolder) -> dict[str, Any]:
        config = run.config
        metric = config.get("best_metric") or next((m for m in METRICS if run.values(m)), None)
        values = run.values(metric) if metric else {}
        best = None
        if values:
            best = (min if lower_is_better(str(metric)) else max)(values.values())
        return {
            "name": str(run.path.relative_to(self.root)),
            "title": run.path.name,
            "path": str(run.path),
            "recipe": run.recipe,
            "state": run.state,
            "step": run.step,
            "model": config.get("model_name"),
            "metric": metric,
            "best": best,
            "last": list(values.values())[-1] if values else None,
            "updated": run.updated,
        }


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns nested settings as keys of the command line."""
    if not isinstance(value, dict):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flat(item, f"{prefix}.{key}" if prefix else key)
    return found


def metrics_of(rows: Iterable[Row]) -> dict[str, dict[str, list[float]]]:
    """Returns the steps and values of each metric that is a finite number in some row."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        step = row.get("step")
        if type(step) is not int:
            continue
        for name, value in row.items():
            if name != "step" and type(value) in (int, float) and math.isfinite(value):
                series = found.setdefault(name, {"steps": [], "values": []})
                series["steps"].append(step)
                series["values"].append(float(f"{value:.6g}"))
    return found


def episodes(path: Path, step: int, split: str) -> dict[str, Any]:
    """Returns a row for each episode of a step, without its tokens."""
    table = Record(path).table(step, split)
    if table is None:
        return {"episodes": []}
    if "targets" in table.column_names:
        return examples(path, table)
    table = table.select(_EPISODE)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in table.to_pylist():
        key = row["group"], row["member"]
        one = found.setdefault(
            key,
            {
                "group": row["group"],
                "member": row["member"],
                "reward": row["episode_reward"],
                "advantage": row["episode_advantage"],
                "stop": row["episode_stop_reason"],
                "weights": row["weights_step"],
                "tags": json.loads(row["tags"] or "[]"),
                "turns": 0,
                "tokens": 0,
                "trained": False,
                "problem": row["problem"],
            },
        )
        if row["turn"] is None:
            continue
        one["turns"] += 1
        one["tokens"] += len(row["answer"])
        one["trained"] |= row["datum"] is not None
        one["last_answer"] = row["answer"]
    tokens = {token for one in found.values() for token in one.get("last_answer") or ()}
    texts = token_texts(path, tokens)
    for one in found.values():
        one["text"] = text_of(one.pop("last_answer", None) or (), texts)
    return {"episodes": list(found.values())}


def examples(path: Path, table: pa.Table) -> dict[str, Any]:
    """Returns the examples of a step, token by token, and the texts of the tokens."""
    found, tokens = [], set()
    for row in table.to_pylist():
        width = row["targets_per_token"] or 1
        # Position i predicts the token after it, so the last target completes the tokens.
        ids = [*row["tokens"], *(row["targets"][-width:][:1] if row["targets"] else [])]
        tokens.update(ids)
        one = {"datum": row["datum"], "tokens": ids}
        if width == 1:
            one |= {name: rounded(row[name]) for name in ("weights", "logprobs")}
        found.append(one)
    return {"examples": found, "tokens": token_texts(path, tokens)}


def groups(path: Path, step: int, split: str, only: int | None = None) -> dict[int, Any]:
    """Returns the episodes of each group, token by token, and the texts of its tokens."""
    table = Record(path).table(step, split)
    if table is None:
        return {}
    if only is not None:
        table = _where(table, "group", only)
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for row in table.to_pylist():
        one = found.setdefault(row["group"], {}).setdefault(
            row["member"],
            {
                "member": row["member"],
                "reward": row["episode_reward"],
                "group_reward": row["episode_group_reward"],
                "advantage": row["episode_advantage"],
                "stop": row["episode_stop_reason"],
                "weights": row["weights_step"],
                "metrics": json.loads(row["episode_metrics"] or "{}"),
                "logs": json.loads(row["episode_logs"] or "{}"),
                "turns": [],
            },
        )
        if row["turn"] is None:
            continue
        one["turns"].append(
            {
                "prompt": row["prompt"],
                "kept": row["prompt_kept"],
                "images": row["images"],
                "answer": row["answer"],
                "logprobs": rounded(row["logprobs"]),
                "trainer": rounded(row["trainer_logprobs"]),
                "advantages": rounded(row["advantages"]),
                "masked": row["masked"],
                "datum": row["datum"],
                "reward": row["reward"],
                "stop": row["stop_reason"],
                "seed": row["seed"],
                "sample": row["sample"],
                "metrics": json.loads(row["metrics"] or "{}"),
                "logs": json.loads(row["logs"] or "{}"),
            }
        )
    used = {number: _tokens_of(members.values()) for number, members in found.items()}
    texts = token_texts(path, set().union(*used.values()))
    return {
        number: {
            "members": list(members.values()),
            "tokens": {token: texts[token] for token in used[number] if token in texts},
        }
        for number, members in found.items()
    }


def _tokens_of(members: Iterable[Mapping[str, Any]]) -> set[int]:
    return {
        token
        for one in members
        for turn in one["turns"]
        for token in (*turn["prompt"], *turn["answer"])
    }


def problem(path: Path, key: str) -> dict[str, Any]:
    """Returns the rewards of a problem at each step that has it, with an answer."""
    record, rows, prompt = Record(path), [], []
    columns = ["group", "member", "turn", "episode_reward", "problem", "prompt", "answer"]
    for step, splits in record.steps().items():
        for split in splits:
            table = record.table(step, split, columns)
            if table is None:
                continue
            found = _where(table, "problem", key).to_pylist()
            first = [row for row in found if row["turn"] == 0]
            for number in sorted({row["group"] for row in first}):
                members = [row for row in first if row["group"] == number]
                prompt = members[0]["prompt"]
                rows.append(
                    {
                        "step": step,
                        "split": split,
                        "group": number,
                        "rewards": [row["episode_reward"] for row in members],
                        "answer": members[0]["answer"],
                    }
                )
    tokens = {token for row in rows for token in row["answer"]} | set(prompt)
    return {"rows": rows, "prompt": prompt, "tokens": token_texts(path, tokens)}


def _where(table: pa.Table, column: str, value: Any) -> pa.Table:
    import pyarrow as pa

    return table.filter(pa.array(np.asarray(table[column].to_pylist(), object) == value))


def rounded(values: list[float] | None) -> list[float] | None:
    """Returns the values with the digits that a page can show."""
    return None if values is None else np.round(values, 4).tolist()


def text_of(tokens: Iterable[int], texts: Mapping[int, str | list[int]], limit: int = 200) -> str:
    """Returns the text of tokens, cut off after ``limit`` characters."""
    content = b""
    for token in tokens:
        piece = texts.get(token, f"[{token}]")
        content += piece.encode() if isinstance(piece, str) else bytes(piece)
    text = content.decode("utf-8", "replace")
    return text if len(text) <= limit else text[:limit] + "…"
