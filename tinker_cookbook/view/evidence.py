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
    """Adds three places that show the cause: where its last step shows it best."""
    steps = record.steps()
    split = "eval_test" if cause.name == "held_out_falls" else "train"
    # The step of a held-out cause may be one without an evaluation.
    recorded = [step for step in steps if split in steps[step] and step <= cause.until]
    table = record.table(recorded[-1], split) if recorded else None
    if table is None:
        return
    place = {"step": recorded[-1], "split": split}
    if "targets" not in table.column_names:
        rows = table.to_pylist()
        order = _EPISODES.get(cause.name, _lowest_reward)
        places = (
            {**place, "group": r["group"], "member": r["member"]} for r in _sorted(rows, order)
        )
        cause.evidence += _different(places, one_of_each=cause.name not in _SAME_GROUP)
    elif cause.name == "duplicates":
        cause.evidence += _equal_examples(record, recorded)
    else:
        rows = table.to_pylist()
        if cause.name == "overfitting":
            rows = _sorted(rows, lambda row: -_loss(row))
        else:
            rows = _sorted(rows, _loss)
        cause.evidence += [{**place, "datum": row["datum"]} for row in rows[:_COUNT]]


def _sorted(rows: list[Row], order: Callable[[Row], float]) -> list[Row]:
    return sorted(rows, key=order, reverse=True)


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
            same.append({"step": step, "split": "train", "datum": row["datum"]})
            if len(same) == _COUNT:
                return same
    return max(seen.values(), key=len) if seen else []


def _loss(row: Row) -> float:
    if row.get("logprobs") is None or row.get("weights") is None:
        return 0.0
    weights = np.abs(row["weights"])
    return float(-(weights * row["logprobs"]).sum() / max(weights.sum(), 1e-9))


def _lowest_reward(row: Row) -> float:
    return -float(row["episode_reward"])


def _highest_reward(row: Row) -> float:
    return float(row["episode_reward"])


def _mismatch(row: Row) -> float:
    if row.get("trainer_logprobs") is None:
        return 0.0
    return float(np.abs(np.subtract(row["trainer_logprobs"], row["logprobs"])).max(initial=0.0))


def _longest(row: Row) -> float:
    return float(len(row.get("answer") or ()))


def _cut_off(row: Row) -> float:
    return float(row.get("stop_reason") == "length")


def _malformed(row: Row) -> float:
    metrics = json.loads(row.get("metrics") or "{}")
    return float(metrics.get("parse_error", 0) > 0 or metrics.get("format") == 0)


def _certain(row: Row) -> float:
    return float(np.mean(row["logprobs"])) if row.get("logprobs") else -np.inf


# Members of one group that are alike.
_SAME_GROUP = ("same_text", "entropy_collapse")
_EPISODES: dict[str, Callable[[Row], float]] = {
    "stale_samples": lambda row: -float(row["weights_step"]),
    "high_kl": _mismatch,
    "length_drift": _longest,
    "cut_off": _cut_off,
    "format": _malformed,
    "all_masked": lambda row: float(bool(row.get("masked"))),
    "empty": lambda row: -_longest(row),
    "entropy_collapse": _certain,
    "all_good": _highest_reward,
    "reward_part": _highest_reward,
}
