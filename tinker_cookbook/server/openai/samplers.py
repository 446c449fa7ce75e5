"""Weights to sample from, and renderers: opened once, kept while they are asked for."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, cast

from fastapi import Depends, Request

from tinker_cookbook.backends.local_sampling import LocalSamplingClient
from tinker_cookbook.engine.checkpoints.paths import SCHEME
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError, ModelNotFoundError
from tinker_cookbook.model_info import resolve_renderer_name
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.renderers.core.codec import TextCodec
from tinker_cookbook.server.keys import Owner
from tinker_cookbook.server.openai.errors import no_model
from tinker_cookbook.server.state import ServerState
from tinker_cookbook.tokenizer_utils import get_tokenizer

MOST_SAMPLERS = 16
MOST_RENDERERS = 32
MOST_THREADS = 8

P = ParamSpec("P")
T = TypeVar("T")


class SingleFlightCache(Generic[T]):
    """What is made in threads, once for all who ask at a time; the last ``most`` are kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._made: OrderedDict[Hashable, Future[T]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of ``key``; made by ``make`` where there is none. Errors are not kept."""
        with self._lock:
            future, mine = self._made.get(key), False
            if future is None:
                future, mine = Future(), True
                self._made[key] = future
            self._made.move_to_end(key)
            while len(self._made) > self._most:
                self._made.popitem(last=False)
        if mine:
            try:
                future.set_result(make())
            except BaseException as error:
                with self._lock:
                    if self._made.get(key) is future:
                        del self._made[key]
                future.set_exception(error)
        return future.result()

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Forgets the keys that are unwanted."""
        with self._lock:
            for key in [key for key in self._made if unwanted(key)]:
                del self._made[key]


@dataclass(frozen=True)
class LoadedModel:
    """Weights, and how their tokens are spelled."""

    name: str
    base_model: str
    sampler: Sampler
    client: LocalSamplingClient
    codec: TextCodec
    renderer_name: str | None = None
    """The chat format that the checkpoint was trained with, where its metadata say."""


class Gateway:
    """What the requests of this API share. ``open`` and ``renderer`` block: they are
    for ``run``, the rest for the event loop."""

    def __init__(self, host: ServerState) -> None:
        self.host = host
        # Threads of its own: while weights are read, those of other requests go on.
        self._threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="openai")
        self._samplers: SingleFlightCache[LoadedModel] = SingleFlightCache(MOST_SAMPLERS)
        self._renderers: SingleFlightCache[Renderer] = SingleFlightCache(MOST_RENDERERS)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``work`` in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *args, **kwargs))

    def open(self, owner: Owner, model: str) -> LoadedModel:
        """The weights of a served base model, or of a checkpoint that this owner has now."""
        if not model.startswith(SCHEME):
            name = self.host.require_model(model, "model")
            key = (owner.name, model, None)
            return self._samplers.get(key, lambda: self._read(owner, model, name))
        # Not the cache but the store says what there is, at every request: a checkpoint may be
        # deleted, expire, or give its name to another.
        try:
            info = owner.store.get_checkpoint(model)
            run = owner.store.get_run(info.path.run_id).info
        except CheckpointError as error:
            self._samplers.drop(lambda key: key[:2] == (owner.name, model))
            raise no_model(f"model: {error}") from error
        if run.base_model not in self.host.models:
            raise ModelNotFoundError(
                f"model: {model} is of {run.base_model!r}, which this server does not serve. It "
                f"serves {', '.join(self.host.models)}"
            )
        key = (owner.name, model, info.created_at)
        # What was noted with the checkpoint is nearer to it than what the run began with.
        recorded = {**run.user_metadata, **info.user_metadata}.get("renderer_name")
        read = partial(self._read, owner, model, run.base_model, model, recorded)
        return self._samplers.get(key, read)

    def renderer(self, opened: LoadedModel, asked: str | None) -> Renderer:
        """The renderer that was asked for, else the one that the checkpoint was trained with, else
        the one that fits the model."""
        base_model, name = opened.base_model, asked or opened.renderer_name

        def make() -> Renderer:
            chosen = resolve_renderer_name(base_model, name)[0]
            return get_renderer(chosen, get_tokenizer(base_model))

        try:
            return self._renderers.get((base_model, name), make)
        except ConfigurationError as error:
            if asked:
                raise
            raise ConfigurationError(
                f"{error}. {opened.name} was trained with {name!r}; name one that this server has "
                "in the request, by renderer_name"
            ) from error

    def _read(
        self,
        owner: Owner,
        name: str,
        base_model: str,
        path: str | None = None,
        renderer_name: str | None = None,
    ) -> LoadedModel:
        base = base_model if path is None else None
        client = LocalSamplingClient.open(self.host.engine, owner.store, path, base)
        codec = TextCodec(get_tokenizer(base_model))
        return LoadedModel(name, base_model, client.sampler(), client, codec, renderer_name)


def gateway_of(request: Request) -> Gateway:
    """The application's gateway, made by the first request."""
    state = request.app.state
    if not hasattr(state, "openai_gateway"):
        state.openai_gateway = Gateway(state.server)
    return cast("Gateway", state.openai_gateway)


async def _gateway(request: Request) -> Gateway:
    # Async: in a thread two first requests could make one each.
    return gateway_of(request)


GatewayDep = Annotated[Gateway, Depends(_gateway)]
