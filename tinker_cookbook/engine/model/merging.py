"""Whether an adapter can be merged into its base model without changing it otherwise."""

from __future__ import annotations

from tinker_cookbook.engine.model.resolve import resolve_model
from tinker_cookbook.exceptions import ModelNotFoundError


def merge_note(base_model: str, train_unembed: bool) -> str | None:
    """Returns a sentence where merging the adapter is inexact, else ``None``.

    With tied embeddings the input embeddings and the output head are one tensor. An adapter on the
    head changes the head alone; merged into the shared tensor it changes the embeddings as well.

    Args:
        base_model: Hub name or local folder.
        train_unembed: Whether the adapter has a part on the head.
    """
    if not train_unembed or not _has_tied_embeddings(base_model):
        return None
    return (
        "merging this adapter into the base model is inexact: the model ties its head to its input "
        "embeddings, and the adapter changes the head alone. Use it as an adapter, untie the head "
        "before merging, or train with train_unembed=false"
    )


def _has_tied_embeddings(base_model: str) -> bool:
    from transformers import AutoConfig

    try:
        folder = resolve_model(base_model, allow_download=False, need="config").folder
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ModelNotFoundError, OSError, ValueError):
        return False  # a model that is not on this machine: nothing is known of it
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
