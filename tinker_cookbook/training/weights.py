"""Checks that saved weights fit the settings of the run that is to go on from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tinker_cookbook.backends import ServiceClient
from tinker_cookbook.engine.resolve import base_name
from tinker_cookbook.exceptions import CheckpointError

_SHAPE = ("lora_rank", "train_attn", "train_mlp", "train_unembed")


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
