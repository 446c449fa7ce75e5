"""One prompt, answered several times, whose answers a preference model compares."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.preference.types import Comparison, PreferenceModel
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.envs.tournament import (
    TournamentPattern,
    get_pairs,
    get_pairs_chunked,
    mean_wins_minus_losses,
)
from tinker_cookbook.rl.rollouts.async_utils import gather_or_cancel
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Metrics,
    Observation,
    StepResult,
    StopCondition,
    Trajectory,
)
from tinker_cookbook.utils import logtree
from tinker_cookbook.utils.imports import lazy_module

if TYPE_CHECKING:
    import tinker
else:
    tinker = lazy_module("tinker")

__all__ = ["LazyPreferenceModel", "PairwisePreferenceGroupBuilder", "PreferenceEnv"]


class PreferenceEnv(Env):
    """Asks for one answer, which its group judges: the step itself earns 0.

    Args:
        convo_prefix: The conversation up to the answer.
        policy_renderer: Writes the prompt and reads the answer.
    """

    def __init__(self, convo_prefix: Sequence[Message], policy_renderer: Renderer) -> None:
        self.convo_prefix: list[Message] = list(convo_prefix)
        self.policy_renderer = policy_renderer

    @property
    def stop_condition(self) -> StopCondition:
        """What ends the answer."""
        return self.policy_renderer.get_stop_sequences()

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """Returns the conversation."""
        prompt = await asyncio.to_thread(
            self.policy_renderer.build_generation_prompt, self.convo_prefix
        )
        return prompt, self.stop_condition

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Takes the answer; the episode is over."""
        return StepResult.final(0.0, self.stop_condition)


class LazyPreferenceModel(PreferenceModel):
    """A preference model that its builder makes at the first comparison.

    It pickles as its builder, so a group may be played where the model itself cannot go: one that
    asks a sampling client holds a connection. A builder that keeps what it made (as
    ``PreferenceModelBuilderFromChatRenderer`` does) makes one for all copies in a process.
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
        with _building:  # the first comparisons of a group come all at once
            if self._model is None:
                self._model = self.builder()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.builder,)


_building = threading.Lock()


@dataclass(frozen=True)
class _Answer:
    """What a trajectory came to: the messages that the judge reads, and whether they are one."""

    messages: list[Message]
    valid: bool


@dataclass(frozen=True)
class PairwisePreferenceGroupBuilder(EnvGroupBuilder):
    """A group that answers one prompt and is judged in pairs.

    Attributes:
        convo_prefix: The conversation up to the answer.
        policy_renderer: Of the policy.
        tournament_pattern: Which pairs are compared.
        preference_model: The judge; to play elsewhere it must pickle (``LazyPreferenceModel``).
        num_envs: Answers, which is the group size.
        content_preprocessor: Text of an answer to what the judge gets to read of it (without the
            reasoning, say).
        matchup_group_size: Matchup group size: answers compared.
        eval_target_completion_A: An answer that all of the group meet instead, for evaluation: in
            both orders or, where pairs meet one way, behind theirs.
    """

    convo_prefix: list[Message]
    policy_renderer: Renderer
    tournament_pattern: TournamentPattern
    preference_model: PreferenceModel
    num_envs: int
    content_preprocessor: Callable[[str], str] | None = None
    matchup_group_size: int = 4
    eval_target_completion_A: list[Message] | None = None

    def __post_init__(self) -> None:
        if self.num_envs < 1:
            raise ConfigurationError(f"num_envs: got {self.num_envs}, expected at least 1")
        get_pairs_chunked(1, self.tournament_pattern, self.matchup_group_size)

    async def make_envs(self) -> Sequence[Env]:
        """Returns ``num_envs`` copies."""
        return [await self.make_env(i) for i in range(self.num_envs)]

    async def make_env(self, index: int) -> Env:
        """One copy; they are all the same."""
        return PreferenceEnv(self.convo_prefix, self.policy_renderer)

    def logging_tags(self) -> list[str]:
        """Returns the kind of task."""
        return ["pair_pref"]

    def get_response_message(self, trajectory: Trajectory) -> tuple[list[Message], bool]:
        """Returns the answer, and whether it ended with the stop sequence and has text."""
        if not trajectory.transitions:  # a limit of the rollout left no room for one
            return [Message(role="assistant", content="")], False
        message, ending = self.policy_renderer.parse_response(trajectory.transitions[0].ac.tokens)
        has_text = bool(get_text_content(message).strip())
        return [message], ending.is_stop_sequence and has_text

    def comparison_reward_for_second_messages(
        self, message_i: list[Message], message_j: list[Message]
    ) -> Comparison:
        """Returns the comparison whose preference is what the second answer earns of the first."""
        return Comparison(
            prompt_conversation=self.convo_prefix,
            completion_A=[self._preprocess(message) for message in message_i],
            completion_B=[self._preprocess(message) for message in message_j],
        )

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Reward and metrics of each answer.

        ``win_minus_loss``
            ``(wins - losses) / matchups``, from -1 to 1. In training its mean is always 0.
        ``win_rate``
            In evaluation, ``(1 + win_minus_loss) / 2``: how often the answer beats the fixed one.
            Starts at what the untrained policy gets, 0.5 being as good; should rise.
        ``format``
            1 for an answer that ended with the stop sequence and has text. Should go to 1.
        ``judge_confidence``
            Mean size of the preferences: 1 for a judge without doubt, near 0 for one that cannot
            tell the answers apart, which teaches nothing.
        ``judge_position_bias``
            Mean preference for the second answer, which a fair judge has at 0. Near 1 or -1 the
            place decides instead of the text. Absent, as the one before, where all answers agree.
        """
        answers = [
            _Answer(*self.get_response_message(trajectory)) for trajectory in trajectory_group
        ]
        if self.eval_target_completion_A is None:
            pairs = get_pairs_chunked(
                len(answers), self.tournament_pattern, self.matchup_group_size
            )
            players = answers
        else:
            players = [*answers, _Answer(self.eval_target_completion_A, True)]
            pairs = [
                ((i, len(answers))[first], (i, len(answers))[second])
                for i in range(len(answers))
                for first, second in get_pairs(2, self.tournament_pattern)
            ]
        asked, preferences = await self._judge(players, pairs)
        balance = mean_wins_minus_losses(len(players), pairs, preferences)
        self._log(answers, pairs, preferences)
        of_judge = _judge_metrics([preferences[k] for k in asked])
        return [
            (win + (answer.valid - 1), {**self._metrics(win, answer), **of_judge})
            for answer, win in zip(answers, balance, strict=False)
        ]

    async def _judge(
        self, players: Sequence[_Answer], pairs: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[float]]:
        """Returns the indices of the judged pairs, and all preferences.

        All are asked at once. Equal answers tie unasked: the judge could only tell them apart by
        their place.
        """
        comparisons = [
            self.comparison_reward_for_second_messages(players[i].messages, players[j].messages)
            for i, j in pairs
        ]
        asked = [k for k, c in enumerate(comparisons) if c.completion_A != c.completion_B]
        verdicts = await gather_or_cancel(self.preference_model(comparisons[k]) for k in asked)
        preferences = [0.0] * len(pairs)
        for k, verdict in zip(asked, verdicts, strict=True):
            preferences[k] = verdict
        return asked, preferences

    def _metrics(self, win_minus_loss: float, answer: _Answer) -> Metrics:
        metrics: Metrics = {"win_minus_loss": win_minus_loss, "format": float(answer.valid)}
        if self.eval_target_completion_A is not None:
            metrics["win_rate"] = (1 + win_minus_loss) / 2
        return metrics

    def _preprocess(self, message: Message) -> Message:
        if self.content_preprocessor is None:
            return message
        return {**message, "content": self.content_preprocessor(get_text_content(message))}

    def _log(
        self,
        answers: Sequence[_Answer],
        pairs: Sequence[tuple[int, int]],
        preferences: Sequence[float],
    ) -> None:
        """The matchups, for the transcript; the answers themselves are there anyway."""
        with logtree.scope_header("Matchups"):
            if self.eval_target_completion_A is not None:
                logtree.log_text(f"Answer {len(answers)} is the fixed one:")
                logtree.log_formatter(
                    logtree.ConversationFormatter(messages=self.eval_target_completion_A)
                )
            logtree.table(
                [
                    {"first": i, "second": j, "preference": preference}
                    for (i, j), preference in zip(pairs, preferences, strict=True)
                ],
                caption="-1: the first is better, 1: the second is",
            )


def _judge_metrics(preferences: Sequence[float]) -> Metrics:
    if not preferences:
        return {}
    return {
        "judge_confidence": sum(map(abs, preferences)) / len(preferences),
        "judge_position_bias": sum(preferences) / len(preferences),
    }
