"""Metrics of trajectories: names and numbers, for batches written down by hand."""

from __future__ import annotations

import pytest
from trajectory_samples import action, episode, group, group_of_rewards, turn

from tinker_cookbook.rl.metric_util import (
    compute_sampling_client_metrics,
    compute_trajectory_metrics,
)
from tinker_cookbook.rl.trajectory_metrics import TrajectoryTotals, error_metrics
from tinker_cookbook.rl.types import RolloutError, StopReason


def two_groups():
    """One group of two: three turns and one; one group of one that played nothing."""
    long = episode(
        turn([1], action([2, 3]), 0.5, done=False, metrics={"hits": 1}),
        turn([1, 2, 3, 4], action([5], prompt_cache_hit_tokens=3), metrics={"hits": 0, "easy": 1}),
        turn([9, 9], action([5, 6, 7], prompt_cache_hit_tokens=1), 0.25, metrics={"hits": 2}),
    )
    short = episode(turn([1], [2]), stop_reason=StopReason.MAX_TOKENS)
    first = group(long, short, final=[0.0, 0.25], metrics=[{"judge": 2}, {"judge": 5, "hits": 9}])
    return [first, group(episode(), final=[0.5])]


def test_every_name_of_a_batch_with_its_number():
    assert compute_trajectory_metrics(two_groups(), [[], []]) == pytest.approx(
        {
            "env/all/ac_tokens_per_turn": 7 / 4,
            "env/all/ob_tokens_per_turn": 8 / 4,
            "env/all/turns_per_episode": 4 / 3,
            "env/all/total_episodes": 3,
            "env/all/total_turns": 4,
            "env/all/total_ac_tokens": 7,
            "env/all/total_ob_tokens": 8,
            "env/all/total_cached_ob_tokens": 4,
            "env/all/reward/total": 1.5 / 3,
            "env/all/by_group/frac_mixed": 1 / 2,
            "env/all/by_group/frac_all_good": 1 / 2,
            "env/all/by_group/frac_all_bad": 0,
            "env/all/by_group/frac_same_text": 0,
            "env/all/by_group/size": 3 / 2,
            "env/all/frac_cut_off": 0,
            "env/all/frac_untrained": 0,
            "env/all/frac_repeated": 0,
            "env/all/hits": 12 / 4,
            "env/all/easy": 1,
            "env/all/judge": 3.5,
            "stop/completed": 2 / 3,
            "stop/max_tokens": 1 / 3,
        }
    )


def test_the_share_of_spans_that_an_answer_repeats():
    groups = [group(episode(turn([1], [7, 8, 9, 7, 8, 9, 7, 8]))), group(episode(turn([1], [7])))]
    # Of the five spans of four tokens, the last two are those of the beginning.
    assert compute_trajectory_metrics(groups, [[], []])["env/all/frac_repeated"] == 2 / 5


def test_a_tag_has_metrics_if_some_groups_lack_it():
    groups = [group_of_rewards(r) for r in (0.0, 1.0, 3.0)]
    tags = [["math", "easy"], ["math", "code"], ["math", "code"]]
    metrics = compute_trajectory_metrics(groups, tags)
    assert metrics["env/easy/reward/total"] == 0
    assert metrics["env/code/reward/total"] == 2
    assert metrics["env/code/total_episodes"] == 2
    assert not [name for name in metrics if name.startswith("env/math/")]
    # A group that carries a tag twice counts once, and no tag takes the place of "all".
    metrics = compute_trajectory_metrics(groups, [["a", "a"], ["all"], []])
    assert metrics["env/a/total_episodes"] == 1
    assert metrics["env/all/total_episodes"] == 3


def test_events_are_shares_of_all_turns_and_episodes():
    bad, good = {"parse_error": 1}, {"parse_error": 0}
    groups = [
        group(
            episode(turn([1], [2], metrics=bad), turn([1], [2]), turn([1], [2], metrics=good)),
            episode(turn([1], [2], metrics={"num_truncations_max_turn_tokens": 1})),
            metrics=[{"zero_reward_on_limit": 1, "num_truncations_max_turn_tokens": 2}, {}],
        ),
        group(episode(turn([1], [2], metrics={"zero_reward_on_limit": True}))),
        group(episode()),
    ]
    metrics = compute_trajectory_metrics(groups, [[]] * 3)
    assert metrics["parse_error"] == pytest.approx(1 / 5)
    assert metrics["zero_reward_on_limit"] == pytest.approx(2 / 4)
    assert metrics["num_truncations_max_turn_tokens"] == 3
    assert not [name for name in metrics if name.startswith("env/") and "error" in name]
    quiet = compute_trajectory_metrics([group_of_rewards(1)], [[]])
    assert not {"parse_error", "zero_reward_on_limit"} & set(quiet)


def test_totals_of_parts_are_those_of_the_whole():
    groups = [*two_groups(), group_of_rewards(0.1, 0.2, 0.3)]
    tags = [["a"], ["b"], ["a"]]
    whole = compute_trajectory_metrics(groups, tags)
    added = TrajectoryTotals.sum(TrajectoryTotals.of(g) for g in groups)
    again = TrajectoryTotals.sum([added])
    assert {f"env/all/{k}": v for k, v in again.env_metrics().items()} == {
        k: v for k, v in whole.items() if k.startswith("env/all/")
    }


def test_age_of_the_weights_that_sampled():
    groups = [group_of_rewards(1, sampling_client_step=step) for step in (5, 7, 7)]
    assert compute_sampling_client_metrics(groups, 8) == pytest.approx(
        {
            "training_client/step": 8,
            "sampling_client/step_max": 7,
            "sampling_client/step_min": 5,
            "sampling_client/step_mean": 19 / 3,
            "async/staleness_max": 3,
            "async/staleness_min": 1,
            "async/staleness_mean": 5 / 3,
        }
    )
    assert compute_sampling_client_metrics([], 8) == {}


def test_rollout_errors_are_counted_by_type():
    errors = [RolloutError(name, "why") for name in ("TimeoutError", "TimeoutError", "KeyError")]
    assert error_metrics(errors, groups_skipped=2) == {
        "rollout_errors/TimeoutError": 2,
        "rollout_errors/KeyError": 1,
        "rollout_errors/total": 3,
        "rollout_errors/groups_skipped": 2,
    }
    assert error_metrics([]) == {}
