"""Stored answers: the files of an evaluation, and the results computed from them.

``SAVE_DIR/BENCHMARK/trajectories.jsonl`` has one line per answer, appended when it is done.
``keys.jsonl`` has the key of each start and what it stands for: model, checkpoint and sampling
settings. Answers with other keys stay in the file; readers see answers of the latest start's key.
In ``ROOT/runs/ID``, the default folder, ``metadata.json`` has the model, the settings and the
scores, and ``ROOT/runs.jsonl`` a line of each ID.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from rich.markup import escape

from tinker_cookbook.cli_utils import default_log_path
from tinker_cookbook.eval.run.types import BenchmarkResult, Logs, Metrics, StoredTrajectory
from tinker_cookbook.eval.statistics import (
    majority_at_k,
    mean_pass_at_k,
    score_interval,
)
from tinker_cookbook.exceptions import DataError, DataFormatError
from tinker_cookbook.run.jsonl import append_row, read_rows
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.utils.terminal import get_console

RESULT, TRAJECTORIES, KEYS = "result.json", "trajectories.jsonl", "keys.jsonl"
SUMMARY, METADATA, RUNS = "summary.json", "metadata.json", "runs.jsonl"
SETTINGS = "settings.json"
"""Settings of the evaluation command without the API key, for ``config=``."""

ANSWER_LOG = "extracted"
"""Key of the log with a response's final answer: its vote in maj@k."""

ACC_NORM = "acc_norm"
"""Metric of an answer: whether the choice with the highest log-probability per byte is right."""

Aggregate: TypeAlias = Callable[[list[float], list[Metrics]], BenchmarkResult]

EVAL_ROOT = default_log_path("eval")


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


def tasks_of(folder: str) -> list[str]:
    """Returns the tasks with answers in an evaluation's folder; raises DataError without any."""
    found = sorted(path.parent.name for path in Path(folder).expanduser().glob(f"*/{TRAJECTORIES}"))
    if not found:
        raise DataError(
            f"{folder}: has no TASK/{TRAJECTORIES}; expected the out= folder of an evaluation"
        )
    return found


def load_summary(save_dir: str) -> dict[str, dict[str, Any]]:
    """Returns ``summary.json``: benchmark -> result; empty if there is none."""
    return read_json(Path(save_dir) / SUMMARY) or {}


def update_summary(save_dir: str, results: Mapping[str, BenchmarkResult]) -> None:
    """Adds results to ``summary.json``; keeps results of other benchmarks."""
    whole = load_summary(save_dir) | {name: dict(r.to_dict()) for name, r in results.items()}
    write_json(Path(save_dir) / SUMMARY, whole)


def record_run(
    folder: Path,
    model_name: str,
    benchmarks: Sequence[str],
    checkpoint_path: str | None = None,
    checkpoint_name: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Writes the metadata of a run in ``ROOT/runs/ID`` that starts or continues.

    The metadata has the benchmarks of both; a new run is added to ``runs.jsonl``.
    """
    before = read_json(folder / METADATA)
    metadata = {
        "run_id": folder.name,
        "model_name": model_name,
        "checkpoint_path": checkpoint_path,
        "checkpoint_name": checkpoint_name,
        "benchmarks": list(dict.fromkeys([*(before or {}).get("benchmarks", ()), *benchmarks])),
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": dict(config or {}),
        "scores": {},
    }
    write_json(folder / METADATA, metadata)
    if before is None:
        names = ("run_id", "model_name", "timestamp")
        append_row(folder.parent.parent / RUNS, {name: metadata[name] for name in names})


def finished_benchmarks(folder: Path) -> list[str]:
    """Returns the benchmarks with a result in a run's folder, sorted."""
    return sorted(path.parent.name for path in folder.glob(f"*/{RESULT}"))


def record_scores(folder: Path) -> dict[str, Any]:
    """Adds the scores of the benchmarks that have finished to a run's metadata; returns these."""
    found = {name: load_result(str(folder), name) for name in finished_benchmarks(folder)}
    scores = {name: result.score for name, result in found.items() if result}
    metadata = {**read_json(folder / METADATA), "scores": scores}
    write_json(folder / METADATA, metadata)
    return metadata


def print_trajectory(traj: StoredTrajectory) -> None:
    """Prints the conversation, the reward and the logs of an answer."""
    console = get_console()
    graded = "right" if traj.correct else "partly right" if traj.reward > 0 else "wrong"
    verdict = "error" if traj.error else graded
    colour = {"right": "green", "partly right": "yellow"}.get(verdict, "red")
    console.rule(
        f"{escape(traj.benchmark)} {traj.idx} ({escape(traj.example_id)}), sample {traj.sample}: "
        f"[{colour}]{verdict}[/], reward {traj.reward:g}"
    )
    for turn in traj.turns:
        role = str(turn.metadata.get("role", turn.role))
        tokens = f" ({turn.token_count} tokens)" if turn.token_count else ""
        console.print(f"[bold cyan]{escape(role)}{tokens}[/]")
        if thinking := turn.metadata.get("thinking"):
            console.print(escape(f"<think>{thinking}</think>"), style="dim")
        console.print(escape(turn.content))
    for name, value in {**traj.metrics, **traj.logs}.items():
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


def summarize(
    name: str,
    rows: Sequence[StoredTrajectory],
    aggregate: Aggregate | None = None,
    time_seconds: float = 0.0,
) -> BenchmarkResult:
    """Returns the result of answers; ``aggregate`` gets rewards and metrics of graded answers.

    Metrics: ``ci_low`` and ``ci_high``, unless ``aggregate`` computes a score other than the mean
    reward; ``score_completed``; with several answers to a problem ``num_problems``, ``maj@K``,
    ``mixed_share`` (problems with different rewards), ``never_solved`` and ``always_solved`` (full
    reward).
    """
    graded = [row for row in rows if row.error is None]
    rewards = [row.reward for row in graded]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    result = BenchmarkResult(name, mean, 0, 0)
    if aggregate is not None:
        result = aggregate(rewards, [row.metrics for row in graded])
    # Only the runner knows errors and truncated answers, so it always sets these counts.
    result.name, result.time_seconds = name, time_seconds
    result.num_examples, result.num_errors = len(rows), len(rows) - len(graded)
    result.num_correct = sum(row.correct for row in graded)
    result.num_truncated = sum(row.truncated for row in graded)
    whole = [row.reward for row in graded if not row.truncated]
    result.metrics["score_completed"] = sum(whole) / len(whole) if whole else 0.0
    normalized = [row.metrics[ACC_NORM] for row in graded if ACC_NORM in row.metrics]
    if normalized:
        result.metrics[ACC_NORM] = sum(normalized) / len(normalized)

    problems: dict[str, list[StoredTrajectory]] = defaultdict(list)
    for row in graded:
        problems[row.example_id].append(row)
    groups = list(problems.values())
    # The interval is valid only for the mean reward.
    if groups and math.isclose(result.score, mean, abs_tol=1e-9):
        low, high = score_interval([[row.reward for row in group] for group in groups])
        result.metrics.update(ci_low=low, ci_high=high)
    if len(groups) < len(graded):
        correct = [[row.correct for row in group] for group in groups]
        result.pass_at_k = mean_pass_at_k(correct)
        result.metrics.update(
            num_problems=len({row.example_id for row in rows}),
            mixed_share=fmean(len({row.reward for row in group}) > 1 for group in groups),
            never_solved=sum(not any(answers) for answers in correct),
            always_solved=sum(all(answers) for answers in correct),
        )
        result.metrics.update(_majority_metrics(groups))
    return result


def _majority_metrics(groups: Sequence[Sequence[StoredTrajectory]]) -> Metrics:
    """Returns ``maj@K`` for powers of 2 and all answers, if graders report what they read."""
    if not any(ANSWER_LOG in row.logs for group in groups for row in group):
        return {}
    # Graders write "" if a response has no final answer.
    read = [[row.logs.get(ANSWER_LOG) for row in group] for group in groups]
    votes = [[None if vote in (None, "") else str(vote) for vote in group] for group in read]
    rewards = [[row.reward for row in group] for group in groups]
    most = min(len(group) for group in groups)
    sizes = {2**power for power in range(1, most.bit_length())} | {most}
    return {
        f"maj@{k}": sum(majority_at_k(*pair, k) for pair in zip(votes, rewards, strict=True))
        / len(groups)
        for k in sorted(size for size in sizes if 1 < size <= most)
    }
