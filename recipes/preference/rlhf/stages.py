"""The three stages of RLHF, each as the config of the loop that trains it.

By default stage 1 trains on both answers of each comparison, good and bad ones alike: the reward
model is trained on answers like these, so it can judge a policy that writes them. Stage 3 then
trains the policy towards the good answers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import chz

from tinker_cookbook import model_info
from tinker_cookbook.checkpoint_utils import CheckpointRecord
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.preference.comparison import LabeledComparison, check_text_only
from tinker_cookbook.preference.preference_datasets import (
    ChatDatasetBuilderFromComparisons,
    ComparisonDatasetBuilder,
)
from tinker_cookbook.preference.preference_model import (
    PreferenceModelBuilderFromChatRenderer,
    PreferenceModelEvaluator,
)
from tinker_cookbook.recipes.preference.rlhf.settings import CLIConfig
from tinker_cookbook.recipes.start import chat_data
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat, get_renderer
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.envs.preference_envs import (
    PairwisePreferenceRLDatasetBuilder,
    TournamentPattern,
)
from tinker_cookbook.supervised import train as sft_train
from tinker_cookbook.supervised.conversation_file import ChatDataset, FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import BackendSettings, TrainingConfig

C = TypeVar("C", bound=TrainingConfig)

# One token of a comparison is trained where an answer has dozens: steps are noisier.
_RM_FRACTION_OF_SFT_LR = 0.4
# Pairwise comparison gives a nonzero advantage in every group, so updates are larger than with
# right-or-wrong rewards. The demo model gets 1e-4; at 3e-4 its answers shrink to one word.
_RL_FRACTION_OF_SFT_LR = 0.075


def sft_config(cli: CLIConfig) -> sft_train.Config:
    """Stage 1: supervised training on demonstrations."""
    # Only the compared answer is trained, not earlier turns of the conversation.
    common = chat_data(cli, cli.batch_size, cli.max_length, TrainOnWhat.LAST_ASSISTANT_MESSAGE)
    dataset: ChatDatasetBuilder
    if cli.sft_dataset == "comparisons":
        dataset = AnswersOfComparisonsBuilder(
            common_config=common, comparison_builder=cli.comparisons
        )
    else:
        dataset = FromConversationFileBuilder(
            common_config=chz.replace(common, train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES),
            file_path=cli.sft_dataset,
            shuffle_seed=cli.seed,
        )
    return _stage(
        sft_train.Config,
        cli,
        "sft",
        dataset_builder=dataset,
        learning_rate=_rate(cli, cli.sft_learning_rate),
    )


def rm_config(cli: CLIConfig) -> sft_train.Config:
    """Stage 2: the same loop on comparisons, whose labels are the answers."""
    comparisons = cli.comparisons
    return _stage(
        sft_train.Config,
        cli,
        "rm",
        dataset_builder=ChatDatasetBuilderFromComparisons(
            common_config=chat_data(cli, cli.batch_size, cli.max_length),
            comparison_builder=comparisons,
            swap_seed=cli.seed,
        ),
        evaluator_builders=[
            partial(
                judge_evaluator, comparisons, cli.renderer, cli.model_name, num_test=cli.num_test
            )
        ],
        # A sample of this model is only a label.
        show_samples=0,
        learning_rate=_rate(cli, cli.rm_learning_rate, _RM_FRACTION_OF_SFT_LR),
    )


def rl_config(
    cli: CLIConfig, sft: CheckpointRecord, rm: CheckpointRecord | None
) -> rl_train.Config:
    """Stage 3: from the weights of ``sft``, judged by ``rm`` or, with ``judge=prompted``, by the
    base model, pulled back towards ``sft``."""
    # Stage 1 is the reference of the KL penalty; without a penalty it need not be loaded.
    reference = None
    if cli.kl_penalty_coef:
        reference = rl_train.KLReferenceConfig(
            base_model=cli.model_name, load_checkpoint_path=sft.sampler_path
        )
    return _stage(
        rl_train.Config,
        cli,
        "rl",
        load_checkpoint_path=sft.state_path,
        dataset_builder=PairwisePreferenceRLDatasetBuilder(
            comparison_builder=cli.comparisons,
            batch_size=cli.rl_batch_size,
            policy_renderer_name=cli.renderer,
            policy_model_name=cli.model_name,
            # A judge that scores both orders sees each pair once.
            tournament_pattern=TournamentPattern.ALL_PAIRS_ONE_WAY
            if cli.judge_both_orders
            else TournamentPattern.ALL_PAIRS_BOTH_WAYS,
            group_size=cli.rl_group_size,
            preference_model_builder=judge_builder(cli, rm if cli.judge == "trained" else None),
            num_test=cli.num_test,
            # The judge has the same base model, hence the same context.
            max_judge_length=model_info.resolve_max_length(cli.model_name, None),
            max_answer_tokens=cli.rl_max_tokens,
        ),
        learning_rate=_rate(cli, cli.rl_learning_rate, _RL_FRACTION_OF_SFT_LR),
        max_tokens=cli.rl_max_tokens,
        kl_penalty_coef=cli.kl_penalty_coef,
        kl_reference_config=reference,
        num_groups_to_log=cli.num_groups_to_log,
    )


def judge_builder(
    cli: CLIConfig, rm: CheckpointRecord | None
) -> PreferenceModelBuilderFromChatRenderer:
    """Returns the reward model of a checkpoint, or the base model."""
    return PreferenceModelBuilderFromChatRenderer(
        model_name=cli.model_name,
        renderer_name=cli.renderer,
        rm_weights_path=None if rm is None else rm.sampler_path,
        both_orders=cli.judge_both_orders,
        **cli.values_of(BackendSettings),
    )


def judge_evaluator(
    comparisons: ComparisonDatasetBuilder, renderer_name: str, model_name: str, num_test: int
) -> PreferenceModelEvaluator:
    """Builds the held-out evaluation of the reward model (``rm/accuracy`` and others)."""
    renderer = get_renderer(renderer_name, get_tokenizer(model_name))
    return PreferenceModelEvaluator(
        held_out(comparisons, num_test),
        renderer,
        max_length=model_info.resolve_max_length(model_name, None),
    )


def held_out(comparisons: ComparisonDatasetBuilder, num_test: int) -> list[LabeledComparison]:
    """Returns the first ``num_test`` held-out comparisons; raises if there are none, or an image,
    which the reward model cannot read."""
    train, test = comparisons.get_labeled_comparisons()
    check_text_only([*train, *(test or ())])
    if not test:
        raise DataValidationError(
            "dataset: has no held-out comparisons, expected some to evaluate the reward model and "
            "the policy on; set test_path, or test_size=100"
        )
    return test[:num_test]


def _stage(kind: type[C], cli: CLIConfig, stage: str, **derived: Any) -> C:
    """Builds the config of a stage; settings without a stage in their name hold for all stages."""
    # Both limits hold, so that max_steps shortens all stages at once.
    limits = (cli.max_steps, getattr(cli, f"{stage}_max_steps"))
    derived["max_steps"] = min((limit for limit in limits if limit is not None), default=None)
    # Each stage is a separate run at Weights & Biases and at the backend.
    for name in ("wandb_name", "session_name"):
        if getattr(cli, name) is not None:
            derived[name] = f"{getattr(cli, name)}-{stage}"
    derived["log_path"] = cli.stage_folder(stage)
    return cli.for_loop(kind, f"rlhf_{stage}", **derived)


def _rate(cli: CLIConfig, given: float | None, fraction: float = 1.0) -> float:
    return fraction * cli.recommended_rate() if given is None else given


@chz.chz
class AnswersOfComparisonsBuilder(ChatDatasetBuilder):
    """Conversations that end with one answer of a comparison; two per comparison."""

    comparison_builder: ComparisonDatasetBuilder = chz.field(doc="Where comparisons come from")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Reads the comparisons."""
        self.common_config.check()
        train, test = self.comparison_builder.comparison_sets
        batch_size = self.common_config.batch_size
        train_set = ChatDataset(self, _conversations(train.usable, self.renderer), batch_size)
        if test is None:
            return train_set, None
        held_out = _conversations(test.usable, self.renderer)
        return train_set, ChatDataset(self, held_out, min(batch_size, len(held_out)))

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Returns the first ``n`` different held-out prompts."""
        _, test = self.comparison_builder.comparison_sets
        return [] if test is None else test.prompts(n, self.renderer)


def _conversations(comparisons: list[LabeledComparison], renderer: Renderer) -> list[list[Message]]:
    return [
        [*one.comparison.prompt(renderer), *answer]
        for one in comparisons
        for answer in one.chosen_and_rejected()
    ]
