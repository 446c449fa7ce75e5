"""AdamW for an adapter's tensors (Loshchilov & Hutter 2019, arXiv 1711.05101): torch's AdamW with
hyper-parameters per step, clipping by the global norm, refusal of non-finite
gradients, and a state that is saved to and loaded from named tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tinker_cookbook.exceptions import CheckpointError, ConfigurationError, TrainingError

_LARGEST_GRADIENT = 1.9e19
"""The norm of a gradient with larger values exceeds float32, so the step is refused."""


@dataclass(frozen=True)
class AdamSettings:
    """Hyper-parameters of one step, with the Tinker API's defaults. ``weight_decay`` is
    decoupled, and ``grad_clip_norm`` 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            high = 1 if name.startswith("beta") else math.inf
            if not 0 <= value < high:
                raise ConfigurationError(
                    f"{name}: got {value}, expected a number >= 0 and < {high}"
                )


_Copies = tuple[list[Tensor], dict[str, Tensor]]


class AdamW:
    """Optimizer of one adapter. ``parameters`` are leaf tensors by name."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self._optimizer = torch.optim.AdamW(list(self._parameters.values()), lr=0.0, fused=True)

    def step(self, gradients: Mapping[str, Tensor], settings: AdamSettings) -> dict[str, float]:
        """Takes one step and returns ``grad_norm`` (before clipping). Raises ``TrainingError``, and
        keeps the weights, if the gradient or a weight after the step is NaN or infinite."""
        grads = [gradients[name] for name in self._parameters]
        # Compute the norm over all tensors before anything changes: a NaN or infinity makes it
        # non-finite, and then the step can still be refused.
        norm = torch.nn.utils.get_total_norm(grads).item()
        if not math.isfinite(norm):
            raise TrainingError(
                f"gradient norm is {norm}; the weights were not changed. Lower learning_rate "
                "or set grad_clip_norm, and look for extreme values in the data"
            )
        clip = settings.grad_clip_norm
        if clip > 0 and norm > clip:
            # In place, because the run no longer needs these gradients. On a GPU, a few kernels
            # scale all.
            torch._foreach_mul_(grads, clip / norm)  # pyright: ignore[reportPrivateImportUsage]
        rate, decay, eps = settings.learning_rate, settings.weight_decay, settings.eps
        betas = (settings.beta1, settings.beta2)
        self._optimizer.param_groups[0].update(lr=rate, betas=betas, eps=eps, weight_decay=decay)
        # An update is at most ``lr * g / eps``, with ``g`` the largest gradient so far. Only
        # unusual settings approach the limit of float32 (3e38). Only then are copies made, from
        # which weights and moments can be restored.
        may_overflow = eps == 0 or rate * decay > 1 or rate * _LARGEST_GRADIENT / eps > 1e36
        before = self._copies() if may_overflow else None
        for parameter, grad in zip(self._parameters.values(), grads, strict=True):
            parameter.grad = grad
        try:
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
            # The first step creates the moments. If it runs out of memory, a tensor's moments may
            # be incomplete. Drop them, so that the next step creates them again.
            for parameter in self._parameters.values():
                if len(self._optimizer.state.get(parameter, {})) not in (0, 3):
                    del self._optimizer.state[parameter]
        if before is not None:
            self._require_finite(before, settings)
        return {"grad_norm": norm}

    def _copies(self) -> _Copies:
        """Returns copies of the weights and moments."""
        weights = [parameter.detach().clone() for parameter in self._parameters.values()]
        return weights, {name: tensor.clone() for name, tensor in self.state().items()}

    @torch.no_grad()
    def _require_finite(self, before: _Copies, settings: AdamSettings) -> None:
        """Restores weights and moments and raises if a weight is not finite."""
        largest = torch.nn.utils.get_total_norm(list(self._parameters.values()), math.inf).item()
        if math.isfinite(largest):
            return
        weights, state = before
        for parameter, weight in zip(self._parameters.values(), weights, strict=True):
            # In place: the adapter and the optimizer refer to this tensor.
            parameter.copy_(weight)
        # ``load`` ignores an empty state, so drop the moments of a refused first step here.
        self._optimizer.state.clear()
        self.load(state, "the optimizer")
        raise TrainingError(
            f"optim_step: learning_rate={settings.learning_rate:g} with eps={settings.eps:g} and "
            f"weight_decay={settings.weight_decay:g} would write a weight that is {largest}; the "
            "weights were not changed. Lower learning_rate, or set eps to 1e-8"
        )

    def state(self) -> dict[str, Tensor]:
        """Returns moments and step counts by name; empty before the first step."""
        return {
            f"{name}.{key}": value.detach()
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }

    def load(self, saved: Mapping[str, Tensor], source: str) -> None:
        """Restores a state returned by ``state``, bit for bit."""
        if not saved:
            return
        for name, parameter in self._parameters.items():
            state = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                value = saved.get(f"{name}.{key}")
                if value is None:
                    raise CheckpointError(
                        f"{source}: optimizer state {name}.{key} is missing; load the checkpoint "
                        "without its optimizer, or an earlier one"
                    )
                device = parameter.device
                # Copy, because a step changes the moments in place.
                state[key] = value.to(device=device, dtype=torch.float32, copy=True)
            self._optimizer.state[parameter] = state
