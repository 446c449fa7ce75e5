"""Adapters of routed experts: their matrices in model files, and in a loaded model.

PEFT names the tensors of a module's stacked parameters by nested wrappers:
``MODULE.base_layer`` has the tensors of the first parameter (``gate_up_proj``, or ``up_proj``
without a gate), ``MODULE`` those of ``down_proj``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from tinker_cookbook.exceptions import WeightsMergeError
from tinker_cookbook.weights._modules import INNER
from tinker_cookbook.weights._source import LowRankUpdate


def by_file(
    updates: Mapping[str, LowRankUpdate], stored: Collection[str], source: str
) -> dict[str, LowRankUpdate]:
    """Returns the updates by module name in a model's files, which store each expert separately.

    Raises:
        WeightsMergeError: The files store experts differently.
    """
    out: dict[str, LowRankUpdate] = {}
    for module, update in updates.items():
        if not update.experts:
            out[module] = update
            continue
        first = f"{module.removesuffix(INNER)}.0."
        parts = ["down_proj"]
        if module.endswith(INNER):
            parts = [p for p in ("gate_proj", "up_proj") if f"{first}{p}.weight" in stored]
        if not parts or f"{first}{parts[-1]}.weight" not in stored:
            raise WeightsMergeError(
                f"{source}: changes the experts of {module.removesuffix(INNER)}, which the base "
                f"model's files do not store as {first}down_proj.weight and so on; set "
                "merge_strategy=full, which loads the base model with transformers"
            )
        for number, one in enumerate(_each(update)):
            # Gate and up projections are the two halves of a stacked matrix.
            height = len(one.b) // len(parts)
            for at, part in enumerate(parts):
                name = f"{module.removesuffix(INNER)}.{number}.{part}"
                half = one.b[at * height : (at + 1) * height]
                out[name] = LowRankUpdate(one.a, half, one.scaling)
    return out


def changed_matrix(model: Any, module: str, update: LowRankUpdate) -> Tensor:
    """Returns the weights [out, in] or [E, out, in] of a loaded model that an update changes; they
    can be modified in place.

    Raises ``AttributeError`` if the model lacks them.
    """
    if not update.experts:
        return model.get_submodule(module).weight.detach()
    experts = model.get_submodule(module.removesuffix(INNER))
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    stacked = getattr(experts, up if module.endswith(INNER) else "down_proj").detach()
    return stacked.transpose(1, 2) if experts.is_transposed else stacked


def _each(update: LowRankUpdate) -> Iterator[LowRankUpdate]:
    a, b = update.split()
    for one_a, one_b in zip(a, b, strict=True):
        yield LowRankUpdate(one_a, one_b, update.scaling)
