"""Starts a vLLM server in the environment of another Python."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tinker_cookbook.engine.extensions.vllm import _serve
from tinker_cookbook.engine.home import home_dir

_END_SECONDS = 10.0
"""Seconds that the server gets to shut down before it is killed."""
_OWN_VARIABLES = frozenset(
    {"PYTHONPATH", "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"}
    | {f"{scope}WORLD_SIZE" for scope in ("", "LOCAL_", "GROUP_", "ROLE_")}
)
_WARNING = "WARNING"
_ERROR_LINE = re.compile(r"\b(\w*Error|\w*Exception|error):")


class VLLMProcess:
    """A running server process. ``key`` protects it from other users of the machine.

    Args:
        python: Interpreter with vLLM.
        model: Folder of the base model.
        arguments: Flags of the server, appended to the fixed ones; later flags win.
        variables: Additional environment variables.
    """

    def __init__(
        self, python: str, model: str, arguments: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        self.key, self.port = secrets.token_urlsafe(24), _free_port()
        self._ended = False
        self.url = f"http://127.0.0.1:{self.port}"
        folder = home_dir() / "vllm"
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"server-{os.getpid()}-{self.port}.log"
        command = [python, "-I", _serve.__file__, "--model", model, "--host", "127.0.0.1"]
        # vLLM would otherwise use the sampling defaults in the model's generation_config.json.
        command += ["--port", str(self.port), "--generation-config", "vllm", *arguments]
        own = {
            "VLLM_API_KEY": self.key,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
        }
        # The server must not inherit this environment's paths or torchrun's variables.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in _OWN_VARIABLES and not name.startswith("TORCHELASTIC")
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**inherited, **own, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group of its own, to end its workers too
            )

    @property
    def running(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def exit_reason(self) -> str | None:
        """Returns why the server ended, with the last errors in its log; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        text = self.log.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip() and _WARNING not in line]
        if code < 0:
            return f"its process was ended by signal {-code}; log: {self.log}"
        # The last errors are the cause; the last lines of the log are often unrelated.
        errors = [line for line in lines if _ERROR_LINE.search(line)][-3:] or lines[-3:]
        return f"its process ended with code {code}; log: {self.log}\n" + "\n".join(errors)

    def end(self) -> None:
        """Ends the server and its workers."""
        if self._ended:  # its group id may have been reused
            return
        self._ended = True
        if self._process.poll() is None:
            self._process.terminate()
            until = time.monotonic() + _END_SECONDS
            while self._process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
        # Kill the rest of the group, which holds GPU memory.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def visible_devices(first: int) -> str:
    """Returns ``CUDA_VISIBLE_DEVICES`` for a process that uses GPU number ``first`` of this one
    before the others."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return ",".join([names.pop(first), *names])


def adapters_folder() -> Path:
    """Returns the folder for adapters: in memory (/dev/shm) if available.

    ``TINKER_COOKBOOK_ADAPTERS`` sets another folder, for example one that a remote server can read.
    """
    chosen = os.environ.get("TINKER_COOKBOOK_ADAPTERS")
    if chosen:
        return Path(chosen).expanduser()
    shared = Path("/dev/shm")
    if shared.is_dir() and os.access(shared, os.W_OK):
        return shared
    return home_dir() / "vllm"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
