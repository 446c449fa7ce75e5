"""What the page says about each cause: when it is named, and the metrics that show it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from typing import Any

_KL, _ENTROPY, _LENGTH = "optim/kl_sample_train_v1", "optim/entropy", "env/all/ac_tokens_per_turn"
_MIXED, _CUT, _LOSSES = "env/all/by_group/frac_mixed", "env/all/frac_cut_off", "train_mean_nll"
_EQUAL = "in each of three steps at most one group in ten has different rewards"
_TRAINING_STEPS = 3

_ABOUT: dict[str, tuple[str, tuple[str, ...]]] = {
    "no_turn": ("three steps have no answer at all", ("env/all/total_turns",)),
    "all_masked": ("three steps train on no answer", ("env/all/frac_untrained",)),
    "group_of_one": ("groups have one episode", ("env/all/by_group/size",)),
    "teacher_agrees": ("in three steps the teacher differs from the student nowhere", ()),
    "duplicates": ("a fifth of the rows are equal to earlier ones", ("data/frac_duplicates",)),
    "stale_samples": (
        "samples are one and more updates old, and their KL to the trainer is above 0.05",
        ("async/staleness_mean", _KL),
    ),
    "high_kl": ("the KL between sampler and trainer is above 0.01", (_KL,)),
    "learning_rate_too_high": (
        "the loss is 30% above its start, or the reward falls while the entropy changes",
        (_LOSSES, "dpo_loss", "teacher_kl", "reward/total", _ENTROPY),
    ),
    "loss_spike": (
        "the loss of one batch is six deviations above the others",
        (_LOSSES, "dpo_loss", "teacher/forward_kl"),
    ),
    "chosen_falls": (
        "held-out chosen answers lose a nat per token",
        ("test/nll", "test/chosen_reward", "chosen_reward", "margin"),
    ),
    "entropy_collapse": (
        "the entropy falls below a fifth, and the reward has not risen",
        (_ENTROPY, "reward/total"),
    ),
    "length_drift": (
        "answers become longer or shorter, and not better, or most are cut off",
        (_LENGTH, _CUT, "reward/total"),
    ),
    "held_out_falls": (
        "the reward rises, and two held-out evaluations are a fifth below the best",
        ("test/env/all/reward/total", "reward/total"),
    ),
    "same_text": (
        f"{_EQUAL}, as half of the groups are one text",
        ("env/all/by_group/frac_same_text", _MIXED),
    ),
    "empty": (f"{_EQUAL}, as the answers are empty", (_LENGTH, _MIXED)),
    "cut_off": (f"{_EQUAL}, as half of the answers are cut off, and wrong", (_CUT, _MIXED)),
    "format": (
        f"{_EQUAL}, as half of the answers do not have the format, and are wrong",
        ("env/all/format", "env/all/parse_error", _MIXED),
    ),
    "one_reward": (f"{_EQUAL}: every answer has got one reward", ("reward/total", _MIXED)),
    "all_good": (f"{_EQUAL}, as all are right", ("env/all/by_group/frac_all_good", _MIXED)),
    "all_bad": (f"{_EQUAL}, as all are wrong", ("env/all/by_group/frac_all_bad", _MIXED)),
    "all_constant": (f"{_EQUAL}, as each problem is too easy or too hard", (_MIXED,)),
    "reward_part": (
        "one part of the reward makes 50 times the difference of another",
        ("reward/range/*",),
    ),
    "overfitting": (
        "two held-out losses are 3% above the best, while the training loss falls",
        ("test/nll", "test/dpo_loss", _LOSSES, "dpo_loss"),
    ),
    "learning_rate_too_low": (
        "after 20 steps neither the loss, nor reward, entropy or length have moved",
        ("test/nll", _LOSSES, "reward/total", _ENTROPY, _LENGTH),
    ),
}


def explained(cause: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns the cause with ``about``, a text, and those of the metric ``names`` that show it."""
    about, patterns = _ABOUT.get(cause["name"], ("see docs/diagnosis.md", ()))
    found = [name for one in patterns for name in sorted(names) if fnmatch(name, one)]
    return {**cause, "about": f"Named when {about}.", "metrics": found}


def checked(rows: Iterable[Mapping[str, Any]], config: Mapping[str, Any]) -> bool:
    """Returns whether causes were looked for: not by other programs, nor before three steps."""
    steps = sum("progress/batch" in row or "num_sequences" in row for row in rows)
    return "_type" in config and steps >= _TRAINING_STEPS
