"""Why the reward cannot move, or training may become unstable, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tinker_cookbook.rl.advantages import is_constant
from tinker_cookbook.rl.report.trajectory_metrics import GOOD_REWARD
from tinker_cookbook.rl.report.transcript_rows import number

if TYPE_CHECKING:
    from tinker_cookbook.rl.types import TrajectoryGroup, Transition

_MOST = 0.5  # the share of answers from which on something is taken for the cause
_RARELY = 0.05
_UNSTABLE_KL = 0.01  # nats a token; the bound of Tinker's documentation on RL
_KL = "optim/kl_sample_train_v1"

GROUP_OF_ONE = (
    "has a single sample, which has nothing to be compared with, so its advantage is 0. Set "
    "group_size=4 or more."
)


class Diagnosis(str):
    """A sentence for people. ``cause`` stays the same while the figures in the sentence change."""

    cause: str
    __slots__ = ("cause",)

    def __new__(cls, cause: str, text: str) -> Diagnosis:
        """Returns a sentence and its cause."""
        new = super().__new__(cls, text)
        new.cause = cause
        return new


def diagnose(
    groups: Sequence[TrajectoryGroup],
    metrics: Mapping[str, float | int | str] | None = None,
    max_tokens: int | None = None,
) -> Diagnosis | None:
    """Returns what keeps a batch from teaching anything; ``None`` where it does teach something.

    An advantage is the difference to the others of the group, so a batch in which no group has two
    different rewards moves nothing, and neither does one without a token to train. Where a teacher
    scores the tokens (``teacher_kl`` is there), rewards may be equal, but not student and teacher.

    Args:
        groups: All that were played, those of constant reward among them.
        metrics: Of the step: ``rollout_errors/total``, ``teacher_kl``, ``optim/num_steps``.
        max_tokens: The limit of an answer; by default taken from the answers that were cut off.
    """
    turns = [t for g in groups for trajectory in g.trajectories_G for t in trajectory.transitions]
    rewards_P = [group.get_total_rewards() for group in groups]
    if not any(rewards_P):
        errors = int(float((metrics or {}).get("rollout_errors/total", 0)))
        return Diagnosis(
            "nothing_played",
            f"No episode was finished ({errors} rollout errors): nothing can be learned. The "
            "errors stand in logs.log; they come from the environment or the sampler.",
        )
    if not turns:
        return Diagnosis(
            "no_turn",
            "No episode got as far as an answer: every first prompt is too long. Raise "
            "max_trajectory_tokens or the context window, or shorten the prompts.",
        )
    if all(turn.masked or not turn.ac.tokens for turn in turns):
        return Diagnosis(
            "all_masked",
            f"None of the {len(turns)} answers is trained on: each is empty or masked as "
            "malformed. Show the format in the prompt (a few-shot prefix), warm up with "
            "supervised examples, or set mask_error_turns=False.",
        )
    if metrics is not None and "teacher_kl" in metrics:
        return _taught(metrics)
    if not all(is_constant(rewards) for rewards in rewards_P):
        return None
    if all(len(rewards) <= 1 for rewards in rewards_P):
        return Diagnosis(
            "group_of_one",
            f"Every group {GROUP_OF_ONE}",
        )
    observed = _observation(rewards_P)
    cause, reason = _reason(groups, turns, rewards_P, max_tokens)
    return Diagnosis(cause, f"{observed}: nothing can be learned from this batch. {reason}")


def diagnose_kl(
    metrics: Mapping[str, float | int | str], max_steps_off_policy: int | None = None
) -> Diagnosis | None:
    """Returns whether sampler and learner are so far apart that training tends to become unstable.

    Args:
        metrics: Of the step: ``optim/kl_sample_train_v1``, in nats a token.
        max_steps_off_policy: Of an asynchronous run.
    """
    kl = float(metrics.get(_KL, 0.0))
    if not kl > _UNSTABLE_KL:
        return None
    if max_steps_off_policy:
        advice = f"lower max_steps_off_policy (now {max_steps_off_policy}), or the learning rate"
    else:
        advice = (
            "lower learning_rate or num_substeps; if it is as high at the first step, sampler and "
            "learner compute differently: sample at temperature=1 and try dtype=float32"
        )
    return Diagnosis(
        "high_kl",
        f"{_KL} is {kl:.3g}, above {_UNSTABLE_KL:g}: the policy that sampled and the one that is "
        f"trained are far apart, and training tends to become unstable. To go on safely, {advice}.",
    )


def _taught(metrics: Mapping[str, float | int | str]) -> Diagnosis | None:
    """Of a batch that a teacher has scored."""
    if metrics.get("optim/num_steps") != 0:
        return None
    return Diagnosis(
        "teacher_agrees",
        "The teacher gives every token the probability that the student does (teacher_kl "
        f"{float(metrics['teacher_kl']):.1g}): nothing can be learned from it. It is the model "
        "that training began from: give it a checkpoint, another base model, or a prompt of its "
        "own.",
    )


def _observation(rewards_P: Sequence[Sequence[float]]) -> str:
    count = f"all {len(rewards_P)} groups" if len(rewards_P) > 1 else "the only group"
    values = [rewards[0] for rewards in rewards_P if rewards]
    if is_constant(values):
        return f"In {count} every sample got the same reward, {number(values[0])}"
    return (
        f"In {count} the samples of a group got the same reward "
        f"(from {number(min(values))} to {number(max(values))} between groups)"
    )


def _reason(
    groups: Sequence[TrajectoryGroup],
    turns: Sequence[Transition],
    rewards_P: Sequence[Sequence[float]],
    max_tokens: int | None,
) -> tuple[str, str]:
    """Returns the likeliest cause, the most telling one first, and what to do."""
    values = [rewards[0] for rewards in rewards_P if rewards]
    if min(values) >= GOOD_REWARD:
        return (
            "all_good",
            "The model solves these problems already: use harder ones, or stop here.",
        )
    cut = [turn for turn in turns if turn.ac.stop_reason == "length"]
    if len(cut) / len(turns) >= _MOST:
        return "cut_off", _cut_off(cut, len(turns), max_tokens)
    if _share([len(turn.ac.tokens) <= 1 for turn in turns]) >= _MOST:
        return (
            "empty",
            f"{_percent([len(turn.ac.tokens) <= 1 for turn in turns])} of the answers are empty: "
            "the model stops at once. Check that renderer_name fits the model, and look at the "
            "prompt in the transcripts.",
        )
    unreadable = _unreadable(turns)
    if unreadable is not None:
        return "format", unreadable
    if _members_agree(groups):
        return (
            "same_text",
            "The samples of each group are the same text: raise temperature towards 1, and "
            "widen top_p and top_k.",
        )
    size = max(len(rewards) for rewards in rewards_P)
    if max(values) < GOOD_REWARD:
        return (
            "all_bad",
            f"None of the samples succeeds: try a larger group_size (now {size}) or more groups, "
            "a higher temperature, an easier task, examples in the prompt, or supervised "
            "training first.",
        )
    return (
        "all_constant",
        f"Each problem is either too easy or too hard for all of its samples: try a larger "
        f"group_size (now {size}), a higher temperature, or problems in between.",
    )


def _cut_off(cut: Sequence[Transition], total: int, max_tokens: int | None) -> str:
    lengths = {len(turn.ac.tokens) for turn in cut}
    limit = lengths.pop() if max_tokens is None and len(lengths) == 1 else max_tokens
    where = "max_tokens" if limit is None else f"max_tokens={limit}"
    return (
        f"{len(cut) / total:.0%} of the answers were cut off at {where}, before they came to "
        "their end: raise max_tokens, or ask for shorter answers."
    )


def _unreadable(turns: Sequence[Transition]) -> str | None:
    errors = [float(turn.metrics.get("parse_error", 0)) > 0 for turn in turns]
    if _share(errors) >= _MOST:
        return (
            f"{_percent(errors)} of the answers could not be parsed: check that renderer_name "
            "fits the model, and show the format in the prompt (a few-shot prefix)."
        )
    formats = [float(t.metrics["format"]) for t in turns if "format" in t.metrics]
    if formats and sum(formats) / len(formats) <= _RARELY:
        return (
            f"{sum(formats) / len(formats):.0%} of the answers have the format the task asks for: "
            "show it in the prompt (a few-shot prefix), or compare the environment's check_format "
            "with the transcripts."
        )
    return None


def _members_agree(groups: Sequence[TrajectoryGroup]) -> bool:
    """Returns whether the samples of each group are equal, token by token."""
    return all(
        len({tuple(tuple(t.ac.tokens) for t in one.transitions) for one in g.trajectories_G}) <= 1
        for g in groups
    )


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


def _percent(values: Sequence[bool]) -> str:
    return f"{_share(values):.0%}"
