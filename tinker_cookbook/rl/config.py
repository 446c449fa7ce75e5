"""Settings of a reinforcement learning run; ``Config.check`` runs before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import chz

from tinker_cookbook.backends.connect import check_backend
from tinker_cookbook.eval.evaluators import EvaluatorBuilder
from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.model_info import resolve_max_length
from tinker_cookbook.rl.advantages import AdvantageNormalization
from tinker_cookbook.rl.rollouts.limits import (
    RolloutConfig,
    TerminationRewardPolicy,
    check_range,
)
from tinker_cookbook.rl.rollouts.presets import (
    default_rollout_config_for_model,
    default_rollout_strategy_for_model,
)
from tinker_cookbook.rl.rollouts.strategy import RolloutStrategy, rollout_strategy_from_config
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.training.config import TrainingConfig, number
from tinker_cookbook.training.lr_scheduling import LRSchedule
from tinker_cookbook.training.server_needs import Need
from tinker_cookbook.utils.checkpoints.weights_paths import check_tinker_path, weights_field

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
# Their gradient equals the one of importance_sampling if the sampler has the learner's weights.
SAME_ON_POLICY = ("ppo", "cispo", "stable_reinforce")
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


@chz.chz
class KLReferenceConfig:
    """Reference policy of the KL penalty."""

    base_model: str = chz.field(doc="Hub name or local folder of the reference model")
    load_checkpoint_path: str | None = weights_field(
        "sampler_weights", "Adapter of the reference; default: the base model without adapter"
    )


STALE_GROUPS = ("discard", "train")


def check_stale_groups(name: str, value: str | None) -> None:
    """Raises ``ConfigurationError`` unless ``value`` is one of ``STALE_GROUPS`` or None."""
    if value is not None and value not in STALE_GROUPS:
        raise ConfigurationError(
            f"{name}: got {value!r}, expected one of {', '.join(STALE_GROUPS)}"
            f"{nearest(value, STALE_GROUPS)}"
        )


@chz.chz
class AsyncConfig:
    """Asynchronous training: sampling continues while the policy trains.

    At most ``groups_per_batch * (max_steps_off_policy + 1)`` groups are started and not yet
    trained. With 0 all data are on-policy. A group that never ends is never replaced, so
    environments that can hang need a timeout
    (``rollout_error_tolerance=RetryOnFailure(per_rollout_timeout=...)``).
    """

    max_steps_off_policy: int = chz.field(
        doc="Updates that sampling may run ahead of training; 0: on-policy"
    )
    groups_per_batch: int = chz.field(
        doc="Groups per update; may differ from the dataset's batch size"
    )
    loss_fn: str = chz.field(
        default="stable_reinforce", doc="Loss of an asynchronous run, instead of the run's loss_fn"
    )
    stale_groups: str | None = chz.field(
        default=None,
        doc="Finished groups more than max_steps_off_policy updates old: discard or train; "
        "default: discard (do_async_training: train, as in the official cookbook)",
    )

    @chz.validate
    def _validate(self) -> None:
        check_stale_groups("async_config.stale_groups", self.stale_groups)
        if self.max_steps_off_policy < 0 or self.groups_per_batch < 1:
            raise ConfigurationError(
                f"async_config: got max_steps_off_policy={self.max_steps_off_policy} and "
                f"groups_per_batch={self.groups_per_batch}, expected at least 0 and at least 1"
            )


@chz.chz
class StreamMinibatchConfig:
    """Streaming: training starts on the first groups while the others are still sampling."""

    groups_per_batch: int = chz.field(doc="Groups in a batch of the dataset")
    num_minibatches: int = chz.field(doc="Parts into which each substep's data is split")


@chz.chz
class PolicyTrainingConfig(TrainingConfig):
    """Settings of a run that trains on samples of its policy (RL, on-policy distillation)."""

    # Sampling.
    max_tokens: int = chz.field(doc="Maximum tokens of a response")
    temperature: float = chz.field(
        default=1.0,
        doc="Sampling temperature. The losses compare with log-probabilities at temperature 1",
    )
    top_p: float = chz.field(
        default=1.0,
        doc="Nucleus sampling: total probability of the tokens that are sampled from; 1: all",
    )
    top_k: int = chz.field(
        default=-1, doc="Number of most probable tokens that are sampled from; -1: all"
    )
    eval_temperature: float = chz.field(default=1.0, doc="Temperature on the test set; 0: greedy")
    rollout_config: RolloutConfig | None = chz.field(
        default=None, doc="Limits of an episode, parse errors, termination"
    )
    termination: TerminationRewardPolicy | None = chz.field(
        default=None, doc="Reward of an episode that reached a limit, instead of rollout_config's"
    )
    rollout_error_tolerance: bool | RolloutStrategy | None = chz.field(
        default=None, doc="Handling of a failed episode; None or False: end the run"
    )
    replay_router: bool = chz.field(
        default=False,
        doc="Train mixture-of-experts models with the sampler's choices of experts (local engine)",
    )

    # Loss and update.
    lr_schedule: LRSchedule = chz.field(default="constant", doc="linear, cosine or constant")
    loss_fn: str = chz.field(default=DEFAULT_LOSS, doc=f"One of {', '.join(RL_LOSSES)}")
    loss_fn_config: dict[str, float] | None = chz.field(
        default=None, doc="Settings of the loss: loss_fn_config.clip_high_threshold=1.3"
    )
    advantage_normalization: AdvantageNormalization = chz.field(
        default="center", doc="center, std or leave_one_out"
    )
    loss_normalization: str = chz.field(
        default="sum",
        doc="sum: sum over the tokens of a step, as in the Tinker API; tokens: their mean, as in "
        "TRL (advantages are divided by the number of action tokens)",
    )
    remove_constant_reward_groups: bool = chz.field(
        default=False, doc="Do not train on groups whose rewards are all equal"
    )
    importance_ratio_cap: float = chz.field(
        default=0.0,
        doc="Truncated importance sampling: upper limit of the ratio of trainer to sampler "
        "probability of a token (2 is usual); 0: off",
    )
    num_substeps: int = chz.field(default=1, doc="Optimizer steps per batch")
    kl_penalty_coef: float = chz.field(default=0.0, doc="Weight of the KL penalty; 0: none")
    kl_discount_factor: float = chz.field(
        default=0.0, doc="Discount of later tokens' KL in a token's penalty; 0: its own KL only"
    )
    compute_post_kl: bool = chz.field(
        default=False, doc="Score each batch again with the new weights (kl_pre_post_v1/_v2)"
    )
    kl_depth_edges: tuple[int, ...] = chz.field(
        default=(),
        doc="Context lengths at which optim/kl_sample_train_v1 and _v2 are split: 1024,4096",
    )

    # Overlap of sampling and training; default: synchronous.
    async_config: AsyncConfig | None = chz.field(default=None, doc="Asynchronous training")
    stream_minibatch_config: StreamMinibatchConfig | None = chz.field(
        default=None, doc="Streaming training"
    )

    # Evaluation and transcripts.
    eval_every: int = number(20, "Steps between evaluations; 0: never")
    evaluator_builders: list[EvaluatorBuilder] = chz.field(
        default_factory=list, doc="Evaluations every eval_every steps, besides the test set"
    )
    infrequent_evaluator_builders: list[EvaluatorBuilder] = chz.field(
        default_factory=list, doc="Evaluations every infrequent_eval_every steps"
    )
    num_groups_to_log: int = chz.field(
        default=4, doc="Groups per step whose transcripts are written"
    )
    rollout_json_export: bool = chz.field(
        default=True, doc="Write transcripts of all groups as JSON lines too"
    )

    def training_loss_fn(self) -> str:
        """Returns the loss to train with: ``async_config.loss_fn`` in an asynchronous run."""
        return self.loss_fn if self.async_config is None else self.async_config.loss_fn

    def records_stability_info(self) -> bool:
        """Returns whether sampling must record what ``stable_reinforce`` trains on."""
        return self.training_loss_fn() == "stable_reinforce"

    def is_on_policy(self) -> bool:
        """Returns whether every update trains on samples of the weights that it changes."""
        stale = self.async_config is not None and self.async_config.max_steps_off_policy > 0
        return not stale and self.num_substeps == 1

    def server_needs(self) -> list[Need]:
        """Returns what a server must be able to do: the loss, and scores for a KL penalty."""
        loss = self.training_loss_fn()
        name = "loss_fn" if self.async_config is None else "async_config.loss_fn"
        # At the sampler's own weights the ratio is 1, where these losses have the same gradient.
        same = loss in SAME_ON_POLICY and self.is_on_policy()
        fallback = f"loss_fn={DEFAULT_LOSS}, whose gradient is the same on on-policy data"
        needs = [
            Need(
                f"loss:{loss}",
                f"{name}={loss}",
                "" if loss == DEFAULT_LOSS else f"set {name}={DEFAULT_LOSS}",
                fallback if same else "",
            )
        ]
        if any(need.falls_back_to for need in needs):
            needs.append(Need(f"loss:{DEFAULT_LOSS}", f"loss_fn={DEFAULT_LOSS}"))
        if self.kl_penalty_coef:
            setting = f"kl_penalty_coef={self.kl_penalty_coef:g}"
            needs.append(Need("prompt_logprobs", setting, "set kl_penalty_coef=0"))
        if self.importance_ratio_cap:
            # The trainer's log-probabilities before a step come from a forward pass with ppo.
            setting = f"importance_ratio_cap={self.importance_ratio_cap:g}"
            needs.append(Need("loss:ppo", setting, "set importance_ratio_cap=0"))
        if self.compute_post_kl:
            needs.append(
                Need("prompt_logprobs", "compute_post_kl=True", "set compute_post_kl=False")
            )
        # The pass of a policy's own samples has no cross_entropy.
        return [*super().server_needs()[1:], *needs]

    def for_server(self, missing: frozenset[str]) -> Self:
        """Returns the config that a server without the features ``missing`` can run."""
        if f"loss:{self.training_loss_fn()}" not in missing:
            return self
        plain = chz.replace(self, loss_fn=DEFAULT_LOSS, loss_fn_config=None)
        if plain.async_config is None:
            return plain
        return chz.replace(
            plain, async_config=chz.replace(plain.async_config, loss_fn=DEFAULT_LOSS)
        )

    def effective_termination(self) -> TerminationRewardPolicy | None:
        """Returns the rewards of truncated episodes: the setting, or the model's preset."""
        if self.termination is not None:
            return self.termination
        # A config of user code with the fields of the official cookbook has no rollout_config.
        config = getattr(self, "rollout_config", None)
        return (config or default_rollout_config_for_model(self.model_name)).termination

    def effective_rollout_strategy(self) -> RolloutStrategy:
        """Returns the handling of failed episodes: the setting, or the model's preset."""
        if self.rollout_error_tolerance is None:
            # Tools fail now and then, so models made for tools have a tolerant preset.
            return default_rollout_strategy_for_model(self.model_name)
        return rollout_strategy_from_config(self.rollout_error_tolerance)

    def rollouts(self) -> RolloutConfig:
        """Returns the settings of the rollouts, including the effective ``termination``."""
        config = self.rollout_config if self.rollout_config is not None else RolloutConfig()
        return chz.replace(config, termination=self.effective_termination())

    @chz.validate
    def _check_bounds(self) -> None:
        # One validator instead of one for each field, because a subclass that defines a field
        # again, with another default, would drop the field's validator.
        for name, low, high in (
            ("max_tokens", 1, math.inf),
            ("temperature", 0, math.inf),
            ("eval_temperature", 0, math.inf),
            ("kl_penalty_coef", 0, math.inf),
            ("kl_discount_factor", 0, 1),
            ("importance_ratio_cap", 0, math.inf),
            ("num_substeps", 1, math.inf),
            ("num_groups_to_log", 0, math.inf),
        ):
            check_range(name, getattr(self, name), low, high)
        edges = self.kl_depth_edges
        if any(edge < 1 for edge in edges) or list(edges) != sorted(set(edges)):
            raise ConfigurationError(
                f"kl_depth_edges: got {edges}, expected rising numbers of tokens from 1 on"
            )
        if self.temperature == 0:
            raise ConfigurationError(
                "temperature: got 0, expected more: greedy samples of a group are all alike, so "
                "there is nothing to learn from; temperature=1 is usual"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p: got {self.top_p}, expected more than 0 and at most 1")
        if self.top_k != -1 and self.top_k < 1:
            raise ConfigurationError(f"top_k: got {self.top_k}, expected -1 (all) or at least 1")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for the first setting that cannot work."""
        super().check()
        # The prompt needs room too, so a response cannot fill the context window.
        context = resolve_max_length(self.model_name, None)
        if context is not None and self.max_tokens >= context:
            raise ConfigurationError(
                f"max_tokens: got {self.max_tokens}, but the context of {self.model_name} is "
                f"{context}, prompt included; expected less than {context}"
            )
        self._check_loss()
        stream = self.stream_minibatch_config
        if stream is not None:
            # Before the division below, which needs both to be at least 1.
            for name in ("groups_per_batch", "num_minibatches"):
                check_range(f"stream_minibatch_config.{name}", getattr(stream, name), 1)
            parts = self.num_substeps * stream.num_minibatches
            if stream.groups_per_batch % parts:
                raise ConfigurationError(
                    f"stream_minibatch_config.groups_per_batch: got {stream.groups_per_batch}, "
                    f"expected a multiple of num_substeps x num_minibatches = {self.num_substeps} "
                    f"x {stream.num_minibatches} = {parts}"
                )
        if self.async_config is not None:
            # The dataset's batch size does not matter here: an asynchronous run forms its own.
            check_substeps(self.async_config.groups_per_batch, self.num_substeps, "async_config.")

    def _check_loss(self) -> None:
        name, normalization = self.training_loss_fn(), self.loss_normalization
        if name not in RL_LOSSES:
            raise ConfigurationError(
                f"loss_fn: got {name!r}, expected one of {', '.join(RL_LOSSES)}{loss_hint(name)}"
            )
        # Two settings name a loss; a changed one must not be ignored silently.
        if self.async_config is not None and self.loss_fn not in (DEFAULT_LOSS, name):
            raise ConfigurationError(
                f"loss_fn: got {self.loss_fn!r} with async_config.loss_fn={name!r}; an "
                "asynchronous run trains with AsyncConfig.loss_fn, so set it there: "
                f"async_config.loss_fn={self.loss_fn}"
            )
        if name == "stable_reinforce" and self.kl_penalty_coef > 0 and self.kl_discount_factor > 0:
            raise ConfigurationError(
                f"kl_discount_factor: got {self.kl_discount_factor:g} with "
                "loss_fn='stable_reinforce' (the default of asynchronous runs), which does not "
                "support it; expected 0, or another loss (loss_fn, async_config.loss_fn)"
            )
        if self.importance_ratio_cap and name not in LOSSES_WITH_RATIO_CAP:
            raise ConfigurationError(
                f"importance_ratio_cap: got {self.importance_ratio_cap:g} with the loss {name}, "
                f"expected one of {', '.join(LOSSES_WITH_RATIO_CAP)}; cispo and stable_reinforce "
                "truncate the ratio themselves (loss_fn_config.clip_high_threshold)"
            )
        if normalization not in LOSS_NORMALIZATIONS:
            raise ConfigurationError(
                f"loss_normalization: got {normalization!r}, expected one of "
                f"{', '.join(LOSS_NORMALIZATIONS)}{nearest(normalization, LOSS_NORMALIZATIONS)}"
            )
        if normalization == "tokens" and name in LOSSES_WITH_PENALTY:
            raise ConfigurationError(
                f"loss_normalization: got 'tokens' with the loss {name}, whose penalty would then "
                "outweigh the advantages; expected 'sum'"
            )
        if normalization == "tokens" and self.stream_minibatch_config is not None:
            raise ConfigurationError(
                "loss_normalization: got 'tokens' with stream_minibatch_config, but the number of "
                "tokens is not known when the first minibatch trains; expected 'sum'"
            )
        # A remote backend checks the loss settings itself.
        kind, _, _ = check_backend(self.backend, self.base_url, self.device, self.dtype)
        if kind == "local":
            # Loads torch, which the local engine needs anyway.
            from tinker_cookbook.engine.training.losses import get_loss

            get_loss(name).resolve_config(self.loss_fn_config)


@chz.chz
class Config(PolicyTrainingConfig):
    """Settings of a reinforcement learning run."""

    dataset_builder: RLDatasetBuilder = chz.field(doc="Training and test environments")
    kl_reference_config: KLReferenceConfig | None = chz.field(
        default=None, doc="Reference policy of the KL penalty; needed with kl_penalty_coef"
    )

    def check(self) -> None:
        """Raises ``ConfigurationError`` for the first setting that cannot work."""
        super().check()
        self.dataset_builder.check()
        if self.kl_penalty_coef == 0:
            return
        if self.kl_reference_config is None:
            raise ConfigurationError(
                f"kl_penalty_coef={self.kl_penalty_coef:g} without kl_reference_config: expected "
                "the reference policy of the penalty; set "
                f"kl_reference_config=KLReferenceConfig(base_model={self.model_name!r}), or "
                "kl_penalty_coef=0"
            )
        check_tinker_path(
            "kl_reference_config.load_checkpoint_path",
            self.kl_reference_config.load_checkpoint_path,
            "sampler_weights",
            "the run that saved the weights",
        )
        if self.stream_minibatch_config is not None:
            raise ConfigurationError(
                f"kl_penalty_coef={self.kl_penalty_coef:g} with stream_minibatch_config: the "
                "penalty is centred over the whole batch, which is not complete when the first "
                "minibatch trains; leave stream_minibatch_config out"
            )


def check_substeps(groups_per_batch: int, num_substeps: int, where: str = "") -> None:
    """Raises ``ConfigurationError`` unless a batch is a multiple of the substeps."""
    if groups_per_batch % num_substeps:
        raise ConfigurationError(
            f"num_substeps: got {num_substeps}, but {where}groups_per_batch is {groups_per_batch}; "
            "expected a divisor of it, as each substep trains the same number of groups"
        )
