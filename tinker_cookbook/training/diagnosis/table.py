"""The causes: how each is found, what to change, and the metrics that show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinker_cookbook.training.diagnosis import rules
from tinker_cookbook.training.diagnosis.equal_rewards import rule_of
from tinker_cookbook.training.diagnosis.history import (
    BAD,
    CUT,
    DUPLICATES,
    EMPTY,
    ENTROPY,
    GOOD,
    HELD_OUT,
    KL,
    LENGTH,
    LOSSES,
    MIXED,
    RANGE,
    REPEATED,
    REWARD,
    SAME,
    STALE,
    TEACHER,
    TEST_REWARD,
    UNTRAINED,
    Found,
    History,
)


@dataclass(frozen=True)
class Rule:
    """How a cause is found and what to change.

    ``change`` is a factor for the value of ``setting``, or another value for it; ``hint`` is what
    else helps, with the fields ``lower_rate``, ``start_again`` and ``sampling``. ``once`` is for a
    cause of a single step. Of a ``family`` only the first is named. ``follows`` are causes of which
    it is an effect if it begins with them or later. ``metrics`` are the names that show it, the
    clearest first; a prefix ends with ``/``.
    """

    holds: Callable[[History], Found]
    setting: str = ""
    change: float | str = ""
    hint: str = ""
    once: bool = False
    family: str = ""
    follows: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


def _equal(
    name: str, *metrics: str, setting: str = "", change: float | str = "", hint: str = ""
) -> Rule:
    names = (*metrics, MIXED)
    return Rule(
        rule_of(name), setting, change, hint, family="equal rewards",
        # What is learned from is lost since the weights were ruined.
        follows=("learning_rate_too_high",), metrics=names,
    )  # fmt: skip


# In this order they are listed: a cause stands before those that follow from it.
CAUSES: dict[str, Rule] = {
    "no_turn": Rule(
        rules.in_steps(
            lambda row: row.get("env/all/total_turns") == 0,
            "No episode has an answer: the first prompts are too long, or rollouts failed",
        ),
        "max_trajectory_tokens",
        2.0,
        "shorten the prompts",
        metrics=("env/all/total_turns",),
    ),
    "all_masked": Rule(
        rules.in_steps(
            lambda row: row.get(UNTRAINED, 0) > 0.99,
            "No answer is trained on: each is empty, or masked because it is malformed",
        ),
        "mask_error_turns",
        "False",
        "show the format in the prompt",
        metrics=(UNTRAINED,),
    ),
    "group_of_one": Rule(
        # A teacher or a reference gives a signal to a single sample, too.
        rules.in_steps(
            lambda row: (
                row.get("env/all/by_group/size") == 1 and not {TEACHER, "kl_policy_base"} & {*row}
            ),
            "Groups have one sample, which cannot be compared with others",
            steps=1,
        ),
        "group_size",
        "4",
        metrics=("env/all/by_group/size",),
    ),
    "teacher_agrees": Rule(
        rules.in_steps(
            lambda row: TEACHER in row and row.get("optim/num_steps") == 0,
            "Teacher and student give every token the same probability",
        ),
        hint="give the teacher other weights, another base model, or a prompt of its own",
        metrics=(
            TEACHER,
            "optim/num_steps",
        ),
    ),
    "duplicates": Rule(
        rules.duplicates,
        hint="remove equal rows from the data; data_report.txt names the first",
        metrics=(DUPLICATES,),
    ),
    "stale_samples": Rule(
        rules.stale,
        "max_steps_off_policy",
        0.5,
        "or {lower_rate}",
        family="KL",
        metrics=(
            STALE,
            KL,
        ),
    ),
    "high_kl": Rule(
        rules.high_kl,
        "num_substeps",
        0.5,
        "if it is as high at the first step, sample at temperature=1 and try dtype=float32",
        family="KL",
        metrics=(KL,),
    ),
    "learning_rate_too_high": Rule(
        rules.rate_too_high,
        "learning_rate",
        0.1,
        "get_lr(model_name) recommends a rate; {start_again}",
        metrics=(
            *LOSSES,
            TEACHER,
            REWARD,
            ENTROPY,
            *HELD_OUT,
        ),
    ),
    "loss_spike": Rule(
        rules.loss_spike,
        "grad_clip_norm",
        "1",
        "look at the examples with the highest loss: they may be damaged",
        once=True,
        metrics=(*LOSSES,),
    ),
    "chosen_falls": Rule(
        rules.chosen_falls,
        "dpo_beta",
        3.0,
        "or {lower_rate}",
        follows=("learning_rate_too_high",),
        metrics=(
            "test/nll",
            "test/chosen_reward",
            "chosen_reward",
            "margin",
        ),
    ),
    "reward_hacking": Rule(
        rules.reward_hacking,
        hint="read the episodes with the highest reward (python -m tinker_cookbook.view LOG_PATH "
        "links to three); if you would not give it, add the missing condition to the reward",
        follows=("learning_rate_too_high",),
        metrics=(
            REWARD,
            ENTROPY,
            REPEATED,
            LENGTH,
        ),
    ),
    "entropy_collapse": Rule(
        rules.entropy_collapse,
        "kl_penalty_coef",
        "0.01",
        "or {lower_rate}",
        follows=("learning_rate_too_high",),
        metrics=(
            ENTROPY,
            REWARD,
        ),
    ),
    "length_drift": Rule(
        rules.length_drift,
        hint="take the length out of the reward, or limit it there",
        follows=("learning_rate_too_high", "reward_hacking"),
        metrics=(
            LENGTH,
            CUT,
            REWARD,
        ),
    ),
    "held_out_falls": Rule(
        rules.held_out_falls,
        "best_metric",
        TEST_REWARD,
        "it keeps the best checkpoint; read episodes with a high reward: they may deserve none",
        metrics=(
            TEST_REWARD,
            REWARD,
        ),
    ),
    "empty": _equal(
        "empty",
        LENGTH,
        EMPTY,
        BAD,
        setting="renderer_name",
        hint="check that it fits the model; read answers with their thinking",
    ),
    "same_text": _equal(
        "same_text",
        SAME,
        setting="temperature",
        change="1",
        hint="{sampling}check that renderer_name fits the model; or the model knows one answer: "
        "start from another",
    ),
    "cut_off": _equal(
        "cut_off",
        CUT,
        BAD,
        setting="max_tokens",
        change=4.0,
        hint="raise it again while most are cut off, or ask for shorter answers in the prompt",
    ),
    "format": _equal(
        "format",
        "env/all/format",
        "parse_error",
        BAD,
        setting="renderer_name",
        hint="check that it fits the model; show the format in the prompt; compare check_format "
        "with the answers",
    ),
    "one_reward": _equal(
        "one_reward",
        REWARD,
        hint="look at the code that computes the reward; if it is right, let it also depend on "
        "something in which the answers differ",
    ),
    "all_good": _equal(
        "all_good",
        GOOD,
        REWARD,
        hint="use harder problems, or stop; if answers look wrong, the grader accepts every answer",
    ),
    "all_bad": _equal(
        "all_bad",
        BAD,
        REWARD,
        setting="group_size",
        change=2.0,
        hint="or use easier problems, examples in the prompt, or supervised training first",
    ),
    "all_constant": _equal(
        "all_constant",
        GOOD,
        BAD,
        setting="group_size",
        change=2.0,
        hint="or use problems of medium difficulty",
    ),
    "reward_part": Rule(
        rules.reward_part,
        hint="scale the parts of the reward so that they differ alike",
        metrics=(RANGE,),
    ),
    "overfitting": Rule(
        rules.overfitting,
        "num_epochs",
        0.5,
        "or keep the best checkpoint with best_metric=test/nll; use more data",
        metrics=(
            *HELD_OUT,
            *LOSSES,
        ),
    ),
    "learning_rate_too_low": Rule(
        rules.rate_too_low,
        "learning_rate",
        10.0,
        "get_lr(model_name) recommends a rate",
        metrics=(
            *HELD_OUT,
            *LOSSES,
            REWARD,
            ENTROPY,
            LENGTH,
        ),
    ),
}
