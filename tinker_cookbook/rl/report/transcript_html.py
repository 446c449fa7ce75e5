"""The page that shows what a step's groups did."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_cookbook.rl.advantages import is_constant
from tinker_cookbook.rl.report.trajectory_metrics import GOOD_REWARD
from tinker_cookbook.rl.report.transcript_rows import LoggedGroup, number, plural
from tinker_cookbook.rl.report.transcript_text import EpisodeText, Piece, TurnText, plain
from tinker_cookbook.rl.types import StopReason, Transition
from tinker_cookbook.utils.logtree import Node, Trace
from tinker_cookbook.utils.logtree.nodes import Child, table_node
from tinker_cookbook.utils.ml_log.pretty_print import format_value

_LONG = 6000  # characters of an episode beyond which it starts folded

_CSS = """
.rl-tiles { display: flex; flex-wrap: wrap; gap: 0.6rem; margin: 1rem 0; }
.rl-tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 0.45rem 0.8rem; min-width: 7rem; }
.rl-tile b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.rl-tile span { color: var(--dim); font-size: 0.8rem; }
.rl-group { border-top: 1px solid var(--line); margin-top: 2.2rem; }
.rl-group h2 { margin-bottom: 0.2rem; }
.rl-sample { background: var(--card); }
.rl-sample > summary { display: flex; flex-wrap: wrap; gap: 0.2rem 1rem; align-items: baseline; }
.rl-sample > summary::before { content: "\\25B8"; color: var(--dim); }
.rl-sample[open] > summary::before { content: "\\25BE"; }
.rl-fact { color: var(--dim); font-size: 0.85rem; font-variant-numeric: tabular-nums; }
.rl-reward { border-radius: 99px; padding: 0 0.6rem; font-weight: 600;
  font-variant-numeric: tabular-nums; background: var(--soft); }
.rl-up { background: var(--good-bg); color: var(--good); }
.rl-down { background: var(--bad-bg); color: var(--bad); }
.rl-dots { display: flex; flex-wrap: wrap; gap: 2px; width: max-content; max-width: 14rem;
  padding-top: 0.25rem; }
.rl-dot { width: 0.75rem; height: 0.75rem; border-radius: 3px; background: var(--line); }
.rl-dot.rl-up { background: var(--good); } .rl-dot.rl-down { background: var(--bad); }
.rl-label { color: var(--dim); font-size: 0.8rem; margin: 0.5rem 0 0; }
.rl-turn + .rl-turn { border-top: 1px dashed var(--line); margin-top: 0.7rem; }
pre.rl-answer { background: var(--answer-bg); border-left: 3px solid var(--accent);
  border-radius: 0 6px 6px 0; }
.rl-special { color: var(--special); background: var(--special-bg); border-radius: 3px; }
.rl-values { font-size: 0.85rem; display: flex; flex-wrap: wrap; gap: 0.1rem 1rem;
  font-variant-numeric: tabular-nums; }
.rl-values i { color: var(--dim); font-style: normal; } .rl-key { color: var(--dim); }
.rl-empty { color: var(--dim); font-style: italic; }
"""


def transcript_page(
    title: str,
    subtitle: str,
    entries: Sequence[LoggedGroup],
    prompts: Mapping[int, list[Piece]],
    num_shown: int,
) -> Trace:
    """Returns a page of groups: figures, a table of all of them, and the first ``num_shown`` in
    full.

    Args:
        title: Which step and split.
        subtitle: One line under it.
        entries: The groups, with their texts.
        prompts: For the groups whose members began alike, by index: what they began with.
        num_shown: Groups with an index below it are shown in full.
    """
    trace = Trace(title)
    trace.add_css(_CSS)
    started = trace.started_at.isoformat(sep=" ", timespec="seconds")
    meta = Node("p", {"class": "lt-meta"}, [f"{subtitle} · {started}"])
    trace.root.add(Node("h1", {}, [title]), meta)
    if not entries:
        trace.root.add(Node("p", {}, ["No group was finished."]))
        return trace
    trace.root.add(_tiles(entries), _group_table(entries, num_shown))
    hidden = sum(entry.index >= num_shown for entry in entries)
    for entry in entries:
        if entry.index < num_shown:
            trace.root.add(_group_section(entry, prompts.get(entry.index), trace))
    if hidden:
        text = (
            f"The table alone has {plural(hidden, 'more group')}; num_groups_to_log=… shows more."
        )
        trace.root.add(Node("p", {"class": "lt-meta"}, [text]))
    return trace


def _tiles(entries: Sequence[LoggedGroup]) -> Node:
    groups = [entry.group for entry in entries]
    rewards = [reward for group in groups for reward in group.get_total_rewards()]
    constant = [_mean(g.get_total_rewards()) for g in groups if is_constant(g.get_total_rewards())]
    turns = [t for g in groups for trajectory in g.trajectories_G for t in trajectory.transitions]
    good = sum(reward >= GOOD_REWARD for reward in constant)
    facts = [
        (number(_mean(rewards)), "mean reward"),
        (f"{len(groups)} × {len(rewards) / len(groups):.4g}", "groups × samples"),
        (str(len(groups) - len(constant)), "groups of mixed reward"),
        (f"{good} / {len(constant) - good}", "groups all good / all bad"),
        (f"{_mean([len(t.ac.tokens) for t in turns]):,.1f}", "tokens an answer"),
        (f"{_share([t.ac.stop_reason == 'length' for t in turns]):.0%}", "answers cut off"),
    ]
    tiles: list[Child] = [
        Node("div", {"class": "rl-tile"}, [Node("b", {}, [value]), Node("span", {}, [label])])
        for value, label in facts
    ]
    return Node("div", {"class": "rl-tiles"}, tiles)


def _group_table(entries: Sequence[LoggedGroup], num_shown: int) -> Node:
    rows = [_group_row(entry, entry.index < num_shown) for entry in entries]
    columns = ["group", "tags", "mean reward", "lowest", "highest", "deviation", "samples",
               "tokens an episode", "ended by"]  # fmt: skip
    if not any(entry.tags for entry in entries):
        columns, rows = [columns[0], *columns[2:]], [[row[0], *row[2:]] for row in rows]
    return table_node(rows, columns, "Groups")


def _group_row(entry: LoggedGroup, linked: bool) -> list[Any]:
    rewards = entry.group.get_total_rewards()
    trajectories = entry.group.trajectories_G
    stops = Counter(str(trajectory.stop_reason) for trajectory in trajectories)
    lengths = [sum(len(t.ac.tokens) for t in tr.transitions) for tr in trajectories]
    label = str(entry.index)
    return [
        Node("a", {"href": f"#group-{entry.index}"}, [label]) if linked else label,
        ", ".join(entry.tags),
        Node("span", {}, [number(_mean(rewards))]),
        number(min(rewards, default=0.0)),
        number(max(rewards, default=0.0)),
        number(statistics.pstdev(rewards) if rewards else 0.0),
        Node("div", {"class": "rl-dots"}, [_dot(entry, member) for member in range(len(rewards))]),
        f"{_mean(lengths):,.1f}",
        ", ".join(f"{reason} {count}" for reason, count in stops.most_common()),
    ]


def _dot(entry: LoggedGroup, member: int) -> Node:
    reward = entry.group.get_total_rewards()[member]
    title = f"sample {member}: reward {number(reward)}"
    return Node("span", {"class": f"rl-dot {_direction(entry, member)}".strip(), "title": title})


def _direction(entry: LoggedGroup, member: int) -> str:
    """Returns whether a sample is better or worse than its group, which is what training sees
    of it."""
    rewards = entry.group.get_total_rewards()
    if is_constant(rewards):
        return ""
    given = entry.advantage(member)
    difference = rewards[member] - _mean(rewards) if given is None else given
    return "rl-up" if difference > 0 else "rl-down" if difference < 0 else ""


def _group_section(entry: LoggedGroup, prompt: list[Piece] | None, trace: Trace) -> Node:
    group = entry.group
    rewards = group.get_total_rewards()
    heading = " · ".join([f"Group {entry.index}", *entry.tags])
    facts = f"mean reward {number(_mean(rewards))}"
    if is_constant(rewards):
        facts += ", the same for every sample: nothing to learn from"
    facts += f" · sampled after {plural(group.sampling_client_step, 'update')}"
    node = Node("section", {"class": "rl-group", "id": f"group-{entry.index}"})
    node.data = {"group_idx": entry.index, "tags": list(entry.tags), "rewards": list(rewards)}
    node.add(Node("h2", {}, [heading]), Node("p", {"class": "lt-meta"}, [facts]))
    for error in group.rollout_errors:
        node.add(Node("p", {"class": "lt-error"}, [f"while sampling: {error}"]))
    if prompt is not None:
        node.add(_label("prompt"), _text(prompt))
    for member in range(len(rewards)):
        node.add(_sample(entry, member, prompt is None, trace))
    rest = [] if entry.log is None else _log_of(entry.log, None)
    if rest:
        node.add(_folded("log of the group", rest))
    return node


def _sample(entry: LoggedGroup, member: int, show_prompt: bool, trace: Trace) -> Node:
    trajectory, text = entry.group.trajectories_G[member], entry.texts[member]
    reward = trajectory.reward + entry.group.final_rewards_G[member]
    direction = _direction(entry, member)
    summary = Node("summary", {}, [Node("b", {}, [f"Sample {member}"])])
    summary.add(
        Node("span", {"class": f"rl-reward {direction}".strip()}, [f"reward {number(reward)}"])
    )
    advantage = entry.advantage(member)
    if advantage is not None:
        summary.add(_fact(f"advantage {number(advantage, sign=True)}"))
    tokens = sum(len(transition.ac.tokens) for transition in trajectory.transitions)
    summary.add(_fact(f"{trajectory.stop_reason}"), _fact(plural(tokens, "token")))
    turns = trajectory.transitions
    if len(turns) != 1:
        summary.add(_fact(plural(len(turns), "turn")))
    elif turns[0].ac.stop_reason == "length" and trajectory.stop_reason != StopReason.MAX_TOKENS:
        summary.add(_fact("cut off"))
    body = Node("div", {"class": "lt-body"})
    for index, transition in enumerate(trajectory.transitions):
        body.add(_turn(index, transition, text, show_prompt, len(trajectory.transitions) > 1))
    if not trajectory.transitions:
        body.add(_empty("The first prompt left no room for an answer."))
    if text.final:
        body.add(_label("what followed"), _text(text.final))
    if trajectory.logs:
        body.add(_values("logs of the episode", trajectory.logs))
    if entry.group.metrics_G[member]:
        body.add(_values("metrics of the episode", entry.group.metrics_G[member]))
    written = [] if entry.log is None else _log_of(entry.log, member)
    if written:
        body.add(_folded("log of the environment", written))
        for css in entry.log.css if entry.log is not None else ():
            trace.add_css(css)
    attrs = {"class": "rl-sample", "id": f"group-{entry.index}-sample-{member}"}
    if sum(len(piece.text) for turn in text.turns for piece in turn.answer) <= _LONG:
        attrs["open"] = ""
    data = {"traj_idx": member, "total_reward": reward, "advantage": advantage}
    return Node("details", attrs, [summary, body], data)


def _turn(
    index: int, transition: Transition, text: EpisodeText, show_prompt: bool, many: bool
) -> Node:
    turn = text.turns[index]
    node = Node("div", {"class": "rl-turn"})
    # The first prompt stands above the samples where all have the same.
    if (index > 0 or show_prompt) and turn.prompt:
        said = "prompt" if index == 0 else f"turn {index + 1}: what is new in the prompt"
        node.add(_label(f"{said}, {plural(turn.num_new_tokens, 'token')}"), _text(turn.prompt))
    facts: list[str] = []
    if many:
        tokens = len(transition.ac.tokens)
        facts += [f"turn {index + 1}", f"answer, {plural(tokens, 'token')}"]
        facts.append(f"reward {number(transition.reward)}")
        if transition.ac.stop_reason == "length":
            facts.append("cut off")
    if transition.masked:
        facts.append("not trained on")
    if facts:
        node.add(_label(" · ".join(facts)))
    node.add(_text(turn.answer, "rl-answer") if turn.answer else _empty("(nothing)"))
    if transition.metrics:
        node.add(_values("metrics", transition.metrics))
    logs = {k: v for k, v in transition.logs.items() if not _stands_here(v, turn)}
    if logs:
        node.add(_values("logs", logs))
    return node


def _stands_here(value: Any, turn: TurnText) -> bool:
    """Many environments log the question and the answer once more. (A short text that agrees with
    the answer may also be the reference.)"""
    if not isinstance(value, str) or _is_short(value):
        return False
    return any(value.strip() in plain(part) for part in (turn.prompt, turn.answer))


def _log_of(trace: Trace, member: int | None) -> list[Child]:
    """Returns what was logged in the scope of one member, or outside of all of them."""
    wanted = None if member is None else str(member)
    return [
        child
        for child in list(trace.root.children)
        if (child.attrs.get("data-member") if isinstance(child, Node) else None) == wanted
        and not (isinstance(child, Node) and "data-member" in child.attrs and not child.children)
    ]


def _text(pieces: Sequence[Piece], css_class: str | None = None) -> Node:
    children: list[Child] = [
        Node("span", {"class": "rl-special"}, [piece.text]) if piece.special else piece.text
        for piece in pieces
    ]
    return Node("pre", {"class": css_class} if css_class else {}, children)


def _values(caption: str, values: Mapping[str, Any]) -> Node:
    """Short values in a line; long ones, often the question or answer once more, folded."""
    line = Node("p", {"class": "rl-values"}, [Node("span", {"class": "rl-key"}, [caption])])
    node = Node("div", {}, [line])
    for key, value in values.items():
        if isinstance(value, str) and not _is_short(value):
            text: list[Child] = [Node("pre", {}, [value])]
            node.add(_folded(f"{caption}: {key}", text))
        else:
            shown = value if isinstance(value, str) else format_value(value)
            line.add(Node("span", {}, [Node("i", {}, [f"{key} "]), shown]))
    return node


def _is_short(text: str) -> bool:
    return len(text) <= 60 and "\n" not in text


def _folded(summary: str, children: Sequence[Child]) -> Node:
    body = Node("div", {"class": "lt-body"}, list(children))
    return Node("details", {}, [Node("summary", {}, [summary]), body])


def _label(text: str) -> Node:
    return Node("p", {"class": "rl-label"}, [text])


def _fact(text: str) -> Node:
    return Node("span", {"class": "rl-fact"}, [text])


def _empty(text: str) -> Node:
    return Node("p", {"class": "rl-empty"}, [text])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0
