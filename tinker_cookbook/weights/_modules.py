"""Names of a base model's modules, and of their matrices in its files.

transformers renames the tensors of many multimodal models when it loads them, and PEFT silently
ignores tensors whose module the model lacks. So the names are read from the model itself, which is
built without weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tinker_cookbook.engine.model.loading import empty_model
from tinker_cookbook.engine.model.lora import in_multimodal_model
from tinker_cookbook.exceptions import WeightsAdapterError

HEAD = "lm_head"
INNER = ".base_layer"
"""Suffix of PEFT's name for the first of a module's stacked parameters."""
T = TypeVar("T")


def by_module(updates: Mapping[str, T], folder: Path, source: str) -> dict[str, T]:
    """Returns an adapter's updates by the names of modules of the model in ``folder``.

    Raises:
        WeightsAdapterError: The model lacks a module.
    """
    model = empty_model(folder)
    if model is None:
        return dict(updates)
    modules = dict(model.named_modules())
    found = in_multimodal_model(updates, _of_language_model(model))
    for name in found:
        if name != HEAD and name.removesuffix(INNER) not in modules:
            raise WeightsAdapterError(
                f"{source}: has an update of {name}, which {folder} lacks; is it its base model?"
            )
    return found


def of_vision_tower(names: Iterable[str], folder: Path) -> set[str]:
    """Returns those of a model's modules that are neither in the language model nor its head."""
    model = empty_model(folder)
    return set() if model is None else {*names} - {HEAD, *_of_language_model(model)}


def _of_language_model(model: Any) -> list[str]:
    inside = {id(module) for module in model.get_decoder().modules()}
    # Of stacked parameters, PEFT names the first one by a suffix.
    found = [name for name, module in model.named_modules() if id(module) in inside]
    return [*found, *(f"{name}{INNER}" for name in found if name.endswith("experts"))]


def stored_names(folder: Path, stored: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Returns the names in a model's files by those in the model that transformers loads.

    ``stored`` are all names in the files. If ``wanted`` are among them, names need no mapping.
    """
    stored = set(stored)
    model = None if stored.issuperset(wanted) else empty_model(folder)
    if model is None:
        return {name: name for name in stored}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model)
    computed = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamed = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    own, prefix = model.state_dict(), model.base_model_prefix
    out = {}
    for name in stored:
        found, changes = rename_source_key(name, renamed, computed, prefix, own)
        if found not in own and name in own:
            found, changes = name, None
        # A tensor that transformers computes from others is no matrix of the files.
        if changes is None:
            out[found] = name
    return out
