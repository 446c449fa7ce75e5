"""Our server with what SkyRL 0.3.0 lacks taken away: real HTTP for the real SDK, in this process.

Recorded from its JAX backend on a CPU, with the SDK of 0.38: losses other than a few are refused,
passes report no metrics, samples have no ids, and fields that it does not know are ignored. Its
FSDP backend answers requests for log-probabilities of prompts with none.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tinker_cookbook.backends.local_sampling import LocalSamplingClient
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.training.run import LossOutput, TrainingRun
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.server.app import make_app
from tinker_cookbook.server.keys import KeyFile
from tinker_cookbook.server.state import ServerState

LOSSES = ("cross_entropy", "importance_sampling")
DOCUMENT = {
    "info": {"title": "Tinker API Mock", "version": "0.0.1"},
    "components": {
        "schemas": {
            "AdamParams": {
                "properties": {
                    "learning_rate": {},
                    "beta1": {},
                    "beta2": {},
                    "eps": {},
                    "weight_decay": {},
                }
            },
            "LoRAConfig": {"properties": {"rank": {}, "seed": {}}},
        }
    },
}


@dataclass
class Restricted:
    """A running server; ``optim_steps`` counts the steps that it took."""

    url: str
    key: str
    optim_steps: int = 0


class _AsSkyRL:
    """Changes three answers of the application ``app``."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if path == "/openapi.json":
            await _answer(send, DOCUMENT)
        elif path == "/api/v1/healthz":
            await _answer(send, {"status": "ok"})
        elif path == "/api/v1/asample":
            await self.app(scope, receive, _WithoutIds(send))
        else:
            await self.app(scope, receive, send)


class _WithoutIds:
    def __init__(self, send: Any) -> None:
        self.send, self.start, self.body = send, None, b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            return
        self.body += message.get("body", b"")
        if not message.get("more_body"):
            answer = json.loads(self.body)
            answer.pop("sample_sequence_ids", None)
            await _answer(self.send, answer, self.start["status"])


async def _answer(send: Any, value: Any, status: int = 200) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def restricted_server(model: str, root: Path) -> Iterator[Restricted]:
    """Serves ``model`` until the end of the block."""
    keys = KeyFile(root / "keys.json", root)
    keys.ensure(["local"])
    key = json.loads((root / "keys.json").read_bytes())["local"]
    engine = Engine("cpu", "float32")
    engine.resolve(model)
    state = ServerState(engine, [model], keys, 120.0, 1000)
    app = _AsSkyRL(make_app(state, 64 << 20))
    settings = uvicorn.Config(app, port=0, log_level="warning", lifespan="on")
    server = uvicorn.Server(settings)
    found = Restricted("", key)
    with pytest.MonkeyPatch.context() as patches:
        _restrict(patches, found)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            thread.join(0.02)
        found.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield found
        state.stopping.set()
        server.should_exit = True
        thread.join(60)
    engine.close()


def _restrict(patches: pytest.MonkeyPatch, found: Restricted) -> None:
    run_pass, sample, step = (
        TrainingRun.forward_backward,
        LocalSamplingClient.sample,
        TrainingRun.optim_step,
    )

    def restricted_pass(self, data, loss_name, loss_config=None, *, backward=True):
        if loss_name not in LOSSES:
            raise DataValidationError(f"Loss functions ['{loss_name}'] are not supported")
        output = run_pass(self, data, loss_name, loss_config, backward=backward)
        return LossOutput(output.logprobs, {})

    def restricted_sample(self, *args, **options):
        options |= {"include_prompt_logprobs": False, "topk_prompt_logprobs": 0}
        return sample(self, *args, **options)

    def counted_step(self, settings):
        found.optim_steps += 1
        return step(self, settings)

    patches.setattr(TrainingRun, "forward_backward", restricted_pass)
    patches.setattr(TrainingRun, "optim_step", counted_step)
    patches.setattr(LocalSamplingClient, "sample", restricted_sample)
