"""Opens a checkpoint or a base model for sampling, with the chat format of its training.

Used by evaluations, chat and exports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import chz

from tinker_cookbook.backends import SamplingClient, ServiceClient
from tinker_cookbook.backends.connect import Connection, connect_with
from tinker_cookbook.backends.sampler_options import SamplerOptions
from tinker_cookbook.engine.sampler_settings import SamplerSettings
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_info import resolve_renderer_name
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.run.renderer_names import get_renderer_name_from_checkpoint_async
from tinker_cookbook.run.weights_paths import FORMS, check_tinker_path, weights_field
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import BackendSettings, check_model, check_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@chz.chz
class SamplingModelSettings(BackendSettings, SamplerOptions):
    """Settings that select a model to sample from."""

    model_path: str | None = weights_field("sampler_weights", "Checkpoint; default: the base model")
    model_name: str | None = chz.field(
        default=None, doc="Base model, Hub name or local folder; default: from model_path"
    )
    renderer_name: str | None = chz.field(
        default=None, doc="Chat format; default: the run's, else the model's"
    )

    @classmethod
    def of(
        cls,
        settings: Any,
        *,
        model_path: str | None,
        model_name: str | None,
        renderer_name: str | None,
    ) -> SamplingModelSettings:
        """Returns a model with the backend and the sampler of a program's ``settings``."""
        names = (*chz.chz_fields(BackendSettings), *chz.chz_fields(SamplerOptions))
        given: dict[str, Any] = {name: getattr(settings, name) for name in names}
        return cls(
            model_path=model_path, model_name=model_name, renderer_name=renderer_name, **given
        )

    def check(self) -> None:
        """Raises ConfigurationError for an invalid setting; opens no connection."""
        if self.model_path is None and self.model_name is None:
            raise ConfigurationError(
                f"model_path: got none, expected a checkpoint ({FORMS}), or model_name= for a base "
                "model"
            )
        if self.model_path is not None:
            check_tinker_path("model_path", self.model_path, "sampler_weights", "the run")
        check_settings(self)
        if self.model_name is not None:
            check_model(self)

    def connect(self) -> Connection:
        """Connects to the backend of the settings."""
        return connect_with(self, sampler=SamplerSettings.of(self))


@dataclass(frozen=True)
class SamplingModel:
    """A model that is ready for sampling, with its renderer."""

    model_name: str
    """Name of the base model."""
    model_path: str | None
    client: SamplingClient
    renderer: Renderer
    renderer_name: str
    renderer_reason: str
    """Why this chat format was chosen."""
    tokenizer: PreTrainedTokenizerBase
    given: str = ""
    """The model as the user named it, such as the log folder of a run."""

    @property
    def name(self) -> str:
        """The checkpoint's path, or the name of the base model."""
        return self.model_path or self.model_name


async def client_of_weights(
    service: ServiceClient, path: str, *, samples_states: bool
) -> SamplingClient:
    """Returns a client of a checkpoint; ``samples_states``: the backend samples from training
    states too, as the local engine does."""
    if "/weights/" in path and not samples_states:
        # The hosted API samples only from sampler weights.
        trained = await service.create_training_client_from_state(path)
        return await trained.save_weights_and_get_sampling_client()
    return await service.create_sampling_client(model_path=path)


async def open_sampling_model(
    connection: Connection, settings: SamplingModelSettings
) -> SamplingModel:
    """Opens the model of ``settings`` on ``connection``.

    Raises:
        ConfigurationError: the checkpoint has another base model than ``model_name``.
        CheckpointError: the backend does not have the checkpoint.
    """
    service, path = connection.service, settings.model_path
    name, renderer_name, recorded = settings.model_name, settings.renderer_name, False
    if path is not None:
        info = await service.create_rest_client().get_weights_info_by_tinker_path(path)
        if name is not None and name != info.base_model:
            raise ConfigurationError(
                f"model_name: got {name}, but {path} was trained on {info.base_model}; leave "
                "model_name out"
            )
        name = info.base_model
        if renderer_name is None:
            renderer_name = await get_renderer_name_from_checkpoint_async(service, path)
            recorded = renderer_name is not None
    assert name is not None
    renderer_name, reason = resolve_renderer_name(name, renderer_name)
    tokenizer = get_tokenizer(name)
    if path is None:
        client = await service.create_sampling_client(base_model=name)
    else:
        local = connection.kind == "local"
        client = await client_of_weights(service, path, samples_states=local)
    return SamplingModel(
        model_name=name,
        model_path=path,
        client=client,
        renderer=get_renderer(renderer_name, tokenizer),
        renderer_name=renderer_name,
        renderer_reason="recorded by the run" if recorded else reason,
        tokenizer=tokenizer,
        given=getattr(settings, "X_model_path", None) or name,  # as before it was resolved
    )
