"""Loss table: pure functions of target log-probabilities, as unnormalized sums over tokens.

With ``lp`` the learner's and ``q`` the sampler's log-probabilities, ``A`` advantages and
``r = exp(lp - q)``:

======================  =====================================================================
cross_entropy           ``-(lp * weights).sum()``; targets and weights may be [T, K]
importance_sampling     ``-(r * A).sum()``
ppo                     ``-min(r * A, clip(r, lo, hi) * A).sum()``          (arXiv 1707.06347)
cispo                   ``-(clip(r, lo, hi).detach() * lp * A).sum()``      (arXiv 2506.13585)
dro                     ``-(lp * A - beta / 2 * (lp - q)**2).sum()``        (arXiv 2405.19107)
                        (no penalty where ``q`` is exactly 0: the token was not sampled)
gspo                    ppo with the sequence's ratio in place of the token's (arXiv 2507.18071)
stable_reinforce        ``-(w * (lp * A - kl_coeff / 2 * (lp - q)**2)).sum()`` with
                        ``w = clip(r, lo, hi).detach()``; no penalty where ``q`` is exactly 0
======================  =====================================================================

Definitions and defaults follow the Tinker API, except for ``stable_reinforce``: the hosted
objective is not published, so another is used here (see ``_stable_reinforce``), and ``r`` is at
most ``e**20``: in importance_sampling, ppo and gspo a token with a larger ratio has no gradient. It
would outweigh all others of its step, or overflow. As the losses are sums, those of micro-batches
add up: splitting a batch never changes its gradient. Every loss is linear in signed weights or
advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, nearest

_RL = ("target_tokens", "logprobs", "advantages")
_CLIP = ("clip_low_threshold", "clip_high_threshold")
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss over concatenated sequences.

    ``fields`` holds fp32 tensors [T] (or [T, K]), by their name in ``loss_fn_inputs``;
    ``sequence`` [T] is the index of each token's sequence; ``config`` holds the resolved settings.
    """

    fields: Mapping[str, Tensor]
    sequence: Tensor
    num_sequences: int
    config: Mapping[str, float]

    def __getitem__(self, field: str) -> Tensor:
        return self.fields[field]

    def clip(self, ratio: Tensor) -> Tensor:
        """Clips ``ratio`` to per-token thresholds if given, else to those of the config."""
        low, high = (
            self.fields[name] if name in self.fields else torch.full_like(ratio, self.config[name])
            for name in _CLIP
        )
        return torch.minimum(torch.maximum(ratio, low), high)


@dataclass(frozen=True)
class Loss:
    """One row of the loss table: function, inputs, and settings with defaults.

    A default of ``None`` marks a setting without a public default: it must be given, and
    ``advice`` names a usual value. ``linear`` marks a loss with a gradient that is known before the
    log-probabilities.
    """

    name: str
    function: Callable[[Tensor, LossInputs], Tensor]
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: Mapping[str, float | None] = field(default_factory=dict)
    linear: bool = False
    advice: str = ""

    def resolve_config(
        self, given: Mapping[str, float | str] | None, *, per_token: frozenset[str] = frozenset()
    ) -> dict[str, float]:
        """Checks the given settings and fills in defaults. ``per_token`` names settings that every
        datum gives per token instead."""
        known = dict(self.config)
        for key, value in (given or {}).items():
            if key not in known:
                expected = ", ".join(known) or "no settings"
                raise ConfigurationError(
                    f"loss_fn_config[{key!r}]: {self.name} has no such setting, expected {expected}"
                    f"{nearest(key, known)}"
                )
            if isinstance(value, str) or not math.isfinite(value):
                raise ConfigurationError(
                    f"loss_fn_config[{key!r}]: got {value!r}, expected a finite number"
                )
            known[key] = float(value)
        for key, value in known.items():
            if value is None and key not in per_token:
                raise ConfigurationError(
                    f"loss_fn_config[{key!r}]: {self.name} has no public default for it; "
                    f"{self.advice}"
                )
        # After filling in defaults: a given bound may conflict with the default of the other.
        low, high = known.get(_CLIP[0]), known.get(_CLIP[1])
        if low is not None and high is not None and low > high:
            raise ConfigurationError(
                f"loss_fn_config: clip_low_threshold is {low}, above clip_high_threshold {high}; "
                "both bound the ratio itself (0.8 and 1.2), not its distance from 1"
            )
        return {key: value for key, value in known.items() if value is not None}


def _cross_entropy(lp: Tensor, inputs: LossInputs) -> Tensor:
    return -(lp * inputs["weights"]).sum()


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    # A sampler may report a log-probability such as -99; float32 overflows at a ratio of e**88.
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp()


def _importance_sampling(lp: Tensor, inputs: LossInputs) -> Tensor:
    return -(_bounded_exp(lp - inputs["logprobs"]) * inputs["advantages"]).sum()


def _ppo(lp: Tensor, inputs: LossInputs) -> Tensor:
    return _clipped_surrogate(_bounded_exp(lp - inputs["logprobs"]), inputs)


def _clipped_surrogate(ratio: Tensor, inputs: LossInputs) -> Tensor:
    advantages = inputs["advantages"]
    # The minimum keeps the gradient where the ratio has moved against the advantage. Clipping
    # removes it only where the ratio has already moved far enough.
    return -torch.minimum(ratio * advantages, inputs.clip(ratio) * advantages).sum()


def _cispo(lp: Tensor, inputs: LossInputs) -> Tensor:
    # Detached, so that a clipped token keeps the gradient of ``lp``; ppo drops it.
    weight = inputs.clip((lp - inputs["logprobs"]).exp()).detach()
    return -(weight * lp * inputs["advantages"]).sum()


def _dro(lp: Tensor, inputs: LossInputs) -> Tensor:
    return -(lp * inputs["advantages"] - _penalty(lp, inputs, "beta")).sum()


def _penalty(lp: Tensor, inputs: LossInputs, coefficient: str) -> Tensor:
    # A q of exactly 0 marks a token that was not sampled (prompt): it has no reference policy.
    q = inputs["logprobs"]
    deviation = (lp - q) * (q != 0)
    return 0.5 * inputs.config[coefficient] * deviation.square()


def _gspo(lp: Tensor, inputs: LossInputs) -> Tensor:
    # The sequence's ratio is the geometric mean over its tokens with mask 1.
    mask = inputs["sequence_ratio_mask"]
    deviation = (lp.detach() - inputs["logprobs"]) * mask
    total = lp.new_zeros(inputs.num_sequences).index_add_(0, inputs.sequence, deviation)
    count = lp.new_zeros(inputs.num_sequences).index_add_(0, inputs.sequence, mask)
    log_ratio = (total / count.clamp(min=1))[inputs.sequence]
    # Straight-through: the value of the sequence's ratio with the gradient of the token's.
    return _clipped_surrogate(_bounded_exp(log_ratio + lp - lp.detach()), inputs)


def _stable_reinforce(lp: Tensor, inputs: LossInputs) -> Tensor:
    """REINFORCE with truncated importance weights and a KL term towards the sampling policy.

    This replaces the hosted objective of the same name, which is not published. With
    ``w = clip(r, lo, hi).detach()`` the gradient is
    ``-sum(w * (A - kl_coeff * (lp - q)) * grad lp)``. Where no weight is truncated, its first part
    is the policy gradient of the learner (REINFORCE, Williams 1992, with importance weights) and
    its second part ``kl_coeff`` times the gradient of ``KL(learner || sampler)``, because
    ``E_q[r * log r * grad lp]`` is that gradient. Truncation bounds how much one stale token can
    count (truncated importance sampling: Ionides 2008; IMPALA, arXiv 1802.01561), Detached
    weights keep the gradient where ``ppo`` would cut it to zero.

    ``config``: ``kl_coeff`` (default 0.01, as in the Tinker cookbook), ``clip_low_threshold``
    (0) and ``clip_high_threshold`` (2), the bounds of ``w``.
    """
    weight = inputs.clip((lp - inputs["logprobs"]).exp()).detach()
    return -(weight * (lp * inputs["advantages"] - _penalty(lp, inputs, "kl_coeff"))).sum()


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", _cross_entropy, ("target_tokens", "weights"), linear=True),
        Loss("importance_sampling", _importance_sampling, _RL),
        Loss("ppo", _ppo, _RL, _CLIP, dict(zip(_CLIP, (0.8, 1.2), strict=True))),
        Loss("cispo", _cispo, _RL, _CLIP, dict(zip(_CLIP, (0.0, 4.0), strict=True))),
        Loss(
            "dro",
            _dro,
            _RL,
            config={"beta": None},
            advice="the Tinker documents use loss_fn_config={'beta': 0.05}",
        ),
        Loss(
            "gspo",
            _gspo,
            (*_RL, "sequence_ratio_mask"),
            _CLIP,
            dict.fromkeys(_CLIP),
            advice="the paper uses loss_fn_config={'clip_low_threshold': 1 - 3e-4, "
            "'clip_high_threshold': 1 + 4e-4}",
        ),
        Loss(
            "stable_reinforce",
            _stable_reinforce,
            _RL,
            _CLIP,
            {"kl_coeff": 0.01, **dict(zip(_CLIP, (0.0, 2.0), strict=True))},
        ),
    )
}

STAND_IN_NOTE = (
    "stable_reinforce: the hosted objective of this name is not published. This backend uses "
    "another one: REINFORCE with truncated importance weights and a KL term towards the "
    "sampling policy (formula: tinker_cookbook/engine/training/losses.py)"
)


def get_loss(name: str) -> Loss:
    """Returns the loss called ``name``; raises ``ConfigurationError`` with the known names."""
    if name in LOSSES:
        return LOSSES[name]
    if name == "custom":
        raise ConfigurationError(
            "loss_fn: 'custom' is not available here: call forward_backward_custom(data, loss_fn) "
            "with your function instead"
        )
    raise ConfigurationError(
        f"loss_fn: got {name!r}, expected one of {', '.join(LOSSES)}{nearest(name, LOSSES)}"
    )


CustomLossFn = Callable[[Sequence[int], "list[Tensor]"], "tuple[Tensor, dict[str, float]]"]
"""``loss_fn(indices, logprobs)``: indices of the datums, and for each an autograd leaf [T];
returns the loss (one element) and metrics."""


def evaluate_custom(
    loss_fn: CustomLossFn, indices: Sequence[int], logprobs: Sequence[Tensor]
) -> tuple[float, dict[str, float], list[Tensor]]:
    """Calls ``loss_fn`` once; returns its value, metrics, and the gradient with respect to the
    log-probabilities of each datum. Raises ``DataValidationError`` for an invalid result."""
    # Differentiate the loss down to the log-probabilities only; the pass continues from there.
    # Pass copies, so that the function cannot change the returned log-probabilities.
    leaves = [values.detach().clone().requires_grad_() for values in logprobs]
    with torch.enable_grad():
        result = loss_fn(indices, leaves)
    if not isinstance(result, tuple) or len(result) != 2:
        raise DataValidationError(
            f"loss_fn: returned {type(result).__name__}, expected a tuple (loss, metrics)"
        )
    value, metrics = result
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise DataValidationError(
            f"loss_fn: returned {type(value).__name__} "
            f"{tuple(value.shape) if isinstance(value, Tensor) else ''} as loss, expected a "
            "tensor of one element"
        )
    if not value.requires_grad:
        raise DataValidationError(
            "loss_fn: the loss does not depend on the log-probabilities it was given; compute it "
            "with torch operations, without .item() or .detach()"
        )
    # A loss may ignore some datums: their gradient is zero.
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    gradients = []
    for index, leaf, gradient in zip(indices, leaves, found, strict=True):
        gradient = torch.zeros_like(leaf) if gradient is None else gradient.float()
        # The optimizer would refuse the step too, but could not name the datum.
        if not torch.isfinite(gradient).all():
            raise DataValidationError(
                f"loss_fn: its gradient is not finite at datum {index}; check for log(0) or 0/0"
            )
        gradients.append(gradient)
    return float(value.detach()), dict(metrics), gradients
