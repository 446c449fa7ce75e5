"""Episodes and groups: what is sampled by which random numbers, limits, ends, and bad input."""

from __future__ import annotations

import asyncio
import math

import pytest
import tinker
from rollout_samples import Group, Policy, Steps, fail, hang, hang_for_hours

from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.exceptions import (
    BackendError,
    DataValidationError,
)
from tinker_cookbook.rl.rollouts.episode import do_single_rollout, run_rollout
from tinker_cookbook.rl.rollouts.errors import RolloutFailedError, SamplingTurnTimeoutError
from tinker_cookbook.rl.rollouts.group import do_group_rollout
from tinker_cookbook.rl.rollouts.hooks import RolloutHooks
from tinker_cookbook.rl.rollouts.limits import (
    ParseErrorPolicy,
    RolloutConfig,
    RolloutLimits,
    TerminationRewardPolicy,
)
from tinker_cookbook.rl.types import (
    InitialObservationOverflow,
    StepResult,
    StopReason,
)


def rollout(env, policy=None, **options):
    return asyncio.run(run_rollout(policy or Policy(), env, **options))


def group_rollout(builder, policy=None, **options):
    return asyncio.run(do_group_rollout(builder, policy or Policy(), **options))


def limits(**bounds):
    return {"limits": RolloutLimits(**bounds)}


# --- one episode ------------------------------------------------------------------------------


def test_an_episode_is_its_turns():
    env = Steps(turns=2, metrics={"m": 3})
    trajectory = asyncio.run(do_single_rollout(Policy(), env))
    first, second = trajectory.transitions
    assert first.ob.to_ints() == [1, 2]
    assert first.ac.tokens == [0, 0]
    assert second.ob.to_ints() == [1, 2, 0, 0, 0]
    assert second.ac.tokens == [0, 1]
    assert trajectory.final_ob.to_ints() == [1, 2, 0, 0, 0, 0, 1, 1]
    assert (trajectory.reward, trajectory.stop_reason) == (2.0, StopReason.COMPLETED)
    assert [t.episode_done for t in trajectory.transitions] == [False, True]
    assert first.metrics == {"m": 3}
    assert env.extras[0] == {"stop_reason": "stop", "logprobs": [-0.5, -0.5]}
    assert set(trajectory.seconds) == {"sampling", "env", "grading"}


def test_an_overflow_at_the_start_keeps_its_reward_and_metrics():
    overflow = InitialObservationOverflow(-0.25, {"too_long": 1}, {"why": "x"})
    trajectory = rollout(Steps(faults={-1: lambda: overflow}))
    assert trajectory.transitions == []
    assert trajectory.reward == -0.25
    assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert (trajectory.metrics, trajectory.logs) == ({"too_long": 1}, {"why": "x"})
    group = group_rollout(Group(lambda: Steps(faults={-1: lambda: overflow}), Steps))
    assert group.get_total_rewards() == [0.25, 1.5]
    assert group.metrics_G == [{"too_long": 1, "place": 0}, {"place": 1}]


# --- limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "turns", "reason"),
    [
        ({"max_turns": 3}, 3, StopReason.MAX_TURNS),
        ({"max_tool_calls": 4}, 3, StopReason.MAX_TOOL_CALLS),
        ({"max_sampled_tokens": 4}, 2, StopReason.MAX_SAMPLED_TOKENS),
        ({"max_trajectory_tokens": 8}, 2, StopReason.MAX_TOKENS),
        ({"max_trajectory_tokens": 2}, 0, StopReason.MAX_TOKENS),
    ],
)
def test_a_limit_ends_the_episode_and_says_which(bounds, turns, reason):
    trajectory = rollout(Steps(turns=9, metrics={"tool_calls": 2}), **limits(**bounds))
    assert (len(trajectory.transitions), trajectory.stop_reason) == (turns, reason)
    assert [t.episode_done for t in trajectory.transitions] == [False] * (turns - 1) + [True] * (
        turns > 0
    )


def test_a_token_limit_shortens_the_request_rather_than_drop_tokens():
    asked = []

    class Client:
        async def sample(self, prompt, num_samples, sampling_params):
            asked.append(sampling_params.max_tokens)
            sequence = tinker.SampledSequence(
                stop_reason="length",
                sequence_id="s",
                _tokens_list=[5] * sampling_params.max_tokens,
                _logprobs_list=[-1.0] * sampling_params.max_tokens,
            )
            return tinker.SampleResponse(sequences=[sequence] * num_samples)

    policy = TinkerTokenCompleter(Client(), max_tokens=6)
    trajectory = rollout(Steps(turns=9), policy, **limits(max_sampled_tokens=10))
    assert asked == [6, 4]
    assert trajectory.stop_reason is StopReason.MAX_SAMPLED_TOKENS
    asked.clear()
    trajectory = rollout(Steps(turns=2), policy, **limits(max_turn_tokens=3))
    assert asked == [3, 3]
    assert trajectory.metrics["num_truncations_max_turn_tokens"] == 2
    asked.clear()
    group = Group(Steps, Steps)
    group_rollout(group, policy, config=RolloutConfig(limits=RolloutLimits(max_turn_tokens=3)))
    assert asked == [3]


def test_a_conversation_that_outgrows_the_context_ends_before_its_first_turn_too():
    class Client:
        async def sample(self, prompt, num_samples, sampling_params):
            sequence = tinker.SampledSequence(
                stop_reason="stop",
                sequence_id="s",
                _tokens_list=[5, 0],
                _logprobs_list=[-1.0] * 2,
            )
            return tinker.SampleResponse(sequences=[sequence])

    policy = TinkerTokenCompleter(Client(), 4, context_window=8)
    trajectory = rollout(Steps(turns=9), policy)
    assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert len(trajectory.transitions) == 2
    for length in (8, 9):
        trajectory = rollout(Steps(start=range(length)), policy)
        assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
        assert trajectory.transitions == []


def test_a_rollout_out_of_time_keeps_its_finished_turns():
    env = Steps(turns=9, faults={2: hang_for_hours})
    trajectory = rollout(env, **limits(rollout_timeout_seconds=3600))
    assert trajectory.stop_reason is StopReason.ROLLOUT_TIMEOUT
    assert len(trajectory.transitions) == 2
    assert trajectory.transitions[-1].episode_done


def test_an_answer_that_does_not_come_is_an_error():
    with pytest.raises(SamplingTurnTimeoutError, match=r"turn 0.*sampling_turn_timeout_seconds=0"):
        rollout(Steps(), Policy(delay=60), **limits(sampling_turn_timeout_seconds=0.1))
    group = Group(Steps, Steps)  # the request that they share
    with pytest.raises(SamplingTurnTimeoutError):
        group_rollout(
            group,
            Policy(delay=60),
            config=RolloutConfig(limits=RolloutLimits(sampling_turn_timeout_seconds=0.1)),
        )


# --- rewards of episodes that were cut; hooks --------------------------------------------------


class Graded(Steps):
    """Rewards the episode with 10."""

    async def grade(self, stop_reason):
        self.graded_for = stop_reason
        await self._fault("grade")
        return 10.0, {"judged": 1}


def terminate(**settings):
    return RolloutConfig(
        limits=RolloutLimits(max_turns=2), termination=TerminationRewardPolicy(**settings)
    )


def test_the_whole_episode_is_graded_whatever_ended_it():
    env = Graded(turns=9)
    trajectory = rollout(env, config=terminate())
    assert env.graded_for is StopReason.MAX_TURNS
    assert [t.reward for t in trajectory.transitions] == [1.0, 11.0]
    assert trajectory.metrics == {"judged": 1}


def test_a_rollout_that_hit_a_limit_has_no_positive_reward_where_so_configured():
    config = terminate(zero_reward_on_limit=True)
    group = group_rollout(Group(lambda: Graded(turns=9), Graded), config=config)
    assert group.get_total_rewards() == [0.0, 11.5]
    assert group.metrics_G[0]["zero_reward_on_limit"] == 1.0
    assert "zero_reward_on_limit" not in group.metrics_G[1]
    policy = TerminationRewardPolicy(zero_reward_on_limit=True)
    limits = RolloutConfig(limits=RolloutLimits(max_turns=2))
    same = group_rollout(Group(lambda: Graded(turns=9), Graded), config=limits, termination=policy)
    assert same.get_total_rewards() == [0.0, 11.5]


def test_a_grader_that_hangs_is_not_waited_for():
    config = terminate(grader_timeout_seconds=0.2)
    trajectory = rollout(Graded(faults={"grade": hang}), config=config)
    assert (trajectory.reward, trajectory.metrics) == (1.0, {"grader_timeout": 1.0})

    class Judged(Group):
        async def compute_group_rewards(self, trajectory_group, env_group):
            await hang()

    with pytest.raises(TimeoutError, match=r"of Judged: grading took .*_seconds=0.2; raise it"):
        group_rollout(Judged(Steps), config=config)


def test_hooks_see_and_steer():
    seen = []

    class Hooks(RolloutHooks):
        async def on_turn_begin(self, state):
            seen.append(("turn", state.turn_index, len(state.transitions), state.sampled_tokens))

        async def on_stop_reason(self, reason, state):
            return "tool_stopped"

        async def on_grade(self, state):
            seen.append(("grade", state.turn_index))

        async def on_artifacts(self, state):
            assert state.elapsed_seconds > 0
            seen.append(("end", state.env.taken, state.trajectory.reward))

    trajectory = rollout(Graded(turns=2), hooks=Hooks())
    assert trajectory.stop_reason is StopReason.TOOL_STOPPED
    tokens = len(trajectory.transitions[0].ac.tokens)
    assert seen == [("turn", 0, 0, 0), ("turn", 1, 1, tokens), ("grade", 2), ("end", 2, 12)]
    assert rollout(Steps(), hooks=Hooks()).stop_reason is StopReason.TOOL_STOPPED
    assert seen[-2:] == [("grade", 1), ("end", 1, 1.0)]


class GoOn(RolloutHooks):
    """Passes over every reason to stop but ``last``; notes them."""

    def __init__(self, last="completed"):
        self.reasons, self.last = [], last

    async def on_stop_reason(self, reason, state):
        self.reasons.append((str(reason), state.turn_index))
        return "of my own" if reason == self.last else None


def test_a_hook_may_let_a_rollout_go_on():
    for limits, reason in (
        (RolloutLimits(max_turns=1), "max_turns"),
        (RolloutLimits(max_sampled_tokens=1), "max_sampled_tokens"),
    ):
        hooks = GoOn()
        trajectory = rollout(Steps(turns=3), limits=limits, hooks=hooks)
        assert trajectory.stop_reason == "of my own"
        assert hooks.reasons == [(reason, 1), (reason, 2), ("completed", 3)]
    hooks = GoOn("max_turns")
    trajectory = rollout(Steps(turns=1), limits=RolloutLimits(max_turns=2), hooks=hooks)
    assert [turn.episode_done for turn in trajectory.transitions] == [False, True]
    assert hooks.reasons == [("completed", 1), ("completed", 2), ("max_turns", 2)]


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1", None, 1j])
def test_a_reward_must_be_a_finite_number(reward):
    with pytest.raises(DataValidationError, match=r"Steps, member 0, turn 0: reward is .*finite"):
        rollout(Steps(reward=reward))

    class Judged(Group):
        async def compute_group_rewards(self, trajectory_group, env_group):
            return [(0.0, {}), (reward, {})]

    with pytest.raises(DataValidationError, match=r"compute_group_rewards of Judged, member 1"):
        group_rollout(Judged(Steps, Steps))


@pytest.mark.parametrize("turn", [-1, 0])
def test_an_empty_observation_is_refused(turn):
    empty = tinker.ModelInput.empty()
    result = (empty, [0]) if turn < 0 else StepResult(0, False, empty, [0])
    with pytest.raises(DataValidationError, match=r"observation is empty.*episode_done"):
        rollout(Steps(turns=2, faults={turn: lambda: result}))


def test_an_error_of_the_environment_names_it_the_member_and_the_turn():
    bug = KeyError("colour")
    group = Group(Steps, lambda: Steps(turns=3, faults={1: fail(bug)}))
    with pytest.raises(
        RolloutFailedError, match=r"Steps, member 1, turn 1: KeyError: 'colour' .*py:\d"
    ):
        group_rollout(group)
    with pytest.raises(RolloutFailedError, match="before its first turn") as caught:
        rollout(Steps(faults={-1: fail(bug)}))
    assert caught.value.__cause__ is bug
    with pytest.raises(BackendError, match="Steps, member 0, turn 0: gone"):  # keeps its type
        rollout(Steps(faults={0: fail(BackendError("gone"))}))


def test_a_group_needs_members_and_a_reward_for_each():
    with pytest.raises(DataValidationError, match="make_envs of Group: got no environments"):
        group_rollout(Group())

    class Judged(Group):
        async def compute_group_rewards(self, trajectory_group, env_group):
            return [(0.0, {})]

    with pytest.raises(DataValidationError, match="got 1 rewards, expected 2"):
        group_rollout(Judged(Steps, Steps))


def test_an_environment_that_supports_limits_receives_them():
    class Receives(Steps):
        received = ()

        def set_max_tool_calls(self, max_tool_calls):
            self.received += (max_tool_calls,)

        def set_parse_error_policy(self, policy):
            self.received += (policy,)

    env, policy = Receives(), ParseErrorPolicy(max_consecutive=1)
    rollout(env, limits=RolloutLimits(max_tool_calls=3), parse_errors=policy)
    assert env.received == (3, policy)
    env = Receives()
    rollout(env)
    assert env.received == ()
