"""A sweep from its command line to its table."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from tinker_cookbook.exceptions import ConfigurationError, TinkerCookbookError
from tinker_cookbook.sweep.arguments import HELP, Sweep, parse_sweep
from tinker_cookbook.sweep.jobs import Job, Jobs
from tinker_cookbook.sweep.records import METRICS, RECORDS, RecordFolder
from tinker_cookbook.sweep.results import (
    PICTURE,
    RESULTS,
    Result,
    best_of,
    check_metric,
    collect,
    curves_of,
    draw,
    results_table,
    write_results,
)
from tinker_cookbook.sweep.serving import (
    Server,
    begin_server,
    last_lines,
    use_server,
    wait_until_up,
)
from tinker_cookbook.sweep.show import SweepDisplay
from tinker_cookbook.sweep.watch import METRICS as USUAL_METRICS
from tinker_cookbook.sweep.watch import Watch, lower_is_better
from tinker_cookbook.utils.command_line.arguments import VERSION
from tinker_cookbook.utils.command_line.programs import version_line
from tinker_cookbook.utils.run_folder.lock import RunLock, lock_holder
from tinker_cookbook.utils.run_folder.paths import ensure_writable_dir
from tinker_cookbook.utils.terminal import get_console

_JOBS_ON_CPU = 4
_INTERRUPTED = 130  # what shells give a program that Ctrl-C ended


def main(argv: Sequence[str]) -> int:
    """Runs a sweep; the exit status is 0 where all runs are done."""
    if not argv or any(word in ("--help", "-h") for word in argv):
        print(HELP, end="")
        return 0 if argv else 1
    if VERSION in argv:
        print(version_line())
        return 0
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    try:
        return _sweep(parse_sweep(argv))
    except TinkerCookbookError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        command = shlex.join(["python", "-m", "tinker_cookbook.sweep", *argv])
        print(f"\nstopped; go on with:\n{command}", flush=True)
        return _INTERRUPTED


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _sweep(sweep: Sweep) -> int:
    own = ensure_writable_dir(sweep.log_dir, "log_dir") / RECORDS
    own.mkdir(exist_ok=True)
    holder = lock_holder(own)
    if holder is not None:
        raise ConfigurationError(
            f"log_dir={sweep.log_dir}: another sweep works there ({holder}); wait for it, stop it, "
            "or give this one its own log_dir=…"
        )
    with RunLock(own):
        records = RecordFolder(sweep.log_dir)
        jobs = [_job(sweep, records, run_index) for run_index in range(len(sweep.runs))]
        if any(job.state == "waiting" for job in jobs):
            _work(sweep, jobs, records)
        return _conclude(sweep, jobs)


def _job(sweep: Sweep, records: RecordFolder, index: int) -> Job:
    run = sweep.runs[index]
    folder = sweep.log_dir / run.name
    names = USUAL_METRICS if sweep.metric is None else (sweep.metric,)
    job = Job(
        run=run,
        log_path=folder,
        record=records.read(run, sweep.recipe, sweep.server_settings),
        watch=Watch(folder / METRICS, names),
        log=folder.with_name(f"{folder.name}.log"),
    )
    job.watch.look()
    if records.is_finished(run, job.record):
        job.state = "done"
    return job


def _work(sweep: Sweep, jobs: list[Job], records: RecordFolder) -> None:
    """Runs what is left to run; the server and the runs end with it, whatever happens."""
    waiting = sum(job.state == "waiting" for job in jobs)
    say = get_console().print
    done = f", {len(jobs) - waiting} done before" if waiting < len(jobs) else ""
    say(f"{len(jobs)} runs of {sweep.recipe}{done}: {sweep.log_dir}", soft_wrap=True, markup=False)
    server: Server | None = None
    work: Jobs | None = None
    try:
        if sweep.server is not None:
            server = use_server(sweep.server)
        else:
            server = _start_server(sweep)
        at_once = sweep.jobs or (min(waiting, _JOBS_ON_CPU) if server.on_cpu else waiting)
        say(f"server {server.url}, {at_once} at a time", soft_wrap=True, markup=False)
        work = Jobs(sweep.recipe, jobs, at_once, server, records)
        with SweepDisplay(jobs) as display:
            work.work(display.changed, display.looked)
    finally:
        try:
            if work is not None:
                work.stop()
        finally:
            if server is not None:
                server.stop()


def _start_server(sweep: Sweep) -> Server:
    """Returns a server of this sweep's own, up and serving."""
    from tinker_cookbook.engine.home import home_dir

    root = home_dir().absolute()
    server = begin_server(sweep.models, sweep.server_settings, root, sweep.log_dir)
    try:
        wait_until_up(server, root)
    except BaseException:
        server.stop()
        raise
    return server


def about_metric(metric: str) -> str | None:
    """Returns what to know about a comparison by this metric; ``None`` for one of held-out data."""
    if metric.startswith("test/"):
        return None
    return (
        f"{metric} is measured on the batches that are trained on, so overfitting improves it and "
        "it varies with the batch; a recipe with held-out data, such as recipes.sl_basic, is "
        "compared by test/nll"
    )


def _conclude(sweep: Sweep, jobs: list[Job]) -> int:
    """Table, file, picture, the best run, and what failed."""
    results = collect(jobs, sweep.metric)
    write_results(results, sweep.log_dir / RESULTS)
    console = get_console()
    console.print(results_table(results))
    failed = [job for job in jobs if job.state == "failed"]
    for job in failed:
        text = last_lines(job.log, start=job.log_start)
        console.print(
            f"{job.run.name} failed; {job.log} ends:\n{text}", markup=False, soft_wrap=True
        )
    if not failed:
        check_metric(results)
    best = best_of(results)
    if best is not None:
        kind = "lowest" if lower_is_better(str(best.metric)) else "highest"
        console.print(
            f"best: {best.name}, {kind} {best.metric} {best.value:.5g}: {best.log_path}",
            markup=False,
            soft_wrap=True,
        )
        if (about := about_metric(str(best.metric))) is not None:
            console.print(about, markup=False, soft_wrap=True)
    for line in _draw(results, sweep.log_dir / PICTURE), f"{sweep.log_dir / RESULTS}":
        console.print(line, markup=False, soft_wrap=True)
    if failed:
        console.print(
            f"{len(failed)} of {len(jobs)} runs failed; the same command tries them again",
            soft_wrap=True,
        )
    return 1 if failed else 0


def _draw(results: list[Result], path: Path) -> str:
    curves = curves_of(results)
    if curves is None:
        return "no picture: no swept key has numbers alone, or no run has the metric"
    try:
        draw(curves, path)
    except ImportError:
        return "no picture: it needs matplotlib: pip install 'tinker_cookbook[plot]'"
    return str(path)
