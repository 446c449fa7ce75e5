"""Files of an evaluation: answers, stored one by one, and results.

``SAVE_DIR/BENCHMARK/trajectories.jsonl`` has one line per answer, appended when it is done.
``keys.jsonl`` has the key of each start and what it stands for: model, checkpoint and sampling
settings. Answers with other keys stay in the file; readers see answers of the latest start's key.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from tinker_cookbook.eval.benchmarks._summary import Aggregate, summarize
from tinker_cookbook.eval.benchmarks._types import BenchmarkResult, Logs, StoredTrajectory
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.run.jsonl import append_row, read_rows
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.utils.terminal import get_console

RESULT, TRAJECTORIES, KEYS, SUMMARY = (
    "result.json",
    "trajectories.jsonl",
    "keys.jsonl",
    "summary.json",
)

EVAL_ROOT = "/tmp/tinker-examples/eval"


def default_folder(model: str) -> Path:
    """Returns the output folder of ``tinker_cookbook.eval`` for a model's path or name."""
    # A run id does not begin with a dot, as "./model" would.
    name = re.sub(r"[^\w.-]+", "_", model.removeprefix("tinker://")).lstrip("._-")
    return Path(EVAL_ROOT) / "runs" / (name or "model")


def key_of(description: Mapping[str, Any]) -> str:
    """Returns a hash of ``description``, as 16 hexadecimal digits."""
    text = json.dumps(description, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class AnswerFile:
    """Stored answers of one benchmark under one key.

    Args:
        folder: ``SAVE_DIR/BENCHMARK``; ``None`` stores nothing.
        description: Content of the key.
    """

    def __init__(self, folder: Path | None, description: Mapping[str, Any]) -> None:
        self.folder, self.key = folder, key_of(description)
        self.rows: dict[tuple[str, int], StoredTrajectory] = {}
        """Example id and sample -> answer."""
        self._lock = threading.Lock()
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        append_row(folder / KEYS, {"key": self.key, "started": started, **description})
        self.rows = {(row.example_id, row.sample): row for row in _rows_of(folder, self.key)}

    def add(self, row: StoredTrajectory) -> None:
        """Stores an answer and replaces an earlier one; thread-safe."""
        row.key = self.key
        with self._lock:
            if self.folder is not None:
                append_row(self.folder / TRAJECTORIES, dict(row.to_dict()))
            self.rows[row.example_id, row.sample] = row

    def write_result(self, result: BenchmarkResult) -> None:
        """Writes ``result.json``."""
        if self.folder is not None:
            write_json(self.folder / RESULT, {**result.to_dict(), "key": self.key})


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; ``None`` if there is no file.

    Raises:
        DataFormatError: the file is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataFormatError(f"{path}: not JSON ({error})") from error


def latest_key(folder: Path) -> str | None:
    """Returns the key of the latest start; ``None`` for files without keys."""
    rows = read_rows(folder / KEYS)
    return str(rows[-1]["key"]) if rows else None


def load_result(save_dir: str, benchmark_name: str) -> BenchmarkResult | None:
    """Returns the result of a benchmark; ``None`` if its latest start has not finished."""
    folder = Path(save_dir) / benchmark_name
    found = read_json(folder / RESULT)
    # The result of an earlier start may belong to another checkpoint.
    if found is None or found.get("key") != latest_key(folder):
        return None
    return BenchmarkResult.from_dict({"name": benchmark_name, **found})


def load_trajectories(
    save_dir: str,
    benchmark_name: str,
    correct_only: bool = False,
    incorrect_only: bool = False,
    errors_only: bool = False,
) -> list[StoredTrajectory]:
    """Returns the answers of the latest key, in the order of problems and samples.

    ``incorrect_only`` selects answers that were graded and did not get the full reward.
    """
    folder = Path(save_dir) / benchmark_name
    rows = _rows_of(folder, latest_key(folder))
    if correct_only:
        rows = [row for row in rows if row.correct]
    if incorrect_only:
        rows = [row for row in rows if row.error is None and not row.correct]
    if errors_only:
        rows = [row for row in rows if row.error is not None]
    return rows


def load_summary(save_dir: str) -> dict[str, dict[str, Any]]:
    """Returns ``summary.json``: benchmark -> result; empty if there is none."""
    return read_json(Path(save_dir) / SUMMARY) or {}


def update_summary(save_dir: str, results: Mapping[str, BenchmarkResult]) -> None:
    """Adds results to ``summary.json``; keeps results of other benchmarks."""
    whole = load_summary(save_dir) | {name: dict(r.to_dict()) for name, r in results.items()}
    write_json(Path(save_dir) / SUMMARY, whole)


def print_trajectory(traj: StoredTrajectory) -> None:
    """Prints the conversation, the reward and the logs of an answer."""
    console = get_console()
    verdict = (
        "[red]error[/]" if traj.error else "[green]right[/]" if traj.correct else "[red]wrong[/]"
    )
    console.rule(
        f"{escape(traj.benchmark)} {traj.idx} ({escape(traj.example_id)}), sample {traj.sample}: "
        f"{verdict}, reward {traj.reward:g}"
    )
    for turn in traj.turns:
        role = str(turn.metadata.get("role", turn.role))
        tokens = f" ({turn.token_count} tokens)" if turn.token_count else ""
        console.print(f"[bold cyan]{escape(role)}{tokens}[/]")
        thinking = turn.metadata.get("thinking")
        if thinking:
            console.print(escape(f"<think>{thinking}</think>"), style="dim")
        console.print(escape(turn.content))
    details = {**traj.metrics, **traj.logs}
    for name, value in details.items():
        console.print(f"[bold]{escape(name)}[/]: {escape(str(value))}")
    if traj.error:
        console.print(f"[bold red]error[/]: {escape(traj.error)}")


def response_of(traj: StoredTrajectory) -> str:
    """Returns the last response, without thinking; ``""`` if there is none."""
    return next((t.content for t in reversed(traj.turns) if t.role == "assistant"), "")


def regrade_trajectories(
    save_dir: str,
    benchmark_name: str,
    grade_fn: Callable[[str, Logs], float],
    aggregate_fn: Aggregate | None = None,
) -> BenchmarkResult:
    """Grades the stored responses of the latest key again, without sampling.

    The next run of the benchmark uses its own grader again.

    ``grade_fn(response, logs)`` gets the response without thinking. Answers with failed sampling
    stay errors; if the grader raises, the answer becomes an error. Rows and ``result.json`` are
    written.
    """
    folder = Path(save_dir) / benchmark_name
    rows = _rows_of(folder, latest_key(folder))
    for row in rows:
        # Without a response, there is nothing to grade.
        if not any(turn.role == "assistant" for turn in row.turns):
            continue
        try:
            row.reward, row.error = float(grade_fn(response_of(row), row.logs)), None
        except Exception as error:
            row.reward, row.error = 0.0, f"grading: {type(error).__name__}: {error}"
        # The benchmark's next run must not count this as its own grade.
        row.grader = ""
        append_row(folder / TRAJECTORIES, dict(row.to_dict()))
    result = summarize(benchmark_name, rows, aggregate_fn)
    write_json(folder / RESULT, {**result.to_dict(), "key": latest_key(folder)})
    update_summary(save_dir, {benchmark_name: result})
    return result


def _rows_of(folder: Path, key: str | None) -> list[StoredTrajectory]:
    """Returns the rows of a key in order, with the latest row of each answer."""
    rows: dict[tuple[str, int], StoredTrajectory] = {}
    for number, row in enumerate(read_rows(folder / TRAJECTORIES)):
        if key is None or row.get("key") == key:
            traj = StoredTrajectory.from_dict(row)
            # Files of the official package may have no example id.
            rows[traj.example_id or f"#{number}", traj.sample] = traj
    return sorted(rows.values(), key=lambda row: (row.idx, row.sample))
