"""Why a reward cannot move: the likeliest cause is named, with what to do."""

from __future__ import annotations

import re

import pytest
import tinker
from talk_samples import ASK, END, answers, group_of, talk

from tinker_cookbook.rl.report.diagnosis import diagnose, diagnose_kl
from tinker_cookbook.rl.types import Trajectory


def groups_of(answer, reward=0.0, size=4, count=8, **metrics):
    """``answer(i)`` is the text of sample i."""
    return [
        group_of(*(talk((f"{ASK}{g}?", answer(i), reward, metrics)) for i in range(size)))
        for g in range(count)
    ]


def ended(i: int) -> str:
    return f"answer {i}{END}"


def masked():
    group = answers(0.0, 1.0)
    for trajectory in group.trajectories_G:
        trajectory.transitions[0].masked = True
    return [group]


CASES = {
    "no_turn": ([group_of(*[Trajectory([], tinker.ModelInput.empty())] * 2)], "too long"),
    "all_masked": (masked(), "None of the 2 answers is trained on"),
    "group_of_one": ([answers(1.0), answers(0.0)], "group_size=4"),
    "cut_off": (groups_of(lambda i: "12345"), r"\(0.000\): .* 100% .* cut off at max_tokens=5"),
    "empty": (groups_of(lambda i: END), "100% of the answers are empty"),
    "format": (groups_of(ended, -0.1, format=0.0), "100% of the answers .* check_format"),
    "same_text": (groups_of(lambda i: f"7 {END}"), "the same text"),
    "all_bad": (groups_of(ended), r"group_size \(now 4\)"),
    "one_reward": (groups_of(ended, 0.5), "look at the answer"),
    "all_good": (groups_of(ended, 1.0), r"\(1.000\): .* harder"),
    "all_constant": ([answers(1.0, 1.0), answers(0.0, 0.0)], r"\(0.000 to 1.000\)"),
}


@pytest.mark.parametrize("cause", CASES)
def test_each_cause_is_named(cause):
    groups, text = CASES[cause]
    found = diagnose(groups, {}, 5)
    assert found is not None
    assert found.cause == cause
    assert re.search(text, found.text)


def test_a_batch_with_a_mixed_group_is_fine():
    assert diagnose([answers(0.0, 0.0), answers(0.0, 0.5)], {}, 5) is None
    # Also where much is cut off: then it is slow, not stuck.
    cut = group_of(talk(("q", "abc", 0.0)), talk(("q", "abcd", 1.0)))
    assert diagnose([cut], {}, 4) is None


def test_a_solved_task_is_no_matter_of_max_tokens():
    found = diagnose(groups_of(lambda i: "12345", 1.0), {}, 5)
    assert found is not None
    assert found.cause == "all_good"


def test_a_high_kl_says_what_to_do():
    metrics = {"optim/kl_sample_train_v1": 0.02}
    found = diagnose_kl(metrics)
    assert found is not None
    assert "kl_sample_train_v1 is 0.02, above 0.01" in found.text
    assert "lower learning_rate or num_substeps" in found.text
    found = diagnose_kl(metrics, max_steps_off_policy=8)
    assert found is not None
    assert "lower max_steps_off_policy (now 8)" in found.text
