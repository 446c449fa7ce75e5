"""Training clients of new and continued runs, whose saved weights must fit the settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.backends import ServiceClient, TrainingClient
from tinker_cookbook.engine.model.resolve import base_name
from tinker_cookbook.exceptions import CheckpointError

if TYPE_CHECKING:
    from tinker_cookbook.checkpoint_utils import CheckpointRecord
    from tinker_cookbook.training.config import TrainingConfig

_SHAPE = ("lora_rank", "train_attn", "train_mlp", "train_unembed")


async def create_training_client(
    service: ServiceClient,
    config: TrainingConfig,
    last: CheckpointRecord | None = None,
    metadata: dict[str, str] | None = None,
) -> TrainingClient:
    """Returns the client that a run trains with.

    Args:
        service: Creates the client.
        config: Names the model and the adapter, and with ``load_checkpoint_path`` the weights to
            start from, with a new optimizer.
        last: The checkpoint that the run continues from, with its optimizer's state.
        metadata: Stored with the training run.

    Raises:
        CheckpointError: The weights are of another model or adapter shape.
    """
    if last is not None and last.state_path is not None:
        await check_weights(service, last.state_path, config)
        return await service.create_training_client_from_state_with_optimizer(
            last.state_path, user_metadata=metadata
        )
    if config.load_checkpoint_path is not None:
        await check_weights(service, config.load_checkpoint_path, config)
        return await service.create_training_client_from_state(
            config.load_checkpoint_path, user_metadata=metadata
        )
    return await service.create_lora_training_client(
        config.model_name,
        rank=config.lora_rank,
        seed=config.seed,
        train_mlp=config.train_mlp,
        train_attn=config.train_attn,
        train_unembed=config.train_unembed,
        user_metadata=metadata,
    )


async def check_weights(service: ServiceClient, path: str, settings: Any) -> None:
    """Refuses weights of another model or adapter shape than the settings say.

    The backend would load them with the shape they have, and the settings would be ignored in
    silence; another model's tokens would even be trained on.

    ``settings`` has ``model_name`` and may have ``lora_rank``, ``train_attn`` and so on.

    Raises:
        CheckpointError: names the setting, what the weights have, and the next step.
    """
    info = await service.create_rest_client().get_weights_info_by_tinker_path(path)
    if not _same_model(info.base_model, settings.model_name):
        raise CheckpointError(
            f"model_name: got {settings.model_name}, but {path} was trained on {info.base_model}; "
            f"set model_name={info.base_model}, or start from other weights"
        )
    for name in _SHAPE:
        saved, asked = getattr(info, name), getattr(settings, name, None)
        if None not in (saved, asked) and saved != asked:  # None: it is not said
            raise CheckpointError(
                f"{name}: got {asked}, but the adapter in {path} has {saved}; set {name}={saved}, "
                "or start from other weights"
            )


def _same_model(saved: str, asked: str) -> bool:
    saved, asked = base_name(saved), base_name(asked)
    if saved == asked:
        return True
    folders = [Path(name).expanduser() for name in (saved, asked)]
    return all(map(Path.is_dir, folders)) and folders[0].samefile(folders[1])
