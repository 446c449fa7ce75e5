"""What a run says that it does: phases, waits, a line a minute, code that blocks the loop."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from rollout_samples import Group, Policy, Steps

from tinker_cookbook.rl.rollouts.group import do_group_rollout
from tinker_cookbook.utils import heartbeat
from tinker_cookbook.utils.activity import Activity


def test_phases_episodes_and_calls_are_a_line_and_a_sentence():
    clock = 0.0
    now = Activity(lambda: clock)
    assert (now.line(), now.sentence()) == ("", "")
    now.step, now.place, now.episode_hint = "step 3/10", "at http://host", "a limit ends them"
    with now.phase("sampling", "0/2 groups"):
        clock = 5.0
        now.finished = 3
        now.episodes = {i: ("LetterEnv.step" if i < 4 else "", 2.9) for i in range(5)}
        assert now.line() == "sampling 0/2 groups, 3/8 episodes; waiting for LetterEnv.step 2.1 s"
        assert now.sentence() == (
            "step 3/10: sampling 0/2 groups, 3/8 episodes at http://host for 5.0 s; 4 of 5 "
            "episodes wait for LetterEnv.step, the longest for 2.1 s (a limit ends them)"
        )
        with contextlib.ExitStack() as calls:
            for _ in range(4):
                calls.enter_context(now.waiting("tool search"))
            clock = 90.0
            assert now.line().endswith("; waiting for tool search 1:25")
            assert now.sentence().endswith("; 4 calls of tool search run, the longest for 1:25")
        with now.phase("training"):
            assert now.line() == "training: 0.0 s"
    assert now.line() == ""


@pytest.mark.parametrize("blocks", [True, False])
def test_code_that_blocks_the_loop_is_named_once_and_measured(monkeypatch, caplog, blocks):
    # A busy machine stops a process for a tenth of a second now and then, as if it were blocked.
    scale = 1 if blocks else 10
    for name, seconds in (("TICK", 0.01), ("BLOCKED", 0.03), ("WARN", 0.15)):
        monkeypatch.setattr(heartbeat, f"{name}_SECONDS", seconds * scale)

    async def fault():
        if blocks:
            time.sleep(0.1)
        else:
            await asyncio.sleep(0.5)

    async def run():
        with heartbeat.reporting_activity() as now, now.phase("sampling"):
            turns = [lambda: Steps(turns=2, faults={0: fault, 1: fault})] * 2
            await do_group_rollout(Group(*turns), Policy())
            await asyncio.sleep(0.02)
            return now.blocked_seconds

    begun = time.monotonic()
    measured = asyncio.run(run())
    if blocks:
        assert 0.3 < measured < time.monotonic() - begun
    else:
        assert measured == 0
    said = [r.getMessage() for r in caplog.records if "blocked the event loop" in r.getMessage()]
    assert len(said) == blocks
    assert all(".fault (test_activity.py:" in line for line in said)
