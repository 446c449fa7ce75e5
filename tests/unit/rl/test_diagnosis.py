"""Why a reward cannot move: the likeliest cause is named, with what to do."""

from __future__ import annotations

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
    "no_episode": ([], ["3 rollout errors", "logs.log"]),
    "no_turn": ([group_of(*[Trajectory([], tinker.ModelInput.empty())] * 2)], ["too long"]),
    "all_masked": (masked(), ["None of the 2 answers is trained on", "mask_error_turns"]),
    "group_of_one": ([answers(1.0), answers(0.0)], ["single sample", "group_size=4"]),
    "cut_off": (
        groups_of(lambda i: "12345"),
        ["In all 8 groups", "the same reward, 0.000", "100% of the answers were cut off at "
         "max_tokens=5", "raise max_tokens"],
    ),
    "empty": (groups_of(lambda i: END), ["100% of the answers are empty", "renderer_name"]),
    "format": (groups_of(ended, -0.1, format=0.0), ["the same reward, -0.100", "0% of the "
               "answers have the format", "check_format"]),
    "same_text": (groups_of(lambda i: f"7 {END}"), ["the same text", "temperature"]),
    "all_bad": (groups_of(ended), ["group_size (now 4)", "easier task", "temperature"]),
    "one_reward": (groups_of(ended, 0.5), ["All 32 samples have exactly", "look at the answer"]),
    "all_good": (groups_of(ended, 1.0), ["the same reward, 1.000", "harder"]),
    "all_constant": ([answers(1.0, 1.0), answers(0.0, 0.0)], ["from 0.000 to 1.000",
                     "group_size (now 2)"]),
}  # fmt: skip


@pytest.mark.parametrize("cause", CASES)
def test_each_cause_is_named(cause):
    groups, parts = CASES[cause]
    found = diagnose(groups, {"rollout_errors/total": 3})
    assert found is not None
    assert found.cause == cause
    for part in parts:
        assert part in found.text


def test_a_batch_with_a_mixed_group_is_fine():
    assert diagnose([answers(0.0, 0.0), answers(0.0, 0.5)]) is None
    # Also where much is cut off: then it is slow, not stuck.
    assert diagnose([group_of(talk(("q", "abc", 0.0)), talk(("q", "abcd", 1.0)))]) is None


def test_a_solved_task_is_no_matter_of_max_tokens():
    found = diagnose(groups_of(lambda i: "12345", 1.0))
    assert found is not None
    assert found.cause == "all_good"


# --- sampler and learner far apart ---------------------------------------------------------------


def test_a_high_kl_says_what_to_do():
    metrics = {"optim/kl_sample_train_v1": 0.02}
    found = diagnose_kl(metrics)
    assert found is not None
    assert "kl_sample_train_v1 is 0.02, above 0.01" in found.text
    assert "lower learning_rate or num_substeps" in found.text
    found = diagnose_kl(metrics, max_steps_off_policy=8)
    assert found is not None
    assert "lower max_steps_off_policy (now 8)" in found.text
