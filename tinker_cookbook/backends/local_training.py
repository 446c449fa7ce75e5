"""Training client of the bundled engine. Loaded only through ``connect()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import tinker
import torch
from tinker import types

from tinker_cookbook.backends import convert
from tinker_cookbook.backends.futures import AsyncNames, LocalFuture, ReadyClient
from tinker_cookbook.backends.local_sampling import LocalSamplingClient
from tinker_cookbook.backends.protocols import CustomLoss
from tinker_cookbook.engine.checkpoints.save_load import load_run, save_run
from tinker_cookbook.engine.checkpoints.store import CheckpointStore, Kind
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.training.run import PassRequest, TrainingRun
from tinker_cookbook.engine.worker import Joinable
from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.leaves import load_leaf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class LocalTrainingClient(ReadyClient["LocalTrainingClient"], AsyncNames):
    """Trains one adapter. Gradients accumulate until ``optim_step``."""

    async_gives_futures = True

    def __init__(
        self,
        engine: Engine,
        store: CheckpointStore,
        base_model: str,
        run_id: str,
        created: Future[TrainingRun],
    ) -> None:
        super().__init__(created)
        self._engine, self._store = engine, store
        self._base_model, self._run_id, self._created = base_model, run_id, created
        self._image_reader = partial(engine.image_reader, base_model)

    def forward(
        self,
        data: list[tinker.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> LocalFuture[types.ForwardBackwardOutput]:
        """Computes log-probabilities and the summed loss, without gradients."""
        examples = partial(convert.examples_of, data, self._image_reader)
        return self.run_pass(examples, loss_fn, loss_fn_config, backward=False)

    def forward_backward(
        self,
        data: list[tinker.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> LocalFuture[types.ForwardBackwardOutput]:
        """Adds the gradient of the summed loss; metric ``loss:sum``."""
        examples = partial(convert.examples_of, data, self._image_reader)
        return self.run_pass(examples, loss_fn, loss_fn_config, backward=True)

    def forward_backward_custom(
        self, data: list[tinker.Datum], loss_fn: CustomLoss
    ) -> LocalFuture[types.ForwardBackwardOutput]:
        """Adds the gradient of ``loss_fn(data, logprobs) -> (loss, metrics)``.

        ``logprobs`` has one tensor [T] per datum. ``loss_fn`` runs with autograd on the engine's
        thread; see ``protocols.CustomLoss`` for its attributes.
        """

        def call(
            indices: Sequence[int], logprobs: list[torch.Tensor]
        ) -> tuple[torch.Tensor, dict[str, float]]:
            # The engine uses its own examples; the loss gets the caller's datums.
            return loss_fn([data[i] for i in indices], logprobs)

        def work(run: TrainingRun) -> types.ForwardBackwardOutput:
            # Runs on the worker in order of submission, like passes of built-in losses.
            trained_only = bool(getattr(loss_fn, "trained_only", False))
            group_size = getattr(loss_fn, "group_size", None)
            # A datum that cannot be converted also makes the next step fail.
            with run.refusing_step_after_failure(True):
                examples = convert.custom_examples_of(
                    data, self._image_reader, trained_only=trained_only
                )
                self._engine.begin_pass()
                output = run.forward_backward_custom(
                    examples, call, group_size, trained_only=trained_only
                )
            return convert.loss_output_of(output)

        return self._submit(work)

    def optim_step(
        self,
        optim_params: types.AdamParams | None = None,
        *,
        adam_params: types.AdamParams | None = None,
    ) -> LocalFuture[types.OptimStepResponse]:
        """Runs one AdamW step; metric ``grad_norm`` (before clipping)."""
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
        return self._save(
            types.SaveWeightsResponse, "weights", name, ttl_seconds, user_metadata, overwrite
        )

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> LocalFuture[types.SaveWeightsForSamplerResponse]:
        """Saves only the adapter; ``.path`` is ``tinker://RUN/sampler_weights/NAME``."""
        response = types.SaveWeightsForSamplerResponse
        return self._save(response, "sampler_weights", name, ttl_seconds, user_metadata)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> LocalFuture[types.SaveWeightsExternalResponse]:
        """Saves the adapter for use elsewhere; ``.path`` is ``tinker://RUN/external_weights/NAME``.

        The files are in PEFT's format; ``copy_out`` of the REST client copies them to a folder.
        """
        refuse("age_encryption_recipients", age_encryption_recipients or None)
        response = types.SaveWeightsExternalResponse
        return self._save(response, "external_weights", name, ttl_seconds, None)

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: str = "snapshot",
    ) -> LocalSamplingClient:
        """Returns a sampling client for the weights after the operations submitted so far.

        Nothing is written: the client shares the current tensors, which later steps do not change.
        ``record_stability_info`` has no effect here, because ``stable_reinforce`` reads the
        sampler's log-probabilities from each datum.
        """
        refuse("kind", None if kind == "snapshot" else kind)

        # In the run's queue: after earlier operations and before later ones.
        def make() -> Sampler:
            run = self._created.result()
            # The snapshot has references, not copies: later steps write new tensors.
            name = f"run {self._run_id} after step {run.step}"
            adapter = run.snapshot()  # first: with all weights trained, it replaces the base model
            return Sampler(run.base, adapter, name, self._store.owner)

        return LocalSamplingClient(self._engine, self._base_model, make, self._run_id)

    def load_state(self, path: str) -> LocalFuture[types.LoadWeightsResponse]:
        """Loads the weights of ``path``; resets the optimizer."""
        return self._load(path, with_optimizer=False)

    def load_state_with_optimizer(self, path: str) -> LocalFuture[types.LoadWeightsResponse]:
        """Loads weights and optimizer of ``path``."""
        return self._load(path, with_optimizer=True)

    def create_sampling_client(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> LocalSamplingClient:
        """Samples from a saved checkpoint; ``record_stability_info`` needs no action here."""
        return LocalSamplingClient.open(self._engine, self._store, model_path, None)

    @property
    def base_model(self) -> str:
        """Name of the base model."""
        return self._base_model

    def get_info(self) -> types.GetInfoResponse:
        """Returns model name, rank and run id; waits until the run exists."""
        run = self._created.result()  # the model's configuration is known once it is loaded
        return types.GetInfoResponse(
            type="get_info",
            model_id=self._run_id,
            model_data=types.ModelData(
                arch=type(run.base.config).__name__,
                model_name=self._base_model,
                tokenizer_id=str(run.base.folder),
            ),
            is_lora=run.adapter.spec.rank > 0,
            lora_rank=run.adapter.spec.rank,
            model_name=self._base_model,
        )

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Returns the tokenizer of the base model."""
        from tinker_cookbook.tokenizer_utils import get_tokenizer

        return get_tokenizer(self._base_model)

    def run_pass(
        self,
        examples: Callable[[], Sequence[Example]],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        backward: bool,
    ) -> LocalFuture[types.ForwardBackwardOutput]:
        """Runs ``forward_backward`` or ``forward``; ``examples`` is called on the worker. If it
        raises, the pass fails, and with ``backward`` the next step too."""

        def prepared() -> Sequence[Example]:
            self._engine.begin_pass()
            return examples()

        def work() -> types.ForwardBackwardOutput:
            run = self._created.result()
            with run.refusing_step_after_failure(backward):
                data = prepared()
                output = run.forward_backward(data, loss_fn, loss_fn_config, backward=backward)
            return convert.loss_output_of(output)

        if not backward:
            return LocalFuture(self._engine.submit_in(self._run_id, work))
        request = PassRequest(self._created.result, prepared, loss_fn, loss_fn_config)
        key = self._base_model, loss_fn, dict(loss_fn_config or {})
        joinable = Joinable(key, request, _together)
        return LocalFuture(self._engine.submit_joinable(self._run_id, work, joinable))

    def _save(
        self,
        response: Callable[..., T],
        kind: Kind,
        name: str,
        ttl_seconds: int | None,
        user_metadata: dict[str, str] | None,
        overwrite: bool = True,
    ) -> LocalFuture[T]:
        def work(run: TrainingRun) -> T:
            path = save_run(
                self._store,
                run,
                kind,
                name,
                ttl_seconds=ttl_seconds,
                overwrite=overwrite,
                user_metadata=user_metadata,
            )
            return response(path=path)

        return self._submit(work)

    def _load(self, path: str, *, with_optimizer: bool) -> LocalFuture[types.LoadWeightsResponse]:
        # Read in the caller's thread, so that a bad path raises here; the weights are replaced in
        # order.
        loaded = self._store.read_checkpoint(path, with_optimizer=with_optimizer)

        def work(run: TrainingRun) -> types.LoadWeightsResponse:
            run.replace_by(load_run(self._engine, self._run_id, self._base_model, loaded, path))
            return types.LoadWeightsResponse(path=path)

        return self._submit(work)

    def _submit(self, work: Callable[[TrainingRun], T]) -> LocalFuture[T]:
        """Queues ``work(run)``; its future has the error if the run could not be created."""
        return LocalFuture(
            self._engine.submit_in(self._run_id, lambda: work(self._created.result()))
        )


def _together(
    requests: Sequence[PassRequest],
) -> Iterator[tuple[int, types.ForwardBackwardOutput | Exception]]:
    """Computes passes of several clients; yields the index and the result of each."""
    run_together = load_leaf("engine.extensions.joint", "joint_training").run_together
    for number, output in run_together(requests):
        failed = isinstance(output, Exception)
        yield number, output if failed else convert.loss_output_of(output)


def refuse(name: str, value: object) -> None:
    """Raises ``BackendError`` for a setting of the hosted API, unless it is None."""
    if value is not None:
        raise BackendError(f"{name}={value!r} is a feature of the hosted API; leave it out here")
