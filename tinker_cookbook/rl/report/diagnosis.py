"""Reasons why the policy does not learn or training may become unstable, with advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tinker_cookbook.rl.advantages import is_constant
from tinker_cookbook.rl.envs.message_env import NOT_PASSED_LOG
from tinker_cookbook.rl.report.trajectory_metrics import GOOD_REWARD
from tinker_cookbook.rl.report.transcript_text import number
from tinker_cookbook.rl.types import TrajectoryGroup, Transition

_MOST = 0.5  # share of answers from which on a property counts as the cause
_RARELY = 0.05
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
    metrics: Mapping[str, float | int | str] | None = None,
    max_tokens: int | None = None,
) -> Diagnosis | None:
    """Returns why nothing can be learned from a batch; ``None`` if something can.

    The advantage of a sample is its difference to the other samples of its group. So a batch has no
    gradient if the rewards are equal within each group, or if no token is trained on. With a
    teacher (``teacher_kl`` is in the metrics) the rewards may be equal.

    ``groups`` must include those with constant rewards; ``max_tokens`` is by default inferred from
    truncated answers.
    """
    turns = [t for g in groups for trajectory in g.trajectories_G for t in trajectory.transitions]
    rewards_P = [group.get_total_rewards() for group in groups]
    metrics = metrics or {}
    # Rewards matter only if there are episodes, answers and trained tokens: these come first.
    if not any(rewards_P):
        errors = int(float(metrics.get("rollout_errors/total", 0)))
        return Diagnosis(
            "no_episode",
            f"No episode was finished ({errors} rollout errors), so nothing can be learned. "
            "logs.log has the errors; they come from the environment or the sampler.",
        )
    if not turns:
        return Diagnosis(
            "no_turn",
            "No episode has an answer, because every first prompt is too long. Raise "
            "max_trajectory_tokens or the context window, or shorten the prompts.",
        )
    if all(turn.is_masked or not turn.ac.tokens for turn in turns):
        return Diagnosis(
            "all_masked",
            f"None of the {len(turns)} answers is trained on: each is empty, or masked because it "
            "is malformed. Show the format in the prompt (few-shot examples), start with "
            "supervised training on examples, or set mask_error_turns=False.",
        )
    # A teacher gives each token an advantage, so equal rewards are not a problem.
    if "teacher_kl" in metrics:
        return _teacher_diagnosis(metrics)
    # One group with different rewards is enough for a gradient.
    if not all(is_constant(rewards) for rewards in rewards_P):
        return None
    # A group of one is a mistake in the settings, whatever the answers are.
    if all(len(rewards) <= 1 for rewards in rewards_P):
        return Diagnosis("group_of_one", f"Every group {GROUP_OF_ONE}")
    count = f"all {len(rewards_P)} groups" if len(rewards_P) > 1 else "the only group"
    values = [rewards[0] for rewards in rewards_P if rewards]
    observed = f"In {count} every sample got the same reward, {number(values[0])}"
    if not is_constant(values):
        spread = f"from {number(min(values))} to {number(max(values))}"
        observed = f"In {count} the samples of a group got the same reward ({spread})"
    cause, reason = _likeliest_cause(groups, turns, rewards_P, max_tokens)
    text = f"{observed}: nothing can be learned from this batch. {reason}"
    # ``EnvFromMessageEnv`` names the method, and the setting that gave the reward instead.
    kept = [str(turn.logs[NOT_PASSED_LOG]) for turn in turns if NOT_PASSED_LOG in turn.logs]
    if len(kept) == len(turns):
        method, _, source = kept[0].partition("; ")
        text += f" 0 of {len(turns)} answers reached {method}: {source}."
    return Diagnosis(cause, text)


def _teacher_diagnosis(metrics: Mapping[str, float | int | str]) -> Diagnosis | None:
    if metrics.get("optim/num_steps") != 0:
        return None
    return Diagnosis(
        "teacher_agrees",
        "The teacher and the student give every token the same probability (teacher_kl is "
        f"{float(metrics['teacher_kl']):.1g}): nothing can be learned. The teacher is the model "
        "that training began from. Use a checkpoint, another base model, or a different prompt for "
        "the teacher.",
    )


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
    rewards_P: Sequence[Sequence[float]],
    max_tokens: int | None,
) -> tuple[str, str]:
    """Returns the cause of constant rewards and the advice; the most specific cause first."""
    values = [rewards[0] for rewards in rewards_P if rewards]
    # Equal and good rewards are success, not a failure of the answers.
    # One value other than 0 and 1 in all groups rather comes from the code of the reward.
    suspect = len(values) > 1 and is_constant(values) and values[0] not in (0.0, 1.0)
    if min(values) >= GOOD_REWARD and not suspect:
        return "all_good", (
            "The model solves these problems already: use harder ones, or stop here. If the "
            "answers look wrong, the grader accepts every answer."
        )
    # Truncated answers come next: without their end they neither parse nor have the format.
    truncated = [turn for turn in turns if turn.ac.stop_reason == "length"]
    share = len(truncated) / len(turns)
    if share >= _MOST:
        # If all were cut at the same length, that is the limit.
        lengths = {len(turn.ac.tokens) for turn in truncated}
        limit = lengths.pop() if max_tokens is None and len(lengths) == 1 else max_tokens
        where = "max_tokens" if limit is None else f"max_tokens={limit}"
        return "cut_off", (
            f"{share:.0%} of the answers were cut off at {where}, before their end: raise "
            "max_tokens, or request shorter answers in the prompt."
        )
    # One token is only the stop token.
    share = sum(len(turn.ac.tokens) <= 1 for turn in turns) / len(turns)
    if share >= _MOST:
        return "empty", (
            f"{share:.0%} of the answers are empty: the model stops at once. Check that "
            "renderer_name fits the model, and look at the prompt in the transcripts."
        )
    if (problem := _format_problem(turns)) is not None:
        return "format", problem
    # Equal samples have equal rewards in any task, so only the sampling settings can help.
    texts = [
        {tuple(tuple(turn.ac.tokens) for turn in one.transitions) for one in group.trajectories_G}
        for group in groups
    ]
    if all(len(different) <= 1 for different in texts):
        return "same_text", (
            "The samples of each group are the same text: raise temperature towards 1, and raise "
            "top_p and top_k."
        )
    if suspect:
        return "one_reward", (
            f"All {sum(map(len, rewards_P))} samples have exactly this reward: does the code that "
            "computes it look at the answer?"
        )
    # What remains is the difficulty of the task.
    size = max(len(rewards) for rewards in rewards_P)
    if max(values) < GOOD_REWARD:
        return "all_bad", (
            f"None of the samples succeeds: try a larger group_size (now {size}) or more groups, a "
            "higher temperature, an easier task, examples in the prompt, or supervised training "
            "first."
        )
    return "all_constant", (
        "Each problem is either too easy or too hard for all of its samples: try a larger "
        f"group_size (now {size}), a higher temperature, or problems of medium difficulty."
    )


def _format_problem(turns: Sequence[Transition]) -> str | None:
    # Parse errors point to the renderer, a missing format to the prompt or the task's check.
    share = sum(float(turn.metrics.get("parse_error", 0)) > 0 for turn in turns) / len(turns)
    if share >= _MOST:
        return (
            f"{share:.0%} of the answers could not be parsed: check that renderer_name fits the "
            "model, and show the format in the prompt (few-shot examples)."
        )
    formats = [float(t.metrics["format"]) for t in turns if "format" in t.metrics]
    if formats and sum(formats) / len(formats) <= _RARELY:
        return (
            f"{sum(formats) / len(formats):.0%} of the answers have the format that the task "
            "requires: show it in the prompt (few-shot examples), or compare the environment's "
            "check_format with the transcripts."
        )
    return None
