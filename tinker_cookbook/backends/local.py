"""The bundled engine behind the interface of the ``tinker`` SDK: service and training client.

Methods return at once; the work happens on the engine's worker, in the order of the calls. The
``*_async`` spellings of older SDKs work as well. Loaded only through ``connect()``, so it may
import the SDK at the top.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import tinker
import torch
from tinker import types

from tinker_cookbook.backends import convert
from tinker_cookbook.backends.async_spellings import ServiceAsync, TrainingAsync
from tinker_cookbook.backends.futures import LocalFuture, ReadyClient
from tinker_cookbook.backends.local_rest import LocalRestClient
from tinker_cookbook.backends.local_sampling import LocalSamplingClient
from tinker_cookbook.backends.protocols import CustomLoss
from tinker_cookbook.engine.adapters import AdapterSpec
from tinker_cookbook.engine.checkpoints import load_run, run_info, save_run
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.store import CheckpointStore, Kind
from tinker_cookbook.engine.training_run import TrainingRun
from tinker_cookbook.exceptions import BackendError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class LocalServiceClient(ServiceAsync):
    """The door to the bundled engine. ``with`` closes it; checkpoints stay.

    Args:
        engine: May serve other clients too.
        store: Where checkpoints lie.
        user_metadata: Kept with each run.
        session: First part of the runs' ids; none is given twice.
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
    ) -> LocalTrainingClient:
        """A new adapter on ``base_model``; without ``seed`` its start is drawn at random."""
        _require_adam(optimizer)
        spec = AdapterSpec(rank, train_attn, train_mlp, train_unembed)
        return self.start_run(self._next_id(), base_model, spec, seed, user_metadata)

    def start_run(
        self,
        run_id: str,
        base_model: str,
        spec: AdapterSpec,
        seed: int | None,
        user_metadata: dict[str, str] | None = None,
    ) -> LocalTrainingClient:
        """``create_lora_training_client`` with the id of the run."""
        self.engine.resolve(base_model)  # a misspelt name fails here, not at the first step
        seed = secrets.randbits(31) if seed is None else seed
        metadata = {**self._metadata, **(user_metadata or {})}

        def create() -> TrainingRun:
            run = self.engine.create_run(run_id, base_model, spec, seed)
            self.store.create_run(run_id, run_info(run, metadata, seed))
            return run

        created = self.engine.submit_in(run_id, create)
        return LocalTrainingClient(self, base_model, run_id, created)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: types.AdamOptimizerConfig | None = None,
    ) -> LocalTrainingClient:
        """A new run from the weights of ``path``, with a fresh optimizer."""
        _require_adam(optimizer)
        _refuse("weights_access_token", weights_access_token)
        return self.continue_run(
            self._next_id(), path, base_model, user_metadata, with_optimizer=False
        )

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> LocalTrainingClient:
        """A new run from weights and optimizer of ``path``: goes on as if never stopped."""
        _refuse("weights_access_token", weights_access_token)
        return self.continue_run(
            self._next_id(), path, base_model, user_metadata, with_optimizer=True
        )

    def continue_run(
        self,
        run_id: str,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        *,
        with_optimizer: bool,
    ) -> LocalTrainingClient:
        """``create_training_client_from_state`` with the id of the new run."""
        loaded = self.store.read_checkpoint(path, with_optimizer=with_optimizer)
        name = base_model or loaded.state["base_model"]
        self.engine.resolve(name)
        metadata = {**self._metadata, **(user_metadata or {}), "loaded_from": path}

        def create() -> TrainingRun:
            run = load_run(self.engine, run_id, name, loaded, path)
            self.store.create_run(run_id, run_info(run, metadata))
            return run

        return LocalTrainingClient(self, name, run_id, self.engine.submit_in(run_id, create))

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> LocalSamplingClient:
        """Samples from the checkpoint ``model_path`` or from the plain ``base_model``."""
        _refuse("record_stability_info", record_stability_info or None)
        if (model_path is None) == (base_model is None):
            raise BackendError(
                "create_sampling_client: give either model_path='tinker://...' or base_model='...'"
            )
        return LocalSamplingClient.open(self.engine, self.store, model_path, base_model)

    def create_rest_client(self) -> LocalRestClient:
        """Lists and manages runs and checkpoints."""
        return LocalRestClient(self.store)

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """The models at hand without a download."""
        supported = [
            types.SupportedModel(
                model_name=name, max_context_length=context, trainable=True, sampleable=True
            )
            for name, context in self.engine.available_models()
        ]
        return types.GetServerCapabilitiesResponse(supported_models=supported)

    def close(self, status: str = "success", detail: str | None = None) -> None:
        """Drops what is queued and stops the engine; saved checkpoints stay.

        ``status`` is ``success``, ``errored`` or ``interrupted``; the last does not wait for the
        operation in progress, since somebody pressed Ctrl-C.
        """
        self.engine.close(wait=status != "interrupted")

    def __enter__(self) -> LocalServiceClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _next_id(self) -> str:
        self._count += 1
        return f"{self._session}:train:{self._count - 1}"


class LocalTrainingClient(ReadyClient["LocalTrainingClient"], TrainingAsync):
    """Trains one adapter. Gradients add up until ``optim_step``."""

    def __init__(
        self,
        service: LocalServiceClient,
        base_model: str,
        run_id: str,
        created: Future[TrainingRun],
    ) -> None:
        super().__init__(created)
        self._service = service
        self._engine = service.engine
        self._base_model = base_model
        self._run_id = run_id
        self._created = created

    def forward(
        self,
        data: list[tinker.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> LocalFuture[types.ForwardBackwardOutput]:
        """Log-probabilities and summed loss, without gradients."""
        return self._pass(data, loss_fn, loss_fn_config, backward=False)

    def forward_backward(
        self,
        data: list[tinker.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> LocalFuture[types.ForwardBackwardOutput]:
        """Adds the gradient of the summed loss; metric ``loss:sum``."""
        return self._pass(data, loss_fn, loss_fn_config, backward=True)

    def forward_backward_custom(
        self, data: list[tinker.Datum], loss_fn: CustomLoss
    ) -> LocalFuture[types.ForwardBackwardOutput]:
        """Adds the gradient of ``loss_fn(data, logprobs) -> (loss, metrics)``.

        ``logprobs`` holds one tensor [T] a datum; real autograd runs through ``loss_fn``, on the
        engine's thread. A function with a ``group_size`` is called for whole groups at a time
        and one that is ``trained_only`` gets no log-probabilities of prompts
        (``protocols.CustomLoss``).
        """

        def call(
            indices: Sequence[int], logprobs: list[torch.Tensor]
        ) -> tuple[torch.Tensor, dict[str, float]]:
            return loss_fn([data[i] for i in indices], logprobs)

        def work(run: TrainingRun) -> types.ForwardBackwardOutput:
            trained_only = bool(getattr(loss_fn, "trained_only", False))
            examples = convert.examples_of(convert.for_custom_loss(data, trained_only=trained_only))
            group_size = getattr(loss_fn, "group_size", None)
            return convert.loss_output_of(
                run.forward_backward_custom(examples, call, group_size, trained_only=trained_only)
            )

        return self._submit(work)

    def optim_step(
        self,
        optim_params: types.AdamParams | None = None,
        *,
        adam_params: types.AdamParams | None = None,
    ) -> LocalFuture[types.OptimStepResponse]:
        """One AdamW step; metric ``grad_norm`` (before clipping)."""
        params = optim_params if optim_params is not None else adam_params
        settings = convert.adam_settings_of(params or types.AdamParams())
        return self._submit(lambda run: types.OptimStepResponse(metrics=run.optim_step(settings)))

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> LocalFuture[types.SaveWeightsResponse]:
        """Saves adapter, optimizer and step; ``.path`` is ``tinker://RUN/weights/NAME``."""
        save = self._save("weights", name, ttl_seconds, overwrite, user_metadata)
        return self._submit(lambda run: types.SaveWeightsResponse(path=save(run)))

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> LocalFuture[types.SaveWeightsForSamplerResponse]:
        """Saves the adapter alone; ``.path`` is ``tinker://RUN/sampler_weights/NAME``."""
        save = self._save("sampler_weights", name, ttl_seconds, True, user_metadata)
        return self._submit(lambda run: types.SaveWeightsForSamplerResponse(path=save(run)))

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> LocalFuture[types.SaveWeightsExternalResponse]:
        """Saves the adapter for use elsewhere; ``.path`` is ``tinker://RUN/external_weights/NAME``.

        Its files are PEFT's own; the rest client's ``copy_out`` gives a folder of them.
        """
        _refuse("age_encryption_recipients", age_encryption_recipients or None)
        save = self._save("external_weights", name, ttl_seconds, True, None)

        return self._submit(lambda run: types.SaveWeightsExternalResponse(path=save(run)))

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: str = "snapshot",
    ) -> LocalSamplingClient:
        """A sampling client for the weights after the operations submitted so far.

        Nothing is written: the client holds the present tensors, and later steps leave them alone.
        """
        _refuse("record_stability_info", record_stability_info or None)
        _refuse("kind", None if kind == "snapshot" else kind)
        return LocalSamplingClient.of_run(
            self._engine, self._base_model, self._run_id, lambda: self._created.result()
        )

    def load_state(self, path: str) -> LocalFuture[types.LoadWeightsResponse]:
        """Replaces the weights by those of ``path``; the optimizer starts afresh."""
        return self._load(path, with_optimizer=False)

    def load_state_with_optimizer(self, path: str) -> LocalFuture[types.LoadWeightsResponse]:
        """Replaces weights and optimizer by those of ``path``."""
        return self._load(path, with_optimizer=True)

    def create_sampling_client(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> LocalSamplingClient:
        """Samples from a saved checkpoint."""
        return self._service.create_sampling_client(
            model_path, None, retry_config, record_stability_info
        )

    def get_info(self) -> types.GetInfoResponse:
        """Model name, rank and run id; waits until the run exists."""
        run = self._created.result()
        return types.GetInfoResponse(
            type="get_info",
            model_id=self._run_id,
            model_data=types.ModelData(
                arch=type(run.base.config).__name__,
                model_name=self._base_model,
                tokenizer_id=str(run.base.folder),
            ),
            is_lora=True,
            lora_rank=run.adapter.spec.rank,
            model_name=self._base_model,
        )

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the base model."""
        from tinker_cookbook.tokenizer_utils import get_tokenizer

        return get_tokenizer(self._base_model)

    def _pass(
        self,
        data: list[tinker.Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        backward: bool,
    ) -> LocalFuture[types.ForwardBackwardOutput]:
        def work(run: TrainingRun) -> types.ForwardBackwardOutput:
            examples = convert.examples_of(data)
            output = run.forward_backward(examples, loss_fn, loss_fn_config, backward=backward)
            return convert.loss_output_of(output)

        return self._submit(work)

    def _save(
        self,
        kind: Kind,
        name: str,
        ttl_seconds: int | None,
        overwrite: bool,
        user_metadata: dict[str, str] | None,
    ) -> Callable[[TrainingRun], str]:
        return lambda run: save_run(
            self._service.store,
            run,
            kind,
            name,
            ttl_seconds=ttl_seconds,
            overwrite=overwrite,
            user_metadata=user_metadata,
        )

    def _load(self, path: str, *, with_optimizer: bool) -> LocalFuture[types.LoadWeightsResponse]:
        loaded = self._service.store.read_checkpoint(path, with_optimizer=with_optimizer)

        def work(run: TrainingRun) -> types.LoadWeightsResponse:
            run.replace_by(load_run(self._engine, self._run_id, self._base_model, loaded, path))
            return types.LoadWeightsResponse(path=path)

        return self._submit(work)

    def _submit(self, work: Callable[[TrainingRun], T]) -> LocalFuture[T]:
        """Queues ``work(run)``; if the run could not be created, raises why."""
        return LocalFuture(
            self._engine.submit_in(self._run_id, lambda: work(self._created.result()))
        )


def _refuse(name: str, value: object) -> None:
    if value is not None:
        raise BackendError(f"{name}={value!r} is a feature of the hosted API; leave it out here")


def _require_adam(optimizer: types.AdamOptimizerConfig | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        raise BackendError(f"optimizer: got {optimizer.type!r}; the local engine has 'adamw' only")
