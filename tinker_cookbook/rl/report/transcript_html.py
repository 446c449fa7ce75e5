"""The page that shows the groups of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from tinker_cookbook.rl.advantages import is_constant
from tinker_cookbook.rl.report.transcript_text import LoggedGroup, Piece, number, plain, plural
from tinker_cookbook.rl.types import StopReason
from tinker_cookbook.run.loggers import format_value
from tinker_cookbook.utils.logtree import Node, Trace
from tinker_cookbook.utils.logtree.nodes import Child, table_node

_MAX_OPEN_CHARS = 6000  # a longer episode is folded at first


@cache
def _css() -> str:
    return "\n" + Path(__file__).with_name("transcript.css").read_text("utf-8")


def transcript_page(
    title: str, subtitle: str, entries: Sequence[LoggedGroup], num_shown: int
) -> Trace:
    """Returns a page with a table of all groups, and the first ``num_shown`` in full."""
    trace = Trace(title)
    trace.add_css(_css())
    started = trace.started_at.isoformat(sep=" ", timespec="seconds")
    trace.root.add(Node("h1", {}, [title]), _el("p", "lt-meta", f"{subtitle} · {started}"))
    if not entries:
        trace.root.add(Node("p", {}, ["No group was finished."]))
        return trace
    trace.root.add(_group_table(entries, num_shown))
    for entry in entries:
        if entry.index < num_shown:
            trace.root.add(_group_section(entry))
            # The environments' formatters need their style sheets on this page.
            for css in entry.log.css if entry.log is not None else ():
                trace.add_css(css)
    hidden = sum(entry.index >= num_shown for entry in entries)
    if hidden:
        more = plural(hidden, "more group")
        text = f"Only the table has {more}; num_groups_to_log=… shows more."
        trace.root.add(_el("p", "lt-meta", text))
    return trace


def _group_table(entries: Sequence[LoggedGroup], num_shown: int) -> Node:
    columns = ["group", "tags", "mean reward", "lowest", "highest", "samples", "ended by"]
    rows: list[list[Any]] = []
    for entry in entries:
        rewards = entry.group.get_total_rewards() or [0.0]
        stops = Counter(str(trajectory.stop_reason) for trajectory in entry.group.trajectories_G)
        label: Node | str = str(entry.index)
        if entry.index < num_shown:
            label = Node("a", {"href": f"#group-{entry.index}"}, [label])
        figures = [number(value) for value in (fmean(rewards), min(rewards), max(rewards))]
        ended = ", ".join(f"{reason} {count}" for reason, count in stops.most_common())
        rows.append([label, ", ".join(entry.tags), *figures, len(rewards), ended])
    return table_node(rows, columns, "Groups")


def _group_section(entry: LoggedGroup) -> Node:
    group, rewards = entry.group, entry.group.get_total_rewards()
    facts = f"mean reward {number(fmean(rewards or [0.0]))}"
    # The groups of an evaluation have no advantages; its page names the step.
    if entry.advantages:
        if is_constant(rewards):
            facts += ", the same for every sample: nothing to learn from"
        facts += f" · sampled after {plural(group.sampling_client_step, 'update')}"
    node = Node("section", {"class": "rl-group", "id": f"group-{entry.index}"})
    node.data = {"group_idx": entry.index, "tags": list(entry.tags), "rewards": list(rewards)}
    node.add(Node("h2", {}, [" · ".join([f"Group {entry.index}", *entry.tags])]))
    node.add(_el("p", "lt-meta", facts))
    for error in group.rollout_errors:
        node.add(_el("p", "lt-error", f"while sampling: {error}"))
    # A first prompt that all samples share is shown once.
    prompts = [text.turns[0].prompt if text.turns else None for text in entry.texts]
    shared = prompts[0] if prompts and all(prompt == prompts[0] for prompt in prompts) else None
    if shared:
        node.add(_el("p", "rl-label", "prompt"), _text(shared))
    node.add(*[_sample(entry, member, not shared) for member in range(len(rewards))])
    rest = _log_of(entry.log, None)
    return node.add(_folded("log of the group", rest)) if rest else node


def _sample(entry: LoggedGroup, member: int, show_prompt: bool) -> Node:
    trajectory, text = entry.group.trajectories_G[member], entry.texts[member]
    turns = trajectory.transitions
    advantage = entry.advantages[member] if entry.advantages else None
    reward = trajectory.reward + entry.group.final_rewards_G[member]
    facts = [f"Sample {member}", f"reward {number(reward)}"]
    facts += [] if advantage is None else [f"advantage {number(advantage, sign=True)}"]
    tokens = sum(len(transition.ac.tokens) for transition in turns)
    facts += [f"{trajectory.stop_reason}", plural(tokens, "token"), plural(len(turns), "turn")]
    # The stop reason max_tokens shows this already.
    cut = any(turn.ac.stop_reason == "length" for turn in turns)
    if cut and trajectory.stop_reason != StopReason.MAX_TOKENS:
        facts.append("cut off")
    body = _el("div", "lt-body")
    for index in range(len(turns)):
        body.add(_turn(entry, member, index, show_prompt))
    if not turns:
        body.add(_el("p", "rl-empty", "The first prompt left no room for an answer."))
    if text.final:
        body.add(_el("p", "rl-label", "after the last answer"), _text(text.final))
    body.add(*_values("logs of the episode", trajectory.logs))
    body.add(*_values("metrics of the episode", entry.group.metrics_G[member]))
    if logged := _log_of(entry.log, member):
        body.add(_folded("log of the environment", logged))
    attrs = {"class": "rl-sample", "id": f"group-{entry.index}-sample-{member}"}
    if sum(len(plain(turn.answer)) for turn in text.turns) <= _MAX_OPEN_CHARS:
        attrs["open"] = ""
    data = {"traj_idx": member, "total_reward": reward, "advantage": advantage}
    return Node("details", attrs, [Node("summary", {}, [" · ".join(facts)]), body], data)


def _turn(entry: LoggedGroup, member: int, index: int, show_prompt: bool) -> Node:
    transitions = entry.group.trajectories_G[member].transitions
    transition, turn = transitions[index], entry.texts[member].turns[index]
    node = _el("div", "rl-turn")
    if (index > 0 or show_prompt) and turn.prompt:
        added = f"added to the prompt, {plural(turn.num_new_tokens, 'token')}"
        node.add(_el("p", "rl-label", added), _text(turn.prompt))
    facts: list[str] = []
    if len(transitions) > 1:
        tokens = plural(len(transition.ac.tokens), "token")
        facts += [f"turn {index + 1}", f"answer, {tokens}", f"reward {number(transition.reward)}"]
    if transition.is_masked:
        facts.append("not trained on")
    if facts:
        node.add(_el("p", "rl-label", " · ".join(facts)))
    node.add(_text(turn.answer, "rl-answer") if turn.answer else _el("p", "rl-empty", "(nothing)"))
    # Many environments log the question and the answer, which are shown already. (A short text
    # that is in the answer may also be the reference.)
    shown = [plain(turn.prompt), plain(turn.answer)]
    logs = {
        key: value
        for key, value in transition.logs.items()
        if not (_is_long(value) and any(str(value).strip() in text for text in shown))
    }
    return node.add(*_values("metrics", transition.metrics), *_values("logs", logs))


def _log_of(trace: Trace | None, member: int | None) -> list[Child]:
    """Returns what was logged in the scope of one member, or outside of all such scopes."""
    found: list[Child] = []
    for child in [] if trace is None else list(trace.root.children):
        # ``MemberStrategy`` marks the scope of a member by this attribute.
        scope = child.attrs.get("data-member") if isinstance(child, Node) else None
        # A member that logged nothing has an empty scope.
        is_empty_scope = scope is not None and isinstance(child, Node) and not child.children
        if scope == (None if member is None else str(member)) and not is_empty_scope:
            found.append(child)
    return found


def _values(caption: str, values: Mapping[str, Any]) -> list[Node]:
    """Returns short values in a line, and long ones folded."""
    short = [
        f"{key} {value if isinstance(value, str) else format_value(value)}"
        for key, value in values.items()
        if not _is_long(value)
    ]
    line = [_el("p", "rl-label", f"{caption}: {' · '.join(short)}")] if short else []
    return line + [
        _folded(f"{caption}: {key}", [Node("pre", {}, [value])])
        for key, value in values.items()
        if _is_long(value)
    ]


def _is_long(value: Any) -> bool:
    return isinstance(value, str) and (len(value) > 60 or "\n" in value)


def _text(pieces: Sequence[Piece], css: str = "") -> Node:
    parts: list[Child] = []
    for piece in pieces:
        parts.append(_el("span", "rl-special", piece.text) if piece.special else piece.text)
        if piece.image:
            parts.append(Node("img", {"src": piece.image, "alt": piece.text, "class": "rl-image"}))
    return _el("pre", css, *parts)


def _folded(summary: str, children: Sequence[Child]) -> Node:
    return Node("details", {}, [Node("summary", {}, [summary]), _el("div", "lt-body", *children)])


def _el(tag: str, css: str, *children: Child) -> Node:
    return Node(tag, {"class": css} if css else {}, list(children))
