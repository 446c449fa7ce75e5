"""The engine: one worker thread that owns the device, the base models on it, and the runs.

Operations are functions that run on the worker in the order in which they were submitted, so the
operations of one run keep their order and never overlap.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from tinker_cookbook.engine.adapters import Adapter, AdapterSpec
from tinker_cookbook.engine.base_model import BaseModel
from tinker_cookbook.engine.devices import (
    DeviceChoice,
    choose_device,
    cpu_threads,
    free_memory_bytes,
)
from tinker_cookbook.engine.resolve import ResolvedModel, model_config, resolve_model
from tinker_cookbook.engine.store import CheckpointStore
from tinker_cookbook.engine.training_run import TrainingRun

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_ACTIVATION_ELEMENTS_CPU = 192 << 20
"""What a micro-batch's activations may take on a CPU. Small is fast there: a few hundred tokens
keep the caches warm, and more only adds memory."""


class Engine:
    """Owns one device. Everything that touches tensors goes through ``submit``."""

    def __init__(self, device: str = "auto", dtype: str = "auto", root: Path | None = None) -> None:
        self.choice: DeviceChoice = choose_device(device, dtype)
        self.store = CheckpointStore(root)
        self._models: dict[Path, BaseModel] = {}
        self._resolved: dict[str, ResolvedModel] = {}
        self._resolving = threading.Lock()
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="engine", initializer=self._start_worker
        )

    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queues ``fn`` on the worker; returns at once."""
        return self._worker.submit(fn, *args, **kwargs)

    def resolve(self, name: str) -> ResolvedModel:
        """The folder of a model name; raises ``ModelNotFoundError``. Cached."""
        with self._resolving:
            if name not in self._resolved:
                self._resolved[name] = resolve_model(name)
            return self._resolved[name]

    def available_models(self) -> list[tuple[str, int]]:
        """(name, context length) of the models that were asked for so far."""
        out = []
        for name, resolved in self._resolved.items():
            config = model_config(resolved.folder)
            out.append((name, int(config.get("max_position_embeddings", 0))))
        return out

    def base_model(self, name: str) -> BaseModel:
        """Loads a base model, once. Runs on the worker."""
        from transformers.utils.logging import disable_progress_bar

        resolved = self.resolve(name)
        folder = Path(resolved.folder)
        if folder not in self._models:
            disable_progress_bar()  # it would cut into the run's own
            self._models[folder] = BaseModel(name, folder, self.choice.device, self.choice.dtype)
        return self._models[folder]

    def create_run(self, run_id: str, model: str, spec: AdapterSpec, seed: int) -> TrainingRun:
        """A run with a fresh adapter. Runs on the worker."""
        base = self.base_model(model)
        adapter = Adapter.create(spec, base.targets, seed, base.device)
        return TrainingRun(run_id, base, adapter, self.token_budget(base))

    def token_budget(self, base: BaseModel) -> int:
        """Padded tokens a micro-batch may hold, from the memory at hand."""
        budget = _ACTIVATION_ELEMENTS_CPU * base.dtype.itemsize
        if base.device.type != "cpu":
            budget = free_memory_bytes(base.device) // 2
        return max(64, budget // base.activation_bytes_per_token())

    def close(self, wait: bool = True) -> None:
        """Drops what is queued; with ``wait`` also waits for the operation in progress."""
        self._worker.shutdown(wait=wait, cancel_futures=True)

    def _start_worker(self) -> None:
        if self.choice.device.type == "cpu":
            torch.set_num_threads(cpu_threads())
        elif self.choice.device.index is not None:
            torch.cuda.set_device(self.choice.device)
