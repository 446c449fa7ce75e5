"""Models of the OpenAI API: ``GET /models``, and the cached weights and renderers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request

from tinker_cookbook.backends.local_sampling import LocalSamplingClient
from tinker_cookbook.engine.checkpoints.format import SCHEME
from tinker_cookbook.engine.checkpoints.store import CheckpointInfo, RunInfo
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.model_info import resolve_renderer_name
from tinker_cookbook.renderers import Renderer, get_renderer, get_renderer_names
from tinker_cookbook.renderers.core.codec import TextCodec
from tinker_cookbook.server.access import ApiUserDep, StateDep
from tinker_cookbook.server.bodies import Json
from tinker_cookbook.server.keys import ApiUser
from tinker_cookbook.server.openai.protocol import ApiError, model_not_found
from tinker_cookbook.server.state import ServerState
from tinker_cookbook.tokenizer_utils import get_tokenizer

T = TypeVar("T")

MAX_MODELS = 16
# Parameters of ``get_renderer`` that are not options of a chat format.
_RESERVED_OPTIONS = ("name", "tokenizer", "image_processor", "model_name")

router = APIRouter()


# Plain functions: FastAPI runs them in threads, since they read files.


@router.get("/models")
def list_models(owner: ApiUserDep, state: StateDep) -> Json:
    """Lists the base models, then the sampler checkpoints, newest first: the caller's, and
    published ones of other owners."""
    lengths = dict(state.engine.available_models())
    entries = [_entry(lengths, name, state.started_at) for name in state.models]
    for run in owner.store.list_runs():
        base_model = run.info.base_model
        if base_model in state.models:
            for info in reversed(owner.store.list_checkpoints(run.run_id)):
                if info.path.kind == "sampler_weights" and info.problem is None:
                    entries.append(_checkpoint_entry(lengths, info, run.info, owner.name))
    for other, info, run in owner.store.published_by_others():
        if run.base_model in state.models and info.path.kind == "sampler_weights":
            entries.append(_checkpoint_entry(lengths, info, run, other))
    return {"object": "list", "data": entries}


@router.get("/models/{name:path}")
def get_model(name: str, owner: ApiUserDep, state: StateDep) -> Json:
    """Returns one model; training checkpoints are allowed, since they can be sampled too."""
    lengths = dict(state.engine.available_models())
    if not name.startswith(SCHEME):
        return _entry(lengths, state.require_model(name, "model"), state.started_at)
    info, run = _checkpoint(state, owner, name)
    return _checkpoint_entry(lengths, info, run, owner.name)


def _checkpoint(state: ServerState, owner: ApiUser, path: str) -> tuple[CheckpointInfo, RunInfo]:
    """Returns a checkpoint and its run if the base model is served, else raises ``ApiError``."""
    try:
        info = owner.store.get_checkpoint(path)
        run = owner.store.get_run(info.path.run_id).info
    except CheckpointError as error:
        raise model_not_found(f"model: {error}") from error
    state.require_model(run.base_model, "model")
    return info, run


def _entry(
    lengths: Mapping[str, int],
    model: str,
    created: float,
    owner: str = "tinker_cookbook",
    **more: str,
) -> Json:
    """Returns a model's entry; ``lengths`` are the base models' contexts in tokens."""
    entry = {"id": model, "object": "model", "created": int(created), "owned_by": owner, **more}
    # vLLM's name. Clients use it to check the length of a prompt.
    return {**entry, "max_model_len": lengths.get(more.get("parent", model))}


def _checkpoint_entry(
    lengths: Mapping[str, int], info: CheckpointInfo, run: RunInfo, owner: str
) -> Json:
    """Returns the entry of a checkpoint, with a ``name`` for people.

    The name has the recipe, the log folder, the checkpoint, its updates, and the time of the save.
    """
    # Runs of other owners show no paths.
    recipe = run.user_metadata.get("recipe", "")
    folder = Path(run.user_metadata.get("log_path", "")).name
    step = info.state.get("step")
    words = [recipe, folder if folder != recipe else "", info.path.name,
             "" if step is None else f"step {step}",
             time.strftime("%d %b %H:%M", time.localtime(info.created_at))]  # fmt: skip
    more = {"parent": run.base_model, "name": " · ".join(filter(None, words))}
    return _entry(lengths, str(info.path), info.created_at, owner, **more)


@dataclass
class LoadedModel:
    """Weights and tokenizer of a model."""

    name: str
    base_model: str
    sampler: Sampler
    codec: TextCodec
    renderer_name: str | None = None
    """Chat format of the checkpoint's training, if recorded in its metadata."""
    used_at: float = 0.0


class ModelLoader:
    """Cache of recently used models. ``load`` blocks, so call it through ``run``."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        # A separate thread pool, so that requests for other models continue while weights are read.
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="openai")
        self._loading = threading.Lock()
        # By owner, model, and the time at which a checkpoint was created.
        self._models: dict[tuple[str, str, float | None], LoadedModel] = {}

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Runs ``work`` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def load(self, owner: ApiUser, model: str) -> LoadedModel:
        """Returns a served base model, or a checkpoint of this owner."""
        path = created = renderer_name = None
        if not model.startswith(SCHEME):
            base_model = self.state.require_model(model, "model")
        else:
            # Check the store at every request: a checkpoint may be deleted, expire, or be
            # replaced by another one with the same name.
            info, run = _checkpoint(self.state, owner, model)
            path, base_model, created = model, run.base_model, info.created_at
            # The checkpoint's metadata override the run's.
            renderer_name = {**run.user_metadata, **info.user_metadata}.get("renderer_name")
        key = (owner.name, model, created)
        loaded = self._models.get(key)
        if loaded is None:
            # One at a time; models in memory are served meanwhile.
            with self._loading:
                loaded = self._models.get(key)
                if loaded is None:
                    client = LocalSamplingClient.open(
                        self.state.engine, owner.store, path, base_model
                    )
                    codec = TextCodec(get_tokenizer(base_model))
                    loaded = LoadedModel(model, base_model, client.sampler(), codec, renderer_name)
                    if len(self._models) >= MAX_MODELS:
                        oldest = min(self._models, key=lambda one: self._models[one].used_at)
                        del self._models[oldest]
                    self._models[key] = loaded
        loaded.used_at = time.monotonic()
        return loaded


def renderer_of(
    model: LoadedModel, requested: str | None, options: Mapping[str, Any] | None = None
) -> Renderer:
    """Returns the requested renderer, else the checkpoint's, else the base model's.

    ``options`` are options of the chat format. ``enable_thinking``, known from chat templates, also
    chooses between a renderer and its variant without thinking. Raises ConfigurationError.
    """
    name = requested or model.renderer_name
    try:
        if options:
            return _renderer_with(model.base_model, name, dict(options))
        return _renderer(model.base_model, name)
    except ConfigurationError as error:
        if requested or options:
            raise
        raise ConfigurationError(
            f"{error}. {model.name} was trained with {name!r}; name one that this server has "
            "in the request, by renderer_name"
        ) from error


def _renderer_with(base_model: str, name: str | None, options: dict[str, Any]) -> Renderer:
    for option in options:
        if option in _RESERVED_OPTIONS:
            raise ApiError(
                f"chat_template_kwargs: got {option!r}, which is no option of a chat format",
                param="chat_template_kwargs",
            )
    name, _ = resolve_renderer_name(base_model, name)
    base = name.partition("?")[0]
    quiet = base.replace("_disable_thinking", "") + "_disable_thinking"
    if base != "template" and "enable_thinking" in options and quiet in get_renderer_names():
        thinks = options.pop("enable_thinking")
        # The base name has thinking, the longer name disables it. Keep the name's options.
        wanted = quiet.removesuffix("_disable_thinking") if thinks else quiet
        name = name.replace(base, wanted, 1)
    return get_renderer(name, get_tokenizer(base_model), **options)


@lru_cache(maxsize=32)
def _renderer(base_model: str, name: str | None) -> Renderer:
    renderer_name, _ = resolve_renderer_name(base_model, name)
    return get_renderer(renderer_name, get_tokenizer(base_model))


async def _loader(request: Request) -> ModelLoader:
    return request.app.state.openai_loader


LoaderDep = Annotated[ModelLoader, Depends(_loader)]
