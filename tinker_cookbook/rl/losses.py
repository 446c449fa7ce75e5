"""Losses of reinforcement learning: their names, the settings that fit, what a server needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker_cookbook.backends.connect import check_backend
from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.training.server_needs import Need

# Algorithms, which are a loss together with a normalization of the advantages.
# GRPO: arXiv 2402.03300; Dr. GRPO: 2503.20783; RLOO: 2402.14740; DAPO: 2503.14476.
_ALGORITHMS = {
    "grpo": "GRPO is loss_fn=importance_sampling or ppo with advantage_normalization=std",
    "dr_grpo": "Dr. GRPO is loss_fn=importance_sampling or ppo with advantage_normalization=center",
    "rloo": "RLOO is loss_fn=importance_sampling with advantage_normalization=leave_one_out",
    "dapo": "DAPO is loss_fn=ppo with loss_fn_config.clip_high_threshold=1.28 and "
    "remove_constant_reward_groups=True",
    "reinforce": "REINFORCE is loss_fn=importance_sampling on samples of the present weights",
}

RL_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")
DEFAULT_LOSS = "importance_sampling"
LOSS_NORMALIZATIONS = ("sum", "tokens")
# Their penalty terms are not advantages: dividing only the advantages would change the balance.
LOSSES_WITH_PENALTY = ("dro", "stable_reinforce")
# The others truncate the ratio to the sampler themselves, or compare with the sampler's policy.
LOSSES_WITH_RATIO_CAP = ("importance_sampling", "ppo", "gspo")


def loss_hint(name: str, losses: Sequence[str] = RL_LOSSES) -> str:
    """Returns the end of an error about ``loss_fn``: the loss and settings that were probably
    meant."""
    known = _ALGORITHMS.get(name.lower().replace("-", "_").replace(".", ""))
    return f"; {known}" if known is not None else nearest(name, losses)


def check_loss(config: Any) -> None:
    """Raises ``ConfigurationError`` for a loss of an RL config that does not exist or does not fit
    its other settings."""
    name, normalization = config.training_loss_fn(), config.loss_normalization
    if name not in RL_LOSSES:
        raise ConfigurationError(
            f"loss_fn: got {name!r}, expected one of {', '.join(RL_LOSSES)}{loss_hint(name)}"
        )
    # Two settings name a loss; a changed one must not be ignored silently.
    if config.async_config is not None and config.loss_fn not in (DEFAULT_LOSS, name):
        raise ConfigurationError(
            f"loss_fn: got {config.loss_fn!r} with async_config.loss_fn={name!r}; an "
            "asynchronous run trains with AsyncConfig.loss_fn, so set it there: "
            f"async_config.loss_fn={config.loss_fn}"
        )
    if name == "stable_reinforce" and config.kl_penalty_coef > 0 and config.kl_discount_factor > 0:
        raise ConfigurationError(
            f"kl_discount_factor: got {config.kl_discount_factor:g} with "
            "loss_fn='stable_reinforce' (the default of asynchronous runs), which does not "
            "support it; expected 0, or another loss (loss_fn, async_config.loss_fn)"
        )
    if config.importance_ratio_cap and name not in LOSSES_WITH_RATIO_CAP:
        raise ConfigurationError(
            f"importance_ratio_cap: got {config.importance_ratio_cap:g} with the loss {name}, "
            f"expected one of {', '.join(LOSSES_WITH_RATIO_CAP)}; cispo and stable_reinforce "
            "truncate the ratio themselves (loss_fn_config.clip_high_threshold)"
        )
    if normalization not in (*LOSS_NORMALIZATIONS, "auto"):
        raise ConfigurationError(
            f"loss_normalization: got {normalization!r}, expected one of "
            f"{', '.join(LOSS_NORMALIZATIONS)}{nearest(normalization, LOSS_NORMALIZATIONS)}"
        )
    if normalization == "tokens" and name in LOSSES_WITH_PENALTY:
        raise ConfigurationError(
            f"loss_normalization: got 'tokens' with the loss {name}, whose penalty would then "
            "outweigh the advantages; expected 'sum'"
        )
    if config.kl_penalty_coef and config.kl_reference_config and config.stream_minibatch_config:
        raise ConfigurationError(
            f"kl_penalty_coef={config.kl_penalty_coef:g} with stream_minibatch_config: the "
            "penalty is centred over the whole batch, which is not complete when the first "
            "minibatch trains; leave stream_minibatch_config out"
        )
    if normalization == "tokens" and config.stream_minibatch_config is not None:
        raise ConfigurationError(
            "loss_normalization: got 'tokens' with stream_minibatch_config, but the number of "
            "tokens is not known when the first minibatch trains; expected 'sum'"
        )
    # A remote backend checks the loss settings itself.
    kind, _, _ = check_backend(config.backend, config.base_url, config.device, config.dtype)
    if kind == "local":
        # Loads torch, which the local engine needs anyway.
        from tinker_cookbook.engine.training.losses import get_loss

        get_loss(name).resolve_config(config.loss_fn_config)


def check_substeps(groups_per_batch: int, num_substeps: int, where: str = "") -> None:
    """Raises ``ConfigurationError`` unless a batch is a multiple of the substeps."""
    if groups_per_batch % num_substeps:
        raise ConfigurationError(
            f"num_substeps: got {num_substeps}, but {where}groups_per_batch is {groups_per_batch}; "
            "expected a divisor of it, as each substep trains the same number of groups"
        )


def loss_needs(config: Any) -> list[Need]:
    """Returns what a server must be able to do for the loss and the KL terms of an RL config."""
    loss = config.training_loss_fn()
    name = "loss_fn" if config.async_config is None else "async_config.loss_fn"
    instead = "" if loss == DEFAULT_LOSS else f"set {name}={DEFAULT_LOSS}"
    needs = [Need(f"loss:{loss}", f"{name}={loss}", instead)]
    if config.kl_penalty_coef:
        setting = f"kl_penalty_coef={config.kl_penalty_coef:g}"
        needs.append(Need("prompt_logprobs", setting, "set kl_penalty_coef=0"))
    if config.importance_ratio_cap:
        # The trainer's log-probabilities before a step come from a forward pass with ppo.
        setting = f"importance_ratio_cap={config.importance_ratio_cap:g}"
        needs.append(Need("loss:ppo", setting, "set importance_ratio_cap=0"))
    if config.compute_post_kl:
        needs.append(Need("prompt_logprobs", "compute_post_kl=True", "set compute_post_kl=False"))
    return needs
