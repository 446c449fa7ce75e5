"""Command ``compare``: settings in which two runs differ, and their metrics with noise."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import chz
from rich.table import Table

from tinker_cookbook.exceptions import ConfigurationError, nearest_sentence
from tinker_cookbook.record.read import Record
from tinker_cookbook.run.best import METRICS, lower_is_better
from tinker_cookbook.run.changes import setting_changes
from tinker_cookbook.run.config import FOLDER_KEY
from tinker_cookbook.run.data_record import data_changes, read_data_record
from tinker_cookbook.run.scan import RunFolder
from tinker_cookbook.runs.inventory import find_run, take_inventory
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.programs import print_whole
from tinker_cookbook.utils.terminal import get_console

_CLEAR = 2.0
"""Standard errors by which a difference is called clear."""
_FEW = 8
"""Episodes; of fewer the spread of rewards is not known."""
# They differ in any two runs, and change no result.
_NAMES = {"log_path", "wandb_name", "session_name", FOLDER_KEY}


@chz.chz
class CompareSettings:
    """Settings of ``compare``."""

    a: str = chz.field(doc="Log folder of the first run, or its name")
    b: str = chz.field(doc="Log folder of the second run, or its name")
    metrics: str | None = chz.field(
        default=None, doc="Comma-separated metrics; default: the main ones that both runs log"
    )
    last: int = number(10, "Rows at the end of a run over which a training metric is averaged", 2)
    json: bool = chz.field(default=False, doc="Print JSON instead of tables")


@dataclass(frozen=True)
class EndValue:
    """Value of a metric at the end of a run.

    Attributes:
        value: Last value of an evaluation, or mean over the last rows of a training metric.
        error: Standard error; ``None`` if there is only one number.
        of: What the error is computed from.
    """

    value: float
    error: float | None
    of: str


def compare_runs(settings: CompareSettings) -> None:
    """Prints the settings that differ and the metrics of two runs."""
    inventory = take_inventory()
    a, b = find_run(settings.a, inventory), find_run(settings.b, inventory)
    names = [part.strip() for part in (settings.metrics or "").split(",") if part.strip()]
    found = [compare_metric(name, a, b, settings.last) for name in names or _common(a, b)]
    changes = setting_changes(a.config, b.config)
    changes = {k: v for k, v in changes.items() if k.rpartition(".")[2] not in _NAMES}
    records = [read_data_record(str(run.path)) or {} for run in (a, b)]
    data = data_changes(*records, longer=False, rebuilt=False)
    if settings.json:
        metrics = [
            {"metric": name, "a": asdict(of_a), "b": asdict(of_b), "verdict": verdict}
            for name, of_a, of_b, verdict in found
        ]
        both = {"a": str(a.path), "b": str(b.path)}
        text = json.dumps({**both, "settings": changes, "data": data, "metrics": metrics}, indent=2)
        print_whole(text)
        return
    console = get_console()
    for label, run in (("A", a), ("B", b)):
        print_whole(f"{label} = {run.path} ({run.recipe}, {run.state} at step {run.step})")
    rows = [(name, old, new) for name, (old, new) in changes.items()]
    if rows:
        console.print(_table(("setting", "A", "B"), rows))
    print_whole("\n".join(data) if rows or data else "no setting differs")
    ends = [(name, _text(of_a), _text(of_b)) for name, of_a, of_b, _ in found]
    console.print(_table(("metric at the end", "A", "B"), ends))
    print_whole("\n".join(verdict for *_, verdict in found))


def compare_metric(
    metric: str, a: RunFolder, b: RunFolder, last: int
) -> tuple[str, EndValue, EndValue, str]:
    """Returns a metric, its values at the end of two runs, and a sentence.

    Raises:
        ConfigurationError: One of them does not log it.
    """
    values = [run.values(metric) for run in (a, b)]
    for run, of_run in zip((a, b), values, strict=True):
        if not of_run:
            known = sorted({key for row in run.rows for key in row if run.values(key)})
            raise ConfigurationError(
                f"metrics: {metric!r} is in no row of {run.path}{nearest_sentence(metric, known)} "
                f"It has: {', '.join(known) or 'none'}"
            )
    end_a, end_b = _end(a, metric, values[0], last), _end(b, metric, values[1], last)
    return metric, end_a, end_b, _verdict(metric, end_a, end_b)


def _end(run: RunFolder, metric: str, values: dict[int, float], last: int) -> EndValue:
    """Returns the value at the end, with the noise that the run's files show."""
    if not metric.startswith("test/"):
        final = list(values.values())[-last:]
        if len(final) < 2:
            return EndValue(final[-1], None, "1 row")
        # Batches differ, so the mean over the last rows is compared, not the last row.
        return EndValue(*_mean(final), f"last {len(final)} rows")
    step = max(values)
    rewards = _test_rewards(run.path, step) if metric == "test/env/all/reward/total" else []
    if rewards:
        return EndValue(values[step], *_error_of(rewards))
    return EndValue(values[step], None, f"evaluation at step {step}")


def _test_rewards(folder: Path, step: int) -> list[float]:
    """Returns the rewards of all test episodes of a step, if the run recorded them."""
    columns = ["group", "member", "episode_reward"]
    table = Record(folder).table(step, "eval_test", columns)
    rows: list[dict[str, Any]] = [] if table is None else table.to_pylist()
    # An episode has a row for each of its turns.
    rewards = {(row["group"], row["member"]): row["episode_reward"] for row in rows}
    return list(rewards.values())


def _error_of(rewards: Sequence[float]) -> tuple[float | None, str]:
    """Returns the standard error of the mean reward of episodes, and what it is computed from."""
    count = len(rewards)
    of = f"{count} test episode{'s' * (count > 1)}"
    if {*rewards} <= {0.0, 1.0}:
        # Agresti and Coull (1998): with two more right and two more wrong answers, the error is
        # not 0 when all answers are right or wrong.
        share = (sum(rewards) + 2) / (count + 4)
        return math.sqrt(share * (1 - share) / (count + 4)), of
    if count < _FEW or len({*rewards}) == 1:
        return None, f"{of}, too few or too equal for an error"
    return _mean(rewards)[1], of


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Returns mean and standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _verdict(metric: str, a: EndValue, b: EndValue) -> str:
    margin = b.value - a.value
    if margin == 0:
        return f"{metric}: equal"
    lower = lower_is_better(metric)
    better = "B" if (margin < 0) == lower else "A"
    kind = "lower" if lower else "higher"
    of = a.of if a.of == b.of else f"{a.of}; {b.of}"
    said = f"{metric}: {better} is better ({kind}) by {abs(margin):.4g}"
    if a.error is None or b.error is None:
        return f"{said}; its noise is unknown ({of})"
    noise = math.hypot(a.error, b.error)
    if abs(margin) > _CLEAR * noise:
        return f"{said}, more than {_CLEAR:g} standard errors ({noise:.2g}; {of})"
    return (
        f"{metric}: no clear difference: B - A is {margin:+.4g} with a standard error of "
        f"{noise:.2g} ({of})"
    )


def _common(a: RunFolder, b: RunFolder) -> list[str]:
    """Returns the main metrics that both runs log, a run's ``best_metric`` first."""
    names = [a.config.get("best_metric"), b.config.get("best_metric"), *METRICS]
    found = [name for name in dict.fromkeys(names) if name and a.values(name) and b.values(name)]
    if not found:
        raise ConfigurationError(
            f"metrics: {a.path} and {b.path} have none of {', '.join(METRICS)} in common; expected "
            "metrics=NAME of metrics that both log"
        )
    return found


def _text(end: EndValue) -> str:
    return f"{end.value:.5g}" + ("" if end.error is None else f" ± {end.error:.2g}")


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    return table
