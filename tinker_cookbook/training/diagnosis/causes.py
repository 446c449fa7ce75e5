"""Why a run does not improve or becomes worse: the causes that the rows of a run show.

The session of a run gives each row of metrics to :class:`Diagnosis`, and writes the causes that
hold then into the row as ``diagnosis``, a line each: ``NAME since STEP: TEXT``, or ``NAME at STEP:
TEXT`` for a single step. :func:`causes_of` reads them from the rows of a run, so the terminal, the
page and ``metrics.jsonl`` name the same causes. ``docs/diagnosis.md`` explains each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.training.diagnosis.equal_rewards import ONLY_ZERO
from tinker_cookbook.training.diagnosis.history import History
from tinker_cookbook.training.diagnosis.table import CAUSES

KEY = "diagnosis"
_FOLLOWS = "; this follows from "
_FIRST = {
    ONLY_ZERO: "call the grader with a right answer; if it returns more than 0, ",
    f"{_FOLLOWS}learning_rate_too_high": "lower learning_rate first; if this stays, ",
    f"{_FOLLOWS}reward_hacking": "change the reward first; if this stays, ",
}
"""What to change before the setting of a cause whose text has these words."""
_LINE = re.compile(r"(\w+) (since|at) (\d+): (.*)")


@dataclass
class Cause:
    """A cause; ``since`` and ``until`` are its first and last step.

    ``setting`` is the key to change and ``advice`` how. ``evidence`` has places in the record:
    ``step``, ``split``, ``group`` with ``member`` or ``datum``, and a ``text`` that says what is
    there. ``holds`` is whether it still holds in the last row. ``metrics`` are the names of
    the curves that show it, the clearest first.
    """

    name: str
    text: str
    since: int
    until: int
    holds: bool = True
    setting: str = ""
    advice: str = ""
    evidence: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Returns the cause as a line of text."""
        steps = f"steps {self.since} to {self.until}"
        if self.since == self.until:
            steps = f"step {self.since}"
        if not self.holds:
            steps += ", no longer"
        change = f"{self.setting}: {self.advice}" if self.setting else self.advice
        return f"{self.name} ({steps}): {self.text}. To change: {change}"


class Diagnosis:
    """Finds the causes of a run from its rows, step by step."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._history = History(config)
        self._holding: dict[str, int] = {}
        """Causes that hold, with the step since which they do."""
        self._said: set[str] = set()

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Continues after the rows of ``metrics.jsonl``."""
        for row in rows:
            self._history.add(row, int(row["step"]))
            self._holding = {name: since for name, _, since, _ in _parsed(row)}
            self._said |= self._holding.keys()

    def add(self, row: Mapping[str, Any], step: int) -> list[Cause]:
        """Returns the causes that hold after ``step``."""
        history, found = self._history, list[Cause]()
        history.add(row, step)
        families = set[str]()
        for name, rule in CAUSES.items():
            if rule.family in families or (result := rule.holds(history)) is None:
                continue
            if rule.family:
                families.add(rule.family)
            since = min(result[0], self._holding.get(name, result[0]))
            text = result[1]
            before = (one.name for one in found if one.name in rule.follows and one.since <= since)
            if cause := next(before, None):
                text += f"{_FOLLOWS}{cause}"
            found.append(_cause(name, text, since, step, history.config))
        self._holding = {cause.name: cause.since for cause in found}
        return found

    def new(self, causes: Iterable[Cause]) -> list[Cause]:
        """Returns the causes that were not yet said in this run, and counts them as said."""
        new = [cause for cause in causes if cause.name not in self._said]
        self._said |= {cause.name for cause in new}
        return new


def as_text(causes: Iterable[Cause]) -> str:
    """Returns the value of ``diagnosis`` in a row."""
    return "\n".join(
        f"{one.name} {'at' if CAUSES[one.name].once else 'since'} {one.since}: {one.text}"
        for one in causes
    )


def causes_of(rows: Iterable[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Cause]:
    """Returns the causes in the rows of a run; those that hold at its end stand first."""
    found: dict[str, Cause] = {}
    now: set[str] = set()
    rows = [*rows]
    for row in rows:
        if type(row.get("step")) is not int:
            continue
        parsed = _parsed(row)
        now = {name for name, *_ in parsed}
        for name, word, since, text in parsed:
            until = since if word == "at" else row["step"]
            found[name] = _cause(name, text, since, until, config)
    names = dict.fromkeys(name for row in rows for name in row) if found else {}
    for cause in found.values():
        # Of alternatives, such as the losses of several loops, a run has its own.
        cause.holds = cause.name in now or CAUSES[cause.name].once
        cause.metrics = [
            name for one in CAUSES[cause.name].metrics for name in names
            if name == one or (one.endswith("/") and name.startswith(one))
        ]  # fmt: skip
    order = [*CAUSES]
    return sorted(
        found.values(),
        key=lambda one: (not one.holds, order.index(one.name)),
    )


def _parsed(row: Mapping[str, Any]) -> list[tuple[str, str, int, str]]:
    matches = map(_LINE.fullmatch, str(row.get(KEY) or "").split("\n"))
    return [(m[1], m[2], int(m[3]), m[4]) for m in matches if m is not None and m[1] in CAUSES]


def _cause(
    name: str, text: str, since: int, until: int, config: Mapping[str, Any], setting: str = ""
) -> Cause:
    rule = CAUSES[name]
    key, value = setting_of(config, setting or rule.setting)
    change = rule.change
    if isinstance(change, float):
        new = value * change if isinstance(value, (int, float)) else None
        if isinstance(value, int) and new is not None:
            new = max(1, round(new))
            if new == value:  # a number that cannot be lower
                return _cause(name, text, since, until, config, "learning_rate")
        direction = "raise it" if change > 1 else "lower it"
        change = direction if new is None else f"{direction} from {value:.3g} to {new:.3g}"
    elif change and isinstance(value, (int, float)) and f"{value:g}" == change:
        key = change = ""  # the run has this value
    elif change:
        change = f"set it to {change}"
    first = next((_FIRST[words] for words in _FIRST if words in text), "")
    # After "lower learning_rate first" another rate would contradict it.
    needless = setting or (first and "{lower_rate}" in rule.hint)
    hint = "" if needless else _hint(rule.hint, since, config)
    advice = "; ".join(filter(None, (str(change), hint)))
    if first:
        advice, key = f"{first}{key + ': ' if key else ''}{advice}", ""
    return Cause(name, text, since, until, setting=key, advice=advice)


def _hint(hint: str, since: int, config: Mapping[str, Any]) -> str:
    rate = config.get("learning_rate")
    lower = "lower learning_rate"
    if isinstance(rate, float):
        lower += f" from {rate:.3g} to {rate / 3:.3g}"
    limits = [n for n, off in (("top_p", 1), ("top_k", -1)) if config.get(n, off) != off]
    sampling = f"leave out {' and '.join(limits)}; " if limits else ""
    again = _start_again(since, config)
    return hint.format(lower_rate=lower, start_again=again, sampling=sampling)


def _start_again(since: int, config: Mapping[str, Any]) -> str:
    # The metrics of a step come from the weights before it, so the update before it is bad.
    last = since - 2
    every = config.get("save_every")
    if every and last >= every:
        return f"start again from the checkpoint of step {last // every * every}"
    other = ("save_every_tokens", "save_every_seconds", "rolling_save_every")
    if last > 0 and (every is None or any(config.get(name) for name in other)):
        return f"start again, or from a checkpoint of step {last} or before"
    return "start again"


def setting_of(config: Mapping[str, Any], name: str) -> tuple[str, Any]:
    """Returns the key of the command line for a setting, and its value.

    A recipe has the settings of its data under their short names; a config in a user's code has
    them where ``config.json`` has them.
    """
    for key, value in _flat(config):
        if key.rpartition(".")[2] == name and value is not None:
            return (name if config.get("recipe_name") else key), value
    return name, config.get(name)


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        path = f"{prefix}{key}"
        yield path, item
        if isinstance(item, (Mapping, list)):
            yield from _flat(item, f"{path}.")
