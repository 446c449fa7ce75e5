"""Settings of rollouts: what is refused when they are made, and by the command line."""

from __future__ import annotations

import pickle

import pytest

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollouts.limits import (
    ParseErrorPolicy,
    RolloutConfig,
    RolloutLimits,
    TerminationRewardPolicy,
)
from tinker_cookbook.rl.rollouts.presets import agentic
from tinker_cookbook.rl.types import StopReason


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: RolloutLimits(max_turns=0), "limits.max_turns: got 0"),
        (lambda: RolloutLimits(max_trajectory_tokens=0), "max_trajectory_tokens"),
        (lambda: RolloutLimits(max_sampled_tokens=-1), "max_sampled_tokens"),
        (lambda: RolloutLimits(max_turn_tokens=0), "max_turn_tokens"),
        (lambda: RolloutLimits(max_tool_calls=0), "max_tool_calls"),
        (lambda: RolloutLimits(rollout_timeout_seconds=0.0), "rollout_timeout_seconds"),
        (lambda: RolloutLimits(sampling_turn_timeout_seconds=-1.0), "sampling_turn_timeout"),
        (lambda: ParseErrorPolicy(max_consecutive=-1), "max_consecutive"),
        (lambda: ParseErrorPolicy(penalty_per_error=-0.1), "penalty_per_error"),
        (lambda: ParseErrorPolicy(retry_message_template="{what}"), "retry_message_template"),
        (lambda: ParseErrorPolicy(retry_message_template="{"), "retry_message_template"),
        (lambda: TerminationRewardPolicy(grader_timeout_seconds=0.0), "grader_timeout_seconds"),
        (lambda: RolloutConfig(tool_execution="concurrent_safe"), "tool_execution"),
    ],
)
def test_invalid_settings_are_refused(make, field):
    with pytest.raises(ConfigurationError, match=field):
        make()


def test_the_agentic_settings():
    config = agentic()
    limits = config.limits
    assert config.termination is not None
    assert (limits.max_turns, limits.max_trajectory_tokens, limits.max_tool_calls) == (
        10,
        65536,
        30,
    )
    assert config.parse_errors is not None
    assert config.parse_errors.max_consecutive == 2
    assert config.termination.grader_timeout_seconds == 900
    assert config.tool_execution == "sequential"
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.termination.clamps(StopReason.ROLLOUT_TIMEOUT)
    assert not config.termination.clamps(StopReason.CONTEXT_OVERFLOW)
    assert len(config.termination.limit_stop_reasons) == 5
