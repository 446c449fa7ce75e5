"""Creates training clients for new and resumed runs; checks saved weights against the settings."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.backends import ServiceClient, TrainingClient
from tinker_cookbook.checkpoint_utils import CheckpointRecord
from tinker_cookbook.engine.model.resolve import base_name
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from tinker_cookbook.training.config import TrainingConfig


async def create_training_client(
    service: ServiceClient,
    config: TrainingConfig,
    last: CheckpointRecord | None = None,
    metadata: dict[str, str] | None = None,
) -> TrainingClient:
    """Returns the client that a run trains with; ``metadata`` is stored with the training run.

    It loads the weights and the optimizer state of ``last``, else the weights of
    ``load_checkpoint_path`` with a new optimizer, else a new adapter.
    """
    # A resumed run continues from its checkpoint; load_checkpoint_path was only its initial state.
    if last is not None and last.state_path is not None:
        # The backend would load incompatible weights without an error (see check_weights).
        await check_weights(service, last.state_path, config)
        return await service.create_training_client_from_state_with_optimizer(
            last.state_path, user_metadata=metadata
        )
    if config.load_checkpoint_path is not None:
        await check_weights(service, config.load_checkpoint_path, config)
        return await service.create_training_client_from_state(
            config.load_checkpoint_path, user_metadata=metadata
        )
    more: dict[str, Any] = {}
    if config.train_vision:
        # The protocol of the hosted API has no such setting, and would ignore it.
        if "train_vision" not in signature(service.create_lora_training_client).parameters:
            raise ConfigurationError(
                "train_vision=True: the hosted API and servers have no adapters on vision towers; "
                "train with backend=local, or set train_vision=False"
            )
        more["train_vision"] = True
    return await service.create_lora_training_client(
        config.model_name,
        rank=config.lora_rank,
        seed=config.seed,
        train_mlp=config.train_mlp,
        train_attn=config.train_attn,
        train_unembed=config.train_unembed,
        user_metadata=metadata,
        **more,
    )


async def check_weights(service: ServiceClient, path: str, settings: Any) -> None:
    """Raises CheckpointError for weights with another model or adapter shape than in the settings.

    The backend would load them with their own shape and silently ignore the settings;
    it would even train on tokens of another model. ``settings`` has ``model_name`` and may have
    ``lora_rank``, ``train_attn`` and so on.
    """
    info = await service.create_rest_client().get_weights_info_by_tinker_path(path)
    saved, wanted = base_name(info.base_model), base_name(settings.model_name)
    folders = [Path(name).expanduser() for name in (saved, wanted)]
    # Two paths may refer to the same folder.
    same_folder = all(map(Path.is_dir, folders)) and folders[0].samefile(folders[1])
    if saved != wanted and not same_folder:
        raise CheckpointError(
            f"model_name: got {settings.model_name}, but {path} was trained on {info.base_model}; "
            f"set model_name={info.base_model}, or start from other weights"
        )
    for name in ("lora_rank", "train_attn", "train_mlp", "train_unembed", "train_vision"):
        found, expected = getattr(info, name, None), getattr(settings, name, None)
        # None means unknown.
        if None not in (found, expected) and found != expected:
            raise CheckpointError(
                f"{name}: got {expected}, but the adapter in {path} has {found}; set "
                f"{name}={found}, or start from other weights"
            )
