"""The engine: one worker thread that owns the device, the base models on it, and the runs.

Operations are functions that run on the worker, one at a time. Operations of one lane (a run, or
the scores of an owner) run in the order of submission, and lanes alternate. Sampling requests are
not operations: they join the running batch of their base model (``scheduler``), which shares the
time with operations.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from tinker_cookbook.engine.device_names import check_base_dtype_name, check_joint_training
from tinker_cookbook.engine.devices import (
    DeviceChoice,
    choose_device,
    cpu_threads,
    free_memory_bytes,
)
from tinker_cookbook.engine.kernels import quantized_layout
from tinker_cookbook.engine.memory import MemoryBudget
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.loading import (
    import_architecture,
    import_library,
    size_text,
    weights_bytes,
)
from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec
from tinker_cookbook.engine.model.resolve import ResolvedModel, model_config, resolve_model
from tinker_cookbook.engine.processes import factory
from tinker_cookbook.engine.sampler_settings import SamplerSettings
from tinker_cookbook.engine.sampling.fair_queue import owner_of
from tinker_cookbook.engine.sampling.fallback_sampler import FallbackSampler
from tinker_cookbook.engine.sampling.requests import (
    PromptScores,
    RequestStats,
    Sample,
    SampleRequest,
    ScoreRequest,
)
from tinker_cookbook.engine.sampling.scheduler import Scheduler
from tinker_cookbook.engine.sampling.scoring import Scorer
from tinker_cookbook.engine.training.run import TrainingRun
from tinker_cookbook.engine.vision.processing import ImageReader, image_reader
from tinker_cookbook.engine.worker import Joinable, Worker
from tinker_cookbook.exceptions import ConfigurationError, OutOfMemoryError
from tinker_cookbook.leaves import load_leaf

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_ACTIVATION_BYTES_CPU = 384 << 20
"""Memory of a micro-batch's activations on a CPU. Small micro-batches are fast there: a few hundred
tokens fit into the caches, and more only adds memory."""


class Engine:
    """Owns one device. All tensor operations go through ``submit``.

    ``base_dtype`` (auto, nf4 or int8) quantises the base models; ``replay_router`` trains routed
    experts with the sampler's choices; ``joint_training`` (auto, true or false) computes small
    passes of several runs together; ``shard_base`` divides the base models among the processes of
    torchrun.
    """

    def __init__(
        self,
        device: str = "auto",
        dtype: str = "auto",
        base_dtype: str = "auto",
        replay_router: bool = False,
        joint_training: str = "auto",
        *,
        shard_base: bool = False,
    ) -> None:
        self._processes = factory.make()
        self.choice: DeviceChoice = choose_device(self._processes.device(device), dtype)
        self.base_dtype = check_base_dtype_name(base_dtype)
        self.replay_router = replay_router
        joint = check_joint_training(joint_training)
        if joint == "true" and self._processes.several:
            raise ConfigurationError(
                "joint_training=true: torchrun started several processes, each of which computes a "
                "part of every batch; start one, or leave joint_training out"
            )
        self._joins_passes = not self._processes.several and (
            joint == "true" or (joint == "auto" and self.choice.device.type == "cuda")
        )
        # Before the worker starts, which must import nothing (see ``loading``), and before anything
        # is loaded, so that a missing package is reported.
        if self._joins_passes:
            load_leaf("engine.extensions.joint", f"joint_training={joint}")
        if replay_router:
            load_leaf("engine.extensions.router_replay", "replay_router=true")
        quantized_layout(self.base_dtype)
        import_library(self.choice.device)
        self._models: dict[Path, BaseModel] = {}
        self._resolved: dict[str, ResolvedModel] = {}
        self._resolving = threading.Lock()
        self._schedulers: dict[BaseModel, Scheduler | FallbackSampler] = {}
        self._arrived: deque[SampleRequest] = deque()
        self.external: Any = None
        """A ``VLLMSampler`` that samples instead of the engine's own batch, where it can; scores
        are always its own."""
        self.sample_entropies = False
        """Whether samples of the engine's own batch have entropies, which a run's record keeps."""
        self.on_sample_end: Callable[[RequestStats, Future[list[Sample]]], None] | None = None
        """Called on the engine's thread when a sampling request ends; it must return at once."""
        self._memory = MemoryBudget(self.choice.device)
        self._scorer = Scorer(self.token_budget, self.pause)
        self._processes.open(device, dtype, self.base_dtype, replay_router, shard_base)
        self._worker = Worker(self._start_worker, self._sample_step, self._drop_samples)

    @property
    def processes(self) -> int:
        """Number of processes that train: those of torchrun, or this one."""
        return self._processes.count

    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queues ``fn`` on the worker in the default lane; returns at once."""
        return self.submit_in(None, fn, *args, **kwargs)

    def submit_in(
        self, lane: Hashable, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Queues ``fn`` at the end of its lane; lanes alternate after each operation."""
        return self._worker.submit(partial(fn, *args, **kwargs), lane)

    def submit_joinable(
        self, lane: Hashable, work: Callable[[], T], joinable: Joinable
    ) -> Future[T]:
        """Queues ``work``, which may be computed together with operations of other lanes."""
        return self._worker.submit(work, lane, joinable if self._joins_passes else None)

    def sample(self, request: SampleRequest) -> Future[list[Sample]]:
        """Runs a sampling request in one batch with other requests.

        Cancelling the future, at any time, frees the request's memory.
        """
        self._watch(request)
        if self.external is not None and self.external.takes(request):
            return self.external.sample(request)
        # In this order, so that the woken thread finds the request.
        self._arrived.append(request)
        self._worker.wake()  # raises if the engine is closed
        return request.future

    def score(self, request: ScoreRequest) -> Future[PromptScores]:
        """Scores a text, in one batch with other waiting requests of its sampler.

        Requests of different owners alternate, so that one owner's queue does not delay others.
        Cancelling the future, at any time, cancels the request.
        """
        if request.sample is not None:
            self._watch(request.sample)
        # Registered before it is queued: the batch of an earlier request can then include it.
        self._scorer.add(request)
        lane = "scores", owner_of(request)
        self.submit_in(lane, self._scorer.serve, request).add_done_callback(request.follow)
        return request.future

    def resolve(self, name: str) -> ResolvedModel:
        """Returns the folder of a model name (cached); raises ``ModelNotFoundError``."""
        # Clients resolve names on their own threads; a lock keeps two from downloading one model.
        with self._resolving:
            if name not in self._resolved:
                resolved = resolve_model(name)
                import_architecture(Path(resolved.folder))
                self._resolved[name] = resolved
            return self._resolved[name]

    def image_reader(self, name: str) -> ImageReader:
        """Returns the reader of images for a model; raises ``ConfigurationError`` for others."""
        return image_reader(name, Path(self.resolve(name).folder))

    def adopt(self, name: str, resolved: ResolvedModel) -> None:
        """Takes the folder of a model name from another process, which has resolved it."""
        import_architecture(Path(resolved.folder))
        self._resolved[name] = resolved

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens, including cancelled and failed requests."""
        return sum(base.sampled_tokens for base in list(self._models.values()))

    def sampling_load(self) -> dict[str, tuple[int, int, float | None]]:
        """Returns the ``load`` of each base model that has sampled, by its name."""
        return {base.name: batch.load() for base, batch in list(self._schedulers.items())}

    def _watch(self, request: SampleRequest) -> None:
        if (ended := self.on_sample_end) is not None:
            # Of the request only its numbers: its future would otherwise keep it in memory.
            request.future.add_done_callback(partial(ended, request.stats))

    def available_models(self) -> list[tuple[str, int]]:
        """Returns (name, context length) of the models requested so far."""
        out = []
        for name, resolved in self._resolved.items():
            config = model_config(resolved.folder)
            config = {**config, **(config.get("text_config") or {})}  # of a vision-language model
            out.append((name, int(config.get("max_position_embeddings", 0))))
        return out

    def base_model(self, name: str) -> BaseModel:
        """Loads a base model once. Runs on the worker.

        Raises ``OutOfMemoryError`` before loading if it does not fit next to the loaded ones.
        """
        from transformers.utils.logging import disable_progress_bar

        resolved = self.resolve(name)
        folder = Path(resolved.folder)
        if folder not in self._models:
            device, dtype = self.choice.device, self.choice.dtype
            # The first model is always tried; for a further one an estimate comes before the load.
            if self._models:
                self._check_room(name, folder)
            disable_progress_bar()  # it would disturb the display of the run
            make = partial(
                BaseModel, name, folder, device, dtype, self.base_dtype, self.replay_router
            )
            self._models[folder] = self._processes.load_base(name, resolved, make)
        return self._models[folder]

    def _check_room(self, name: str, folder: Path) -> None:
        # On a CPU, loading a too large model raises no error: the kernel kills the process and all
        # runs.
        device, dtype = self.choice.device, self.choice.dtype
        sizes = [
            (one, weights_bytes(at, dtype, self.base_dtype, self._processes.shards))
            for one, at in ((name, folder), *((m.name, at) for at, m in self._models.items()))
        ]
        needed, *others = [f"{one!r} ({size_text(size)})" for one, size in sizes]
        free, loaded = free_memory_bytes(device), ", ".join(others)
        if sizes[0][1] + _ACTIVATION_BYTES_CPU > free:
            half = ", or hold them in half the memory with dtype=bfloat16"
            raise OutOfMemoryError(
                f"{needed} and {size_text(_ACTIVATION_BYTES_CPU)} to compute with do not fit: "
                f"{size_text(free)} are free on {device}, where {loaded} is loaded already. Choose "
                f"a smaller model{half if dtype.itemsize > 2 else ''}"
            )
        left = size_text(free - sizes[0][1])
        logger.info("Base models on %s: %s and %s; that leaves %s.", device, loaded, needed, left)

    def use_sampler(self, settings: SamplerSettings) -> str:
        """Chooses the sampler; returns the sentence for the user that says which one, and why.

        Raises:
            ConfigurationError: vLLM is requested and missing, or no server answers at the URL.
        """
        device = self.choice.device
        # vLLM has other weights than a quantised base, and does not tell what its routers chose.
        own = {"base_dtype": self.base_dtype != "auto", "replay_router": self.replay_router}
        if needed := [name for name, on in own.items() if on]:
            if settings.sampler not in ("auto", "builtin"):
                raise ConfigurationError(
                    f"sampler={settings.sampler}: {' and '.join(needed)} work with the engine's "
                    "own sampler; set sampler=builtin"
                )
            settings = replace(settings, sampler="builtin")
        name, reason = settings.choose(device.type)
        if name != "builtin":
            try:
                vllm = load_leaf("engine.extensions.vllm.sampler", f"sampler={name}")
                self.external = vllm.VLLMSampler(settings, device, self.choice.dtype, self.submit)
            except ConfigurationError:
                self.close()
                raise
        return reason

    def require_trainable(self) -> None:
        """Raises ``ConfigurationError`` for dtypes in which gradients underflow or overflow."""
        if self.choice.dtype == torch.float16:
            raise ConfigurationError(
                "dtype: got float16, in which gradients need loss scaling, which the engine does "
                "not have; set dtype=bfloat16 or dtype=float32 to train (float16 can sample)"
            )

    def create_run(self, run_id: str, model: str, spec: AdapterSpec, seed: int) -> TrainingRun:
        """Creates a run with a new adapter. Runs on the worker."""
        base = self.trained_base(model)
        if spec.rank == 0:
            full = load_leaf("engine.extensions.full", "lora_rank=0")
            return full.open_run(self, run_id, base)
        base.require_covered(spec)
        if self.external is not None:
            self.external.require(base, spec)
        adapter = Adapter.create(spec, base.targets, seed, base.device)
        return self.new_run(run_id, base, adapter)

    def trained_base(self, name: str) -> BaseModel:
        """Returns ``base_model(name)``, which all processes of torchrun load at the same time."""
        with self._processes.loading(name, self.resolve(name)):
            return self.base_model(name)

    def new_run(self, run_id: str, base: BaseModel, adapter: Adapter, step: int = 0) -> TrainingRun:
        """Returns a run of ``trained_base``, which shares its batches among the processes."""
        measure = partial(self.token_budget, base, adapter.spec.train_vision)
        pause = self._worker.pause
        return self._processes.new_run(run_id, base, adapter, measure(), step, pause, measure)

    def token_budget(self, base: BaseModel, train_vision: bool = False) -> int:
        """Returns the maximum padded tokens of a micro-batch, from the free memory."""
        budget = _ACTIVATION_BYTES_CPU
        if base.device.type != "cpu":
            budget = self._memory.training_bytes()
        needed = base.activation_bytes_per_token
        if train_vision and base.vision is not None:
            needed += base.vision.activation_bytes_per_token(base.dtype.itemsize)
        tokens = max(64, budget // needed)
        return base.limits.budget(tokens, partial(free_memory_bytes, base.device))

    def close(self, wait: bool = True) -> None:
        """Drops queued operations; with ``wait`` waits for the running one."""
        external, self.external = self.external, None
        if external is not None:
            external.close()
        self._worker.close(wait)
        self._processes.close(wait)

    def begin_pass(self) -> None:
        """Makes room for a training pass. Runs on the worker."""
        if self.external is not None:
            self.external.rest()

    def pause(self) -> None:
        """Yields to sampling; long operations call it between their parts."""
        self._worker.pause()

    def _sample_step(self) -> bool:
        """Runs one step of every running batch; returns whether there was any.

        A step's errors fail its requests. If even that runs out of memory, all requests fail,
        because this thread must not end: no request would ever complete again.
        """
        try:
            # New requests join the running batch of their base model between two steps.
            while self._arrived:
                request = self._arrived.popleft()
                base = request.sampler.base
                try:
                    if base not in self._schedulers:
                        # Runs that train all weights have a base model for each snapshot.
                        kept = self._models.values()
                        old = [b for b, s in self._schedulers.items() if not (b in kept or s.busy)]
                        for gone in old:
                            del self._schedulers[gone]
                        shapes = base.kv_shapes
                        self._schedulers[base] = (
                            FallbackSampler()
                            if shapes is None
                            else Scheduler(base, shapes, self._memory)
                        )
                    self._schedulers[base].add(request)
                except Exception as error:  # of a model that cannot be prepared; others go on
                    request.fail(error)
            # One step for each base model in turn, so that none waits for another's requests.
            busy = [scheduler for scheduler in self._schedulers.values() if scheduler.busy]
            for scheduler in busy:
                scheduler.step()
            return bool(busy)
        except Exception as error:
            # The state of a scheduler is unknown now, so the next request gets a new one.
            while self._arrived:
                self._arrived.popleft().fail(error)
            while self._schedulers:
                self._schedulers.popitem()[1].give_up(error)
            logger.exception("Sampling broke; the requests that waited have failed.")
            return False

    def _drop_samples(self) -> None:
        """Cancels all sampling requests when the engine closes."""
        for request in self._arrived:
            request.future.cancel()
        for scheduler in self._schedulers.values():
            scheduler.cancel_all()

    def _start_worker(self) -> None:
        # Number of threads and current device are settings of the thread that computes.
        if self.choice.device.type == "cpu":
            torch.set_num_threads(cpu_threads())
        elif self.choice.device.type == "cuda" and self.choice.device.index is not None:
            torch.cuda.set_device(self.choice.device)
