"""Writes stored benchmark answers as logs of Inspect AI, so that ``inspect view`` opens them.

    python -m tinker_cookbook.eval.inspect_bridge.logs SAVE_DIR out=inspect-logs
    inspect view --log-dir inspect-logs

``SAVE_DIR`` is the ``save_dir`` of ``run_benchmarks``, or a parent folder of several. Each
benchmark becomes one log, written by Inspect itself; writing it again replaces it. Needs
``pip install -e '.[inspect]'``.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import chz
from rich.table import Table

from tinker_cookbook.eval.benchmarks import (
    BenchmarkResult,
    StoredTrajectory,
    load_result,
    load_trajectories,
)
from tinker_cookbook.eval.inspect_bridge.evaluators import import_inspect
from tinker_cookbook.eval.run.answers import KEYS, TRAJECTORIES, key_of, summarize
from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.run.paths import ensure_writable_dir
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalResults, EvalSample
    from inspect_ai.model import ChatMessage

_UNKNOWN = "unknown"
_SAID = ("user", "assistant")


@chz.chz
class Config:
    """Settings of the command."""

    save_dir: str = chz.field(doc="Folder with BENCHMARK/trajectories.jsonl, at any depth")
    out: str | None = chz.field(default=None, doc="Folder of the logs; default: inspect-logs in it")
    format: Literal["eval", "json"] = chz.field(
        default="eval", doc="eval (a zip file, much smaller) or json"
    )

    def check(self) -> None:
        """Raises ConfigurationError for a missing folder, or without ``inspect-ai``."""
        import_inspect()
        if not Path(self.save_dir).expanduser().is_dir():
            raise ConfigurationError(f"save_dir: there is no folder {self.save_dir}")


def main(config: Config) -> None:
    """Writes the logs, and prints a table and the command that shows them."""
    config.check()
    folder = Path(config.save_dir).expanduser()
    out = folder / "inspect-logs" if config.out is None else config.out
    paths = write_inspect_logs(folder, out, config.format)
    console = get_console()
    table = Table("benchmark", "samples", "score", box=None)
    table.add_column("model", overflow="fold")
    for log in paths.values():
        assert log.results is not None
        score = log.results.scores[0].metrics["accuracy"].value
        count = str(log.results.total_samples)
        table.add_row(log.eval.task, count, f"{score:.4f}", log.eval.model)
    console.print(table)
    console.print(f"logs: {out}  (inspect view --log-dir {out})", soft_wrap=True, highlight=False)


def write_inspect_logs(
    save_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: Literal["eval", "json"] = "eval",
) -> dict[Path, EvalLog]:
    """Writes one log per benchmark below ``save_dir``; returns the logs by file.

    Raises:
        ConfigurationError: ``inspect-ai`` is not installed, or ``out`` cannot be written.
        DataError: there are no answers below ``save_dir``.
    """
    import_inspect()
    from inspect_ai.log import write_eval_log

    folders = sorted(path.parent for path in Path(save_dir).rglob(TRAJECTORIES))
    if not folders:
        raise DataError(
            f"{save_dir}: no {TRAJECTORIES} in it; expected the save_dir of run_benchmarks, or the "
            "out of python -m tinker_cookbook.eval"
        )
    target = ensure_writable_dir(out, "out")
    written: dict[Path, EvalLog] = {}
    for folder in folders:
        log = inspect_log(folder)
        # Inspect's naming scheme: time, task and an id, which its viewer uses to list logs.
        time = log.eval.created.replace(":", "-").replace("+", "-")
        path = target / f"{time}_{log.eval.task.replace('_', '-')}_{log.eval.eval_id}.{format}"
        # Atomic, so that a reader such as a running viewer never sees an incomplete log.
        part = path.with_name(f".{os.getpid()}-{path.name}")
        try:
            write_eval_log(log, str(part), format)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        log.location = str(path)
        written[path] = log
    return written


def inspect_log(folder: str | os.PathLike[str]) -> EvalLog:
    """Returns the stored answers of one benchmark (``SAVE_DIR/BENCHMARK``) as a log.

    Each answer is a sample; the answers to one problem are its epochs. For times that are not
    stored, the files' times are used.
    """
    from inspect_ai.log import (
        EvalConfig,
        EvalDataset,
        EvalLog,
        EvalPlan,
        EvalPlanStep,
        EvalSpec,
        EvalStats,
    )
    from inspect_ai.model import GenerateConfig, ModelUsage

    folder = Path(folder)
    rows = load_trajectories(str(folder.parent), folder.name)
    if not rows:
        raise DataError(f"{folder / TRAJECTORIES}: has no answers")
    result = load_result(str(folder.parent), folder.name)
    complete = result is not None
    result = result or summarize(folder.name, rows)
    starts = read_rows(folder / KEYS)
    settings: dict[str, Any] = dict(starts[-1]) if starts else {}
    model = str(settings.get("model") or _UNKNOWN)
    ended = datetime.fromtimestamp((folder / TRAJECTORIES).stat().st_mtime, UTC)
    created = ended
    if "started" in settings:
        created = datetime.fromisoformat(settings["started"]).astimezone(UTC)
    samples = [_sample(row, model) for row in rows]
    # A deterministic id, so that writing the log again replaces it.
    identity = key_of({"folder": folder.name, "model": model, "key": settings.get("key")})
    usage = sum((s.model_usage[model] for s in samples), ModelUsage())
    config_names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    sampling = {name: settings[name] for name in config_names if settings.get(name) is not None}
    problems = list(dict.fromkeys(sample.id for sample in samples))
    return EvalLog(
        status="success" if complete else "cancelled",
        eval=EvalSpec(
            eval_id=identity,
            run_id=identity,
            task_id=identity,
            created=created.isoformat(timespec="seconds"),
            task=folder.name,
            dataset=EvalDataset(name=folder.name, samples=len(problems), sample_ids=problems),
            model=model,
            model_generate_config=GenerateConfig(**sampling),
            config=EvalConfig(epochs=max(row.sample for row in rows) + 1),
            metadata=settings or None,
        ),
        plan=EvalPlan(steps=[EvalPlanStep(solver="generate")]),
        results=_results(folder.name, rows, result),
        stats=EvalStats(
            started_at=created.isoformat(timespec="seconds"),
            completed_at=max(created, ended).isoformat(timespec="seconds"),
            model_usage={model: usage},
        ),
        samples=samples,
    )


def _results(name: str, rows: Sequence[StoredTrajectory], result: BenchmarkResult) -> EvalResults:
    from inspect_ai.log import EvalMetric, EvalResults, EvalScore

    graded = sum(row.error is None for row in rows)
    numbers = {"accuracy": result.score, **result.metrics}
    numbers |= {f"pass@{k}": value for k, value in result.pass_at_k.items()}
    score = EvalScore(
        name=name,
        scorer=name,
        scored_samples=graded,
        unscored_samples=len(rows) - graded,
        # JSON has no NaN, but metrics of an empty selection may be NaN.
        metrics={
            key: EvalMetric(name=key, value=value)
            for key, value in numbers.items()
            if math.isfinite(value)
        },
    )
    return EvalResults(total_samples=len(rows), completed_samples=graded, scores=[score])


def _sample(row: StoredTrajectory, model: str) -> EvalSample:
    from inspect_ai.log import EvalError, EvalSample
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessageAssistant,
        ModelOutput,
        ModelUsage,
    )
    from inspect_ai.scorer import Score

    messages = _messages(row, model)
    # The answer is the last turn that is not from a grader or an environment. An assistant turn
    # before a user's is part of the prompt.
    ends = (i for i in range(len(row.turns) - 1, -1, -1) if row.turns[i].role in _SAID)
    at = next(ends, None)
    answered = at is not None and row.turns[at].role == "assistant"
    # The token count of a prompt is stored in its last turn, answers have their own counts.
    used = ModelUsage(
        input_tokens=sum(t.token_count for t in row.turns if t.role != "assistant"),
        output_tokens=sum(t.token_count for t in row.turns if t.role == "assistant"),
    )
    used.total_tokens = used.input_tokens + used.output_tokens
    output = ModelOutput(model=model, usage=used, time=row.time_seconds)
    last: Any = messages[at] if answered and at is not None else None
    if isinstance(last, ChatMessageAssistant):
        reason = "max_tokens" if row.truncated else "stop"
        output.choices = [ChatCompletionChoice(message=last, stop_reason=reason)]
        output.completion = last.text
    score = Score(
        value=row.reward, answer=_text(row.logs.get("extracted")), metadata=dict(row.metrics)
    )
    error = None
    if row.error is not None:
        error = EvalError(message=row.error, traceback="", traceback_ansi="")
    return EvalSample(
        id=row.example_id or row.idx,
        epoch=row.sample + 1,
        input=messages[:at] if answered else messages,
        target=_text(row.logs.get("expected")) or "",
        messages=messages,
        output=output,
        scores=None if error else {row.benchmark: score},
        metadata=dict(row.logs),
        model_usage={model: used},
        total_time=row.time_seconds,
        error=error,
    )


def _messages(row: StoredTrajectory, model: str) -> list[ChatMessage]:
    from inspect_ai.model import (
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageTool,
        ChatMessageUser,
        ContentReasoning,
        ContentText,
    )

    kinds = {"system": ChatMessageSystem, "tool": ChatMessageTool}
    messages: list[ChatMessage] = []
    for turn in row.turns:
        role = str(turn.metadata.get("role", turn.role))
        content: Any = turn.content
        if thinking := turn.metadata.get("thinking"):
            content = [ContentReasoning(reasoning=str(thinking)), ContentText(text=turn.content)]
        if role == "assistant":
            messages.append(ChatMessageAssistant(content=content, model=model))
        else:
            messages.append(kinds.get(role, ChatMessageUser)(content=content))
    return messages


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def named(arguments: Sequence[str]) -> list[str]:
    """Adds ``save_dir=`` to a first argument without a key."""
    first = arguments[0] if arguments else "-"
    is_folder = not first.startswith("-") and "=" not in first
    return [f"save_dir={first}", *arguments[1:]] if is_folder else list(arguments)


if __name__ == "__main__":
    sys.argv[1:] = named(sys.argv[1:])
    run_entrypoint(main)
