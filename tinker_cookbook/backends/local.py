"""The service client of the bundled engine, with the interface of the ``tinker`` SDK.

Methods return immediately; the work runs on the engine's worker, in the order of the calls. Loaded
only through ``connect()``, so it may import the SDK at the top.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from tinker import types

from tinker_cookbook.backends.futures import AsyncNames
from tinker_cookbook.backends.local_rest import LocalRestClient
from tinker_cookbook.backends.local_sampling import LocalSamplingClient
from tinker_cookbook.backends.local_training import LocalTrainingClient, refuse
from tinker_cookbook.engine.checkpoints.save_load import load_run, run_info
from tinker_cookbook.engine.checkpoints.store import CheckpointStore
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.engine.training.run import TrainingRun
from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.leaves import load_leaf


class LocalServiceClient(AsyncNames):
    """Service client of the bundled engine. ``with`` closes it; checkpoints are kept.

    Args:
        engine: The engine, which may have several clients.
        store: Store of the checkpoints.
        user_metadata: Saved with each run.
        session: Prefix of the runs' unique ids.
    """

    def __init__(
        self,
        engine: Engine,
        store: CheckpointStore,
        user_metadata: dict[str, str] | None = None,
        session: str | None = None,
    ) -> None:
        self.engine, self.store = engine, store
        self._metadata = dict(user_metadata or {})
        self._session = session or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        self._count = 0

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: types.AdamOptimizerConfig | None = None,
        *,
        train_vision: bool = False,
    ) -> LocalTrainingClient:
        """Returns a new adapter on ``base_model``; without ``seed`` it is initialized at random.

        ``rank`` 0 trains all weights of a small text model instead (float32).
        ``train_vision``: also on the vision tower, and on its connector to the language model.
        """
        _require_adam(optimizer)
        make = AdapterSpec
        if rank == 0:
            make = load_leaf("engine.extensions.full", "rank=0").FullSpec
        spec = make(rank, train_attn, train_mlp, train_unembed, train_vision)
        return self.start_run(self._next_id(), base_model, spec, seed, user_metadata)

    def start_run(
        self,
        run_id: str,
        base_model: str,
        spec: AdapterSpec,
        seed: int | None,
        user_metadata: dict[str, str] | None = None,
    ) -> LocalTrainingClient:
        """Like ``create_lora_training_client``, with a given run id."""
        self.engine.require_trainable()
        self.engine.resolve(base_model)  # raises for a misspelt name now, not at the first step
        # Choose the seed here and not in torch, so that it is stored in the run's record.
        seed = secrets.randbits(31) if seed is None else seed
        metadata = {**self._metadata, **(user_metadata or {})}

        # Runs on the worker, the only thread that uses the device. A run is stored once it exists.
        def create() -> TrainingRun:
            run = self.engine.create_run(run_id, base_model, spec, seed)
            self.store.create_run(run_id, run_info(run, metadata, seed))
            return run

        # First in the run's queue, so that the client's operations can be submitted immediately.
        created = self.engine.submit_in(run_id, create)
        return LocalTrainingClient(self.engine, self.store, base_model, run_id, created)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: types.AdamOptimizerConfig | None = None,
    ) -> LocalTrainingClient:
        """Returns a new run that starts from the weights of ``path`` with a fresh optimizer."""
        _require_adam(optimizer)
        refuse("weights_access_token", weights_access_token)
        run_id = self._next_id()
        return self.continue_run(run_id, path, base_model, user_metadata, with_optimizer=False)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> LocalTrainingClient:
        """Returns a new run that continues exactly from weights and optimizer of ``path``."""
        refuse("weights_access_token", weights_access_token)
        run_id = self._next_id()
        return self.continue_run(run_id, path, base_model, user_metadata, with_optimizer=True)

    def continue_run(
        self,
        run_id: str,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        *,
        with_optimizer: bool,
    ) -> LocalTrainingClient:
        """Like ``create_training_client_from_state``, with a given run id."""
        # Read in the caller's thread, so that a missing or damaged checkpoint raises here.
        self.engine.require_trainable()
        loaded = self.store.read_checkpoint(path, with_optimizer=with_optimizer)
        name = base_model or loaded.state["base_model"]
        self.engine.resolve(name)
        metadata = {**self._metadata, **(user_metadata or {}), "loaded_from": path}

        def create() -> TrainingRun:
            run = load_run(self.engine, run_id, name, loaded, path)
            self.store.create_run(run_id, run_info(run, metadata))
            return run

        created = self.engine.submit_in(run_id, create)
        return LocalTrainingClient(self.engine, self.store, name, run_id, created)

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> LocalSamplingClient:
        """Returns a client that samples from the checkpoint ``model_path`` or from ``base_model``.

        ``record_stability_info`` has no effect here, because ``stable_reinforce`` reads the
        sampler's log-probabilities from each datum.
        """
        if (model_path is None) == (base_model is None):
            raise BackendError(
                "create_sampling_client: give either model_path='tinker://...' or base_model='...'"
            )
        return LocalSamplingClient.open(self.engine, self.store, model_path, base_model)

    def create_rest_client(self) -> LocalRestClient:
        """Returns the client that lists and manages runs and checkpoints."""
        return LocalRestClient(self.store)

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """Returns the models that are available without a download."""
        supported = [
            types.SupportedModel(
                model_name=name, max_context_length=context, trainable=True, sampleable=True
            )
            for name, context in self.engine.available_models()
        ]
        return types.GetServerCapabilitiesResponse(supported_models=supported)

    def close(self, status: str = "success", detail: str | None = None) -> None:
        """Cancels queued operations and stops the engine; saved checkpoints are kept.

        ``status`` is ``success``, ``errored`` or ``interrupted`` (Ctrl-C); the last does not wait
        for the operation in progress.
        """
        self.engine.close(wait=status != "interrupted")

    def __enter__(self) -> LocalServiceClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _next_id(self) -> str:
        self._count += 1
        return f"{self._session}:train:{self._count - 1}"


def _require_adam(optimizer: types.AdamOptimizerConfig | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        raise BackendError(f"optimizer: got {optimizer.type!r}; the local engine only has 'adamw'")
