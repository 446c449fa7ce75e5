"""Environments in which a judge compares the answers of a group in pairs.

The reward of an answer is ``(wins - losses) / matchups + (format - 1)``. Wins and losses are the
preferences of a judge model, as fractions if it returns probabilities; ``format`` is 1 if the
answer ended with the stop sequence and has text, else 0.

Within a group, wins and losses cancel: the mean training reward is ``mean(format) - 1`` even if
the answers improve. Improvement shows on the held-out prompts, where the policy's
answers are compared with a fixed answer (``win_rate``).

A preference is a number from -1 (the first is better) to 1 (the second is better); 0 is a tie. A
judge with probabilities gives ``P(second) - P(first)``, which counts as a fraction of a win.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Any

import chz

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    DataValidationError,
)
from tinker_cookbook.preference.comparison import comparisons_that_fit
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison, PreferenceModel
from tinker_cookbook.renderers import Message, Renderer, get_renderer, get_text_content
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.rollouts.async_utils import gather_or_cancel
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Metrics,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
    StopCondition,
    Trajectory,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import at_least, number, setting
from tinker_cookbook.utils import logtree


class TournamentPattern(StrEnum):
    """Pairs of a group to compare."""

    ALL_PAIRS_BOTH_WAYS = "all_pairs_both_ways"
    """Each pair in both orders, so that the judge's position bias cancels."""
    ALL_PAIRS_ONE_WAY = "all_pairs_one_way"
    """Each pair once, the earlier member first, at half the cost."""


def get_pairs(n: int, pattern: TournamentPattern) -> list[tuple[int, int]]:
    """Returns the pairs (first, second) among ``n`` members."""
    pattern = TournamentPattern(pattern)
    both = pattern == TournamentPattern.ALL_PAIRS_BOTH_WAYS
    return [(i, j) for i in range(n) for j in range(n) if (i != j if both else i < j)]


def get_pairs_chunked(n: int, pattern: TournamentPattern, chunk_size: int) -> list[tuple[int, int]]:
    """Returns the pairs within chunks of at most ``chunk_size`` of ``n`` members.

    The number of comparisons grows with ``n`` instead of its square. The sizes of chunks differ by
    at most one, so that each member has an opponent: five members in chunks of four are two and
    three. (With a chunk size of 2, an odd ``n`` has one chunk of three.)
    """
    if chunk_size < 2:
        raise ConfigurationError(
            f"matchup_group_size: got {chunk_size}, expected at least 2, as one has no opponent"
        )
    # At least two members in each chunk, and at least one chunk.
    num_chunks = max(1, min(math.ceil(n / chunk_size), n // 2))
    bounds = [n * k // num_chunks for k in range(num_chunks + 1)]
    return [
        (start + i, start + j)
        for start, end in pairwise(bounds)
        for i, j in get_pairs(end - start, pattern)
    ]


def mean_wins_minus_losses(
    n: int, pairs: Sequence[tuple[int, int]], preferences: Sequence[float]
) -> list[float]:
    """Returns ``(wins - losses) / matchups`` for each of ``n`` members, from -1 to 1.

    ``preferences[k]`` belongs to ``pairs[k]``. A member without a matchup gets 0. If all members
    have the same number of matchups, the values sum to 0.
    """
    balance, matchups = [0.0] * n, [0] * n
    for (first, second), preference in zip(pairs, preferences, strict=True):
        # One answer's win is the other's loss, so each pair adds 0 to the sum.
        balance[first] -= preference
        balance[second] += preference
        matchups[first] += 1
        matchups[second] += 1
    # Use a mean, since chunks of different sizes have different numbers of matchups.
    return [value / max(count, 1) for value, count in zip(balance, matchups, strict=True)]


class PreferenceEnv(Env):
    """Environment with one answer to a conversation; the group builder computes the reward."""

    def __init__(self, convo_prefix: Sequence[Message], policy_renderer: Renderer) -> None:
        self.convo_prefix: list[Message] = list(convo_prefix)
        self.policy_renderer = policy_renderer
        self._answer: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """The conversation; after ``step`` also the answer."""
        return [*self.convo_prefix, *self._answer]

    @property
    def stop_condition(self) -> StopCondition:
        """Stop sequences of the renderer."""
        return self.policy_renderer.get_stop_sequences()

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """Returns the rendered conversation and the stop sequences."""
        prompt = await asyncio.to_thread(
            self.policy_renderer.build_generation_prompt, self.convo_prefix
        )
        return prompt, self.stop_condition

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Ends the episode."""
        self._answer = [self.policy_renderer.parse_response(action)[0]]
        return StepResult.final(0.0, self.stop_condition)


# One lock for all models: copies share a builder, which may cache its model.
_build_lock = threading.Lock()


class LazyPreferenceModel(PreferenceModel):
    """A preference model that is built at its first comparison.

    It is pickled as its builder, so a group can run in another process although the model and its
    connection cannot be pickled. A builder that caches its model builds one for all
    copies in a process.
    """

    def __init__(self, builder: Callable[[], PreferenceModel]) -> None:
        self.builder = builder
        self._model: PreferenceModel | None = None

    async def __call__(self, comparison: Comparison) -> float:
        """Returns the model's preference; the first call may load weights, in a thread."""
        if self._model is None:
            await asyncio.to_thread(self._build)
        assert self._model is not None
        return await self._model(comparison)

    def _build(self) -> None:
        with _build_lock:  # the first comparisons of a group are concurrent
            if self._model is None:
                self._model = self.builder()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.builder,)


@dataclass(frozen=True)
class PairwisePreferenceGroupBuilder(EnvGroupBuilder):
    """Group of answers to one prompt, judged in pairs.

    Attributes:
        convo_prefix: The conversation before the answer.
        policy_renderer: Renderer of the policy.
        tournament_pattern: Pairs to compare.
        preference_model: The judge; must be picklable (``LazyPreferenceModel``) if groups run in
            other processes.
        num_envs: Group size.
        content_preprocessor: Maps the text of an answer to the judge's input (for
            example, without the reasoning).
        matchup_group_size: Answers are compared in chunks of at most this size.
        eval_target_completion_A: For evaluation, a fixed answer with which all others are compared
            instead: in both orders or, if pairs are compared in one order, as the second answer.
    """

    convo_prefix: list[Message]
    policy_renderer: Renderer
    tournament_pattern: TournamentPattern
    preference_model: PreferenceModel
    num_envs: int
    content_preprocessor: Callable[[str], str] | None = None
    matchup_group_size: int = 4
    eval_target_completion_A: list[Message] | None = None

    async def make_envs(self) -> Sequence[Env]:
        """Creates ``num_envs`` equal environments."""
        return [await self.make_env(i) for i in range(self.num_envs)]

    async def make_env(self, index: int) -> Env:
        """Creates one environment; all members of the group are equal."""
        return PreferenceEnv(self.convo_prefix, self.policy_renderer)

    def logging_tags(self) -> list[str]:
        """Returns the tag of the task."""
        return ["pair_pref"]

    def get_response_message(self, trajectory: Trajectory) -> tuple[list[Message], bool]:
        """Returns the answer, and whether it ended with the stop sequence and has text."""
        if not trajectory.transitions:  # a limit of the rollout left no room for an answer
            return [Message(role="assistant", content="")], False
        message, ending = self.policy_renderer.parse_response(trajectory.transitions[0].ac.tokens)
        return [message], ending.is_stop_sequence and bool(get_text_content(message).strip())

    def comparison_reward_for_second_messages(
        self, message_i: list[Message], message_j: list[Message]
    ) -> Comparison:
        """Returns the comparison; its preference is the reward of the second answer."""

        def judged(message: Message) -> Message:
            if self.content_preprocessor is None:
                return message
            return {**message, "content": self.content_preprocessor(get_text_content(message))}

        return Comparison(
            prompt_conversation=self.convo_prefix,
            completion_A=[judged(message) for message in message_i],
            completion_B=[judged(message) for message in message_j],
        )

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Returns reward and metrics of each answer.

        ``win_minus_loss`` is ``(wins - losses) / matchups``, from -1 to 1; in training its mean is
        0. In evaluation ``win_rate`` is the rate at which the answer beats the fixed one.

        ``judge_confidence`` is the mean absolute preference, near 0 for a judge that cannot
        distinguish the answers. ``judge_position_bias`` is the mean preference for the second
        answer: near 1 or -1, the position decides instead of the text.
        """
        responses = [self.get_response_message(trajectory) for trajectory in trajectory_group]
        n, target = len(responses), self.eval_target_completion_A
        compared = [messages for messages, _ in responses]
        # In training, answers of a group are compared, so wins and losses cancel.
        if target is None:
            pairs = get_pairs_chunked(n, self.tournament_pattern, self.matchup_group_size)
        else:
            # In evaluation, the opponent is a fixed answer, so that the win rate can rise.
            compared.append(target)  # has index n
            # Two orders or one, depending on the pattern; the order (0, 1) puts the fixed answer
            # second.
            orders = get_pairs(2, self.tournament_pattern)
            pairs = [((i, n)[first], (i, n)[second]) for i in range(n) for first, second in orders]
        comparisons = [
            self.comparison_reward_for_second_messages(compared[i], compared[j]) for i, j in pairs
        ]
        # Equal answers tie without the judge, which could distinguish them only by position.
        judged = [k for k, c in enumerate(comparisons) if c.completion_A != c.completion_B]
        verdicts = await gather_or_cancel(self.preference_model(comparisons[k]) for k in judged)
        preferences = [0.0] * len(pairs)
        for k, verdict in zip(judged, verdicts, strict=True):
            preferences[k] = verdict
        balance = mean_wins_minus_losses(len(compared), pairs, preferences)
        self._log(n, pairs, preferences)
        # The judge's metrics are equal for all members.
        shared: Metrics = {}
        if verdicts:
            shared["judge_confidence"] = sum(map(abs, verdicts)) / len(verdicts)
            shared["judge_position_bias"] = sum(verdicts) / len(verdicts)
        rewards: list[tuple[float, Metrics]] = []
        # balance may have one more entry, for the fixed answer.
        for (_, valid), win in zip(responses, balance, strict=False):
            metrics: Metrics = {"win_minus_loss": win, "format": float(valid)}
            if target is not None:
                metrics["win_rate"] = (1 + win) / 2
            # A wrong format costs 1, as much as the step from a tie to losing every matchup.
            rewards.append((win + (valid - 1), {**metrics, **shared}))
        return rewards

    def _log(
        self, num_answers: int, pairs: list[tuple[int, int]], preferences: list[float]
    ) -> None:
        """Logs the matchups for the transcript, which already has the answers."""
        with logtree.scope_header("Matchups"):
            if target := self.eval_target_completion_A:
                logtree.log_text(f"Answer {num_answers} is the fixed one:")
                logtree.log_formatter(logtree.ConversationFormatter(messages=target))
            rows = [
                {"first": i, "second": j, "preference": preference}
                for (i, j), preference in zip(pairs, preferences, strict=True)
            ]
            logtree.table(rows, caption="-1: the first is better, 1: the second is")


def _group(
    labeled: LabeledComparison, held_out: bool = False, **settings: Any
) -> PairwisePreferenceGroupBuilder:
    """Returns the group of a prompt; with ``held_out``, the opponent is the preferred answer."""
    comparison, target = labeled.comparison, None
    # The answers are single messages, so a tool could never answer.
    if comparison.tools:
        raise DataFormatError(
            "tools: got a comparison with tools, which this environment cannot call; expected "
            "comparisons without, or preference.dpo.train, which trains on the answers of the data"
        )
    if held_out:
        target = comparison.completion_B if labeled.label == "B" else comparison.completion_A
    return PairwisePreferenceGroupBuilder(
        comparison.prompt_conversation, eval_target_completion_A=target, **settings
    )


class PairwisePreferenceDataset(ProblemDataset[LabeledComparison]):
    """Groups over the prompts of a comparison dataset; its answers and labels are not used.

    ``comparisons`` replaces the training part of ``comparison_builder``. For the other arguments
    see ``PairwisePreferenceGroupBuilder``.
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


@chz.chz
class PairwisePreferenceRLDatasetBuilder(RLDatasetBuilder):
    """Prompts of a comparison dataset; a preference model judges the policy's answers.

    On held-out prompts, the opponent is the preferred answer of the data; ties are
    skipped.
    """

    comparison_builder: ComparisonDatasetBuilder = chz.field(doc="Source of the prompts")
    batch_size: int = chz.field(validator=at_least(1), doc="Prompts per step")
    policy_renderer_name: str = chz.field(doc="Chat format of the policy")
    policy_model_name: str = chz.field(doc="Model that has the tokenizer")
    tournament_pattern: TournamentPattern = setting(
        TournamentPattern.ALL_PAIRS_BOTH_WAYS, "Pairs of a group to compare"
    )
    # A single answer has no opponent.
    group_size: int = chz.field(validator=at_least(2), doc="Answers per prompt")
    content_preprocessor: Callable[[str], str] | None = setting(
        None, "Maps the text of an answer to the judge's input"
    )
    preference_model_builder: Callable[[], PreferenceModel] = chz.field(doc="Builder of the judge")
    matchup_group_size: int = number(
        4, "Answers are compared in chunks of at most this many", low=2
    )
    num_test: int = number(32, "Held-out prompts for evaluation; 0: no evaluation")
    test_group_size: int = number(1, "Answers per prompt in evaluation", low=1)
    max_judge_length: int | None = setting(
        None, "Skip prompts with comparisons that may exceed this many tokens"
    )
    max_answer_tokens: int = setting(0, "Maximum tokens of an answer, for max_judge_length")

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Loads the comparisons; the judge is built at its first comparison."""
        train, test = await asyncio.to_thread(self.comparison_builder.get_labeled_comparisons)
        if not train:
            raise DataValidationError(
                f"comparison_builder: {type(self.comparison_builder).__name__} returned "
                "no comparison for the prompts, expected at least one"
            )
        renderer = get_renderer(self.policy_renderer_name, get_tokenizer(self.policy_model_name))
        judge = LazyPreferenceModel(self.preference_model_builder)
        # In training, both compared answers will be sampled; in evaluation, only one.
        that_fit = partial(
            comparisons_that_fit,
            renderer=renderer,
            max_length=self.max_judge_length,
            answer_tokens=self.max_answer_tokens,
        )
        train_set = PairwisePreferenceDataset(
            self.comparison_builder,
            renderer,
            self.batch_size,
            judge,
            self.tournament_pattern,
            self.group_size,
            self.content_preprocessor,
            matchup_group_size=self.matchup_group_size,
            comparisons=that_fit(train, new_answers=2),
        )
        # A tie has no preferred answer to use as the opponent.
        held_out = [labeled for labeled in test or [] if labeled.label != "Tie"][: self.num_test]
        held_out = that_fit(held_out, new_answers=1)
        if not held_out:
            return train_set, None
        make_group = partial(
            _group,
            held_out=True,
            policy_renderer=renderer,
            tournament_pattern=self.tournament_pattern,
            preference_model=judge,
            num_envs=self.test_group_size,
            content_preprocessor=self.content_preprocessor,
        )
        # One batch in a fixed order, so that every evaluation has the same groups.
        return train_set, ProblemDataset(held_out, make_group, len(held_out), shuffle=False)
