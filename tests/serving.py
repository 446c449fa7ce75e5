"""The server in a process of its own, as a person starts it."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import forks
import httpx
from prometheus_client.parser import text_string_to_metric_families

SECONDS = 120.0


@dataclass
class Serving:
    """A running server; ``url`` is read off what it says."""

    root: Path
    settings: dict[str, Any]
    process: subprocess.Popen[str] | None = None
    url: str = ""
    said: list[str] = field(default_factory=list)
    launcher: tuple[str, ...] = ()
    """Words between ``python`` and the program, as of torchrun."""
    seconds: float = SECONDS
    """How long a start may take."""

    def start(self) -> Serving:
        """Starts it and waits until it serves."""
        settings = {"port": 0, "device": "cpu", "dtype": "float32", **self.settings}
        words = [f"{name}={value}" for name, value in settings.items()]
        start = functools.partial(subprocess.Popen, text=True) if self.launcher else forks.Popen
        self.process = start(
            [
                *(sys.executable, *self.launcher, "-m", "tinker_cookbook.server"),
                *(f"root={self.root}", *words),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"},
        )
        self.url, self.said = "", []
        reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        reader.start()
        until = time.monotonic() + self.seconds
        while not any(line.startswith("keys ") for line in self.said):
            assert reader.is_alive(), "\n".join(self.said)
            assert time.monotonic() < until, "\n".join(self.said)
            time.sleep(0.05)
        (self.url,) = [line.split()[-1] for line in self.said if line.startswith("serving")]
        return self

    def key(self, owner: str = "local") -> str:
        """An owner's key, from the file."""
        return json.loads((self.root / "server_keys.json").read_bytes())[owner]

    def metrics(self, owner: str = "local") -> dict[str, float]:
        """What ``/metrics`` counts, asked by an owner: sums over the labels."""
        headers = {"Authorization": f"Bearer {self.key(owner)}"}
        text = httpx.get(f"{self.url}/metrics", headers=headers).text
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Ends it; returns the exit status."""
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(60)

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self.said.append(line.rstrip("\n"))


class Caller:
    """HTTP as one owner; ``post("optim_step", model_id=…)`` gives status and answer."""

    def __init__(self, serving: Serving, key: str | None) -> None:
        headers = {} if key is None else {"X-API-Key": key}
        self.http = httpx.Client(base_url=f"{serving.url}/api/v1", headers=headers, timeout=60)

    def post(self, path: str, /, **body):
        answer = self.http.post(path, json=body)
        return answer.status_code, answer.json() if answer.content else None

    def get(self, path: str):
        answer = self.http.get(path)
        return answer.status_code, answer.json()

    def result(self, acknowledged):
        """What comes of a request."""
        status, said = acknowledged
        assert status == 200, said
        while True:
            status, answer = self.post("retrieve_future", request_id=said["request_id"])
            if status != 408:
                assert status == 200, answer
                return answer

    def session(self) -> str:
        return self.post("create_session", sdk_version="test")[1]["session_id"]

    def model(self, base_model: str, session: str | None = None) -> str:
        made = self.post(
            "create_model",
            session_id=session or self.session(),
            model_seq_id=0,
            base_model=base_model,
            lora_config={"rank": 4, "seed": 0},
        )
        return self.result(made)["model_id"]

    def train(self, model: str, number: int, **more):
        """A pass over one datum, in JSON."""
        datum = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 44, 101]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [44, 101, 7], "dtype": "int64", "shape": [3]},
                "weights": {"data": [1, 1, 1], "dtype": "float32", "shape": [3]},
            },
        }
        given = {"data": [datum], "loss_fn": "cross_entropy", **more}
        return self.post(
            "forward_backward", model_id=model, seq_id=number, forward_backward_input=given
        )

    def step(self, model: str, number: int):
        params = {"learning_rate": 0.01}
        return self.post("optim_step", model_id=model, seq_id=number, adam_params=params)
