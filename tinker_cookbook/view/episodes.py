"""Episodes and examples of a run, token by token, from its record.

Each function returns a JSON object.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_cookbook.record.images import image_file
from tinker_cookbook.record.read import Record
from tinker_cookbook.record.vocabulary import text_of, token_texts
from tinker_cookbook.view.guard import attempt

if TYPE_CHECKING:
    import pyarrow as pa

_LISTED = [
    "group", "member", "turn", "weights_step", "prompt", "answer", "datum", "masked",
    "episode_reward", "episode_advantage", "episode_stop_reason", "tags", "problem",
]  # fmt: skip
_PREVIEW = 200
"""Characters of a text in a list."""
_SEARCHED = 2000
"""The last files of a record in which a problem is looked for: 2 seconds."""


Rows = list[dict[str, Any]]
"""Rows of a table of the record."""


def read(path: Path, step: int, split: str, columns: list[str] | None = None) -> Rows:
    """Returns the rows of a step, none if its file is absent; raises as ``Record.table``."""
    table = Record(path).table(step, split, columns)
    return [] if table is None else table.to_pylist()


def episodes(path: Path, step: int, split: str) -> dict[str, Any]:
    """Returns a row for each episode of a step, without its tokens; or the examples of a step.

    ``problem`` is why there are none.
    """
    problems: list[str] = []
    empty: dict[str, Any] = {"episodes": []}
    found = attempt(f"step {step}", lambda: _episodes(path, step, split), empty, problems)
    return found | {"problem": problems[0]} if problems else found


def _episodes(path: Path, step: int, split: str) -> dict[str, Any]:
    # ``targets_per_token`` tells examples from episodes; a column that a file lacks is left out.
    rows = read(path, step, split, [*_LISTED, "targets_per_token"])
    if rows and "group" not in rows[0]:
        return examples(path, read(path, step, split))
    return listing(path, rows)


def listing(path: Path, rows: Rows) -> dict[str, Any]:
    """Returns a row for each episode, without its tokens."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        one = found.setdefault((row["group"], row["member"]), _listed(row))
        if row["turn"] is None:
            continue
        one["turns"] += 1
        one["trained"] |= row["datum"] is not None
        one["masked"] |= bool(row["masked"])
        if row["turn"] == 0 and row["member"] == 0:
            # The end of a prompt has the question; its beginning is often the same for all.
            one["prompt"] = (row.get("prompt") or [])[-_PREVIEW:]
        if row.get("answer") is not None:  # absent with record=summary
            one["tokens"] += len(row["answer"])
            if row["turn"] == 0:  # of the same turn as the prompt
                one["answer"] = row["answer"][:_PREVIEW]
    ids = {token for one in found.values() for token in (*one["prompt"], *one["answer"])}
    texts = token_texts(path, ids)
    for one in found.values():
        one["prompt"] = text_of(one["prompt"], texts)[-_PREVIEW:]
        one["text"] = text_of(one.pop("answer"), texts)[:_PREVIEW]
    return {"episodes": list(found.values())}


def _of_episode(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "member": row["member"],
        "reward": number(row["episode_reward"]),
        "advantage": number(row["episode_advantage"]),
        "stop": row["episode_stop_reason"],
        "weights": row["weights_step"],
        "problem": row["problem"],
    }


def _listed(row: Mapping[str, Any]) -> dict[str, Any]:
    counted = {"turns": 0, "tokens": 0, "trained": False, "masked": False}
    tags = json.loads(row["tags"] or "[]")
    texts = {"prompt": [], "answer": []}
    return {"group": row["group"], **_of_episode(row), "tags": tags, **counted, **texts}


def examples(path: Path, rows: Rows) -> dict[str, Any]:
    """Returns the examples of a step, token by token, and the texts of the tokens."""
    found, tokens = [], set()
    for row in rows:
        if row.get("tokens") is None:  # record=summary
            found.append({"datum": row["datum"], "tokens": []})
            continue
        width = row["targets_per_token"] or 1
        # Position i predicts the token after it, so the last target completes the tokens.
        ids = [*row["tokens"], *(row["targets"][-width:][:1] if row["targets"] else [])]
        tokens.update(ids)
        one = {"datum": row["datum"], "tokens": ids, "images": row["images"]}
        if row.get("pair") is not None:
            one |= {name: row[name] for name in ("pair", "chosen")}
            one |= {name: number(row[name]) for name in ("reward", "margin")}
        if width == 1:
            one |= {name: rounded(row[name]) for name in ("weights", "logprobs")}
        found.append(one)
    return {"examples": found, "tokens": token_texts(path, tokens)}


def groups(path: Path, rows: Rows, with_images: bool = True) -> dict[int, Any]:
    """Returns the episodes of each group, token by token, the texts of its tokens, images, and the
    numbers of the groups beside it."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for row in rows:
        members = found.setdefault(row["group"], {})
        one = members.setdefault(row["member"], _episode(row))
        if row["turn"] is not None:
            one["turns"].append(_turn(row))
    used = {number: _tokens_of(members.values()) for number, members in found.items()}
    texts = token_texts(path, set().union(*used.values()))
    return {
        number: {
            "members": list(members.values()),
            "tokens": {token: texts[token] for token in used[number] if token in texts},
            "pictures": _pictures(path, members.values()) if with_images else {},
            **_beside(number, [*found]),
        }
        for number, members in found.items()
    }


def group(path: Path, step: int, split: str, number: int) -> dict[str, Any]:
    """Returns one of the ``groups`` of a step; empty if there is none."""
    table = Record(path).table(step, split)
    if table is None:
        return {}
    found = groups(path, _where(table, "group", number).to_pylist()).get(number, {})
    return found and found | _beside(number, table["group"].to_pylist())


def _beside(number: int, numbers: list[int]) -> dict[str, int | None]:
    return {
        "before": max((one for one in numbers if one < number), default=None),
        "after": min((one for one in numbers if one > number), default=None),
    }


def _episode(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_of_episode(row),
        "group_reward": number(row["episode_group_reward"]),
        "metrics": json.loads(row["episode_metrics"] or "{}"),
        "logs": json.loads(row["episode_logs"] or "{}"),
        "messages": json.loads(row["episode_messages"] or "null"),
        "calls": json.loads(row.get("episode_tool_calls") or "[]"),
        "turns": [],
    }


def _turn(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt": row.get("prompt") or [],
        "kept": row["prompt_kept"],
        "images": row.get("images") or [],
        "answer": row.get("answer") or [],
        "sampler": rounded(row.get("logprobs")),
        "trainer": rounded(row.get("trainer_logprobs")),
        "reference": rounded(row.get("reference_logprobs")),
        "advantage": rounded(row.get("advantages")),
        "entropy": rounded(row.get("entropies")),
        "masked": row["masked"],
        "datum": row["datum"],
        "reward": number(row["reward"]),
        "stop": row["stop_reason"],
        "seed": row["seed"],
        "sample": row["sample"],
        "metrics": json.loads(row["metrics"] or "{}"),
        "logs": json.loads(row["logs"] or "{}"),
    }


def _pictures(path: Path, members: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the stored images by digest, each as an address with its content."""
    images = [image for one in members for turn in one["turns"] for image in turn["images"]]
    found: dict[str, str] = {}
    for image in images:
        file = image_file(path, image) if image.get("format") else None
        if file is not None and image["sha256"] not in found and file.is_file():
            content = base64.b64encode(file.read_bytes()).decode()
            found[image["sha256"]] = f"data:image/{image['format']};base64,{content}"
    return found


def _tokens_of(members: Iterable[Mapping[str, Any]]) -> set[int]:
    return {
        token
        for one in members
        for turn in one["turns"]
        for token in (*turn["prompt"], *turn["answer"])
    }


def search(path: Path, step: int, split: str, text: str) -> dict[str, Any]:
    """Returns group and member of the episodes whose prompts, answers or logs have ``text``."""
    lists, texts = ["prompt", "answer"], ["logs", "episode_logs", "episode_messages"]
    texts.append("episode_tool_calls")
    rows = read(path, step, split, ["group", "member", *lists, *texts])
    names = token_texts(path, {i for row in rows for name in lists for i in row.get(name) or ()})
    wanted, found = text.casefold(), dict[tuple[int, int], None]()
    for row in rows:
        contents = [text_of(row.get(name) or (), names) for name in lists]
        contents += [row.get(name) or "" for name in texts]
        if any(wanted in content.casefold() for content in contents):
            found[row["group"], row["member"]] = None
    return {"found": [list(place) for place in found]}


class Problems:
    """Rewards of each problem at each step that has it, with an answer."""

    columns = ("group", "member", "turn", "episode_reward", "problem", "prompt", "answer")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}

    def add(self, step: int, split: str, rows: Rows) -> None:
        """Adds the rows of a step."""
        groups: dict[int, dict[str, Any]] = {}
        for row in rows:
            if row["turn"] != 0:
                continue
            if row["group"] not in groups:
                one = {"step": step, "split": split, "group": row["group"], "rewards": []}
                groups[row["group"]] = one | {"answer": (row.get("answer") or [])[:_PREVIEW]}
                new = {"rows": [], "prompt": row.get("prompt") or []}
                self._found.setdefault(row["problem"], new)["rows"].append(groups[row["group"]])
            groups[row["group"]]["rewards"].append(number(row["episode_reward"]))

    def result(self) -> dict[str, dict[str, Any]]:
        """Returns, for each problem, its rows, its prompt and the texts of the tokens."""
        for one in self._found.values():
            tokens = {*one["prompt"], *(token for row in one["rows"] for token in row["answer"])}
            one["tokens"] = token_texts(self._path, tokens)
        return self._found


def problem(path: Path, key: str) -> dict[str, Any]:
    """Returns the rewards of a problem at each step that has it, with an answer."""
    record, found = Record(path), Problems(path)
    places = [(step, split) for step, splits in record.steps().items() for split in splits]
    for step, split in places[-_SEARCHED:]:
        # Most steps lack the problem, so their other columns are not read.
        def add(step: int = step, split: str = split) -> None:
            if any(row.get("problem") == key for row in read(path, step, split, ["problem"])):
                table = record.table(step, split, [*Problems.columns])
                rows = [] if table is None else _where(table, "problem", key).to_pylist()
                found.add(step, split, rows)

        attempt("", add, None, [])  # the step of a damaged file says so itself
    result = found.result().get(key, {})
    return result | {"searched": min(len(places), _SEARCHED), "of": len(places)}


def _where(table: pa.Table, column: str, value: Any) -> pa.Table:
    import pyarrow as pa

    return table.filter(pa.array(np.asarray(table[column].to_pylist(), object) == value))


def rounded(values: list[float] | None) -> list[float | None] | None:
    """Returns the values with the digits that a page can show; null for NaN and infinity."""
    if values is None:
        return None
    array = np.asarray(values, float)
    # Four significant digits, and no digit before the point is lost.
    with np.errstate(all="ignore"):
        scale = 10.0 ** np.clip(3 - np.floor(np.log10(np.abs(array))), 0, 12)
        array = np.where(array == 0, 0.0, np.round(array * scale) / scale)
    return array.tolist() if np.isfinite(array).all() else [*map(_finite_or_none, array.tolist())]


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def number(value: float | None) -> float | str | None:
    """Returns a number for JSON, which has no NaN and infinity: these are texts."""
    return value if value is None or math.isfinite(value) else str(value)
