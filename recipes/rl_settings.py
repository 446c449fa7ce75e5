"""Settings that every recipe takes whose model learns from its own samples, and RL in particular.

A recipe of RL subclasses :class:`RLSettings`, adds the settings of its task, builds its dataset,
and hands both to :func:`rl_config`. What follows from the model (renderer, learning rate) is None
on the command line and resolved here.
"""

from __future__ import annotations

from typing import Any

import chz

from tinker_cookbook import cli_utils, hyperparam_utils, model_info
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.start import start
from tinker_cookbook.rl import train
from tinker_cookbook.rl.envs.random_reward import RandomRewardDatasetBuilder
from tinker_cookbook.rl.policy_settings import (
    DEFAULT_LOSS,
    LOSSES_WITH_PENALTY,
    RL_LOSSES,
    PolicySettings,
)
from tinker_cookbook.rl.report.diagnosis import GROUP_OF_ONE
from tinker_cookbook.rl.rollouts.limits import TerminationRewardPolicy
from tinker_cookbook.rl.rollouts.strategy import RetryOnFailure
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.utils.command_line.entrypoint import also_named
from tinker_cookbook.utils.terminal import get_console

DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Rewards are a noisier teacher than texts: a quarter of the rate recommended for those.
_RL_FRACTION_OF_SFT_LR = 0.25


@also_named(batch_size="groups_per_batch")
@chz.chz
class SampledSettings(PolicySettings):
    """Settings of a run on samples of the model itself; what is None is derived and printed."""

    model_name: str = chz.field(default=DEMO_MODEL, doc="Hub name or local folder of the model")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    group_size: int = chz.field(default=8, doc="Episodes of a problem, compared with each other")
    groups_per_batch: int = chz.field(default=8, doc="Problems a step")
    learning_rate: float | None = chz.field(
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
    async_config: train.AsyncConfig | None = chz.field(
        default=None, doc="max_steps_off_policy, and how many groups an update trains then"
    )
    stream_minibatch_config: train.StreamMinibatchConfig | None = chz.field(
        default=None, doc="num_minibatches, and the groups of a batch: groups_per_batch once more"
    )
    rollout_error_tolerance: bool = chz.field(
        default=False, doc="Go on without the episodes that fail; else a failure ends the run"
    )
    termination: TerminationRewardPolicy | None = chz.field(
        default=None, doc="Reward of an episode that reached a limit"
    )
    rollout_max_retries: int | None = chz.field(
        default=None, doc="Retries of a failed episode; default: a failure ends the run"
    )

    log_path: str | None = chz.field(
        default=None, doc="Folder of this run; default: /tmp/tinker-examples/RECIPE"
    )
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = chz.field(
        default="ask", doc="ask, resume, delete or raise"
    )

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


def resolve_renderer(cli: SampledSettings) -> str:
    """The chat format that the settings or else the model ask for."""
    return model_info.resolve_renderer_name(cli.model_name, cli.renderer_name, cli.log_path)[0]


def rl_learning_rate(model_name: str) -> float:
    """A quarter of ``hyperparam_utils.get_lr``: 3.3e-4 for the demo model, 7e-5 for Llama 8B."""
    return _RL_FRACTION_OF_SFT_LR * hyperparam_utils.get_lr(model_name)


def rl_config(cli: RLSettings, recipe_name: str, dataset: RLDatasetBuilder) -> train.Config:
    """The run's config: settings as given, and those that follow from the model filled in."""
    _check_comparable(cli)
    learning_rate = cli.learning_rate
    if learning_rate is None:
        learning_rate = rl_learning_rate(cli.model_name)
    if cli.random_rewards:
        dataset = RandomRewardDatasetBuilder(inner=dataset, seed=cli.seed)
    settings = {**_reference(cli), **common_config(cli, recipe_name)}
    if cli.loss_normalization == "auto":
        settings["loss_normalization"] = _loss_normalization(settings)
    return train.Config(dataset_builder=dataset, learning_rate=learning_rate, **settings)


def _loss_normalization(settings: dict[str, Any]) -> str:
    """The mean over tokens wherever the config accepts it."""
    stale = settings.get("async_config")
    loss = settings["loss_fn"] if stale is None else stale.loss_fn
    streams = settings.get("stream_minibatch_config") is not None
    return "sum" if streams or loss in LOSSES_WITH_PENALTY else "tokens"


def _check_comparable(cli: RLSettings) -> None:
    # Known before the start, so said before the start: such a run does 40 steps for nothing.
    if cli.group_size == 1 and cli.kl_penalty_coef == 0:
        raise ConfigurationError(
            "group_size: got 1, expected at least 2; an episode's advantage is its reward less the "
            "mean of its group, which is 0 in a group of one, so nothing would be learned"
        )


def common_config(cli: SampledSettings, recipe_name: str) -> dict[str, Any]:
    """What the config of any such run has, but for its data and its learning rate, by name."""
    return {
        "recipe_name": recipe_name,
        "log_path": cli.log_path or cli_utils.default_log_path(recipe_name),
        "model_name": cli.model_name,
        "renderer_name": resolve_renderer(cli),
        "max_tokens": cli.max_tokens,
        **_mode(cli),
        "rollout_error_tolerance": _tolerance(cli),
        "termination": cli.termination,
        **{**cli.shared(), "loss_fn": DEFAULT_LOSS if cli.loss_fn == "auto" else cli.loss_fn},
    }


def _tolerance(cli: SampledSettings) -> bool | RetryOnFailure | None:
    """What happens when an episode fails: the run ends, or goes on without it, or it is retried."""
    if cli.rollout_max_retries is None:
        return cli.rollout_error_tolerance or None
    return RetryOnFailure(max_retries=cli.rollout_max_retries)


def _reference(cli: RLSettings) -> dict[str, Any]:
    """The KL penalty's reference, where there is a penalty."""
    if cli.kl_penalty_coef == 0:
        for name in ("kl_reference_model", "kl_reference_path"):
            if getattr(cli, name) is not None:
                raise ConfigurationError(
                    f"{name}={getattr(cli, name)} without kl_penalty_coef; expected a coefficient "
                    "above 0 beside it, since the reference is used by the penalty alone"
                )
        return {}
    return {
        "kl_reference_config": train.KLReferenceConfig(
            base_model=cli.kl_reference_model or cli.model_name,
            load_checkpoint_path=cli.kl_reference_path,
        )
    }


def _mode(cli: SampledSettings) -> dict[str, Any]:
    """Which of the two ways to overlap sampling and training was asked for, if any."""
    _check_once(cli, "max_steps_off_policy", "async_config")
    _check_once(cli, "num_minibatches", "stream_minibatch_config")
    mode: dict[str, Any] = {
        name: getattr(cli, name)
        for name in ("async_config", "stream_minibatch_config")
        if getattr(cli, name) is not None
    }
    if cli.max_steps_off_policy is not None:
        mode["async_config"] = train.AsyncConfig(
            max_steps_off_policy=cli.max_steps_off_policy,
            groups_per_batch=cli.groups_per_batch,
            loss_fn="stable_reinforce" if cli.loss_fn == "auto" else cli.loss_fn,
        )
    if cli.num_minibatches is not None:
        mode["stream_minibatch_config"] = train.StreamMinibatchConfig(
            groups_per_batch=cli.groups_per_batch, num_minibatches=cli.num_minibatches
        )
    return mode


def _check_once(cli: SampledSettings, short: str, nested: str) -> None:
    """Refuses two spellings of one setting."""
    if getattr(cli, short) is not None and getattr(cli, nested) is not None:
        raise ConfigurationError(
            f"{short}={getattr(cli, short)} and {nested}.{short}="
            f"{getattr(getattr(cli, nested), short)} set the same; leave one out"
        )


async def run(cli: RLSettings, config: train.Config) -> None:
    """Checks the config, then the log folder, then trains."""
    if cli.group_size == 1 and cli.kl_penalty_coef == 0:
        get_console().print(f"group_size=1: every group {GROUP_OF_ONE}", soft_wrap=True)
    await start(config, cli.behavior_if_log_dir_exists, train.main)
