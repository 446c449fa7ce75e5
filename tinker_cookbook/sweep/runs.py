"""The runs of a sweep and their server, as processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from tinker_cookbook.checkpoint_utils import get_last_checkpoint
from tinker_cookbook.exceptions import BackendError, ConfigurationError
from tinker_cookbook.run.jsonl import NONFINITE_KEY, read_rows
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.sweep.arguments import Point, Sweep
from tinker_cookbook.sweep.child import end_children, start_child

State = Literal["waiting", "running", "resumed", "done", "failed"]

RECORDS = ".sweep"
"""Folder in ``log_dir`` with a file for each run: its recipe, settings and state."""

_POLL_SECONDS = 0.3
_STOP_SECONDS = 30.0


@dataclass
class SweepRun:
    """A point of the grid and its process; ``LOG_DIR/.sweep/NAME.json`` keeps it between sweeps."""

    point: Point
    recipe: str
    settings: dict[str, str]
    """Those of the point and of the server, which the result depends on."""
    log_path: Path
    state: State = "waiting"
    """``resumed`` is a run that continues from an earlier sweep."""
    seconds: float = 0.0
    """Duration of the finished attempts."""
    started: float | None = None
    """Time at which the present attempt started."""
    step: int | None = None
    total: int | None = None
    """Number of steps, computed from the ``progress`` of the last row."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Last value of each metric."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _read: tuple[int, int] = (0, 0)
    """Time and size of ``metrics.jsonl`` when it was read."""

    def __post_init__(self) -> None:
        name = self.log_path.name
        self.log = self.log_path.with_name(f"{name}.log")
        self._rows = self.log_path / "metrics.jsonl"
        self._record = self.log_path.parent / RECORDS / f"{name}.json"

    @property
    def elapsed(self) -> float:
        """Seconds of all attempts, including the present one."""
        return self.seconds + (time.time() - self.started if self.started is not None else 0.0)

    def load(self) -> None:
        """Restores the state that an earlier sweep saved.

        Raises:
            ConfigurationError: The earlier run had other settings.
        """
        self.read_metrics()
        last = get_last_checkpoint(self.log_path)
        if last is not None and last.final:
            self.state = "done"
        if not self._record.exists():
            return
        record = json.loads(self._record.read_bytes())
        expected = {"recipe": record["recipe"], **record["settings"]}
        given = {"recipe": self.recipe, **self.settings}
        # A run with other settings must not continue from the checkpoints in this folder.
        for key in {**given, **expected}:
            if given.get(key) != expected.get(key):
                raise ConfigurationError(
                    f"{key}: got {given.get(key)}, expected {expected.get(key)}, the value of the "
                    f"earlier run in {self.log_path}; give this sweep another log_dir, or delete "
                    f"that folder and {self._record}"
                )
        # Its process ended with status 0. A recipe need not save a final checkpoint.
        if record["done"]:
            self.state = "done"
        self.seconds = record["seconds"]

    def start(self, server: Server) -> None:
        """Starts the process, which resumes if there is a checkpoint."""
        words = [f"{key}={value}" for key, value in self.point.settings.items()]
        words += [f"log_path={self.log_path}", f"backend={server.url}"]
        # Also for a run without a folder yet: then it starts from the beginning.
        words += ["behavior_if_log_dir_exists=resume"]
        # Saved before the start, so that a killed sweep has the settings of the attempt.
        self.state = "resumed" if self._rows.exists() else "running"
        self.started = time.time()
        self._save()
        # Appended, so that the output of earlier attempts is kept.
        with self.log.open("ab") as log:
            # SIGKILL is safe for a run, which resumes from its last checkpoint.
            self.process = start_child(
                self.recipe, words, signal.SIGKILL, stdout=log, env=server.environment()
            )

    def finish(self, status: int) -> None:
        """Records the end of the process."""
        self.read_metrics()
        self.state = "done" if status == 0 else "failed"
        self.seconds, self.started, self.process = self.elapsed, None, None
        self._save()

    def _save(self) -> None:
        self._record.parent.mkdir(parents=True, exist_ok=True)
        record = {"recipe": self.recipe, "settings": self.settings, "done": self.state == "done"}
        record |= {"seconds": self.seconds}
        # A sweep killed during the write leaves the old record or the new one.
        write_atomically(self._record, json.dumps(record, indent=2).encode())

    def read_metrics(self) -> None:
        """Reads ``metrics.jsonl`` again, if it has changed since the last call."""
        with contextlib.suppress(FileNotFoundError):
            status = self._rows.stat()
            if self._read == (stamp := (status.st_mtime_ns, status.st_size)):
                return
            self._read, self.metrics = stamp, {}
            for row in read_rows(self._rows):
                self.metrics |= {k: v for k, v in row.items() if type(v) in (int, float)}
                # JSON has no NaN and infinity, so rows have them as texts.
                self.metrics |= {k: float(v) for k, v in row.get(NONFINITE_KEY, {}).items()}
                self.step = row.get("step", self.step)
                if self.step and row.get("progress"):
                    self.total = round(self.step / row["progress"])


def run_all(
    runs: Sequence[SweepRun], jobs: int, server: Server, on_change: Callable[[SweepRun], None]
) -> None:
    """Runs everything that waits, in order, ``jobs`` processes at a time.

    ``on_change`` is called with each run that starts or ends. Raises ``BackendError`` if the server
    has ended.
    """
    while True:
        # Processes that have ended make room for waiting runs.
        for run in runs:
            if run.process is not None:
                run.read_metrics()
                if (status := run.process.poll()) is not None:
                    run.finish(status)
                    on_change(run)
        room = jobs - sum(run.process is not None for run in runs)
        for run in [run for run in runs if run.state == "waiting"][:room]:
            run.start(server)
            on_change(run)
        # Checked before the server, which is no longer needed when all runs have ended.
        if all(run.state in ("done", "failed") for run in runs):
            return
        server.check_alive()
        time.sleep(_POLL_SECONDS)


def stop_runs(runs: Sequence[SweepRun]) -> None:
    """Interrupts running processes as Ctrl-C does, and kills those that do not end."""
    active = [(run, run.process) for run in runs if run.process is not None]
    try:
        end_children([process for _, process in active], signal.SIGINT, _STOP_SECONDS)
    finally:  # after a second Ctrl-C too
        for run, process in active:
            run.finish(process.wait())


@dataclass
class Server:
    """Server on which the runs train; ``process`` and ``log`` are set if the sweep started it."""

    url: str = ""
    key: str = ""
    on_cpu: bool = True
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    def environment(self) -> dict[str, str]:
        """Returns the environment of a run."""
        # PYTHONUNBUFFERED: the output of a killed run is in its log file.
        added = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key, "PYTHONUNBUFFERED": "1"}
        environment = {**os.environ, **added}
        if self.process is not None:
            environment.pop("TINKER_CREDENTIAL_CMD", None)  # it gives the key of another server
            for name in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach the loopback address
                environment[name] = ",".join(filter(None, [environment.get(name), "127.0.0.1"]))
        return environment

    def check_alive(self) -> None:
        """Raises ``BackendError`` with the last lines of the log if the process has ended."""
        if self.process is not None and self.process.poll() is not None:
            assert self.log is not None
            raise BackendError(
                f"the server ended with status {self.process.returncode}; the last lines of "
                f"{self.log}:\n{last_lines(self.log)}"
            )


@contextlib.contextmanager
def serving(sweep: Sweep) -> Iterator[Server]:
    """Yields the server of a sweep: the one at its URL, or a new one that ends with the block.

    Raises:
        BackendError: The server does not respond, refuses the key, or ended at its start.
    """
    if (url := sweep.keys.server) is not None:
        server = Server(url.rstrip("/"), os.environ["TINKER_API_KEY"])
        try:  # a request that needs a key, so that a wrong key is found as well
            url, headers = f"{server.url}/api/v1/get_server_capabilities", {"X-API-Key": server.key}
            httpx.get(url, headers=headers, timeout=10.0).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error).partition("\n")[0]
            raise BackendError(
                f"server={server.url}: {reason}. Check the URL and TINKER_API_KEY"
            ) from error
        yield server
        return
    from tinker_cookbook.engine.home import home_dir  # the engine is optional with server=

    root = home_dir().absolute()
    with started_server(sweep.models, sweep.server_settings, root, sweep.log_dir) as server:
        yield server


@contextlib.contextmanager
def started_server(
    models: Sequence[str], settings: dict[str, str], root: Path, log_dir: Path
) -> Iterator[Server]:
    """Yields a new server that listens on a free port, and ends with the block.

    Its checkpoints and keys are in ``root``, and its output in ``log_dir/server.log``. Raises
    ``BackendError`` if it ended at its start.
    """
    # A free port, so that several sweeps can run on one machine.
    words = ["port=0", f"model_name={','.join(models)}", f"root={root}"]
    words += [f"{key}={value}" for key, value in settings.items()]
    log = log_dir / "server.log"
    # A new file, since old output would contain the port of an earlier server.
    log.unlink(missing_ok=True)
    log.touch(mode=0o600)
    with log.open("wb") as file:
        # Empty: the sweep's server has its keys in a file, not in the environment.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TINKER_COOKBOOK_SERVER_KEYS": ""}
        module = "tinker_cookbook.server"
        process = start_child(module, words, signal.SIGTERM, stdout=file, env=environment)
    server, started = Server(process=process, log=log), dict[str, str]()
    try:
        # The start of the server prints a line that begins with each of these words.
        while not {"serving", "device", "keys"} <= started.keys():
            server.check_alive()
            time.sleep(_POLL_SECONDS)
            lines = [line.split() for line in log.read_text("utf-8", "replace").splitlines()]
            started = {words[0]: words[1] for words in lines if len(words) > 1}
        server.url, server.on_cpu = started["serving"], started["device"].startswith("cpu")
        server.key = json.loads((root / "server_keys.json").read_bytes())["local"]
        yield server
    finally:
        # The server completes its running operation first.
        end_children([process], signal.SIGTERM, 2 * _STOP_SECONDS)


def last_lines(path: Path, count: int = 15) -> str:
    """Returns the last lines of a text file, indented."""
    lines = path.read_bytes().decode("utf-8", "replace").rstrip().split("\n")[-count:]
    # A progress bar overwrites its line, so only the text after the last \r is shown.
    return "\n".join("    " + line.rpartition("\r")[2] for line in lines)
