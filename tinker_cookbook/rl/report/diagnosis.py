"""Reasons why the policy does not learn or training may become unstable, with advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tinker_cookbook.rl.advantages import is_constant
from tinker_cookbook.rl.report.trajectory_metrics import GOOD_REWARD
from tinker_cookbook.rl.report.transcript_text import number
from tinker_cookbook.rl.types import TrajectoryGroup, Transition

_MOST = 0.5  # share of answers from which on a property counts as the cause
_UNSTABLE_KL = 0.01  # nats per token; the bound in Tinker's documentation on RL
_KL = "optim/kl_sample_train_v1"

GROUP_OF_ONE = (
    "has a single sample, which cannot be compared with others, so its advantage is 0. Set "
    "group_size=4 or more."
)


class Diagnosis(NamedTuple):
    """A message; ``cause`` identifies the problem, while the numbers in the message change."""

    cause: str
    text: str


def diagnose(
    groups: Sequence[TrajectoryGroup],
    metrics: Mapping[str, float | int | str],
    max_tokens: int,
) -> Diagnosis | None:
    """Returns why nothing can be learned from a batch; ``None`` if something can.

    The advantage of a sample is its difference to the other samples of its group. So a batch has no
    gradient if the rewards are equal within each group, or if no token is trained on. With a
    teacher (``teacher_kl`` is in the metrics) the rewards may be equal.

    ``groups`` must include those with constant rewards.
    """
    turns = [t for g in groups for trajectory in g.trajectories_G for t in trajectory.transitions]
    rewards_P = [rewards for group in groups if (rewards := group.get_total_rewards())]
    # Rewards matter only if there are answers and trained tokens: these come first.
    if not turns:
        return Diagnosis(
            "no_turn",
            "No episode has an answer: every first prompt is too long, or every rollout failed "
            "(logs.log has the errors). Shorten the prompts or raise max_trajectory_tokens.",
        )
    if all(turn.is_masked or not turn.ac.tokens for turn in turns):
        return Diagnosis(
            "all_masked",
            f"None of the {len(turns)} answers is trained on: each is empty, or masked because it "
            "is malformed. Show the format in the prompt (few-shot examples), or set "
            "mask_error_turns=False.",
        )
    # A teacher gives each token an advantage, so equal rewards are not a problem.
    if (kl := metrics.get("teacher_kl")) is not None:
        if metrics.get("optim/num_steps") != 0:
            return None
        return Diagnosis(
            "teacher_agrees",
            "The teacher and the student give every token the same probability (teacher_kl is "
            f"{float(kl):.1g}): nothing can be learned. The teacher is the model that training "
            "began from. Use a checkpoint, another base model, or another prompt for it.",
        )
    # One group with different rewards is enough for a gradient.
    if not all(is_constant(rewards) for rewards in rewards_P):
        return None
    # A group of one is a mistake in the settings, whatever the answers are.
    if all(len(rewards) <= 1 for rewards in rewards_P):
        return Diagnosis("group_of_one", f"Every group {GROUP_OF_ONE}")
    values = [rewards[0] for rewards in rewards_P]
    span = " to ".join(map(number, dict.fromkeys([min(values), max(values)])))
    cause, reason = _likeliest_cause(groups, turns, values, max_tokens)
    text = f"The samples of each group got the same reward ({span}): nothing can be learned "
    text += f"from this batch. {reason}"
    return Diagnosis(cause, text)


def diagnose_kl(
    metrics: Mapping[str, float | int | str], max_steps_off_policy: int | None = None
) -> Diagnosis | None:
    """Returns a warning if the KL of sampler and learner is high enough to risk instability."""
    kl = float(metrics.get(_KL, 0.0))
    # Not kl <= bound, so that NaN gives no warning.
    if not kl > _UNSTABLE_KL:
        return None
    # Off-policy the KL grows with staleness, on-policy with the step or a numerical mismatch.
    if max_steps_off_policy:
        advice = f"lower max_steps_off_policy (now {max_steps_off_policy}), or the learning rate"
    else:
        advice = (
            "lower learning_rate or num_substeps; if it is as high at the first step, sampler and "
            "learner compute differently: sample at temperature=1 and try dtype=float32"
        )
    return Diagnosis(
        "high_kl",
        f"{_KL} is {kl:.3g}, above {_UNSTABLE_KL:g}: the policy that sampled differs much from "
        f"the policy that is trained, and training may become unstable. To avoid this, {advice}.",
    )


def _likeliest_cause(
    groups: Sequence[TrajectoryGroup],
    turns: Sequence[Transition],
    values: Sequence[float],
    max_tokens: int,
) -> tuple[str, str]:
    """Returns the cause and the advice; ``values`` are the rewards of the groups."""
    # One value other than 0 and 1 in all groups rather comes from the code of the reward.
    suspect = len(values) > 1 and is_constant(values) and values[0] not in (0.0, 1.0)
    # Good rewards are success, not a failure of the answers.
    if min(values) >= GOOD_REWARD and not suspect:
        return "all_good", (
            "The model solves these problems already: use harder ones, or stop here. If the "
            "answers look wrong, the grader accepts every answer."
        )
    shares = {
        # Truncated answers come first: without their end they neither parse nor have the format.
        "cut_off": sum(turn.ac.stop_reason == "length" for turn in turns),
        # One token is only the stop token.
        "empty": sum(len(turn.ac.tokens) <= 1 for turn in turns),
        "format": sum(
            float(turn.metrics.get("parse_error", 0)) > 0 or turn.metrics.get("format") == 0
            for turn in turns
        ),
    }
    advice = {
        "cut_off": f"were cut off at max_tokens={max_tokens}, before their end: raise max_tokens, "
        "or request shorter answers in the prompt",
        "empty": "are empty: the model stops at once. Check that renderer_name fits the model, and "
        "look at the prompt in the transcripts",
        "format": "could not be parsed or have not the format that the task requires: check that "
        "renderer_name fits the model, show the format in the prompt (few-shot examples), or "
        "compare the environment's check_format with the transcripts",
    }
    for cause, count in shares.items():
        if count / len(turns) >= _MOST:
            return cause, f"{count / len(turns):.0%} of the answers {advice[cause]}."
    # Equal samples have equal rewards in any task, so only the sampling settings can help.
    if all(
        len({str([turn.ac.tokens for turn in one.transitions]) for one in group.trajectories_G}) < 2
        for group in groups
    ):
        return "same_text", (
            "The samples of each group are the same text: raise temperature towards 1, and raise "
            "top_p and top_k."
        )
    if suspect:
        return "one_reward", "Does the code that computes the reward look at the answer?"
    # What remains is the difficulty of the task.
    size = max(len(group.trajectories_G) for group in groups)
    return "all_bad" if max(values) < GOOD_REWARD else "all_constant", (
        f"Each problem is too easy or too hard for all of its samples: try a larger group_size "
        f"(now {size}), a higher temperature, problems of medium difficulty, examples in the "
        "prompt, or supervised training first."
    )
