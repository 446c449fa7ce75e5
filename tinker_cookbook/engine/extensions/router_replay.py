"""Router replay: training reuses the sampler's choices of experts.

Sampling and training round differently, so a router with nearly equal scores for two experts may
choose the other one in training. The log-probabilities of that token then differ by far more than
rounding. With the sampler's choices both passes use the same experts; their weights are computed in
training, so gradients flow through the routers as usual.

Source: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers" (arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tinker_cookbook.engine.memory import BoundedCache
from tinker_cookbook.engine.model.experts import AdapterExperts
from tinker_cookbook.engine.model.lora import ActiveTerms
from tinker_cookbook.exceptions import ConfigurationError

_MOST_BYTES = 1 << 30
"""Memory for stored choices: 2.8 million tokens of a model with 48 layers and 8 experts per
token."""

_UNKNOWN = -1


class RouterReplay:
    """Stored choices of the sampled sequences, by their tokens.

    ``width`` is the number of choices of a token in all layers together.
    """

    def __init__(self, model: nn.Module, active: ActiveTerms, probe: Callable[[], Tensor]) -> None:
        self._known: BoundedCache[bytes, np.ndarray] = BoundedCache(_MOST_BYTES)
        layers = [(n, m) for n, m in model.named_modules() if isinstance(m, AdapterExperts)]
        if not layers:
            raise ConfigurationError(
                f"replay_router=true, but {type(model).__name__} has no routed experts; leave it "
                "out"
            )
        for number, (name, experts) in enumerate(layers):
            block = model.get_submodule(name.rpartition(".")[0])
            block.forward = partial(_replayed, block.forward, active, number, experts.num_experts)
        # The first pass shows the number of choices; the second checks that replayed ones are used.
        chosen: list[Tensor] = []
        obeyed: list[Tensor] = []
        with active.use(recorded=chosen):
            probe()
        self._layers, self._k = len(layers), chosen[0].shape[1]
        self.width = self._layers * self._k
        wanted = (torch.stack(chosen, 1) + 1) % min(e.num_experts for _, e in layers)
        with active.use(recorded=obeyed, replayed=wanted):
            probe()
        if not torch.equal(torch.stack(obeyed, 1), wanted):
            raise ConfigurationError(
                f"replay_router=true: the routers of {type(model).__name__} choose in a way that "
                "cannot be replayed; leave it out"
            )

    def keep(self, tokens: np.ndarray, chosen: np.ndarray) -> None:
        """Stores the choices [T, width] of a sampled sequence's ``tokens`` [T]."""
        self._known.put(_key(tokens), chosen, chosen.nbytes)

    def known(self, sequences: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (tokens, choices) of the sequences with stored choices."""
        pairs = ((tokens, self._known.get(_key(tokens))) for tokens in sequences)
        return [(tokens, chosen) for tokens, chosen in pairs if chosen is not None]

    def find(
        self, sequences: Sequence[np.ndarray], flat: Tensor, positions: int
    ) -> tuple[Tensor | None, int]:
        """Returns the choices [positions, layers, k] of a micro-batch, and the number of tokens
        with stored choices.

        ``flat`` [N] has the position of each token of the sequences, one after another. A position
        without a stored choice has -1, and its routers choose.
        """
        out = np.full((positions, self.width), _UNKNOWN, dtype=np.int16)
        at, start, count = flat.cpu().numpy(), 0, 0
        for tokens in sequences:
            here = at[start : start + len(tokens)]
            start += len(tokens)
            if (chosen := self._known.get(_key(tokens))) is not None:
                out[here] = chosen
                count += len(tokens)
        if not count:
            return None, 0
        found = torch.from_numpy(out).to(device=flat.device, dtype=torch.int64)
        return found.view(positions, self._layers, self._k), count


def _key(tokens: np.ndarray) -> bytes:
    return blake2b(np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=16).digest()


def _replayed(
    forward: Callable[..., Any],
    active: ActiveTerms,
    number: int,
    experts: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs the expert block ``number`` with the active choices, if there are any."""
    if active.replayed is None:
        return forward(*args, **kwargs)
    with _Chosen(active.replayed[:, number], experts):
        return forward(*args, **kwargs)


class _Chosen(TorchFunctionMode):
    """Replaces the experts that a router selects with ``topk``, for any router code around it."""

    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self._chosen, self._experts = chosen, experts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return out
        scores = args[0] if args else kwargs["input"]
        # A router may also use ``topk`` on groups of experts; those scores have another shape.
        if out.indices.shape != self._chosen.shape or scores.shape[-1] != self._experts:
            return out
        indices = torch.where(self._chosen >= 0, self._chosen, out.indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))
