"""Interface of backends for loops and recipes.

These are the methods of the official ``tinker`` SDK that the loops use, with its types, so the
hosted clients satisfy these protocols. Each method returns a future immediately: ``await`` it or
call ``.result()``. Operations of one training client run in the order in which they were
*submitted*, so a checkpoint has exactly the steps submitted before it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from tinker_cookbook.utils.imports import tinker, torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T_co = TypeVar("T_co", covariant=True)

CustomLoss = Callable[
    ["list[tinker.Datum]", "list[torch.Tensor]"], "tuple[torch.Tensor, dict[str, float]]"
]
"""``loss_fn(data, logprobs)``: one 1-D tensor of target log-probabilities per datum; returns the
scalar loss and metrics. It may depend on all datums of a batch.

Two attributes, of the function or of a callable object, let the local engine save work; the hosted
API ignores them. ``group_size = n``: the loss is a sum over groups of n consecutive datums (n = 2
for the pairs of DPO). It is then called for some whole groups at a time, in their order, and values
and metrics are summed, so neither may be a mean over the datums of a call. Each forward pass runs
once, in the memory of one micro-batch; the batch length must be a multiple of n.
``trained_only = True``: the loss reads log-probabilities only where the ``weights`` of a datum are
not zero. The others are not computed: the function and ``loss_fn_outputs`` get 0 for them.
"""


class Future(Protocol[T_co]):
    """Part of ``tinker.APIFuture`` that the loops use."""

    def result(self, timeout: float | None = None) -> T_co:
        """Blocks until the operation is done; raises its error."""
        ...

    def __await__(self) -> Generator[Any, None, T_co]: ...


@runtime_checkable
class SamplingClient(Protocol):
    """Samples from one fixed version of the weights."""

    def sample(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
    ) -> Future[tinker.SampleResponse]:
        """Samples ``num_samples`` completions of ``prompt``."""
        ...

    def compute_logprobs(
        self, prompt: tinker.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> Future[list[float | None]]:
        """Returns log-probabilities of the prompt tokens, or only of the last ones; ``None`` for
        the first token and for tokens that were not requested."""
        ...

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Returns the tokenizer of the base model."""
        ...


@runtime_checkable
class TrainingClient(Protocol):
    """Trains one adapter. Gradients accumulate until ``optim_step``."""

    def forward(
        self,
        data: list[tinker.Datum],
        loss_fn: tinker.types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Future[tinker.ForwardBackwardOutput]:
        """Computes log-probabilities and the summed loss, without gradients."""
        ...

    def forward_backward(
        self,
        data: list[tinker.Datum],
        loss_fn: tinker.types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Future[tinker.ForwardBackwardOutput]:
        """Adds the gradient of the summed loss; metric ``loss:sum``."""
        ...

    def forward_backward_custom(
        self, data: list[tinker.Datum], loss_fn: CustomLoss
    ) -> Future[tinker.ForwardBackwardOutput]:
        """Adds the gradient of a custom loss of the log-probabilities."""
        ...

    def optim_step(self, optim_params: tinker.AdamParams) -> Future[tinker.OptimStepResponse]:
        """Runs one optimizer step on the accumulated gradients and clears them."""
        ...

    def save_state(
        self, name: str, ttl_seconds: int | None = None, overwrite: bool = False
    ) -> Future[tinker.types.SaveWeightsResponse]:
        """Saves adapter, optimizer and step; ``.path`` is ``tinker://RUN/weights/NAME``."""
        ...

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None
    ) -> Future[tinker.types.SaveWeightsForSamplerResponse]:
        """Saves only the adapter; ``.path`` is ``tinker://RUN/sampler_weights/NAME``."""
        ...

    def save_weights_and_get_sampling_client(
        self, *, record_stability_info: bool = False
    ) -> Future[SamplingClient]:
        """Returns a sampling client for the weights after the operations submitted so far.

        ``record_stability_info``: its samples can be trained on with ``stable_reinforce``.
        """
        ...

    def get_info(self) -> tinker.types.GetInfoResponse:
        """Returns model name, rank and run id."""
        ...

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Returns the tokenizer of the base model."""
        ...


@runtime_checkable
class RestClient(Protocol):
    """Lists and manages runs and checkpoints."""

    def get_training_run(self, training_run_id: str) -> Future[tinker.TrainingRun]:
        """Returns a run by its id."""
        ...

    def get_training_run_by_tinker_path(self, tinker_path: str) -> Future[tinker.TrainingRun]:
        """Returns the run that wrote a checkpoint."""
        ...

    def get_weights_info_by_tinker_path(
        self, tinker_path: str
    ) -> Future[tinker.types.WeightsInfoResponse]:
        """Returns base model and adapter shape of a checkpoint."""
        ...

    def list_training_runs(
        self, limit: int = 20, offset: int = 0
    ) -> Future[tinker.types.TrainingRunsResponse]:
        """Lists runs, newest first."""
        ...

    def list_checkpoints(
        self, training_run_id: str
    ) -> Future[tinker.types.CheckpointsListResponse]:
        """Lists the checkpoints of a run, oldest first."""
        ...

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Deletes a checkpoint permanently."""
        ...

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> Future[None]:
        """Sets or (``None``) removes the time after which a checkpoint expires."""
        ...


@runtime_checkable
class ServiceClient(Protocol):
    """Service client of a backend: creates the other clients."""

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
    ) -> Future[TrainingClient]:
        """Returns a new adapter on ``base_model``."""
        ...

    def create_training_client_from_state(
        self, path: str, user_metadata: dict[str, str] | None = None
    ) -> Future[TrainingClient]:
        """Returns a new run that starts from saved weights with a fresh optimizer."""
        ...

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: dict[str, str] | None = None
    ) -> Future[TrainingClient]:
        """Returns a new run that continues exactly from saved weights and optimizer state."""
        ...

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> Future[SamplingClient]:
        """Returns a client that samples from a saved checkpoint or from a base model."""
        ...

    def create_rest_client(self) -> RestClient:
        """Returns the client that lists and manages checkpoints."""
        ...
