"""Runs the engine's sampling requests in a vLLM server, with the built-in sampler's result format.

vLLM only samples. The engine scores prompts: prompt log-probabilities of vLLM fail with an
adapter on the head. The end of a sample is decided here, token by token, as in the built-in
sampler; the stop conditions sent to vLLM only save it work.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinker_cookbook.engine.extensions.vllm.adapters import ServedAdapters
from tinker_cookbook.engine.extensions.vllm.client import (
    Choice,
    ServedModel,
    VLLMClient,
    probe_server,
)
from tinker_cookbook.engine.extensions.vllm.process import VLLMProcess, visible_devices
from tinker_cookbook.engine.memory import release_cached_memory
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.engine.model.resolve import model_config
from tinker_cookbook.engine.sampler_settings import (
    ARCHITECTURES_WITH_HEAD,
    CHECKED_VERSION,
    LORA_RANKS,
    SamplerSettings,
    lora_rank_limit,
)
from tinker_cookbook.engine.sampling.requests import Sample, SampledSequence, SampleRequest
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.exceptions import BackendError, ConfigurationError, DataValidationError

logger = logging.getLogger(__name__)

_NAME = "base"
_START_SECONDS = 1800.0  # loading a large model from a slow disk
_POLL_SECONDS = 0.25
_LEAST_RANK = 32
_MOST_ADAPTERS, _MOST_ADAPTERS_CPU = 4, 32
_MEMORY_SHARE = 0.45
"""Share of the GPU's memory for a server on the trainer's GPU; the trainer has the rest."""
_SLEEP_FLAG = "--enable-sleep-mode"
_MOST_STARTS = 3
"""Failed starts in a row after which the server is not started again."""


@dataclass
class _Server:
    """A ready server. ``process`` is None if it was started elsewhere."""

    client: VLLMClient
    model: ServedModel
    process: VLLMProcess | None = None
    asleep: bool = False

    @property
    def ended(self) -> bool:
        """Whether its process is known to have ended."""
        return self.process is not None and not self.process.running


class VLLMSampler:
    """Runs sampling requests of one base model in vLLM.

    Args:
        settings: ``sampler`` is a URL or ``vllm``.
        device: The trainer's device.
        dtype: Precision of the base model, also in vLLM.
        submit: Queues a function on the engine's worker.

    Raises:
        ConfigurationError: No server answers at the URL.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        device: torch.device,
        dtype: torch.dtype,
        submit: Callable[..., Future[Any]],
    ) -> None:
        self._settings, self._device, self._dtype = settings, device, dtype
        self._submit = submit
        self._key = os.environ.get("VLLM_API_KEY") if settings.url else None
        url = settings.url
        self._given = None if url is None else probe_server(url, self._key)
        self._base: BaseModel | None = None
        self._others: set[BaseModel] = set()
        self._server: asyncio.Task[_Server] | None = None
        self._starts = 0
        self._requests: set[asyncio.Task[None]] = set()
        self._waking = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._adapters = ServedAdapters(submit, self._loop)
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        # Also ends the server if the engine is garbage-collected or never closed.
        self._processes: list[VLLMProcess] = []
        self._end = weakref.finalize(
            self, _end, self._processes, self._adapters.folder, self._loop, self._thread
        )

    def require(self, base: BaseModel, spec: AdapterSpec) -> None:
        """Raises ``ConfigurationError`` if vLLM was requested but cannot sample for this run."""
        reason = _unsupported(base, spec)
        if reason is not None and self._settings.sampler != "auto":
            raise ConfigurationError(
                f"sampler={self._settings.sampler}: {reason}, or set sampler=builtin"
            )
        if self._given is not None and not _same_model(self._given.root, base):
            raise ConfigurationError(
                f"sampler: the server at {self._settings.url} has the model {self._given.root}, "
                f"but the run trains {base.name}; start a server with that model, or set "
                "sampler=builtin"
            )

    def takes(self, request: SampleRequest) -> bool:
        """Returns whether vLLM samples the request; if not, the built-in sampler does."""
        base, adapter = request.sampler.base, request.sampler.adapter
        # A mask is a Python object that is called before each token. Images have ids of the engine.
        if request.settings.token_mask is not None or request.images:
            return False
        if adapter is not None and (reason := _unsupported(base, adapter.spec)) is not None:
            self._warn_once(base, reason)
            return False
        if self._base is None and (self._given is None or _same_model(self._given.root, base)):
            self._base = base
        if base is not self._base:
            self._warn_once(base, "the vLLM server has another model")
        return base is self._base

    def sample(self, request: SampleRequest) -> Future[list[Sample]]:
        """Samples a request; cancelling its future also aborts it in the server."""
        task = asyncio.run_coroutine_threadsafe(self._run(request), self._loop)
        # Cancelling the task closes the connection, and the server then aborts the request.
        request.future.add_done_callback(lambda done: done.cancelled() and task.cancel())
        return request.future

    def rest(self) -> None:
        """Puts an idle server to sleep, if it supports that, to free its memory for training.

        Blocks until the server sleeps; called on the engine's worker.
        """
        if _SLEEP_FLAG in self._settings.vllm_args and self._server is not None:
            asyncio.run_coroutine_threadsafe(self._sleep(), self._loop).result()

    def close(self) -> None:
        """Ends a server that this object started, and removes all adapters."""
        # Callbacks of futures run on the loop's thread and may close the engine.
        if threading.current_thread() is self._thread:
            threading.Thread(target=self.close).start()
            return
        if self._end.alive:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._end()

    def _warn_once(self, base: BaseModel, reason: str) -> None:
        if base not in self._others:
            self._others.add(base)
            logger.warning("%s is sampled by the built-in sampler: %s", base.name, reason)

    async def _run(self, request: SampleRequest) -> None:
        current = asyncio.current_task()
        assert current is not None
        self._requests.add(current)
        try:
            await self._sample_at(await self._ready_server(request.sampler), request)
        except asyncio.CancelledError:
            request.future.cancel()
        except Exception as error:
            request.fail(error)
        finally:
            self._requests.discard(current)

    async def _sample_at(self, server: _Server, request: SampleRequest) -> None:
        await self._wake(server)
        name = server.model.name
        if request.sampler.adapter is not None:
            name = await self._adapters.name_of(request.sampler, server.client)
        body = request_body(request, name, server.model.max_length)
        # At temperature 0 all samples are equal, and vLLM rejects ``n`` > 1.
        rows = list(request.rows)
        rows_of = {0: rows} if body["n"] < len(rows) else {i: [row] for i, row in enumerate(rows)}
        cached = 0
        if request.on_token is None:
            choices, cached = await server.client.complete(body)
            for index, choice in enumerate(choices):
                _append(rows_of[index], choice)
        else:
            async with aclosing(server.client.stream(body)) as parts:
                async for index, choice in parts:
                    _append(rows_of[index], choice)
                    if all(row.ended for row in rows):
                        break  # the server would continue samples that have ended here
        for row in rows:
            row.sample.cached_prompt_tokens = min(cached, len(request.prompt))
            request.row_ended()

    async def _ready_server(self, sampler: Sampler) -> _Server:
        """Returns the server. The first request starts it; concurrent requests wait for the same
        start."""
        task = self._server
        if task is not None and task.done() and not task.cancelled():
            if (error := task.exception()) is not None:
                # Memory may be free by now. Other failures repeat themselves, each after minutes.
                if self._starts < _MOST_STARTS:
                    logger.warning("vLLM is started again: %s", error)
                    task = None
            elif (server := task.result()).ended and server.process is not None:
                logger.warning("vLLM is started again: %s", server.process.exit_reason())
                await server.client.close()
                task = None
        if task is None:
            self._starts += 1
            task = self._server = self._loop.create_task(self._start(sampler))
        return await asyncio.shield(task)

    async def _start(self, sampler: Sampler) -> _Server:
        timeout = self._settings.vllm_timeout
        if self._given is not None:
            url = self._settings.url or ""
            return _Server(VLLMClient(url, self._key, timeout), self._given)
        arguments, variables = self._command(sampler)
        await self._release_memory()
        process = VLLMProcess(
            self._settings.python(), str(sampler.base.folder), arguments, variables
        )
        self._processes[:] = [process]
        began = time.monotonic()
        logger.info("vLLM starts with %s; log: %s", sampler.base.name, process.log)
        client = VLLMClient(process.url, process.key, timeout, process.exit_reason)
        try:
            while not await client.healthy():
                if not process.running:
                    raise BackendError(f"vLLM did not start: {process.exit_reason()}")
                if time.monotonic() - began > _START_SECONDS:
                    raise BackendError(
                        f"vLLM did not start within {_START_SECONDS:g} s; log: {process.log}"
                    )
                await asyncio.sleep(_POLL_SECONDS)
            model = await asyncio.to_thread(probe_server, process.url, process.key)
        except BaseException:
            process.end()
            raise
        self._starts = 0
        logger.info("vLLM answers after %.0f s", time.monotonic() - began)
        return _Server(client, model, process)

    def _command(self, sampler: Sampler) -> tuple[list[str], dict[str, str]]:
        """Returns flags and environment variables of the server."""
        rank = _LEAST_RANK if sampler.adapter is None else sampler.adapter.spec.rank
        limit = lora_rank_limit(max(rank, _LEAST_RANK))
        dtype = str(self._dtype).removeprefix("torch.")
        arguments = ["--served-model-name", _NAME, "--dtype", dtype, "--enable-lora"]
        arguments += ["--max-lora-rank", str(limit), "--max-loras", str(_MOST_ADAPTERS)]
        arguments += ["--max-cpu-loras", str(_MOST_ADAPTERS_CPU), "--max-logprobs", "-1"]
        arguments += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        # vLLM's default seed is 0: requests without a seed would get equal samples in every run.
        arguments += ["--seed", str(secrets.randbits(31))]
        if self._device.type == "cuda":
            arguments += ["--gpu-memory-utilization", str(_MEMORY_SHARE)]
        else:
            # On CPUs, vLLM 0.32 crashes if the prompt of a request with a seed is split between
            # steps.
            arguments += ["--no-enable-chunked-prefill"]
        variables, words = self._settings.words
        if self._device.index:  # by itself vLLM uses the first visible GPU
            variables = {"CUDA_VISIBLE_DEVICES": visible_devices(self._device.index), **variables}
        if _SLEEP_FLAG in words:
            variables = {"VLLM_SERVER_DEV_MODE": "1", **variables}
        return [*arguments, *words], variables

    async def _sleep(self) -> None:
        # Check before taking the lock: a request that holds it may wait for the worker, and the
        # worker waits for this coroutine.
        task = self._server
        if self._requests or task is None or not task.done() or task.exception():
            return
        async with self._waking:
            server = task.result()
            if server.asleep or server.ended:
                return
            try:
                await server.client.post("/sleep?level=1", {})  # the weights go to host memory
            except BackendError as error:  # the pass may fit nevertheless
                logger.warning("vLLM keeps its memory during training: %s", error)
            else:
                server.asleep = True

    async def _wake(self, server: _Server) -> None:
        async with self._waking:
            if server.asleep:
                await self._release_memory()
                await server.client.post("/wake_up", {})
                server.asleep = False

    async def _release_memory(self) -> None:
        """Frees the trainer's cached memory for the server."""
        # After the training pass in progress: trainer and server cannot use the memory at once.
        await asyncio.wrap_future(self._submit(release_cached_memory, self._device))

    async def _close(self) -> None:
        """Ends all requests and connections."""
        # No other task is cancelled: an HTTP call that unloads an adapter has tasks of its own.
        ended = [*self._requests] if self._server is None else [*self._requests, self._server]
        for task in ended:
            task.cancel()
        outcomes = await asyncio.gather(*ended, return_exceptions=True)
        outcome = outcomes[-1] if self._server is not None else None
        if isinstance(outcome, _Server):
            # A server process of this object ends anyway, so only external servers need unloading.
            if outcome.process is None:
                await self._adapters.unload_all()
            else:
                self._adapters.stop_loading()
            await outcome.client.close()


def _append(rows: Sequence[SampledSequence], choice: Choice) -> None:
    """Appends the tokens of a choice to samples; drops those after the end of a sample."""
    for row in rows:
        request, k = row.request, row.request.topk
        for place, token in enumerate(choice.tokens):
            if row.ended:
                break
            logprob = choice.logprobs[place]
            if not math.isfinite(logprob):
                raise request.sampler.diverged(row.length)
            top = _best(choice.top[place], k) if k else None
            request.sampler.base.sampled_tokens += 1
            row.add(token, logprob, top)
        # vLLM ended the sample at a stop string that its own detokenizer found.
        if choice.stopped and not row.ended:
            row.sample.stop_reason, row.ended = "stop", True


def request_body(request: SampleRequest, model: str, max_length: int | None) -> dict[str, Any]:
    """Returns the body of ``/v1/completions`` for a request.

    Raises ``DataValidationError`` if the prompt fills the server's context.
    """
    settings, limit = request.settings, request.limit
    if max_length is not None:
        limit = min(limit, max_length - len(request.prompt))
    if limit < 1:
        raise DataValidationError(
            f"prompt: {len(request.prompt)} tokens leave no room in the vLLM server's context of "
            f"{max_length}; shorten the prompt, or start it with a larger --max-model-len"
        )
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt.tolist(),
        "n": 1 if settings.temperature == 0 else request.num_samples,
        "max_tokens": limit,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": max(settings.top_k, 0),
        "min_p": settings.min_p,
        "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty,
        "repetition_penalty": settings.repetition_penalty,
        "min_tokens": settings.min_tokens,
        # The request's stop tokens already include the end-of-sequence tokens, if it has any.
        "ignore_eos": True,
        "stop_token_ids": sorted(settings.stop_tokens),
        "skip_special_tokens": False,
        "logprobs": request.topk,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if settings.stop_strings:
        body["stop"] = list(settings.stop_strings)
        body["include_stop_str_in_output"] = True
    if settings.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in settings.logit_bias.items()}
    if settings.seed is not None:
        body["seed"] = _seed_of(settings.seed)
    return body


def _seed_of(seed: int) -> int:
    """Hashes a seed, so that no two requests give a sample the same seed."""
    # vLLM adds the sample's index to the seed: sample 1 of seed 0 would equal sample 0 of seed 1.
    high, low = np.random.SeedSequence(seed).generate_state(2)
    return ((int(high) << 32) | int(low)) >> 2


def _best(scores: dict[int, float], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the k most probable tokens and their log-probabilities."""
    # The scores also include the sampled token, even if k other tokens are more probable.
    best = sorted(scores.items(), key=lambda item: -item[1])[:k]
    ids, values = zip(*best, strict=True)
    return np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)


def _end(
    processes: Sequence[VLLMProcess],
    folder: Path,
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
) -> None:
    """Ends the thread and the server, and removes the adapters."""
    loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:
        thread.join()
        loop.close()
    for process in processes:
        process.end()
    shutil.rmtree(folder, ignore_errors=True)


def _unsupported(base: BaseModel, spec: AdapterSpec) -> str | None:
    """Returns why vLLM cannot apply such an adapter and what to change; None if it can."""
    architecture = next(iter(model_config(base.folder).get("architectures") or []), "")
    if spec.train_vision:
        return "vLLM ignores adapters on vision towers; set train_vision=False"
    if spec.train_unembed and architecture not in ARCHITECTURES_WITH_HEAD:
        return (
            f"vLLM {CHECKED_VERSION} has no adapters on the head of {architecture or base.name}; "
            "set train_unembed=False"
        )
    if any(target.experts for target in spec.covered(base.targets)):
        return "vLLM was not tested with adapters on routed experts; set train_mlp=False"
    if lora_rank_limit(spec.rank) is None:
        return f"vLLM supports ranks up to {LORA_RANKS[-1]}; lower lora_rank (got {spec.rank})"
    return None


def _same_model(root: str, base: BaseModel) -> bool:
    """Returns whether a server's model is ``base``: same path, or same last part of the name."""
    # A server in a container sees the same folder under another path.
    names: Sequence[str] = (base.name, str(base.folder))
    return root in names or Path(root).name.lower() in {Path(name).name.lower() for name in names}
