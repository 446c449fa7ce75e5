"""Reinforcement learning where a judge compares answers: the answers of a group meet each other.

The reward of an answer is ``(wins - losses) / matchups + (format - 1)``. ``wins`` and ``losses``
are what a preference model says, in parts of a win where it gives probabilities; ``format`` is 1
for an answer that ended with the stop sequence and has text, else 0.

Among the answers of a group, wins and losses cancel: the mean reward of training is
``mean(format) - 1`` however good the answers become. Whether they improve is told by the held-out
part, whose answers meet a fixed one (``win_rate``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import chz

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.preference.comparison import comparisons_that_fit
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import LabeledComparison, PreferenceModel
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.envs.preference_group import (
    LazyPreferenceModel,
    PairwisePreferenceGroupBuilder,
    PreferenceEnv,
)
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.envs.tournament import TournamentPattern, get_pairs, get_pairs_chunked
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

__all__ = [
    "LazyPreferenceModel",
    "PairwisePreferenceDataset",
    "PairwisePreferenceGroupBuilder",
    "PairwisePreferenceRLDatasetBuilder",
    "PreferenceEnv",
    "TournamentPattern",
    "get_pairs",
    "get_pairs_chunked",
]


class PairwisePreferenceDataset(ProblemDataset[LabeledComparison]):
    """Groups over the prompts of a comparison dataset, whose answers and labels are not used.

    Args:
        comparison_builder: Where the prompts come from.
        renderer: Of the policy.
        batch_size: Groups in a batch.
        preference_model: The judge.
        tournament_pattern: Which pairs of a group are compared.
        group_size: Answers to a prompt.
        content_preprocessor: As in ``PairwisePreferenceGroupBuilder``.
        matchup_group_size: As there.
        comparisons: Instead of the training part of ``comparison_builder``.
    """

    def __init__(
        self,
        comparison_builder: ComparisonDatasetBuilder,
        renderer: Renderer,
        batch_size: int,
        preference_model: PreferenceModel,
        tournament_pattern: TournamentPattern = TournamentPattern.ALL_PAIRS_BOTH_WAYS,
        group_size: int = 4,
        content_preprocessor: Callable[[str], str] | None = None,
        *,
        matchup_group_size: int = 4,
        comparisons: Sequence[LabeledComparison] | None = None,
    ) -> None:
        if comparisons is None:
            comparisons = comparison_builder.get_labeled_comparisons()[0]
        make_group = partial(
            _group,
            policy_renderer=renderer,
            tournament_pattern=tournament_pattern,
            preference_model=preference_model,
            num_envs=group_size,
            content_preprocessor=content_preprocessor,
            matchup_group_size=matchup_group_size,
        )
        super().__init__(comparisons, make_group, batch_size)


def _group(labeled: LabeledComparison, **settings: Any) -> EnvGroupBuilder:
    return PairwisePreferenceGroupBuilder(labeled.comparison.prompt_conversation, **settings)


def _held_out_group(labeled: LabeledComparison, **settings: Any) -> EnvGroupBuilder:
    """Returns a group that meets the answer which the data prefers."""
    comparison = labeled.comparison
    preferred = comparison.completion_B if labeled.label == "B" else comparison.completion_A
    return _group(labeled, eval_target_completion_A=preferred, **settings)


@chz.chz
class PairwisePreferenceRLDatasetBuilder(RLDatasetBuilder):
    """Prompts of a comparison dataset, answered by the policy and judged by a preference model.

    On the prompts of its held-out part, the policy's answers meet the answer that the data prefers.
    Comparisons labelled as ties have none, and are left out there.
    """

    comparison_builder: ComparisonDatasetBuilder = chz.field(doc="Where the prompts come from")
    batch_size: int = chz.field(doc="Prompts a step")
    policy_renderer_name: str = chz.field(doc="Chat format of the policy")
    policy_model_name: str = chz.field(doc="Whose tokenizer turns text into tokens")
    tournament_pattern: TournamentPattern = chz.field(
        default=TournamentPattern.ALL_PAIRS_BOTH_WAYS, doc="Which pairs of a group are compared"
    )
    group_size: int = chz.field(doc="Answers to a prompt")
    content_preprocessor: Callable[[str], str] | None = chz.field(
        default=None, doc="Text of an answer to what the judge gets to read of it"
    )
    preference_model_builder: Callable[[], PreferenceModel] = chz.field(doc="Makes the judge")
    matchup_group_size: int = chz.field(default=4, doc="Matchup group size: answers compared")
    num_test: int = chz.field(default=32, doc="Held-out prompts to evaluate on; 0: no evaluation")
    test_group_size: int = chz.field(default=1, doc="Answers to a prompt in evaluation")
    max_judge_length: int | None = chz.field(
        default=None, doc="Leave out prompts whose judgement may be longer, in tokens"
    )
    max_answer_tokens: int = chz.field(
        default=0, doc="Most tokens of an answer, for max_judge_length"
    )

    def check(self) -> None:
        """Raises ``ConfigurationError`` for a number out of range."""
        for name, low in (
            ("batch_size", 1),
            ("group_size", 2),  # a single answer has no opponent
            ("matchup_group_size", 2),
            ("num_test", 0),
            ("test_group_size", 1),
        ):
            if getattr(self, name) < low:
                raise ConfigurationError(
                    f"{name}: got {getattr(self, name)}, expected at least {low}"
                )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Reads the comparisons; the judge is made when it is first asked."""
        self.check()
        train, test = await asyncio.to_thread(self.comparison_builder.get_labeled_comparisons)
        if not train:
            raise DataValidationError(
                f"comparison_builder: {type(self.comparison_builder).__name__} gave no comparison "
                "to take prompts from, expected at least one"
            )
        renderer = get_renderer(self.policy_renderer_name, get_tokenizer(self.policy_model_name))
        judge = LazyPreferenceModel(self.preference_model_builder)
        train = self._judgeable(train, renderer, 2)
        train_set = PairwisePreferenceDataset(
            self.comparison_builder,
            renderer,
            self.batch_size,
            judge,
            self.tournament_pattern,
            self.group_size,
            self.content_preprocessor,
            matchup_group_size=self.matchup_group_size,
            comparisons=train,
        )
        held_out = [labeled for labeled in test or [] if labeled.label != "Tie"][: self.num_test]
        held_out = self._judgeable(held_out, renderer, 1)
        if not held_out:
            return train_set, None
        make_group = partial(
            _held_out_group,
            policy_renderer=renderer,
            tournament_pattern=self.tournament_pattern,
            preference_model=judge,
            num_envs=self.test_group_size,
            content_preprocessor=self.content_preprocessor,
        )
        return train_set, ProblemDataset(held_out, make_group, len(held_out), shuffle=False)

    def _judgeable(
        self, comparisons: list[LabeledComparison], renderer: Renderer, new_answers: int
    ) -> list[LabeledComparison]:
        return comparisons_that_fit(
            comparisons,
            renderer,
            self.max_judge_length,
            new_answers=new_answers,
            answer_tokens=self.max_answer_tokens,
        )
