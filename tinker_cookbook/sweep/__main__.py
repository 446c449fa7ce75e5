"""Runs a recipe once for each combination of the comma-separated values.

python -m tinker_cookbook.sweep RECIPE key=value key=a,b,c log_dir=FOLDER
python -m tinker_cookbook.sweep recipes.sl_loop learning_rate=1e-4,3e-4,1e-3 log_dir=FOLDER
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Sequence

from rich.live import Live
from rich.table import Table

from tinker_cookbook.run.best import METRICS, lower_is_better
from tinker_cookbook.run.jsonl import encode_row
from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.sweep.arguments import Sweep, SweepKeys, parse_sweep
from tinker_cookbook.sweep.results import (
    best_of,
    collect,
    metric_note,
    plot,
    progress_line,
    runs_table,
)
from tinker_cookbook.sweep.runs import SweepRun, last_lines, run_all, serving, stop_runs
from tinker_cookbook.utils.command_line.arguments import HELP, VERSION
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments, run_program
from tinker_cookbook.utils.terminal import get_console, print_line


def main(argv: Sequence[str]) -> int:
    """Runs a sweep; returns 0 if all runs are done, 130 if the sweep was interrupted."""
    if any(word in (*HELP, VERSION) for word in argv):
        parse_arguments(SweepKeys, argv)  # prints, and raises SystemExit
    sweep = parse_sweep(argv)
    # SIGTERM then stops the runs and the server as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run_sweep(sweep)
    except KeyboardInterrupt:
        command = shlex.join(["python", "-m", "tinker_cookbook.sweep", *argv])
        print(f"\ninterrupted; resume with:\n{command}", flush=True)
        return 130  # the usual exit status after Ctrl-C


def _run_sweep(sweep: Sweep) -> int:
    """Runs what has not been done, and reports; returns the exit status."""
    metrics = METRICS if sweep.keys.metric is None else (sweep.keys.metric,)
    console = get_console()
    with RunLock(sweep.log_dir, "log_dir"):
        runs: list[SweepRun] = []
        for point in sweep.points:
            settings = {**point.settings, **sweep.server_settings}
            runs.append(SweepRun(point, sweep.recipe, settings, sweep.log_dir / point.name))
            # All runs are loaded before any starts, so that wrong settings stop the sweep at once.
            runs[-1].load()

        def table() -> Table:
            return runs_table(runs, metrics)

        def print_change(run: SweepRun) -> None:
            if not console.is_terminal:
                print_line(progress_line(run, metrics))

        if waiting := sum(run.state == "waiting" for run in runs):
            print_line(f"{len(runs)} runs of {sweep.recipe}, {waiting} to do: {sweep.log_dir}")
            with serving(sweep) as server:
                jobs = sweep.keys.jobs or (min(waiting, 4) if server.on_cpu else waiting)
                print_line(f"server {server.url}, {jobs} runs at a time")
                live = Live(console=console, get_renderable=table) if console.is_terminal else None
                # The server and the runs end here in any case.
                try:
                    with live or contextlib.nullcontext():
                        run_all(runs, jobs, server, print_change)
                finally:
                    stop_runs(runs)
        return _report(sweep, runs)


def _report(sweep: Sweep, runs: list[SweepRun]) -> int:
    """Writes and prints the results; returns the exit status."""
    rows = collect(runs, sweep.keys.metric)
    results = sweep.log_dir / "results.jsonl"
    write_atomically(results, b"".join(map(encode_row, rows)))
    best, metric = best_of(rows), rows[0]["metric"] or ""
    get_console().print(runs_table(runs, [metric], best=best["run"] if best else ""))
    failed = [run for run in runs if run.state == "failed"]
    for run in failed:
        print_line(f"{run.point.name} failed; the last lines of {run.log}:\n{last_lines(run.log)}")
    if best is not None:
        kind = "lowest" if lower_is_better(metric) else "highest"
        print_line(f"best: {best['run']}, {kind} {metric} {best['value']:.5g}: {best['log_path']}")
        if (note := metric_note(metric)) is not None:
            print_line(note)
    print_line(plot(rows, list(runs[0].point.swept), sweep.log_dir / "sweep.png"))
    print_line(str(results))
    if failed:
        print_line(f"{len(failed)} of {len(runs)} runs failed; the same command tries them again")
    return 1 if failed else 0


if __name__ == "__main__":
    run_program(lambda: sys.exit(main(sys.argv[1:])))
