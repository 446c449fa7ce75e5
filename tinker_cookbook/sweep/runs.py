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
from functools import partial
from pathlib import Path
from typing import Literal

import httpx

from tinker_cookbook.checkpoint_utils import get_last_checkpoint
from tinker_cookbook.exceptions import BackendError, ConfigurationError, DataFormatError
from tinker_cookbook.sweep.arguments import Point, Sweep
from tinker_cookbook.sweep.child import start_child
from tinker_cookbook.utils.run_folder.lock import lock_holder
from tinker_cookbook.utils.run_folder.paths import write_atomically

State = Literal["waiting", "running", "resumed", "done", "failed"]

RECORDS = ".sweep"
_POLL_SECONDS = 0.3
_STOP_SECONDS = 30.0
_LOCK_SECONDS = 30.0  # time for the runs of a killed sweep to end
_TAIL_BYTES = 1 << 16


@dataclass
class Run:
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
    log_start: int = 0
    """Position in the output file at which the present attempt starts."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _seen: tuple[int, int, int] | None = None

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
        with contextlib.suppress(FileNotFoundError):
            try:
                record = json.loads(self._record.read_bytes())
                expected = {"recipe": record["recipe"], **record["settings"]}
                self.seconds, started, done = record["seconds"], record["started"], record["done"]
            except (ValueError, TypeError, KeyError) as error:
                raise DataFormatError(
                    f"{self._record}: cannot be read ({error}), expected a record of the sweep; "
                    "delete it to start the run again from its checkpoints"
                ) from error
            given = {"recipe": self.recipe, **self.settings}
            # A run with other settings must not continue from the checkpoints in this folder.
            for key in {**given, **expected}:
                if given.get(key) != expected.get(key):
                    raise ConfigurationError(
                        f"{key}: got {given.get(key, 'none')}, expected "
                        f"{expected.get(key, 'none')}, the value of the earlier run in "
                        f"{self.log_path}; give this sweep another log_dir, or delete that folder "
                        f"and {self._record}"
                    )
            # Its process ended with status 0. A recipe need not save a final checkpoint.
            if done:
                self.state = "done"
            if started is not None:
                # The attempt was killed. Its last row tells how long it ran.
                with contextlib.suppress(OSError):
                    self.seconds += max(0.0, self._rows.stat().st_mtime - started)
        self.read_metrics()
        with contextlib.suppress(DataFormatError):  # the recipe reports this error with its reason
            last = get_last_checkpoint(self.log_path)
            if last is not None and last.final:
                self.state = "done"

    def start(self, server: Server) -> None:
        """Starts the process, which resumes if there is a checkpoint."""
        words = [f"{key}={value}" for key, value in self.point.settings.items()]
        words += [f"log_path={self.log_path}", f"backend={server.url}"]
        # Also for a run without a folder yet: then it starts from the beginning.
        words += ["behavior_if_log_dir_exists=resume"]
        # Saved before the start, so that the record of a killed sweep shows the attempt.
        self.state = "resumed" if self._rows.exists() else "running"
        self.started = time.time()
        self._save()
        # Appended, so that the output of earlier attempts is kept; the position separates them.
        with self.log.open("ab") as log:
            self.log_start = log.tell()
            # SIGKILL is safe for a run, which resumes from its last checkpoint.
            self.process = start_child(
                self.recipe, words, signal.SIGKILL, stdout=log, env=server.environment()
            )

    def finish(self, status: int) -> None:
        """Records the end of the process."""
        self.state = "done" if status == 0 else "failed"
        self.seconds, self.started, self.process = self.elapsed, None, None
        self._save()

    def _save(self) -> None:
        self._record.parent.mkdir(parents=True, exist_ok=True)
        record = {"recipe": self.recipe, "settings": self.settings, "done": self.state == "done"}
        record |= {"seconds": self.seconds, "started": self.started}
        # A sweep killed during the write leaves the old record or the new one.
        write_atomically(self._record, json.dumps(record, indent=2).encode())

    def read_metrics(self, whole: bool = False) -> None:
        """Reads ``metrics.jsonl``: the last 64 KiB if the file has changed, or the whole file."""
        try:
            status = self._rows.stat()
            # The display reads several times a second; most of the time the file has not changed.
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            if seen == self._seen and not whole:
                return
            with self._rows.open("rb") as file:
                file.seek(0 if whole else max(0, status.st_size - _TAIL_BYTES))
                lines = file.read().split(b"\n")
        except OSError:
            return
        self._seen = seen
        # The first line of the tail may be cut, and the run may be writing the last one.
        for line in lines:
            with contextlib.suppress(ValueError, AttributeError):  # an incomplete line
                row = json.loads(line)
                self.metrics |= {
                    name: value
                    for name, value in row.items()
                    if isinstance(value, (int, float)) and not isinstance(value, bool)
                }
                self.step = row.get("step", self.step)
                if self.step and row.get("progress"):
                    self.total = round(self.step / row["progress"])


def run_all(
    runs: Sequence[Run], jobs: int, server: Server, on_change: Callable[[Run], None]
) -> None:
    """Runs everything that waits, in order, ``jobs`` processes at a time.

    ``on_change`` is called with each run that starts or ends. Raises ``BackendError`` if the server
    has ended.
    """
    begun = time.monotonic()
    while True:
        # Processes that have ended make room for waiting runs.
        for run in runs:
            if run.process is not None:
                status = run.process.poll()
                # After the poll: rows that a process wrote before its end are then all read.
                run.read_metrics()
                if status is not None:
                    run.finish(status)
                    on_change(run)
        active = sum(run.process is not None for run in runs)
        for run in (run for run in runs if run.state == "waiting"):
            # A run of a killed sweep may hold its folder for a moment longer.
            locked = lock_holder(run.log_path) is not None
            if active < jobs and not (locked and time.monotonic() - begun < _LOCK_SECONDS):
                run.start(server)
                on_change(run)
                active += 1
        # Checked before the server, which is no longer needed when all runs have ended.
        if all(run.state in ("done", "failed") for run in runs):
            return
        server.check_alive()
        time.sleep(_POLL_SECONDS)


def stop_runs(runs: Sequence[Run]) -> None:
    """Interrupts running processes as Ctrl-C does, and kills those that do not end."""
    active = [(run, run.process) for run in runs if run.process is not None]
    # All are interrupted first, so that they end in parallel within one limit of time.
    for _, process in active:
        process.send_signal(signal.SIGINT)
    until = time.monotonic() + _STOP_SECONDS
    try:
        for _, process in active:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
    finally:  # a second Ctrl-C ends the wait
        for run, process in active:
            process.kill()
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

    def problem(self) -> str | None:
        """Returns why the server cannot be used, or ``None``."""
        # An address that needs a key, so that a wrong key is found as well.
        url, key = f"{self.url}/api/v1/get_server_capabilities", {"X-API-Key": self.key}
        try:  # a proxy cannot reach a server that the sweep started
            answer = httpx.get(url, headers=key, timeout=10.0, trust_env=self.process is None)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"no response: {error}"
        if answer.is_success:
            return None
        return f"it responds with {answer.status_code} {answer.reason_phrase}"

    def stop(self) -> None:
        """Ends the started process, which completes its running operation first."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(2 * _STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def serving(sweep: Sweep) -> Iterator[Server]:
    """Yields the server of a sweep: the one at its URL, or a new one that ends with the block.

    Raises:
        BackendError: The server does not respond, refuses the key, or ended at its start.
    """
    if sweep.server is not None:
        server = Server(sweep.server.rstrip("/"), os.environ["TINKER_API_KEY"])
        if (problem := server.problem()) is not None:
            raise BackendError(f"server={server.url}: {problem}. Check the URL and TINKER_API_KEY")
        yield server
        return
    from tinker_cookbook.engine.home import home_dir  # the engine is optional with server=

    root = home_dir().absolute()
    server = start_server(sweep.models, sweep.server_settings, root, sweep.log_dir)
    try:
        wait_until_ready(server, root)
        yield server
    finally:
        server.stop()


def start_server(
    models: Sequence[str], settings: dict[str, str], root: Path, log_dir: Path
) -> Server:
    """Starts a server on a free port; call ``wait_until_ready`` before you use it.

    Its checkpoints and keys are in ``root``, and its output in ``log_dir/server.log``.
    """
    # A free port, so that several sweeps can run on one machine.
    words = ["port=0", f"model_name={','.join(models)}", f"root={root}"]
    words += [f"{key}={value}" for key, value in settings.items()]
    log = log_dir / "server.log"
    # Old output would contain the port of an earlier server, and mode "x" refuses old files.
    log.unlink(missing_ok=True)
    # The first start of a server prints its new key, so only the user may read the file.
    with open(log, "xb", opener=partial(os.open, mode=0o600)) as file:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        module = "tinker_cookbook.server"
        process = start_child(module, words, signal.SIGTERM, stdout=file, env=environment)
    return Server(process=process, log=log)


def wait_until_ready(server: Server, root: Path) -> None:
    """Waits until a started server responds, and sets its URL and key.

    Raises:
        BackendError: The server ended, or does not respond.
    """
    assert server.log is not None
    until = None
    while True:
        server.check_alive()
        # The start of the server prints a line for each of these words.
        lines = [line.split() for line in server.log.read_text("utf-8", "replace").splitlines()]
        values = {words[0]: words[1] for words in lines if len(words) > 1}
        if "serving" in values and "keys" in values:
            server.url = values["serving"]
            # Read from the key file: only the first start prints the key.
            server.key = json.loads((root / "server_keys.json").read_bytes())["local"]
            server.on_cpu = values.get("device", "cpu").startswith("cpu")
            if (problem := server.problem()) is None:
                return
            # Counts from the line ``serving`` on: loading the models before it may take long.
            until = until or time.monotonic() + 2 * _STOP_SECONDS
            if time.monotonic() > until:
                raise BackendError(f"the server at {server.url} does not respond ({problem})")
        time.sleep(_POLL_SECONDS)


def last_lines(path: Path, count: int = 15, start: int = 0) -> str:
    """Returns the last lines of a text file after byte ``start``, indented."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - (count << 12)))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as error:
        return f"    ({error})"
    # A progress bar overwrites its line, so only the text after the last \r is shown.
    lines = [line.rpartition("\r")[2] for line in text.rstrip().split("\n")]
    return "\n".join(f"    {line}" for line in lines[-count:])
