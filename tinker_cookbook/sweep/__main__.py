"""``python -m tinker_cookbook.sweep RECIPE key=a,b,c log_dir=FOLDER``."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from rich.live import Live

from tinker_cookbook.exceptions import ConfigurationError, TinkerCookbookError
from tinker_cookbook.sweep.arguments import HELP, Sweep, parse_sweep
from tinker_cookbook.sweep.results import (
    METRICS,
    Display,
    best_of,
    collect,
    metric_note,
    plot,
    results_table,
)
from tinker_cookbook.sweep.runs import RECORDS, Run, last_lines, run_all, serving, stop_runs
from tinker_cookbook.training.best import lower_is_better
from tinker_cookbook.utils.command_line.arguments import VERSION
from tinker_cookbook.utils.command_line.programs import version_line
from tinker_cookbook.utils.run_folder.jsonl import encode_row
from tinker_cookbook.utils.run_folder.lock import RunLock, lock_holder
from tinker_cookbook.utils.run_folder.paths import ensure_writable_dir, write_atomically
from tinker_cookbook.utils.terminal import get_console


def main(argv: Sequence[str]) -> int:
    """Runs a sweep; returns 0 if all runs are done."""
    if not argv or any(word in ("--help", "-h") for word in argv):
        print(HELP, end="")
        return 0 if argv else 1
    if VERSION in argv:
        print(version_line())
        return 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # SIGTERM then stops the runs and the server as Ctrl-C does.
    signal.signal(signal.SIGTERM, interrupt)
    try:
        return _run_sweep(parse_sweep(argv))
    except TinkerCookbookError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        command = shlex.join(["python", "-m", "tinker_cookbook.sweep", *argv])
        print(f"\ninterrupted; resume with:\n{command}", flush=True)
        return 130  # the usual exit status after Ctrl-C


def _run_sweep(sweep: Sweep) -> int:
    """Runs what has not been done, and reports; returns the exit status."""
    records = ensure_writable_dir(sweep.log_dir, "log_dir") / RECORDS
    records.mkdir(exist_ok=True)
    # Before the lock, whose error would name the folder of records instead of log_dir.
    if (holder := lock_holder(records)) is not None:
        raise ConfigurationError(
            f"log_dir={sweep.log_dir}: another sweep uses it ({holder}); wait for it, stop it, or "
            "choose another log_dir"
        )
    with RunLock(records):
        runs = []
        for point in sweep.points:
            settings = {**point.settings, **sweep.server_settings}
            runs.append(Run(point, sweep.recipe, settings, sweep.log_dir / point.name))
            # All runs are loaded before any starts, so that wrong settings stop the sweep at once.
            runs[-1].load()
        waiting = sum(run.state == "waiting" for run in runs)
        if waiting:
            done = f", {len(runs) - waiting} already done" if waiting < len(runs) else ""
            _print(f"{len(runs)} runs of {sweep.recipe}{done}: {sweep.log_dir}")
            display = Display(runs, METRICS if sweep.metric is None else (sweep.metric,))
            with serving(sweep) as server:
                jobs = sweep.jobs or (min(waiting, 4) if server.on_cpu else waiting)
                _print(f"server {server.url}, {jobs} runs at a time")
                live = Live(display, console=get_console(), refresh_per_second=4)
                # The server and the runs end here in any case.
                try:
                    with live if get_console().is_terminal else contextlib.nullcontext():
                        run_all(runs, jobs, server, display.print_change)
                finally:
                    stop_runs(runs)
        return _report(sweep, runs)


def _report(sweep: Sweep, runs: list[Run]) -> int:
    """Writes and prints the results; returns the exit status."""
    rows = collect(runs, sweep.metric)
    swept = list(runs[0].point.swept)
    write_atomically(sweep.log_dir / "results.jsonl", b"".join(map(encode_row, rows)))
    get_console().print(results_table(rows, swept))
    failed = [run for run in runs if run.state == "failed"]
    for run in failed:
        text = last_lines(run.log, start=run.log_start)
        _print(f"{run.point.name} failed; the last lines of {run.log}:\n{text}")
    if (best := best_of(rows)) is not None:
        metric, value = best["metric"], best["value"]
        kind = "lowest" if lower_is_better(metric) else "highest"
        _print(f"best: {best['run']}, {kind} {metric} {value:.5g}: {best['log_path']}")
        if (note := metric_note(metric)) is not None:
            _print(note)
    _print(plot(rows, swept, sweep.log_dir / "sweep.png"))
    _print(str(sweep.log_dir / "results.jsonl"))
    if failed:
        _print(f"{len(failed)} of {len(runs)} runs failed; the same command tries them again")
    return 1 if failed else 0


def _print(text: str) -> None:
    get_console().print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
