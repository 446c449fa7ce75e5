"""Commands ``list`` and ``show``."""

from __future__ import annotations

import json
import time
from typing import Any

import chz
from rich.filesize import decimal

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.run.best import METRICS, lower_is_better
from tinker_cookbook.run.config import KINDS_KEY, LOST_KEY, load_config
from tinker_cookbook.run.data_record import read_data_record
from tinker_cookbook.run.paths import folder_size
from tinker_cookbook.run.scan import RunFolder
from tinker_cookbook.runs.inventory import (
    Inventory,
    find_run,
    take_inventory,
)
from tinker_cookbook.training.setting_lines import changed
from tinker_cookbook.utils.command_line.config_file import program_of
from tinker_cookbook.utils.command_line.programs import print_whole, program_command

_LISTED = 100
"""Characters of an error's message in the list."""
FOLDER_DOC = "Folder with log folders; default: where recipes write, and the runs with weights here"


@chz.chz
class ListSettings:
    """Settings of ``list``."""

    folder: str | None = chz.field(default=None, doc=FOLDER_DOC)
    json: bool = chz.field(default=False, doc="Print JSON instead of a table")
    metric: str | None = chz.field(
        default=None, doc="Metric to show; default: the run's best_metric, else its main one"
    )


@chz.chz
class ShowSettings:
    """Settings of ``show``."""

    run: str = chz.field(doc="Log folder of the run, or its name")
    json: bool = chz.field(default=False, doc="Print JSON instead of text")


def list_runs(settings: ListSettings) -> None:
    """Lists the runs, the one that changed last first."""
    inventory = take_inventory(settings.folder)
    rows = [_row(run, inventory, settings.metric) for run in inventory.runs]
    left = inventory.without_folder
    if settings.json:
        data = [{"run_id": w.run_id, "log_path": str(w.log_path), "bytes": w.size} for w in left]
        print_whole(json.dumps({"runs": rows, "weights_without_log_folder": data}, indent=2))
        return
    names = ("state", "metric", "weights", "changed", "recipe", "run", "")
    lines = [names] + [
        (
            _state_text(row),
            _metric_text(row),
            decimal(row["weights_bytes"]) if row["weights_bytes"] else "-",
            _when(row["updated"]),
            row["recipe"],
            row["log_path"] if settings.folder is None else row["name"],
            (row["error"] or "").partition(": ")[2][:_LISTED] if row["state"] == "failed" else "",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    # One line for each run, also in a pipe; the longest texts are last.
    padded = ["  ".join(f"{x:<{n}}" for x, n in zip(line, widths, strict=True)) for line in lines]
    print_whole("\n".join(line.rstrip() for line in padded) if rows else "no runs")
    if left:
        size = decimal(sum(one.size for one in left))
        command = program_command("tinker_cookbook.runs")
        print_whole(f"{len(left)} weights without log folder, {size}: {command} prune")


def show_run(settings: ShowSettings) -> None:
    """Shows what is known of a run, and the commands to continue, chat, evaluate and compare."""
    inventory = take_inventory(run=settings.run)
    run = find_run(settings.run, inventory)
    row = _row(run, inventory, None)
    row |= {
        "settings": _changed_settings(run),
        "data": read_data_record(str(run.path)),
        "checkpoints": [one.to_dict() for one in run.checkpoints],
        "metrics": run.rows[-1] if run.rows else {},
    }
    if settings.json:
        print_whole(json.dumps(row, indent=2, default=str))
        return
    lines = [f"{run.path}", f"  {row['recipe']}, {_state_text(row)}, changed {_when(run.updated)}"]
    if run.holder:
        lines.append(f"  {run.holder}")
    if run.state == "failed":
        lines.append(f"  ended by {run.error}")
    if run.problem:
        lines.append(f"  cannot be read: {run.problem}")
    size = decimal(row["log_bytes"])
    lines.append(f"  logs {size}, weights {decimal(row['weights_bytes'])}")
    lines += _section("settings that are not the default", row["settings"])
    lines += _section("data", {k: _words(v) for k, v in (row["data"] or {}).items()})
    saved = {
        f"{run.path}@{one.name}": f"step {one.batch}: {one.sampler_path or one.state_path}"
        for one in run.checkpoints
    }
    lines += _section("checkpoints", saved)
    last = {name: value for name, value in row["metrics"].items() if not name.startswith("time/")}
    lines += _section(
        "last row", {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in last.items()}
    )
    print_whole("\n".join([*lines, *_section("commands", _commands(run))]))


def main_metric(run: RunFolder, metric: str | None = None) -> str | None:
    """Returns ``metric``, else the run's ``best_metric``, else the first usual one it logs."""
    names = [metric] if metric else [run.config.get("best_metric"), *METRICS]
    return next((name for name in names if name and run.values(name)), None)


def _row(run: RunFolder, inventory: Inventory, metric: str | None) -> dict[str, Any]:
    name = main_metric(run, metric)
    values = run.values(name) if name else {}
    best = min if name and lower_is_better(name) else max
    weights = inventory.weights_of(run)
    return {
        "name": run.path.name,
        "log_path": str(run.path),
        "recipe": run.recipe,
        "model": run.config.get("model_name"),
        "state": run.state,
        "step": run.step,
        "error": run.error,
        "metric": name,
        "last": values[max(values)] if values else None,
        "best": best(values.values()) if values else None,
        "log_bytes": folder_size(run.path),
        "weights_bytes": sum(one.size for one in weights),
        "weights": [one.run_id for one in weights],
        "updated": run.updated,
    }


def _state_text(row: dict[str, Any]) -> str:
    at = "" if row["step"] is None else f" at {row['step']}"
    by = f": {row['error'].partition(':')[0]}" if row["state"] == "failed" else ""
    return f"{row['state']}{at}{by}"


def _metric_text(row: dict[str, Any]) -> str:
    if row["metric"] is None:
        return "-"
    best = f" (best {row['best']:.4g})" if row["best"] != row["last"] else ""
    return f"{row['metric']} {row['last']:.4g}{best}"


def _when(seconds: float) -> str:
    return time.strftime("%m-%d %H:%M", time.localtime(seconds))


def _words(values: dict[str, Any]) -> str:
    return ", ".join(f"{value} {key}" if key != "sha256" else f"sha256 {str(value)[:12]}…"
                     for key, value in values.items())  # fmt: skip


def _section(title: str, values: dict[str, Any]) -> list[str]:
    return [f"{title}:", *(f"  {k}  {v}" for k, v in values.items())] if values else []


def _changed_settings(run: RunFolder) -> dict[str, Any]:
    """Returns the settings that are not the default, all plain ones if the recipe is gone."""
    try:
        return dict(changed(load_config(_without_code(run.config))))
    except (TinkerCookbookError, ImportError, TypeError):
        plain = (str, int, float, bool)
        return {k: v for k, v in run.config.items() if isinstance(v, plain) and k[0] != "_"}


def _without_code(data: Any) -> Any:
    """Returns data of ``config.json`` without the objects and functions of the run's script.

    They are no plain settings, and only the script has them.
    """
    if isinstance(data, list):
        return [_without_code(one) for one in data]
    if not isinstance(data, dict):
        return data
    if LOST_KEY in data:
        return ...
    kinds = data.get(KINDS_KEY, {})
    code = {where.partition("/")[0] for where, kind in kinds.items() if kind == "object"}
    kept = {where: kind for where, kind in kinds.items() if where.partition("/")[0] not in code}
    return {k: ... if k in code else _without_code(v) for k, v in data.items()} | {KINDS_KEY: kept}


def _commands(run: RunFolder) -> dict[str, str]:
    weights = f"model_path={run.path}"
    commands = {}
    module = program_of(run.config.get("_type", ""))
    if module and run.state != "running":
        commands["continue"] = program_command(module, f"config={run.path}")
    if run.checkpoints:
        commands["chat    "] = program_command("tinker_cookbook.chat", weights)
        commands["evaluate"] = program_command("tinker_cookbook.eval", weights, "tasks=…")
    if run.rows:
        commands["plot    "] = program_command("tinker_cookbook.plot", f"log_path={run.path}")
    return commands
