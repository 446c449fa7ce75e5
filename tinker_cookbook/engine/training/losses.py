"""The loss table: pure functions of target log-probabilities, as unnormalised sums over tokens.

With ``lp`` the learner's and ``q`` the sampler's log-probabilities, ``A`` advantages and
``r = exp(lp - q)``:

======================  =====================================================================
cross_entropy           ``-(lp * weights).sum()``; targets and weights may be [T, K]
importance_sampling     ``-(r * A).sum()``
ppo                     ``-min(r * A, clip(r, lo, hi) * A).sum()``          (arXiv 1707.06347)
cispo                   ``-(clip(r, lo, hi).detach() * lp * A).sum()``      (arXiv 2506.13585)
dro                     ``-(lp * A - beta / 2 * (lp - q)**2).sum()``        (arXiv 2405.19107)
                        (no penalty where ``q`` is exactly 0: nobody sampled that token)
gspo                    ppo with the sequence's ratio in place of the token's (arXiv 2507.18071)
stable_reinforce        ``-(w * (lp * A - kl_coeff / 2 * (lp - q)**2)).sum()`` with
                        ``w = clip(r, lo, hi).detach()``; no penalty where ``q`` is exactly 0
======================  =====================================================================

Definitions and defaults are those of the Tinker API, except for ``stable_reinforce``: the hosted
API does not publish its objective, so the one here is a stand-in (see ``_stable_reinforce``).
Being sums, losses of batches add up, so the
split into micro-batches never changes a gradient; and every loss is linear in signed weights or
advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from tinker_cookbook.exceptions import ConfigurationError, nearest


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss over concatenated sequences.

    ``fields`` holds fp32 tensors [T] (or [T, K]) by the name they have in ``loss_fn_inputs``;
    ``sequence`` [T] numbers the sequence of each token; ``config`` holds the resolved settings.
    """

    fields: Mapping[str, torch.Tensor]
    sequence: torch.Tensor
    num_sequences: int
    config: Mapping[str, float]

    def __getitem__(self, field: str) -> torch.Tensor:
        return self.fields[field]

    def clip(self, ratio: torch.Tensor) -> torch.Tensor:
        """Returns ``ratio`` between the thresholds: those of the token where given, else the
        config's."""
        low = self.fields.get("clip_low_threshold", self.config.get("clip_low_threshold"))
        high = self.fields.get("clip_high_threshold", self.config.get("clip_high_threshold"))
        if not isinstance(low, torch.Tensor):
            low = torch.full_like(ratio, float(low))  # type: ignore[arg-type]
        if not isinstance(high, torch.Tensor):
            high = torch.full_like(ratio, float(high))  # type: ignore[arg-type]
        return torch.minimum(torch.maximum(ratio, low), high)


_RL = ("target_tokens", "logprobs", "advantages")
_CLIP = ("clip_low_threshold", "clip_high_threshold")

LossFn = Callable[[torch.Tensor, LossInputs], torch.Tensor]


@dataclass(frozen=True)
class Loss:
    """One row of the table: the function, its inputs, and its settings with their defaults.

    A default of ``None`` marks a setting whose default is not public: it must be given.
    ``linear`` marks a loss whose gradient is known before the log-probabilities are.
    """

    name: str
    function: LossFn
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: Mapping[str, float | None] = field(default_factory=dict)
    linear: bool = False

    def resolve_config(
        self, given: Mapping[str, float | str] | None, *, per_token: frozenset[str] = frozenset()
    ) -> dict[str, float]:
        """Checks the given settings and fills in defaults.

        ``per_token`` names settings that every datum gives token by token instead.
        """
        known = dict(self.config)
        for key, value in (given or {}).items():
            if key not in known:
                expected = ", ".join(known) or "no settings"
                raise ConfigurationError(
                    f"loss_fn_config[{key!r}]: {self.name} does not know it, expected {expected}"
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
                    f"{_ADVICE[self.name]}"
                )
        low, high = known.get(_CLIP[0]), known.get(_CLIP[1])
        if low is not None and high is not None and low > high:
            raise ConfigurationError(
                f"loss_fn_config: clip_low_threshold is {low}, above clip_high_threshold {high}; "
                "both bound the ratio itself (0.8 and 1.2), not its distance from 1"
            )
        return {key: value for key, value in known.items() if value is not None}


_ADVICE = {
    "dro": "the Tinker documents use loss_fn_config={'beta': 0.05}",
    "gspo": "the paper uses loss_fn_config={'clip_low_threshold': 1 - 3e-4, "
    "'clip_high_threshold': 1 + 4e-4}",
}


def _cross_entropy(lp: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    return -(lp * inputs["weights"]).sum()


def _importance_sampling(lp: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    return -((lp - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def _clipped_surrogate(ratio: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, inputs.clip(ratio) * advantages).sum()


def _ppo(lp: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    return _clipped_surrogate((lp - inputs["logprobs"]).exp(), inputs)


def _cispo(lp: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    weight = inputs.clip((lp - inputs["logprobs"]).exp()).detach()
    return -(weight * lp * inputs["advantages"]).sum()


def _dro(lp: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    # A q of exactly 0 marks a token that nobody sampled (a prompt's): nothing to stay close to.
    q = inputs["logprobs"]
    deviation = (lp - q) * (q != 0)
    penalty = 0.5 * inputs.config["beta"] * deviation.square()
    return -(lp * inputs["advantages"] - penalty).sum()


def _gspo(lp: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """The token's ratio has the value of the sequence's and the gradient of the token's."""
    mask = inputs["sequence_ratio_mask"]
    deviation = (lp.detach() - inputs["logprobs"]) * mask
    total = lp.new_zeros(inputs.num_sequences).index_add_(0, inputs.sequence, deviation)
    count = lp.new_zeros(inputs.num_sequences).index_add_(0, inputs.sequence, mask)
    log_ratio = (total / count.clamp(min=1))[inputs.sequence]
    return _clipped_surrogate((log_ratio + lp - lp.detach()).exp(), inputs)


def _stable_reinforce(lp: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """REINFORCE with truncated importance weights and a KL term towards the sampling policy.

    This is a stand-in for the hosted objective of the same name, which is not published. With
    ``w = clip(r, lo, hi).detach()`` the gradient is
    ``-sum(w * (A - kl_coeff * (lp - q)) * grad lp)``. Where no weight is truncated, its first part
    is the policy gradient of the learner (REINFORCE, Williams 1992, with importance weights) and
    its second part ``kl_coeff`` times the gradient of ``KL(learner || sampler)``, because
    ``E_q[r * log r * grad lp]`` is that gradient. Truncation bounds how much one stale token can
    count (truncated importance sampling: Ionides 2008; IMPALA, arXiv 1802.01561), and detached
    weights keep the gradient where ``ppo`` would cut it to zero.

    ``config``: ``kl_coeff`` (default 0.01, that of the Tinker cookbook), ``clip_low_threshold``
    (0) and ``clip_high_threshold`` (2), the bounds of ``w``.
    """
    q = inputs["logprobs"]
    weight = inputs.clip((lp - q).exp()).detach()
    # A q of exactly 0 marks a token that was not sampled (a prompt's), so it has no KL.
    deviation = (lp - q) * (q != 0)
    penalty = 0.5 * inputs.config["kl_coeff"] * deviation.square()
    return -(weight * (lp * inputs["advantages"] - penalty)).sum()


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", _cross_entropy, ("target_tokens", "weights"), config={}, linear=True),
        Loss("importance_sampling", _importance_sampling, _RL, config={}),
        Loss("ppo", _ppo, _RL, _CLIP, dict(zip(_CLIP, (0.8, 1.2), strict=True))),
        Loss("cispo", _cispo, _RL, _CLIP, dict(zip(_CLIP, (0.0, 4.0), strict=True))),
        Loss("dro", _dro, _RL, config={"beta": None}),
        Loss("gspo", _gspo, (*_RL, "sequence_ratio_mask"), _CLIP, dict.fromkeys(_CLIP)),
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
    "stable_reinforce: the hosted objective of this name is not published. This backend trains "
    "with a stand-in: REINFORCE with truncated importance weights and a KL term towards the "
    "sampling policy (formula: tinker_cookbook/engine/training/losses.py)"
)

_NOT_PUBLIC = {
    "custom": "call forward_backward_custom(data, loss_fn) with your function instead",
}


def get_loss(name: str) -> Loss:
    """Returns the loss called ``name``; a ``ConfigurationError`` says what exists instead."""
    if name in LOSSES:
        return LOSSES[name]
    if name in _NOT_PUBLIC:
        raise ConfigurationError(f"loss_fn: {name!r} is not available here: {_NOT_PUBLIC[name]}")
    raise ConfigurationError(
        f"loss_fn: got {name!r}, expected one of {', '.join(LOSSES)}{nearest(name, LOSSES)}"
    )
