"""Episodes and examples in the record of a run that show a cause."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tinker_cookbook.record.read import Record
from tinker_cookbook.training.diagnosis.causes import Cause

_COUNT = 3
_LOOKED_AT = 30
"""Steps in which equal examples are looked for."""

Row = dict[str, Any]


def add_evidence(cause: Cause, record: Record) -> None:
    """Adds three places that show the cause: where it began, or its last step if it only lasts."""
    steps = record.steps()
    split = "eval_test" if cause.name == "held_out_falls" else "train"
    recorded = [step for step in steps if split in steps[step] and step <= cause.until]
    # The step of a held-out cause may be one without an evaluation.
    begun = [step for step in recorded if step >= cause.since] if cause.name in _BEGIN else []
    step = (begun[:1] or recorded[-1:] or [None])[0]
    table = None if step is None else record.table(step, split)
    if table is None:
        return
    place, rows = {"step": step, "split": split}, table.to_pylist()
    if "targets" in table.column_names:
        if cause.name == "duplicates":
            cause.evidence += _equal_examples(record, recorded)
        else:
            shown = [(value, row) for row in rows if (value := _shows(cause.name, row)) is not None]
            shown.sort(key=lambda one: -one[0][0])
            cause.evidence += [
                {**place, "datum": row["datum"], "text": text} for (_, text), row in shown[:_COUNT]
            ]
        return
    order = _EPISODES.get(cause.name, lambda row: -row["episode_reward"])
    rows = [row for row in rows if order(row) > -np.inf]
    places = (
        {
            **place,
            "group": row["group"],
            "member": row["member"],
            "text": f"reward {row['episode_reward']:.3g}, {row['episode_stop_reason']}",
        }
        for row in sorted(rows, key=order, reverse=True)
    )
    cause.evidence += _different(places, one_of_each=cause.name not in _SAME_GROUP)


def _shows(cause: str, row: Row) -> tuple[float, str] | None:
    """Returns how much an example shows the cause, and what it is; ``None`` for none."""
    loss = _mean(row, row["logprobs"])
    if row.get("pair") is None:
        value = -loss if cause == "overfitting" else loss
        # A loss that is not a number comes first.
        return (value if value == value else np.inf), f"loss {loss:.3g}"
    if not row["chosen"]:
        return None
    # The links lead to steps of training, where the same happens as to held-out pairs.
    if cause == "chosen_falls":
        fell = loss - _mean(row, row["reference_logprobs"])
        text = f"chosen answer of training, {fell:.3g} nats a token below the reference"
        return fell, text
    margin = row["margin"]
    return (margin if cause == "overfitting" else -margin), f"chosen answer, margin {margin:.3g}"


def _different(places: Iterator[Row], one_of_each: bool) -> list[Row]:
    """Returns the first places, each of another group, or of another member of the first group."""
    found: list[Row] = []
    seen: set[Any] = set()
    for place in places:
        key = place["group"] if one_of_each else place["member"]
        if key in seen or (found and not one_of_each and place["group"] != found[0]["group"]):
            continue
        seen.add(key)
        found.append(place)
        if len(found) == _COUNT:
            break
    return found


def _equal_examples(record: Record, steps: list[int]) -> list[Row]:
    """Returns equal examples, the first that occur again."""
    seen: dict[tuple[int, ...], list[Row]] = {}
    for step in steps[:_LOOKED_AT]:
        table = record.table(step, columns=["datum", "tokens"])
        for row in table.to_pylist() if table is not None else ():
            same = seen.setdefault(tuple(row["tokens"]), [])
            place = {"step": step, "split": "train", "datum": row["datum"]}
            same.append({**place, "text": "the same tokens"})
            if len(same) == _COUNT:
                return same
    return max(seen.values(), key=len) if seen else []


def _mean(row: Row, logprobs: list[float] | None) -> float:
    """Returns the mean of ``-log p`` over the trained tokens."""
    if logprobs is None or row.get("weights") is None:
        return 0.0
    weights = np.abs(row["weights"])
    return float(-(weights * logprobs).sum() / max(weights.sum(), 1e-9))


def _mismatch(row: Row) -> float:
    if row.get("trainer_logprobs") is None:
        return 0.0
    return float(np.abs(np.subtract(row["trainer_logprobs"], row["logprobs"])).max(initial=0.0))


def _malformed(row: Row) -> bool:
    metrics = json.loads(row.get("metrics") or "{}")
    return metrics.get("parse_error", 0) > 0 or metrics.get("format") == 0


def _only(shows: Callable[[Row], Any]) -> Callable[[Row], float]:
    """Returns an order of the rows that show a cause, without the others."""
    return lambda row: 0.0 if shows(row) else -np.inf


# Causes of which the last step only shows what followed.
_BEGIN = {
    "learning_rate_too_high", "loss_spike", "chosen_falls", "entropy_collapse", "high_kl",
}  # fmt: skip
# Members of one group that are alike.
_SAME_GROUP = ("same_text", "entropy_collapse")
_EPISODES: dict[str, Callable[[Row], float]] = {
    "stale_samples": lambda row: -row["weights_step"],
    "high_kl": _mismatch,
    "length_drift": lambda row: len(row.get("answer") or ()),
    "cut_off": _only(lambda row: row.get("stop_reason") == "length"),
    "format": _only(_malformed),
    "all_masked": _only(lambda row: row.get("masked")),
    "empty": lambda row: -len(row.get("answer") or ()),
    "entropy_collapse": lambda row: np.mean(row["logprobs"]) if row.get("logprobs") else -np.inf,
    "all_good": lambda row: row["episode_reward"],
    "reward_part": lambda row: row["episode_reward"],
    "reward_hacking": lambda row: row["episode_reward"],
}
