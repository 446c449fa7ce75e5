"""The three stages as configs of the loops that train them."""

from __future__ import annotations

from functools import partial
from typing import Any

import chz

from tinker_cookbook import hyperparam_utils, model_info
from tinker_cookbook.checkpoint_utils import CheckpointRecord
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.preference.comparison import LabeledComparison
from tinker_cookbook.preference.preference_datasets import (
    ChatDatasetBuilderFromComparisons,
    ComparisonDatasetBuilder,
)
from tinker_cookbook.preference.preference_model import PreferenceModelBuilderFromChatRenderer
from tinker_cookbook.preference.preference_model_evaluator import PreferenceModelEvaluator
from tinker_cookbook.recipes.preference.rlhf.demonstrations import (
    AnswersOfComparisonsBuilder,
    DemonstrationFileBuilder,
)
from tinker_cookbook.recipes.preference.rlhf.settings import CLIConfig
from tinker_cookbook.renderers import TrainOnWhat, get_renderer
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.envs.preference_envs import PairwisePreferenceRLDatasetBuilder
from tinker_cookbook.supervised import train as sft_train
from tinker_cookbook.supervised.types import ChatDatasetBuilder, ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import RunSettings

# One token of a comparison is trained where an answer has dozens: steps are noisier.
_RM_FRACTION_OF_SFT_LR = 0.4
# A judge prefers one of any two answers, so no step is without a push. The demo model gets 1e-4; at
# three times that, the rate of rewards that say right or wrong, its answers shrink to a word.
_RL_FRACTION_OF_SFT_LR = 0.075


def sft_config(cli: CLIConfig) -> sft_train.Config:
    """Stage 1: supervised training on demonstrations."""
    common = _common(cli, TrainOnWhat.LAST_ASSISTANT_MESSAGE)
    dataset: ChatDatasetBuilder
    if cli.sft_dataset == "comparisons":
        dataset = AnswersOfComparisonsBuilder(
            common_config=common, comparison_builder=cli.comparisons
        )
    else:
        dataset = DemonstrationFileBuilder(
            common_config=chz.replace(common, train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES),
            file_path=cli.sft_dataset,
            shuffle_seed=cli.seed,
        )
    return sft_train.Config(
        dataset_builder=dataset, **_supervised(cli, "sft", cli.sft_learning_rate)
    )


def rm_config(cli: CLIConfig) -> sft_train.Config:
    """Stage 2: the same loop on comparisons, whose labels are the answers."""
    comparisons = cli.comparisons
    return sft_train.Config(
        dataset_builder=ChatDatasetBuilderFromComparisons(
            common_config=_common(cli, None),
            comparison_builder=comparisons,
            swap=cli.rm_swap,
            swap_seed=cli.seed,
        ),
        evaluator_builders=[
            partial(
                judge_evaluator, comparisons, cli.renderer, cli.model_name, num_test=cli.num_test
            )
        ],
        show_samples=0,
        **_supervised(cli, "rm", cli.rm_learning_rate, _RM_FRACTION_OF_SFT_LR),
    )


def rl_config(cli: CLIConfig, sft: CheckpointRecord, rm: CheckpointRecord) -> rl_train.Config:
    """Stage 3: from the weights of ``sft``, judged by ``rm``, pulled back towards ``sft``."""
    reference = None
    if cli.kl_penalty_coef:
        reference = rl_train.KLReferenceConfig(
            base_model=cli.model_name, load_checkpoint_path=sft.sampler_path
        )
    run = {**_run(cli, "rl"), "load_checkpoint_path": sft.state_path}
    return rl_train.Config(
        dataset_builder=PairwisePreferenceRLDatasetBuilder(
            comparison_builder=cli.comparisons,
            batch_size=cli.rl_batch_size,
            policy_renderer_name=cli.renderer,
            policy_model_name=cli.model_name,
            tournament_pattern=cli.tournament,
            group_size=cli.rl_group_size,
            preference_model_builder=judge_builder(cli, rm),
            matchup_group_size=cli.matchup_group_size,
            num_test=cli.num_test,
            max_judge_length=model_info.resolve_max_length(cli.model_name, None),
            max_answer_tokens=cli.rl_max_tokens,
        ),
        learning_rate=_rate(cli, cli.rl_learning_rate, _RL_FRACTION_OF_SFT_LR),
        max_tokens=cli.rl_max_tokens,
        kl_penalty_coef=cli.kl_penalty_coef,
        kl_reference_config=reference,
        num_groups_to_log=cli.num_groups_to_log,
        **run,
    )


def judge_builder(cli: CLIConfig, rm: CheckpointRecord) -> PreferenceModelBuilderFromChatRenderer:
    """The reward model of a checkpoint."""
    assert rm.sampler_path is not None
    return PreferenceModelBuilderFromChatRenderer(
        renderer_name=cli.renderer,
        model_name=cli.model_name,
        rm_weights_path=rm.sampler_path,
        base_url=cli.base_url,
        backend=cli.backend,
        device=cli.device,
        dtype=cli.dtype,
        both_orders=cli.judge_both_orders,
    )


def judge_evaluator(
    comparisons: ComparisonDatasetBuilder, renderer_name: str, model_name: str, num_test: int
) -> PreferenceModelEvaluator:
    """Held-out accuracy of the reward model, ``rm/accuracy`` and the like."""
    renderer = get_renderer(renderer_name, get_tokenizer(model_name))
    return PreferenceModelEvaluator(
        held_out(comparisons, num_test),
        renderer,
        max_length=model_info.resolve_max_length(model_name, None),
    )


def held_out(comparisons: ComparisonDatasetBuilder, num_test: int) -> list[LabeledComparison]:
    """The first ``num_test`` held-out comparisons.

    Raises:
        DataValidationError: There are none.
    """
    _, test = comparisons.get_labeled_comparisons()
    if not test:
        raise DataValidationError(
            "dataset: has no held-out comparisons, expected some to evaluate the reward model and "
            "the policy on; set test_path, or test_size=100"
        )
    return test[:num_test]


def _common(cli: CLIConfig, train_on_what: TrainOnWhat | None) -> ChatDatasetBuilderCommonConfig:
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=cli.model_name,
        renderer_name=cli.renderer,
        max_length=model_info.resolve_max_length(cli.model_name, cli.max_length),
        batch_size=cli.batch_size,
        train_on_what=train_on_what,
    )


def _supervised(
    cli: CLIConfig, stage: str, learning_rate: float | None, of_recommended: float = 1.0
) -> dict[str, Any]:
    return {**_run(cli, stage), "learning_rate": _rate(cli, learning_rate, of_recommended)}


def _rate(cli: CLIConfig, given: float | None, of_recommended: float) -> float:
    return of_recommended * hyperparam_utils.get_lr(cli.model_name) if given is None else given


def _run(cli: CLIConfig, stage: str) -> dict[str, Any]:
    """The settings of the run that a stage has in common with the others."""
    shared = {name: getattr(cli, name) for name in chz.chz_fields(RunSettings)}
    limits = (cli.max_steps, getattr(cli, f"{stage}_max_steps"))
    steps = min((limit for limit in limits if limit is not None), default=None)
    names = {
        name: f"{getattr(cli, name)}-{stage}"
        for name in ("wandb_name", "session_name")
        if getattr(cli, name) is not None
    }
    return {
        **shared,
        **names,
        "max_steps": steps,
        "recipe_name": f"rlhf_{stage}",
        "log_path": cli.stage_folder(stage),
        "model_name": cli.model_name,
        "renderer_name": cli.renderer,
    }
