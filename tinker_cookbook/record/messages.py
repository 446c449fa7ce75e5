"""Episodes of a record as messages."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinker_cookbook.exceptions import DataError
from tinker_cookbook.record.read import Record
from tinker_cookbook.record.schema import IMAGE
from tinker_cookbook.record.vocabulary import text_of, token_texts

_COLUMNS = [
    "group", "member", "turn", "prompt", "answer", "episode_reward", "episode_stop_reason",
    "weights_step",
]  # fmt: skip
_LONGEST = 20_000


def sampled_messages(
    record: Record, step: int, split: str, count: int
) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Returns the first episode of each of the first ``count`` groups of a step.

    Each is its messages (a prompt as the user's, without the tokens of the turns before, with the
    chat format's markers; an answer as the assistant's) and what is known about it. A split without
    sampled episodes or tokens, or with a damaged file, has none.
    """
    import pyarrow as pa

    try:
        table = record.table(step, split)
    except DataError:
        return []
    if table is None or not set(_COLUMNS) <= set(table.column_names):
        return []
    first = np.asarray(table["member"]) == 0
    groups = np.unique(np.asarray(table["group"])[first])[:count]
    chosen = first & np.isin(np.asarray(table["group"]), groups)
    rows = table.select(_COLUMNS).filter(pa.array(chosen)).to_pylist()
    texts = token_texts(
        record.log_path,
        {t for row in rows for name in ("prompt", "answer") for t in row[name] or ()},
    )
    texts[IMAGE] = ""
    found: dict[int, tuple[list[dict[str, Any]], dict[str, Any]]] = {}
    for row in rows:
        about = {
            "step": step,
            "split": split,
            "group": row["group"],
            "reward": row["episode_reward"],
            "stop_reason": row["episode_stop_reason"],
            "weights_step": row["weights_step"],
        }
        messages, _ = found.setdefault(row["group"], ([], about))
        for role, name in (("user", "prompt"), ("assistant", "answer")):
            if row[name] is not None:
                messages.append({"role": role, "content": text_of(row[name], texts)[:_LONGEST]})
    return list(found.values())
