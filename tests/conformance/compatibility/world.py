"""A server of its own, and the clients that the probes share."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
from tinker import types

from tinker_cookbook.exceptions import BackendError

TOKENS = [1, 44, 101, 7, 9]


@dataclass(frozen=True)
class Server:
    """Where it is, and its key."""

    url: str
    key: str


@contextlib.contextmanager
def served(model_name: str, folder: Path) -> Iterator[Server]:
    """A server in another process, as long as the block lasts."""
    settings = [f"model_name={model_name}", f"root={folder / 'root'}", "port=0"]
    command = [
        sys.executable,
        "-m",
        "tinker_cookbook.server",
        *settings,
        "device=cpu",
        "dtype=float32",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Server(_address(process.stdout), _key(folder / "root" / "server_keys.json"))
        finally:
            process.terminate()


def _address(lines: Iterator[str]) -> str:
    url = ""
    for line in lines:
        if line.startswith("serving"):
            url = line.split()[-1]
        if line.startswith("keys "):
            return url
    raise BackendError("the server ended before it served; its output says why")


def _key(path: Path) -> str:
    return json.loads(path.read_bytes())["local"]


class World:
    """Clients of one server, made when they are first asked for.

    Args:
        url: Of the server.
        key: Of its owner ``local``.
        model: The base model that it serves.
        folder: For what is downloaded.
    """

    def __init__(self, url: str, key: str, model: str, folder: Path) -> None:
        os.environ["TINKER_BASE_URL"], os.environ["TINKER_API_KEY"] = url, key
        os.environ.pop("TINKER_PROJECT_ID", None)
        self.url, self.key, self.model, self.folder = url, key, model, folder
        self.http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60)
        self._futures = False
        self._numbers = itertools.count()

    def with_futures(self) -> World:
        """The same, but whose clients are the futures that the SDK hands out in their place."""
        other = copy.copy(self)
        other.__dict__.pop("sampling", None)
        other.__dict__.pop("training", None)
        other._futures = True
        return other

    @cached_property
    def service(self) -> tinker.ServiceClient:
        """A session."""
        return tinker.ServiceClient(display_name="compatibility")

    @cached_property
    def rest(self) -> tinker.RestClient:
        """Without a session."""
        return tinker.RestClient()

    @cached_property
    def admin(self) -> tinker.AdminClient:
        """Without a session."""
        return tinker.AdminClient()

    @cached_property
    def training(self) -> tinker.TrainingClient:
        """A run that stepped once."""
        client = self.new_training()
        client.forward_backward([datum()], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        return client

    @cached_property
    def sampling(self) -> tinker.SamplingClient:
        """Of the base model."""
        return self._client(self.service.create_sampling_client(base_model=self.model))

    @cached_property
    def loss(self) -> tinker.LossHandle:
        """A traced loss; a session takes each once."""

        def plain_sum(logprobs: Any) -> tuple:
            return -logprobs.sum(), {}

        return self.service.create_custom_loss(plain_sum, {"logprobs": 1}).result()

    def new_training(self, **settings: Any) -> tinker.TrainingClient:
        """A run that nothing has failed on: one failure makes a client useless."""
        made = self.service.create_lora_training_client(self.model, rank=4, seed=0, **settings)
        return self._client(made)

    def saved(self, kind: str = "weights") -> str:
        """The path of a new checkpoint of ``training``."""
        client = self.training
        save = {
            "weights": client.save_state,
            "sampler_weights": client.save_weights_for_sampler,
            "external_weights": client.save_weights_external,
        }[kind]
        return save(self.name()).result().path

    def name(self) -> str:
        """One that was not given before."""
        return f"n{next(self._numbers)}"

    def listed(self, path: str) -> types.Checkpoint | None:
        """A checkpoint's line in the list of its run."""
        found = self.rest.list_checkpoints(run_of(path)).result().checkpoints
        return next((one for one in found if one.tinker_path == path), None)

    def close(self) -> None:
        """Ends the session."""
        self.service.close("success").result()
        self.http.close()

    def _client(self, made: Any) -> Any:
        return made if self._futures else made.result()


def run_of(path: str) -> str:
    """The run that wrote a checkpoint."""
    return path.removeprefix("tinker://").partition("/")[0]


def datum(**more: Any) -> types.Datum:
    """A short sequence of which every token counts."""
    targets = np.array(TOKENS[1:], dtype=np.int64)
    inputs: dict[str, Any] = {"target_tokens": targets}
    inputs |= more or {"weights": np.ones(len(targets), dtype=np.float32)}
    return types.Datum(model_input=prompt(TOKENS[:-1]), loss_fn_inputs=inputs)


def prompt(tokens: list[int] | None = None) -> types.ModelInput:
    """Tokens to begin from."""
    return types.ModelInput.from_ints(TOKENS if tokens is None else tokens)


def loss_of(client: Any) -> float:
    """The loss of ``datum()``, which tells apart weights."""
    return client.forward([datum()], "cross_entropy").result().metrics["loss:sum"]
