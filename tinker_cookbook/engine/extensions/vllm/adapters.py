"""The adapters of a vLLM server: each is written once, loaded under its own name, and removed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tinker_cookbook.engine.extensions.vllm.client import VLLMClient
from tinker_cookbook.engine.extensions.vllm.process import adapters_folder
from tinker_cookbook.engine.model.lora import Adapter
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.exceptions import BackendError

logger = logging.getLogger(__name__)

_PREFIX = "tinker-cookbook-"


class _ServedAdapter:
    """Files of one adapter snapshot, and the server that has loaded them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.client: VLLMClient | None = None
        self.loading: asyncio.Task[None] | None = None


class ServedAdapters:
    """Adapters of each sampler. All methods run in one event loop.

    Args:
        submit: Queues a function on the engine's worker, the only thread that reads the tensors.
        loop: The event loop.
    """

    def __init__(self, submit: Callable[..., Future[Any]], loop: asyncio.AbstractEventLoop) -> None:
        self._submit, self._loop = submit, loop
        self._served: weakref.WeakKeyDictionary[Sampler, _ServedAdapter] = (
            weakref.WeakKeyDictionary()
        )
        self._client: VLLMClient | None = None
        self.removals: set[asyncio.Task[None]] = set()
        """Removals in progress, for samplers that no longer exist."""
        place = adapters_folder()
        _remove_left_over(place)
        self.folder = place / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"

    async def name_of(self, sampler: Sampler, client: VLLMClient) -> str:
        """Returns the adapter's name on the server; writes and loads the adapter first if needed.

        Raises ``BackendError`` if the server refuses the adapter.
        """
        self._client = client
        served = self._served.get(sampler)
        if served is None:
            # Names are never reused: the server's prefix cache uses the adapter's name as part of
            # its key.
            name = f"adapter-{uuid.uuid4().hex[:12]}"
            served = self._served[sampler] = _ServedAdapter(name, self.folder / name)
            weakref.finalize(sampler, self._sampler_gone, served).atexit = False
        # Concurrent requests share one load. After a restart of the server, load again.
        if served.loading is None or served.client is not client or _failed(served.loading):
            served.client = client
            served.loading = self._loop.create_task(self._load(sampler, served, client))
        await asyncio.shield(served.loading)
        return served.name

    def stop_loading(self) -> None:
        """Cancels the requests that load adapters."""
        for served in self._served.values():
            if served.loading is not None:
                served.loading.cancel()

    async def unload_all(self) -> None:
        """Unloads all adapters."""
        removals = [self._remove(served) for served in self._served.values()]
        await asyncio.gather(*removals, *self.removals)

    async def _load(self, sampler: Sampler, served: _ServedAdapter, client: VLLMClient) -> None:
        adapter = sampler.adapter
        assert adapter is not None
        if not served.folder.exists():
            writing = self._submit(write_adapter, adapter, sampler.base.name, served.folder)
            await asyncio.wrap_future(writing)
        body = {"lora_name": served.name, "lora_path": str(served.folder)}
        await client.post("/v1/load_lora_adapter", body)

    def _sampler_gone(self, served: _ServedAdapter) -> None:
        # Called by the garbage collector, possibly on another thread.
        try:
            self._loop.call_soon_threadsafe(self._begin_removal, served)
        except RuntimeError:  # the loop has ended, and the server with it
            shutil.rmtree(served.folder, ignore_errors=True)

    def _begin_removal(self, served: _ServedAdapter) -> None:
        task = self._loop.create_task(self._remove(served))
        self.removals.add(task)
        task.add_done_callback(self.removals.discard)

    async def _remove(self, served: _ServedAdapter) -> None:
        client = self._client
        # A restarted server no longer has it.
        if served.loading is not None and served.client is client and client is not None:
            try:
                await asyncio.wait([served.loading])
                if not _failed(served.loading):
                    await client.post("/v1/unload_lora_adapter", {"lora_name": served.name})
            except BackendError as error:  # the server has ended: nothing to unload
                logger.debug("vLLM did not unload %s: %s", served.name, error)
        served.loading = None
        shutil.rmtree(served.folder, ignore_errors=True)


def write_adapter(adapter: Adapter, base_model: str, folder: Path) -> None:
    """Writes an adapter in PEFT's format. Runs on the engine's worker."""
    # Renamed when complete, so that an incomplete adapter is never loaded.
    part = folder.with_name(f"{folder.name}.part")
    part.mkdir(parents=True)
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in adapter.parameters().items()
    }
    save_file(tensors, part / "adapter_model.safetensors")
    config = json.dumps(adapter.peft_config(base_model))
    (part / "adapter_config.json").write_text(config, encoding="utf-8")
    part.rename(folder)


def _remove_left_over(place: Path) -> None:
    """Removes files of killed processes: the folder may be in memory."""
    for folder in place.glob(f"{_PREFIX}*-*"):
        process = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists() and Path("/proc").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
