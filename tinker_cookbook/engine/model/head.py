"""Target log-probabilities from hidden states in chunks, without the full [T, V] logits.

For logits ``z = cap(scale * (W h + B A h))`` and upstream gradient ``g`` of the target's
log-probability, ``dz = g (onehot(target) - softmax(z))``. Logits and log-sum-exp are fp32. The
backward pass runs only over positions with a non-zero gradient; the frozen ``W`` gets none. It
reuses the part of the softmax that the forward pass saved (``SavedSoftmax``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine.kernels import FrozenWeight, add_low_rank, compiled_softmax
from tinker_cookbook.engine.model.low_rank import LowRank, Part

_CHUNK_BYTES_CPU = 32 << 20  # larger chunks are more efficient but need several times their size
_CHUNK_BYTES_GPU = 512 << 20
_KEPT_BYTES = 256 << 20
"""Bytes that a forward pass may save for its backward pass: about 1,300 positions at V = 50k."""


@dataclass
class HeadGradients:
    """Gradients of the hidden states and of the head's adapter."""

    hidden: Tensor
    a: Tensor | None = None
    b: Tensor | None = None


@dataclass(frozen=True)
class _Softmax:
    """Softmax of a few positions: ``exp(z - max z)`` [T, V], sums [T, 1], and the targets'
    values."""

    exponents: Tensor
    total: Tensor
    logprobs: Tensor
    cap_slope: Tensor | None = None


@dataclass
class SavedSoftmax:
    """Softmax of the first ``positions`` [N] of a pass, saved within a memory budget."""

    positions: Tensor
    _parts: list[tuple[slice, _Softmax]] = field(default_factory=list)
    _left: int = _KEPT_BYTES

    def add(self, rows: slice, softmax: _Softmax) -> None:
        """Saves the softmax of ``positions[rows]`` if it fits into the budget."""
        if softmax.exponents.nbytes <= self._left:
            self._left -= softmax.exponents.nbytes
            self._parts.append((rows, softmax))

    def take(self) -> Iterator[tuple[Tensor, _Softmax]]:
        """Removes and yields positions and their softmax, which the caller may overwrite."""
        while self._parts:
            rows, softmax = self._parts.pop()
            yield self.positions[rows], softmax


@dataclass(frozen=True)
class Head:
    """The unembedding layer of a model: ``weight`` [V, H], optional bias, scale and soft cap."""

    weight: FrozenWeight
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: Any, config: Any) -> Head:
        """Builds the head from a transformers model: weight and logit transformations."""
        config = getattr(config, "text_config", config)
        layer = model.get_output_embeddings()
        scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere multiplies
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite divides
        softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
        weight = FrozenWeight(layer.weight)
        return cls(weight, layer.bias, scale, float(softcap) if softcap else None)

    @property
    def chunk_rows(self) -> int:
        """Number of positions in a chunk."""
        # Logits are fp32; a chunk has at least 8 rows, however large the vocabulary is.
        budget = _CHUNK_BYTES_CPU if self.weight.device.type == "cpu" else _CHUNK_BYTES_GPU
        return max(8, budget // (4 * self.weight.shape[0]))

    def logits(self, hidden: Tensor, lora: LowRank | None) -> Tensor:
        """Returns fp32 logits [T, V] of a few positions ``hidden`` [T, H]."""
        return self.logits_of_parts(hidden, [] if lora is None else lora.parts(len(hidden)))

    def logits_of_parts(self, hidden: Tensor, parts: Sequence[Part]) -> Tensor:
        """Returns logits for ``parts`` of the rows, each with its own adapter."""
        # In bfloat16 a logit of 20 has an error of up to 0.06, and sampler and trainer would
        # differ.
        z = self.weight.forward.product_fp32(hidden)
        if self.bias is not None:
            z += self.bias
        z = add_low_rank(z, hidden, parts)
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z

    @torch.no_grad()
    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        lora: LowRank | None,
        kept: SavedSoftmax | None = None,
    ) -> Tensor:
        """Returns fp32 log-probabilities in the shape of ``targets`` ([T] or [T, K]).

        ``kept`` receives the softmax for a backward pass over the same positions.
        """
        out = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        compiled = self._compiled(targets)
        for rows in self._chunks(len(hidden)):
            inputs = (hidden[rows], lora and lora.at(rows))
            if compiled is not None:
                # Nothing is kept: computing the logits again takes less time than the passes over
                # them that are saved.
                out[rows] = compiled[1](self.logits(*inputs), targets[rows])
                continue
            softmax = self._softmax(*inputs, targets[rows])
            out[rows] = softmax.logprobs
            # With a soft cap its derivative would have to be saved too, which doubles the memory.
            if kept is not None and self.softcap is None:
                kept.add(rows, softmax)
        return out

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int, lora: LowRank | None) -> tuple[Tensor, Tensor]:
        """Returns the ``k`` most probable tokens of each position: (logprobs [T, k], ids [T,
        k])."""
        values, ids = [], []
        for rows in self._chunks(len(hidden)):
            z = self.logits(hidden[rows], lora and lora.at(rows))
            top = z.topk(k, dim=-1)
            values.append(top.values - z.logsumexp(-1, keepdim=True))
            ids.append(top.indices)
        return torch.cat(values), torch.cat(ids)

    @torch.no_grad()
    def backward(
        self,
        hidden: Tensor,
        targets: Tensor,
        upstream: Tensor,
        lora: LowRank | None,
        logprobs_out: Tensor | None = None,
        kept: SavedSoftmax | None = None,
    ) -> HeadGradients:
        """Returns gradients for ``upstream``, the gradient of the log-probabilities (like
        ``targets``).

        ``kept`` is the softmax that ``logprobs`` saved; this pass consumes it.

        With ``logprobs_out`` the log-probabilities of *all* positions are written there as well,
        in the same pass: the gradient of a linear loss is known beforehand, so such a loss needs
        the logits only once.
        """
        # Positions without a gradient (prompts) keep these zeros and cost nothing.
        grads = HeadGradients(torch.zeros_like(hidden))
        if lora is not None:
            grads.a = torch.zeros_like(lora.a, dtype=torch.float32)
            grads.b = torch.zeros_like(lora.b, dtype=torch.float32)
        needed = (upstream != 0) if upstream.dim() == 1 else (upstream != 0).any(-1)
        inputs = (hidden, targets, upstream)
        for at, logprobs, dz in self._logit_gradients(*inputs, needed, lora, kept):
            if logprobs_out is not None:
                logprobs_out[at] = logprobs
            grads.hidden[at] = self._through_layer(dz, hidden[at], lora and lora.at(at), grads)
        if logprobs_out is not None:
            # Positions without a gradient only need the log-probability, so no softmax is saved.
            rest = (~needed).nonzero()[:, 0]
            logprobs_out[rest] = self.logprobs(hidden[rest], targets[rest], lora and lora.at(rest))
        return grads

    def _logit_gradients(
        self,
        hidden: Tensor,
        targets: Tensor,
        upstream: Tensor,
        needed: Tensor,
        lora: LowRank | None,
        kept: SavedSoftmax | None,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields chunks of the positions in the mask ``needed`` [T], with their log-probabilities
        and the gradients [T, V] of their raw logits."""
        # Positions with a saved softmax need no second product with [V, H].
        rest = needed.clone()
        for at, softmax in kept.take() if kept is not None else ():
            wanted = needed[at]
            rest[at] = False
            if not wanted.any():
                continue
            if not wanted.all():
                parts = (softmax.exponents, softmax.total, softmax.logprobs)
                at, softmax = at[wanted], _Softmax(*(part[wanted] for part in parts))
            dz = self._through_softmax(softmax, targets[at], upstream[at])
            yield at, softmax.logprobs, dz.to(hidden.dtype)
        order, compiled = rest.nonzero()[:, 0], self._compiled(targets)
        for rows in self._chunks(len(order)):
            at = order[rows]
            inputs = (hidden[at], lora and lora.at(at))
            if compiled is not None:
                scaled = upstream[at] * self.scale
                logits = self.logits(*inputs)
                yield at, *compiled[0](logits, targets[at], scaled, hidden.dtype)
            else:
                softmax = self._softmax(*inputs, targets[at], slope=True)
                dz = self._through_softmax(softmax, targets[at], upstream[at])
                yield at, softmax.logprobs, dz.to(hidden.dtype)

    def _compiled(self, targets: Tensor) -> Any:
        """Returns the functions of ``compiled_softmax``, if they apply here."""
        if targets.dim() == 2 or self.softcap is not None or targets.device.type != "cuda":
            return None
        return compiled_softmax.compiled()

    def _through_softmax(self, softmax: _Softmax, targets: Tensor, upstream: Tensor) -> Tensor:
        """Returns d loss / d raw logits [T, V], in the memory of the softmax."""
        if targets.dim() == 1:
            targets, upstream = targets[:, None], upstream[:, None]
        # ``dz = g (onehot - softmax)``; the gradients of K targets of a position add up.
        dz = softmax.exponents.mul_(-upstream.sum(-1, keepdim=True) / softmax.total)
        dz.scatter_add_(1, targets, upstream)
        # Chain rule in reverse order of ``logits``: first the cap, then the scale.
        if softmax.cap_slope is not None:
            dz.mul_(softmax.cap_slope)
        return dz.mul_(self.scale) if self.scale != 1.0 else dz

    def _softmax(
        self, hidden: Tensor, lora: LowRank | None, targets: Tensor, *, slope: bool = False
    ) -> _Softmax:
        z = self.logits(hidden, lora)
        # Read the target logits before the exponentials overwrite them.
        at_target = z.gather(1, targets if targets.dim() == 2 else targets[:, None])
        cap_slope = 1 - (z / self.softcap) ** 2 if slope and self.softcap is not None else None
        # In place: besides the products, passes over [T, V] take most of the head's time.
        highest = z.amax(-1, keepdim=True)
        total = z.sub_(highest).exp_().sum(-1, keepdim=True)
        logprobs = at_target - (highest + total.log())
        return _Softmax(z, total, logprobs if targets.dim() == 2 else logprobs[:, 0], cap_slope)

    def _through_layer(
        self, dz: Tensor, hidden: Tensor, lora: LowRank | None, grads: HeadGradients
    ) -> Tensor:
        # Only the hidden states and the adapter get gradients; the head's matrix is frozen.
        d_hidden = self.weight.backward.product(dz)
        if lora is None or grads.a is None or grads.b is None:
            return d_hidden
        for rows, ranks in lora.members():
            a, b = lora.a[ranks], lora.b[:, ranks]
            d_low = dz[rows] @ b
            # Accumulate over chunks in fp32: a large sum in bfloat16 would lose small terms.
            grads.b[:, ranks].add_((dz[rows].t() @ F.linear(hidden[rows], a)).float())
            grads.a[ranks].add_((d_low.t() @ hidden[rows]).float())
            d_hidden[rows].addmm_(d_low, a)
        return d_hidden

    def _chunks(self, rows: int) -> Iterator[slice]:
        size = self.chunk_rows
        return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
