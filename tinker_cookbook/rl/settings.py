"""Settings that recipes and ``rl.run`` take, and how they become the config of a training loop.

They are the fields of the config, with three differences: values that follow from the model may be
None, ``loss_fn`` and ``loss_normalization`` may be "auto", and nested settings have short keys
(``max_steps_off_policy``, ``num_minibatches``, ``kl_reference_model`` …).
"""

from __future__ import annotations

from typing import Any, TypeVar

import chz

from tinker_cookbook import cli_utils, hyperparam_utils, model_info
from tinker_cookbook.demo.model import DEMO_MODEL
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.config import (
    DEFAULT_LOSS,
    LOSSES_WITH_PENALTY,
    RL_LOSSES,
    PolicyTrainingConfig,
)
from tinker_cookbook.rl.envs.random_reward import RandomRewardDatasetBuilder
from tinker_cookbook.rl.report.diagnosis import GROUP_OF_ONE
from tinker_cookbook.rl.rollouts.limits import check_range
from tinker_cookbook.rl.rollouts.strategy import RetryOnFailure
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.utils.checkpoints.weights_paths import weights_field
from tinker_cookbook.utils.command_line.entrypoint import also_named
from tinker_cookbook.utils.terminal import get_console

C = TypeVar("C", bound=PolicyTrainingConfig)


@also_named(batch_size="groups_per_batch")
@chz.chz
class SampledSettings(PolicyTrainingConfig):
    """Settings of a run on samples of the model; ``None`` values are derived and printed."""

    model_name: str = chz.field(default=DEMO_MODEL, doc="Hub name or local folder of the model")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    log_path: str | None = chz.field(  # type: ignore[assignment]
        default=None, doc="Folder of this run; default: /tmp/tinker-examples/RECIPE"
    )
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = chz.field(
        default="ask", doc="ask, resume, delete or raise"
    )
    group_size: int = chz.field(default=8, doc="Episodes of a problem, compared with each other")
    groups_per_batch: int = chz.field(default=8, doc="Problems per step")
    learning_rate: float | None = chz.field(  # type: ignore[assignment]
        default=None, doc="Default: a quarter of the recommended rate for supervised fine-tuning"
    )
    max_tokens: int = chz.field(default=256, doc="Maximum tokens of a response")

    max_steps_off_policy: int | None = chz.field(
        default=None,
        doc="Max staleness in optimizer steps for asynchronous RL; default: synchronous",
    )
    stale_groups: str | None = chz.field(
        default=None,
        doc="Groups older than max_steps_off_policy: discard (the default) or train",
    )
    loss_fn: str = chz.field(
        default="auto",
        doc=f"One of {', '.join(RL_LOSSES)}; auto: {DEFAULT_LOSS}, or stable_reinforce with "
        "max_steps_off_policy",
    )
    num_minibatches: int | None = chz.field(
        default=None, doc="Start training on parts of the batch while the rest is still sampled"
    )
    rollout_error_tolerance: bool = chz.field(
        default=False, doc="Continue without failed episodes; False: a failure ends the run"
    )
    rollout_max_retries: int | None = chz.field(
        default=None, doc="Retries of a failed episode; default: a failure ends the run"
    )

    @property
    def renderer(self) -> str:
        """Chat format: the setting, or the model's default."""
        return model_info.resolve_renderer_name(self.model_name, self.renderer_name, self.log_path)[
            0
        ]

    @chz.validate
    def _check_group(self) -> None:
        for name in ("group_size", "groups_per_batch"):
            check_range(name, getattr(self, name), 1)


@chz.chz
class RLSettings(SampledSettings):
    """Settings of a reinforcement learning run; ``None`` values are derived and printed."""

    kl_reference_model: str | None = chz.field(
        default=None, doc="Reference model of the KL penalty; default: model_name, untrained"
    )
    kl_reference_path: str | None = weights_field(
        "sampler_weights", "Adapter of the reference, if it has one"
    )
    loss_normalization: str = chz.field(
        default="auto",
        doc="sum: sum over the tokens of a step; tokens: their mean, as in TRL; auto: tokens "
        "unless the loss has a penalty term or the run streams",
    )
    random_rewards: bool = chz.field(
        default=False,
        doc="Random-reward control; scores must not rise",
    )


def rl_learning_rate(model_name: str) -> float:
    """Returns a quarter of ``get_lr``: 3.3e-4 for the demo model, 7e-5 for Llama 8B."""
    # Less than for supervised training, because rewards are noisier than target texts.
    return 0.25 * hyperparam_utils.get_lr(model_name)


def rl_config(cli: RLSettings, recipe_name: str, dataset: RLDatasetBuilder) -> train.Config:
    """Builds the config of an RL run; settings that follow from the model are filled in."""
    # With a KL penalty a group of one can still learn, from the reference.
    if cli.group_size == 1 and cli.kl_penalty_coef == 0:
        raise ConfigurationError(
            "group_size: got 1, expected at least 2; an episode's advantage is its reward less the "
            "mean of its group, which is 0 in a group of one, so nothing would be learned"
        )
    if cli.random_rewards:
        # Random rewards give nothing to learn: a rising score shows an error of the setup.
        dataset = RandomRewardDatasetBuilder(inner=dataset, seed=cli.seed)
    reference = None
    if cli.kl_penalty_coef:
        reference = train.KLReferenceConfig(
            base_model=cli.kl_reference_model or cli.model_name,
            load_checkpoint_path=cli.kl_reference_path,
        )
    else:
        for name in ("kl_reference_model", "kl_reference_path"):
            if getattr(cli, name) is not None:
                raise ConfigurationError(
                    f"{name}={getattr(cli, name)} without kl_penalty_coef; expected a coefficient "
                    "above 0, since only the penalty uses the reference"
                )
    return sampled_config(
        train.Config, cli, recipe_name, dataset_builder=dataset, kl_reference_config=reference
    )


def sampled_config(kind: type[C], cli: SampledSettings, recipe_name: str, **derived: Any) -> C:
    """Builds the config of a loop that trains on samples of the model (RL, distillation).

    A field of ``kind`` that ``cli`` has too takes its value, those that are None or "auto" are
    resolved, and ``derived`` holds the other fields.
    """
    loss_fn = DEFAULT_LOSS if cli.loss_fn == "auto" else cli.loss_fn
    # The short keys are another spelling of nested settings.
    asynchronous, stream = cli.async_config, cli.stream_minibatch_config
    for short, nested in (
        ("max_steps_off_policy", "async_config"),
        ("num_minibatches", "stream_minibatch_config"),
    ):
        if getattr(cli, short) is not None and getattr(cli, nested) is not None:
            raise ConfigurationError(
                f"{short}={getattr(cli, short)} and {nested}.{short}="
                f"{getattr(getattr(cli, nested), short)} set the same; leave one out"
            )
    if cli.max_steps_off_policy is not None:
        asynchronous = train.AsyncConfig(
            max_steps_off_policy=cli.max_steps_off_policy,
            groups_per_batch=cli.groups_per_batch,
            loss_fn="stable_reinforce" if cli.loss_fn == "auto" else cli.loss_fn,
            stale_groups=cli.stale_groups,
        )
    elif cli.stale_groups is not None:
        raise ConfigurationError(
            f"stale_groups={cli.stale_groups} without max_steps_off_policy, the bound of a group's "
            "age in an asynchronous run; set max_steps_off_policy, or leave stale_groups out"
        )
    if cli.num_minibatches is not None:
        stream = train.StreamMinibatchConfig(
            groups_per_batch=cli.groups_per_batch, num_minibatches=cli.num_minibatches
        )
    # The mean over tokens, wherever the config accepts it.
    normalization = cli.loss_normalization
    if normalization == "auto":
        loss = loss_fn if asynchronous is None else asynchronous.loss_fn
        normalization = "sum" if stream or loss in LOSSES_WITH_PENALTY else "tokens"
    # Off becomes ``None``, so that the model's preset decides.
    tolerance: bool | RetryOnFailure | None = cli.rollout_error_tolerance or None
    if cli.rollout_max_retries is not None:
        tolerance = RetryOnFailure(max_retries=cli.rollout_max_retries)
    # Fields that both classes have keep their value.
    shared = chz.chz_fields(kind).keys() & chz.chz_fields(type(cli)).keys()
    settings = {name: getattr(cli, name) for name in shared} | {
        "recipe_name": cli.recipe_name or recipe_name,
        "log_path": cli.log_path or cli_utils.default_log_path(recipe_name),
        "renderer_name": cli.renderer,
        "loss_fn": loss_fn,
        "loss_normalization": normalization,
        "async_config": asynchronous,
        "stream_minibatch_config": stream,
        "rollout_error_tolerance": tolerance,
    }
    # The default depends on the model, which is known only now.
    if cli.learning_rate is None:
        settings["learning_rate"] = rl_learning_rate(cli.model_name)
    return kind(**(settings | derived))


async def run(cli: RLSettings, config: train.Config) -> None:
    """Checks the config, then decides about its log folder, then trains.

    A wrong setting together with ``behavior_if_log_dir_exists="delete"`` deletes nothing.
    """
    # With a KL penalty this is allowed, so it is a note here and no error.
    if cli.group_size == 1:
        get_console().print(f"group_size=1: every group {GROUP_OF_ONE}", soft_wrap=True)
    config.check()
    with cli_utils.log_dir_of_run(config.log_path, cli.behavior_if_log_dir_exists):
        await train.main(config)
