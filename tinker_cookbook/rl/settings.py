"""Settings that recipes and ``rl.run`` take, and how they become the config of a training loop.

They are the fields of the config itself, with three differences: what follows from the model
(renderer, learning rate) may be None, ``loss_fn`` and ``loss_normalization`` may be "auto", and
nested settings have short keys (``max_steps_off_policy``, ``num_minibatches``,
``kl_reference_model`` …). :func:`sampled_config` is the one place where they are resolved.
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
from tinker_cookbook.rl.rollouts.strategy import RetryOnFailure
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.utils.command_line.entrypoint import also_named
from tinker_cookbook.utils.terminal import get_console

C = TypeVar("C", bound=PolicyTrainingConfig)


# Rewards are noisier than target texts: a quarter of the rate recommended for supervised training.
_RL_FRACTION_OF_SFT_LR = 0.25


@also_named(batch_size="groups_per_batch")
@chz.chz
class SampledSettings(PolicyTrainingConfig):
    """Settings of a run on samples of the model itself; what is None is derived and printed."""

    model_name: str = chz.field(default=DEMO_MODEL, doc="Hub name or local folder of the model")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    log_path: str | None = chz.field(  # type: ignore[assignment]
        default=None, doc="Folder of this run; default: /tmp/tinker-examples/RECIPE"
    )
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = chz.field(
        default="ask", doc="ask, resume, delete or raise"
    )
    group_size: int = chz.field(default=8, doc="Episodes of a problem, compared with each other")
    groups_per_batch: int = chz.field(default=8, doc="Problems a step")
    learning_rate: float | None = chz.field(  # type: ignore[assignment]
        default=None, doc="Default: a quarter of what is recommended for supervised fine-tuning"
    )
    max_tokens: int = chz.field(default=256, doc="Most tokens to sample in a turn")

    max_steps_off_policy: int | None = chz.field(
        default=None,
        doc="Max staleness in optimizer steps for asynchronous RL; default: synchronous",
    )
    loss_fn: str = chz.field(
        default="auto",
        doc=f"One of {', '.join(RL_LOSSES)}; auto: {DEFAULT_LOSS}, or stable_reinforce with "
        "max_steps_off_policy",
    )
    num_minibatches: int | None = chz.field(
        default=None, doc="Begin to train on parts of the batch while the rest still samples"
    )
    rollout_error_tolerance: bool = chz.field(
        default=False, doc="Go on without the episodes that fail; else a failure ends the run"
    )
    rollout_max_retries: int | None = chz.field(
        default=None, doc="Retries of a failed episode; default: a failure ends the run"
    )

    @property
    def renderer(self) -> str:
        """The chat format that was set, or that of the model."""
        name, _ = model_info.resolve_renderer_name(
            self.model_name, self.renderer_name, self.log_path
        )
        return name

    @chz.validate
    def _check_group(self) -> None:
        for name in ("group_size", "groups_per_batch"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}: got {getattr(self, name)}, expected at least 1")


@chz.chz
class RLSettings(SampledSettings):
    """Settings of a reinforcement learning run; what is None is derived and printed."""

    kl_reference_model: str | None = chz.field(
        default=None, doc="Model that the penalty pulls towards; default: model_name, untrained"
    )
    kl_reference_path: str | None = chz.field(
        default=None, doc="tinker:// path of the reference's adapter, where it has one"
    )
    loss_normalization: str = chz.field(
        default="auto",
        doc="sum over the tokens of a step, or tokens: their mean, as in TRL; auto: tokens where "
        "the loss has no penalty of its own and the run does not stream",
    )
    random_rewards: bool = chz.field(
        default=False,
        doc="Random-reward control; scores must not rise",
    )


def rl_learning_rate(model_name: str) -> float:
    """Returns a quarter of ``get_lr``: 3.3e-4 for the demo model, 7e-5 for Llama 8B."""
    return _RL_FRACTION_OF_SFT_LR * hyperparam_utils.get_lr(model_name)


def rl_config(cli: RLSettings, recipe_name: str, dataset: RLDatasetBuilder) -> train.Config:
    """Builds the config of an RL run; settings that follow from the model are filled in."""
    # An episode's advantage is its reward less the mean of its group: 0 in a group of one.
    if cli.group_size == 1 and cli.kl_penalty_coef == 0:
        raise ConfigurationError(
            "group_size: got 1, expected at least 2; an episode's advantage is its reward less the "
            "mean of its group, which is 0 in a group of one, so nothing would be learned"
        )
    if cli.random_rewards:
        dataset = RandomRewardDatasetBuilder(inner=dataset, seed=cli.seed)
    return sampled_config(
        train.Config,
        cli,
        recipe_name,
        dataset_builder=dataset,
        kl_reference_config=_kl_reference(cli),
        loss_normalization=_loss_normalization(cli),
    )


def sampled_config(kind: type[C], cli: SampledSettings, recipe_name: str, **derived: Any) -> C:
    """Builds the config of a loop that trains on samples of the model (RL, distillation).

    A field of ``kind`` that ``cli`` has too takes its value, those that are None or "auto" are
    resolved, and ``derived`` holds the other fields.
    """
    shared = chz.chz_fields(kind).keys() & chz.chz_fields(type(cli)).keys()
    settings = {name: getattr(cli, name) for name in shared} | {
        "recipe_name": cli.recipe_name or recipe_name,
        "log_path": cli.log_path or cli_utils.default_log_path(recipe_name),
        "renderer_name": cli.renderer,
        "loss_fn": _loss(cli),
        "async_config": async_config(cli),
        "stream_minibatch_config": stream_config(cli),
        "rollout_error_tolerance": error_tolerance(cli),
    }
    if cli.learning_rate is None:
        settings["learning_rate"] = rl_learning_rate(cli.model_name)
    return kind(**(settings | derived))


def async_config(cli: SampledSettings) -> train.AsyncConfig | None:
    """Returns the settings of asynchronous training; None: synchronous."""
    _check_one_spelling(cli, "max_steps_off_policy", "async_config")
    if cli.max_steps_off_policy is None:
        return cli.async_config
    return train.AsyncConfig(
        max_steps_off_policy=cli.max_steps_off_policy,
        groups_per_batch=cli.groups_per_batch,
        loss_fn="stable_reinforce" if cli.loss_fn == "auto" else cli.loss_fn,
    )


def stream_config(cli: SampledSettings) -> train.StreamMinibatchConfig | None:
    """Returns the settings of streaming training; None: a batch trains when it is complete."""
    _check_one_spelling(cli, "num_minibatches", "stream_minibatch_config")
    if cli.num_minibatches is None:
        return cli.stream_minibatch_config
    return train.StreamMinibatchConfig(
        groups_per_batch=cli.groups_per_batch, num_minibatches=cli.num_minibatches
    )


def error_tolerance(cli: SampledSettings) -> bool | RetryOnFailure | None:
    """Returns what happens when an episode fails: it is retried, left out, or ends the run."""
    if cli.rollout_max_retries is None:
        return cli.rollout_error_tolerance or None
    return RetryOnFailure(max_retries=cli.rollout_max_retries)


def _loss(cli: SampledSettings) -> str:
    """Returns the loss of a synchronous run."""
    return DEFAULT_LOSS if cli.loss_fn == "auto" else cli.loss_fn


def _loss_normalization(cli: RLSettings) -> str:
    """Returns the setting; for auto, the mean over tokens wherever the config accepts it."""
    if cli.loss_normalization != "auto":
        return cli.loss_normalization
    asynchronous = async_config(cli)
    loss = _loss(cli) if asynchronous is None else asynchronous.loss_fn
    streams = stream_config(cli) is not None
    return "sum" if streams or loss in LOSSES_WITH_PENALTY else "tokens"


def _kl_reference(cli: RLSettings) -> train.KLReferenceConfig | None:
    """Returns the reference policy of the KL penalty, where there is a penalty."""
    if cli.kl_penalty_coef:
        return train.KLReferenceConfig(
            base_model=cli.kl_reference_model or cli.model_name,
            load_checkpoint_path=cli.kl_reference_path,
        )
    for name in ("kl_reference_model", "kl_reference_path"):
        if getattr(cli, name) is not None:
            raise ConfigurationError(
                f"{name}={getattr(cli, name)} without kl_penalty_coef; expected a coefficient "
                "above 0 beside it, since the reference is used by the penalty alone"
            )
    return None


def _check_one_spelling(cli: SampledSettings, short: str, nested: str) -> None:
    """Raises ``ConfigurationError`` where both spellings of one setting are given."""
    if getattr(cli, short) is not None and getattr(cli, nested) is not None:
        raise ConfigurationError(
            f"{short}={getattr(cli, short)} and {nested}.{short}="
            f"{getattr(getattr(cli, nested), short)} set the same; leave one out"
        )


async def run(cli: RLSettings, config: train.Config) -> None:
    """Checks the config, then decides about its log folder, then trains.

    A wrong setting together with ``behavior_if_log_dir_exists="delete"`` deletes nothing.
    """
    if cli.group_size == 1:
        get_console().print(f"group_size=1: every group {GROUP_OF_ONE}", soft_wrap=True)
    config.check()
    with cli_utils.log_dir_of_run(config.log_path, cli.behavior_if_log_dir_exists):
        await train.main(config)
