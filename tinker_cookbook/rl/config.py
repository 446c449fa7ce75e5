"""Settings of a reinforcement learning run; ``Config.check`` runs before anything is loaded."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import chz

from tinker_cookbook.eval.evaluators import EvaluatorBuilder
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_info import resolve_max_length
from tinker_cookbook.rl.advantages import AdvantageNormalization
from tinker_cookbook.rl.envs.random_reward import RandomRewardDatasetBuilder
from tinker_cookbook.rl.losses import (
    DEFAULT_LOSS,
    LOSSES_WITH_PENALTY,
    RL_LOSSES,
    check_loss,
    check_substeps,
    loss_needs,
)
from tinker_cookbook.rl.rollouts.limits import (
    RolloutConfig,
    TerminationRewardPolicy,
    check_range,
)
from tinker_cookbook.rl.rollouts.presets import (
    default_rollout_config_for_model,
    default_rollout_strategy_for_model,
)
from tinker_cookbook.rl.rollouts.strategy import (
    RetryOnFailure,
    RolloutStrategy,
    rollout_strategy_from_config,
)
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.run.weights_paths import check_tinker_path, weights_field
from tinker_cookbook.training.config import REQUIRED, TrainingConfig, at_least, number, setting
from tinker_cookbook.training.lr_scheduling import LRSchedule
from tinker_cookbook.training.server_needs import Need
from tinker_cookbook.utils.terminal import get_console

B = TypeVar("B", bound=RLDatasetBuilder)

# Short keys: the nested config whose setting each is, and the key that it needs.
_SHORT_KEYS = {
    "kl_reference_model": ("kl_reference_config", "kl_penalty_coef"),
    "kl_reference_path": ("kl_reference_config", "kl_penalty_coef"),
    "max_steps_off_policy": ("async_config", "groups_per_batch"),
    "stale_groups": ("async_config", "max_steps_off_policy"),
    "num_minibatches": ("stream_minibatch_config", "groups_per_batch"),
}


@chz.chz
class KLReferenceConfig:
    """Reference policy of the KL penalty."""

    base_model: str = chz.field(doc="Hub name or local folder of the reference model")
    load_checkpoint_path: str | None = weights_field(
        "sampler_weights", "Adapter of the reference; default: the base model without adapter"
    )


StaleGroups: TypeAlias = Literal["discard", "train"]


@chz.chz
class AsyncConfig:
    """Asynchronous training: sampling continues while the policy trains.

    At most ``groups_per_batch * (max_steps_off_policy + 1)`` groups are started and not yet
    trained. With 0 all data are on-policy. A group that never ends is never replaced, so
    environments that can hang need a timeout
    (``rollout_error_tolerance=RetryOnFailure(per_rollout_timeout=...)``).
    """

    max_steps_off_policy: int = chz.field(
        validator=at_least(0), doc="Updates that sampling may run ahead of training; 0: on-policy"
    )
    groups_per_batch: int = chz.field(
        validator=at_least(1), doc="Groups per update; may differ from the dataset's batch size"
    )
    loss_fn: str = setting(
        "stable_reinforce", "Loss of an asynchronous run, instead of the run's loss_fn"
    )
    stale_groups: StaleGroups | None = setting(
        None,
        "Finished groups more than max_steps_off_policy updates old: discard or train; "
        "default: discard (do_async_training: train, as in the official cookbook)",
    )


@chz.chz
class StreamMinibatchConfig:
    """Streaming: training starts on the first groups while the others are still sampling."""

    groups_per_batch: int = chz.field(validator=at_least(1), doc="Groups in a batch of the dataset")
    num_minibatches: int = chz.field(
        validator=at_least(1), doc="Parts into which each substep's data is split"
    )


@chz.chz
class Config(TrainingConfig):
    """Settings of a reinforcement learning run.

    ``build_dataset`` of a recipe uses ``groups_per_batch`` and ``group_size``; a given
    ``dataset_builder`` has its own.
    """

    # Code for the Tinker API expects a sum, and names its loss.
    recipe_defaults: ClassVar[dict[str, Any]] = {
        **TrainingConfig.recipe_defaults,
        "loss_fn": "auto",
        "loss_normalization": "auto",
    }

    # Data.
    dataset_builder: RLDatasetBuilder = chz.field(
        default=None, doc="Training and test environments", metadata=REQUIRED
    )
    groups_per_batch: int | None = number(None, "Problems per step of a recipe", low=1)
    group_size: int | None = number(
        None, "Episodes of a problem in a recipe, compared with each other", low=1
    )
    random_rewards: bool = setting(False, "Random-reward control; scores must not rise")

    # Sampling.
    max_tokens: int = number(256, "Maximum tokens of a response", low=1)
    temperature: float = number(
        1.0, "Sampling temperature. The losses compare with log-probabilities at temperature 1"
    )
    top_p: float = setting(
        1.0, "Nucleus sampling: total probability of the tokens that are sampled from; 1: all"
    )
    top_k: int = setting(-1, "Number of most probable tokens that are sampled from; -1: all")
    eval_temperature: float = number(1.0, "Temperature on the test set; 0: greedy")
    rollout_config: RolloutConfig | None = setting(
        None, "Limits of an episode, parse errors, termination"
    )
    termination: TerminationRewardPolicy | None = setting(
        None, "Reward of an episode that reached a limit, instead of rollout_config's"
    )
    rollout_error_tolerance: bool | RolloutStrategy | None = setting(
        None,
        "Continue without failed episodes; False: a failure ends the run; default: the "
        "model's preset",
    )
    rollout_max_retries: int | None = number(
        None, "Retries of a failed episode, instead of rollout_error_tolerance"
    )
    replay_router: bool = setting(
        False,
        "Train mixture-of-experts models with the sampler's choices of experts (local engine)",
    )

    # Loss and update.
    lr_schedule: LRSchedule = "constant"
    loss_fn: str = chz.field(
        default=DEFAULT_LOSS,
        munger=lambda _, name: DEFAULT_LOSS if name == "auto" else name,
        doc=f"One of {', '.join(RL_LOSSES)}; auto: {DEFAULT_LOSS}, or stable_reinforce with "
        "max_steps_off_policy",
    )
    loss_fn_config: dict[str, float] | None = setting(
        None, "Settings of the loss: loss_fn_config.clip_high_threshold=1.3"
    )
    advantage_normalization: AdvantageNormalization = setting(
        "center", "center, std or leave_one_out"
    )
    loss_normalization: str = setting(
        "sum",
        "sum: sum over the tokens of a step, as in the Tinker API; tokens: their mean, as in "
        "TRL (advantages are divided by the number of action tokens); auto: tokens, unless the "
        "loss has a penalty term or the run streams",
    )
    remove_constant_reward_groups: bool = setting(
        False, "Do not train on groups whose rewards are all equal"
    )
    importance_ratio_cap: float = number(
        0.0,
        "Truncated importance sampling: upper limit of the ratio of trainer to sampler "
        "probability of a token (2 is usual); 0: off",
    )
    num_substeps: int = number(1, "Optimizer steps per batch", low=1)
    kl_penalty_coef: float = number(0.0, "Weight of the KL penalty; 0: none")
    kl_discount_factor: float = setting(
        0.0, "Discount of later tokens' KL in a token's penalty; 0: its own KL only"
    )
    kl_reference_config: KLReferenceConfig | None = setting(
        None, "Reference policy of the KL penalty; needed with kl_penalty_coef"
    )
    kl_reference_model: str | None = setting(
        None, "Reference model of the KL penalty; default: model_name, untrained"
    )
    kl_reference_path: str | None = weights_field(
        "sampler_weights", "Adapter of the reference, if it has one"
    )
    compute_post_kl: bool = setting(
        False, "Score each batch again with the new weights (kl_pre_post_v1/_v2)"
    )
    kl_depth_edges: tuple[int, ...] = setting(
        (), "Context lengths at which optim/kl_sample_train_v1 and _v2 are split: 1024,4096"
    )

    # Overlap of sampling and training; default: synchronous.
    max_steps_off_policy: int | None = number(
        None, "Max staleness in optimizer steps for asynchronous RL; default: synchronous"
    )
    stale_groups: StaleGroups | None = setting(
        None, "Groups older than max_steps_off_policy: discard (the default) or train"
    )
    async_config: AsyncConfig | None = setting(None, "Asynchronous training")
    num_minibatches: int | None = number(
        None, "Start training on parts of the batch while the rest is still sampled", low=1
    )
    stream_minibatch_config: StreamMinibatchConfig | None = setting(None, "Streaming training")

    episodes_from: str | None = setting(
        None, "Log folder of a recorded run whose episodes are trained on, instead of sampling"
    )

    # Evaluation and transcripts.
    eval_every: int = 20
    evaluator_builders: list[EvaluatorBuilder] = chz.field(
        default_factory=list, doc="Evaluations every eval_every steps, besides the test set"
    )
    infrequent_evaluator_builders: list[EvaluatorBuilder] = chz.field(
        default_factory=list, doc="Evaluations every infrequent_eval_every steps"
    )
    num_groups_to_log: int = number(4, "Groups per step whose conversations and logs are written")
    rollout_json_export: bool = setting(True, "Write transcripts of all groups as JSON lines too")

    def builder_of(self, kind: type[B], **settings: Any) -> B:
        """Returns a dataset builder with the settings of this run that it has too.

        Equal names are equal settings, and ``batch_size`` of a builder is ``groups_per_batch``;
        ``settings`` are those that the run has not, or has with another value.
        """
        run = {
            "model_name_for_tokenizer": self.model_name,
            "renderer_name": self.renderer,
            "batch_size": self.groups_per_batch,
        }
        for name in chz.chz_fields(kind).keys() & chz.chz_fields(self).keys():
            run.setdefault(name, getattr(self, name))
        known = {name: run[name] for name in chz.chz_fields(kind).keys() & run.keys()}
        return kind(**known | settings)

    def data_builder(self) -> RLDatasetBuilder:
        """Returns the builder of the data of a resolved config."""
        return self.dataset_builder

    def recommended_rate(self) -> float:
        """Returns a quarter of ``get_lr``: 3.3e-4 for the demo model, 7e-5 for Llama 8B."""
        # Less than for supervised training, because rewards are noisier than target texts.
        return 0.25 * super().recommended_rate()

    def resolved(self) -> Config:
        """Returns the config with all values that follow from others, as the loop trains with it.

        The short keys of nested settings have become these, so they are None.
        """
        config = self._filled(Config, "dataset_builder", **self._derived())
        if not self.random_rewards:
            return config
        # Random rewards give nothing to learn: a rising score shows an error of the setup.
        random = RandomRewardDatasetBuilder(inner=config.dataset_builder, seed=self.seed)
        return chz.replace(config, dataset_builder=random, random_rewards=False)

    def _derived(self) -> dict[str, Any]:
        self._check_group()
        self._check_short_keys()
        asynchronous, stream = self._asynchronous(), self._stream()
        normalization = self.loss_normalization
        if normalization == "auto":
            used = self.loss_fn if asynchronous is None else asynchronous.loss_fn
            summed = stream is not None or used in LOSSES_WITH_PENALTY
            normalization = "sum" if summed else "tokens"
        tolerance = self.rollout_error_tolerance
        if self.rollout_max_retries is not None:
            tolerance = RetryOnFailure(max_retries=self.rollout_max_retries)
        others = ("rollout_max_retries", "groups_per_batch", "group_size")
        return dict.fromkeys((*_SHORT_KEYS, *others)) | {
            "loss_fn": self.loss_fn,
            "loss_normalization": normalization,
            "async_config": asynchronous,
            "stream_minibatch_config": stream,
            "rollout_error_tolerance": tolerance,
            "kl_reference_config": self._reference(),
        }

    def _check_group(self) -> None:
        if self.group_size and not self.is_recipe():
            raise ConfigurationError(
                f"group_size: got {self.group_size}, but the dataset_builder decides it; set "
                "dataset_builder.group_size, or what it has in its place"
            )
        if self.group_size != 1:
            return
        # With a KL penalty a group of one can still learn, from the reference.
        if self.kl_penalty_coef:
            line = "group_size=1: an episode is compared with no other, only with the reference"
            get_console().print(line, soft_wrap=True)
            return
        raise ConfigurationError(
            "group_size: got 1, expected at least 2; an episode's advantage is its reward less the "
            "mean of its group, which is 0 in a group of one, so nothing would be learned"
        )

    def _check_short_keys(self) -> None:
        for short, (nested, needed) in _SHORT_KEYS.items():
            value = getattr(self, short)
            if value is None:
                continue
            if getattr(self, nested) is not None:
                raise ConfigurationError(
                    f"{short}={value} and {nested} set the same; leave one out"
                )
            # A coefficient of 0 is none.
            if getattr(self, needed) is None or (
                not self.kl_penalty_coef and needed == "kl_penalty_coef"
            ):
                raise ConfigurationError(
                    f"{short}={value} without {needed}, which it belongs to; set {needed}, or "
                    f"leave {short} out"
                )

    def _asynchronous(self) -> AsyncConfig | None:
        if self.max_steps_off_policy is None or self.groups_per_batch is None:
            return self.async_config
        given = getattr(self, "X_loss_fn")  # noqa: B009 - the value before the munger
        return AsyncConfig(
            max_steps_off_policy=self.max_steps_off_policy,
            groups_per_batch=self.groups_per_batch,
            loss_fn="stable_reinforce" if given == "auto" else given,
            stale_groups=self.stale_groups,
        )

    def _stream(self) -> StreamMinibatchConfig | None:
        if self.num_minibatches is None or self.groups_per_batch is None:
            return self.stream_minibatch_config
        return StreamMinibatchConfig(
            groups_per_batch=self.groups_per_batch, num_minibatches=self.num_minibatches
        )

    def _reference(self) -> KLReferenceConfig | None:
        if not self.kl_penalty_coef or self.kl_reference_config is not None:
            return self.kl_reference_config
        given = self.kl_reference_model or self.kl_reference_path
        if not given and not self.is_recipe():
            raise ConfigurationError(
                f"kl_penalty_coef={self.kl_penalty_coef:g} without kl_reference_config: expected "
                "the reference policy of the penalty; set "
                f"kl_reference_config=KLReferenceConfig(base_model={self.model_name!r}), or "
                "kl_penalty_coef=0"
            )
        return KLReferenceConfig(
            base_model=self.kl_reference_model or self.model_name,
            load_checkpoint_path=self.kl_reference_path,
        )

    def training_loss_fn(self) -> str:
        """Returns the loss to train with: ``async_config.loss_fn`` in an asynchronous run."""
        return self.loss_fn if self.async_config is None else self.async_config.loss_fn

    def records_stability_info(self) -> bool:
        """Returns whether sampling must record what ``stable_reinforce`` trains on."""
        return self.training_loss_fn() == "stable_reinforce"

    def server_needs(self) -> list[Need]:
        """Returns what a server must be able to do: the loss, and scores for a KL penalty."""
        # The pass of a policy's own samples has no cross_entropy.
        return [*super().server_needs()[1:], *loss_needs(self)]

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
        check_range("kl_discount_factor", self.kl_discount_factor, 0, 1)
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
        check_loss(self)
        stream = self.stream_minibatch_config
        if stream is not None:
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
        if (reference := self._reference()) is not None:
            check_tinker_path(
                "kl_reference_config.load_checkpoint_path",
                reference.load_checkpoint_path,
                "sampler_weights",
                "the run that saved the weights",
            )
        self.check_data()

    def check_data(self) -> None:
        """Raises ``ConfigurationError`` for settings of the data that cannot work."""
        self.dataset_builder.check()
