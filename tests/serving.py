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
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from tinker.proto import response_conv
from tinker.proto import tinker_public_pb2 as pb

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

    def cpu_seconds(self) -> float:
        """CPU time of the process so far, which other work of the machine does not change."""
        assert self.process is not None
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

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
        """What comes of a request; a sample or a pass as a dictionary."""
        status, said = acknowledged
        assert status == 200, said
        while True:
            answer = self.http.post("retrieve_future", json={"request_id": said["request_id"]})
            if answer.status_code == 408:
                continue
            assert answer.status_code == 200, answer.text
            if "json" in answer.headers["content-type"]:
                return answer.json()
            if ":sample:" in said["request_id"]:
                found = response_conv.deserialize_sample_response(answer.content)
                names = ("sequences", "prompt_logprobs")
                found = {name: getattr(found, name) for name in names}
                sequences = [
                    {name: getattr(one, name) for name in ("tokens", "logprobs", "stop_reason")}
                    for one in found["sequences"]
                ]
                return {**found, "sequences": sequences}
            return vars(response_conv.deserialize_forward_backward_output(answer.content))

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

    def train(self, model: str, number: int, loss_fn: str = "cross_entropy", data=None):
        """A pass over tokens of weight 1; ``data`` are pairs of inputs and targets."""
        message = pb.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn=loss_fn)
        for tokens, targets in data or [([1, 44, 101], [44, 101, 7])]:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.int32(tokens).tobytes()
            for name, values, dtype in (
                ("target_tokens", np.int64(targets), pb.DTYPE_INT64),
                ("weights", np.ones(len(targets), np.float32), pb.DTYPE_FLOAT32),
            ):
                tensor = datum.loss_fn_inputs[name]
                tensor.dense, tensor.dtype = values.tobytes(), dtype
        return self.send_pass(message.SerializeToString())

    def send_pass(self, content):
        """A body of a pass as it is."""
        headers = {"Content-Type": "application/x-protobuf"}
        answer = self.http.post("forward_backward", content=content, headers=headers)
        return answer.status_code, answer.json()

    def step(self, model: str, number: int):
        params = {"learning_rate": 0.01}
        return self.post("optim_step", model_id=model, seq_id=number, adam_params=params)
