"""The one server of a sweep: started, asked whether it serves, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.sweep.parent_death import tied_to_parent

SERVER_LOG = "server.log"
KEY_FILE = "server_keys.json"
OWNER = "local"
_POLL_SECONDS = 0.2
_STOP_SECONDS = 60.0
_ASK_SECONDS = 10.0
_LAST_LINES = 15


@dataclass
class Server:
    """Where the runs train.

    Attributes:
        url: Its address.
        key: What opens it.
        on_cpu: Whether it computes on a CPU; taken for granted where it cannot be known.
        process: Its process, where the sweep has started it.
        log: What it says, where the sweep has started it.
    """

    url: str
    key: str
    on_cpu: bool = True
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    def environment(self) -> dict[str, str]:
        """Returns the environment of a run."""
        surroundings = {**os.environ, "TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key}
        surroundings["PYTHONUNBUFFERED"] = "1"  # else a run that is killed takes its last words
        if self.process is not None:
            surroundings.pop("TINKER_CREDENTIAL_CMD", None)  # its key would be another server's
            for name in ("NO_PROXY", "no_proxy"):  # no proxy reaches this machine's own address
                kept = [surroundings[name]] if surroundings.get(name) else []
                surroundings[name] = ",".join([*kept, "127.0.0.1"])
        return surroundings

    def check_alive(self) -> None:
        """Raises ``BackendError`` with its last words when the started process has ended."""
        if self.process is not None and self.process.poll() is not None:
            assert self.log is not None
            raise BackendError(
                f"the server ended with status {self.process.returncode}; {self.log} ends:\n"
                f"{last_lines(self.log)}"
            )

    def stop(self) -> None:
        """Ends the process that was started; it finishes the operation in hand first."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def use_server(url: str) -> Server:
    """Returns a server that runs already, with the key in ``TINKER_API_KEY``.

    Raises:
        BackendError: Nothing answers there, or the key is not one of its.
    """
    server = Server(url.rstrip("/"), os.environ["TINKER_API_KEY"])
    answer = ask(server)
    if answer is not None:
        raise BackendError(f"server={url}: {answer}. Check the URL and TINKER_API_KEY")
    return server


def begin_server(
    models: Sequence[str], settings: dict[str, str], root: Path, log_dir: Path
) -> Server:
    """Starts a server on a free port, and gives it back before it serves; see ``wait_until_up``.

    Args:
        models: Base models to load.
        settings: ``device`` and ``dtype`` where they are given.
        root: Where checkpoints and keys are kept.
        log_dir: Gets what the server says.
    """
    words = ["port=0", f"model_name={','.join(models)}", f"root={root}"]
    words += [f"{key}={value}" for key, value in settings.items()]
    log = log_dir / SERVER_LOG
    log.unlink(missing_ok=True)
    # A first start says the new key, so the file is nobody else's to read.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            tied_to_parent(
                [sys.executable, "-m", "tinker_cookbook.server", *words], signal.SIGTERM
            ),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # a Ctrl-C on the terminal is the sweep's alone
        )
    finally:
        os.close(descriptor)
    return Server("", "", process=process, log=log)


def wait_until_up(server: Server, root: Path) -> None:
    """Waits until a started server answers; fills in its address and key.

    Raises:
        BackendError: It ended instead, or does not take its own key.
    """
    assert server.log is not None
    while not server.url:
        server.check_alive()
        said = server.log.read_text("utf-8", errors="replace").splitlines()
        words = {line.split()[0]: line.split() for line in said if len(line.split()) > 1}
        if "serving" in words and "keys" in words:
            server.url = words["serving"][1]
            server.on_cpu = words.get("device", ["", "cpu"])[1].strip(",").startswith("cpu")
        time.sleep(_POLL_SECONDS)
    server.key = json.loads((root / KEY_FILE).read_bytes())[OWNER]
    until = time.monotonic() + _STOP_SECONDS
    while (answer := ask(server)) is not None:  # it is announced a moment before it listens
        server.check_alive()
        if time.monotonic() > until:
            raise BackendError(f"the server at {server.url} does not serve ({answer})")
        time.sleep(_POLL_SECONDS)


def ask(server: Server) -> str | None:
    """Why the server cannot be used, or ``None`` if it can."""
    request = urllib.request.Request(
        f"{server.url}/api/v1/get_server_capabilities", headers={"X-API-Key": server.key}
    )
    local = urllib.request.ProxyHandler({}) if server.process is not None else None
    opener = urllib.request.build_opener(*([local] if local is not None else []))
    try:
        opener.open(request, timeout=_ASK_SECONDS).close()
    except urllib.error.HTTPError as error:
        with contextlib.closing(error):
            return f"it answers {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return f"no answer: {error.reason}"
    except (OSError, ValueError) as error:
        return f"no answer: {error}"
    return None


def last_lines(path: Path, count: int = _LAST_LINES, start: int = 0) -> str:
    """Returns the end of a text file, indented; of what stands behind byte ``start``."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - (count << 12)))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as error:
        return f"    ({error})"
    # A progress bar writes over itself: what it showed last counts.
    lines = [line.rpartition("\r")[2] for line in text.rstrip().split("\n")]
    return "\n".join(f"    {line}" for line in lines[-count:])
