"""The server in a process of its own, as a person starts it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS = 120.0


@dataclass
class Serving:
    """A running server; ``url`` is read off what it says."""

    root: Path
    settings: dict[str, Any]
    process: subprocess.Popen[str] | None = None
    url: str = ""
    said: list[str] = field(default_factory=list)

    def start(self) -> Serving:
        """Starts it and waits until it serves."""
        settings = {"port": 0, "device": "cpu", "dtype": "float32", **self.settings}
        words = [f"{name}={value}" for name, value in settings.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tinker_cookbook.server", f"root={self.root}", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"},
        )
        self.said, lines = [], queue.Queue[str]()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        while not self.said or not self.said[-1].startswith("keys "):
            self.said.append(lines.get(timeout=SECONDS))
            assert self.said[-1], "\n".join(self.said)
        self.url = self.said[0].split()[-1] if self.said[0].startswith("serving") else ""
        assert self.url, "\n".join(self.said)
        return self

    def key(self, owner: str = "local") -> str:
        """An owner's key, from the file."""
        return json.loads((self.root / "server_keys.json").read_bytes())[owner]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Ends it; returns the exit status."""
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(60)

    def _read(self, lines: queue.Queue[str]) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.put(line.rstrip("\n"))
            self.said.append(line.rstrip("\n")) if self.url else None
        lines.put("")
