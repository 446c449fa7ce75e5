"""What a person sees of a reinforcement learning run while it runs.

On a terminal, four live lines::

    rl ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ step 12/50  ETA 3:10  test 0.520
    reward 0.431 ▁▂▃▃▅▆▇█  mixed 62% good 25% bad 13%  KL 0.00031  entropy 1.21
    sampling: 5/8 groups, 4.0 s  (sampling 412 tok/s, training 1,830 tok/s)
    step 12.3 s: sampling 61% train 32% grading 5% other 2%

elsewhere one plain line, at most every 10 seconds.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.panel import Panel
from rich.text import Text

from tinker_cookbook.rl.advantages import is_constant
from tinker_cookbook.rl.report.transcript_rows import number, plural
from tinker_cookbook.rl.report.transcript_text import Piece, TokenText, plain
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.utils.logtree.nodes import visible
from tinker_cookbook.utils.terminal import Pace, ProgressDisplay, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["RLProgress"]

REWARD = "env/all/reward/total"
KL = "optim/kl_sample_train_v1"
ENTROPY = "optim/entropy"
TEACHER_KL = "teacher_kl"
TOTAL_TIME = "time/total"
_TOKENS_PER_SECOND = {
    "sampling": "time/sampled_tokens_per_second",
    "training": "time/trained_tokens_per_second",
}
_SHARES = {"mixed": "frac_mixed", "good": "frac_all_good", "bad": "frac_all_bad"}

_BARS = "▁▂▃▄▅▆▇█"
_CURVE = 8  # values in the small curve
_PROMPT_CHARS, _EPISODE_CHARS = 400, 1000

Metrics = Mapping[str, float | int | str]


class RLProgress:
    """Shows how a run does. Use it in ``with``.

    Args:
        total_steps: Updates of the whole run.
        initial_step: Updates done before (on resume).
        console: By default the shared one on standard output.
        min_interval_s: Where nobody watches: seconds between two lines. The first and the last
            step always get one.
        transcript_interval_s: Seconds between two transcripts.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        total_steps: int,
        initial_step: int = 0,
        console: Console | None = None,
        min_interval_s: float = 10.0,
        transcript_interval_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self._step = initial_step
        self._clock = clock
        self._display = ProgressDisplay(
            total_steps, initial_step, "rl", console, min_interval_s, clock, self._lines
        )
        self._pace = Pace(clock(), initial_step)
        self._transcript_interval = transcript_interval_s
        self._shown_at: float | None = None
        self._rewards: deque[float] = deque(maxlen=_CURVE)
        self._metrics: Metrics = {}
        self._test_reward: float | None = None
        self._phase, self._groups = "starting", ""
        self._began = self._phase_began = clock()

    def __enter__(self) -> Self:
        self._pace = Pace(self._clock(), self._step)
        self._began = self._phase_began = self._clock()
        self._display.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._set_phase("done" if error is None else "stopped")
        self._phase_began = self._began  # how long all of it took
        self._display.stop()

    def sampling(self, done_groups: int, total_groups: int) -> None:
        """Groups are being played; so many of them are finished."""
        if self._phase != "sampling":
            self._set_phase("sampling")
        self._groups = f"{done_groups}/{total_groups} groups"

    def training(self) -> None:
        """All groups of the step are there, and the policy is being updated."""
        self._set_phase("training")

    def evaluating(self) -> None:
        """The weights are being evaluated or saved."""
        self._set_phase("evaluating")

    def update(self, step: int, metrics: Metrics) -> None:
        """Says that an update is done.

        Args:
            step: Updates done, this one included.
            metrics: Of the step, as they are logged; what is missing is not shown.
        """
        self._step, self._metrics = step, metrics
        reward = _value(metrics, REWARD)
        if reward is not None:
            self._rewards.append(reward)
        tests = [key for key in metrics if key.endswith(f"/{REWARD}")]
        self._test_reward = _value(metrics, tests[0]) if tests else self._test_reward
        self._pace.update(self._clock(), step)
        parts = [f"step {step}/{self.total_steps}", *self._pace.describe(self.total_steps)]
        if self._test_reward is not None:
            parts.append(f"test {number(self._test_reward)}")
        details = [*self._facts(), *self._speeds(), self._time_split()]
        self._display.update(step, "  ".join(parts), "  ".join(filter(None, details)))
        self._set_phase("preparing" if step < self.total_steps else "finishing")

    def show_transcript(
        self,
        group: TrajectoryGroup | Sequence[TrajectoryGroup],
        tokenizer: Any,
        force: bool = False,
    ) -> bool:
        """Prints the best episode of a group, and the worst where it earned less.

        Args:
            group: A group; of several, the first whose rewards differ.
            tokenizer: Of the policy.
            force: Also if the last transcript was shown a moment ago.

        Returns:
            Whether it was shown.
        """
        now = self._clock()
        recent = self._shown_at is not None and now - self._shown_at < self._transcript_interval
        chosen = group if isinstance(group, TrajectoryGroup) else _most_telling(group)
        if (recent and not force) or chosen is None or not chosen.trajectories_G:
            return False
        self._shown_at = now
        title, body = _transcript(chosen, TokenText(tokenizer))
        console = self._display.console
        if console.is_terminal:
            console.print(Panel(body, title=Text(title), title_align="left"))
        else:
            console.print(f"rl: {title}", markup=False, soft_wrap=True)
            indented = "\n".join(f"  | {line}" for line in body.plain.splitlines())
            console.print(indented, markup=False, soft_wrap=True)
        return True

    def _set_phase(self, phase: str) -> None:
        self._phase, self._groups = phase, ""
        self._phase_began = self._clock()

    def _lines(self) -> list[Text]:
        facts = self._facts(curve=True)
        seconds = self._clock() - self._phase_began
        phase = f"{self._phase}: {', '.join(filter(None, [self._groups, _short_time(seconds)]))}"
        speeds = self._speeds()
        if speeds:
            phase += f"  ({', '.join(speeds)})"
        lines = ["  ".join(facts), phase, self._time_split()]
        return [Text(line) for line in lines if line]

    def _facts(self, curve: bool = False) -> list[str]:
        """Reward, kinds of groups, KLs and entropy, as far as they are known."""
        facts: list[str] = []
        reward = _value(self._metrics, REWARD)
        if reward is not None:
            facts.append(
                f"reward {number(reward)}{' ' + _curve(tuple(self._rewards)) if curve else ''}"
            )
        shares = {
            name: _value(self._metrics, f"env/all/by_group/{key}") for name, key in _SHARES.items()
        }
        known = [f"{name} {share:.0%}" for name, share in shares.items() if share is not None]
        taught = _value(self._metrics, TEACHER_KL) is not None
        # A teacher needs no difference in reward: where there is none, that is no news.
        if known and (shares["mixed"] or not taught):
            facts.append(" ".join(known))
        for name, key in (("teacher KL", TEACHER_KL), ("KL", KL), ("entropy", ENTROPY)):
            value = _value(self._metrics, key)
            if value is not None:
                facts.append(f"{name} {_compact(value)}")
        return facts

    def _speeds(self) -> list[str]:
        known = {name: _value(self._metrics, key) for name, key in _TOKENS_PER_SECOND.items()}
        return [f"{name} {rate:,.0f} tok/s" for name, rate in known.items() if rate is not None]

    def _time_split(self) -> str:
        """Returns where the last step's time went: every ``time/NAME`` that is a part of the
        whole."""
        total = _value(self._metrics, TOTAL_TIME)
        if not total:
            return ""
        others = {TOTAL_TIME, "time/eval", *_TOKENS_PER_SECOND.values()}
        parts = {
            key.removeprefix("time/"): float(value) / total
            for key, value in self._metrics.items()
            if key.startswith("time/") and key not in others and isinstance(value, (int, float))
        }
        shares = [f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005]
        return f"step {_short_time(total)}: {' '.join(shares)}" if shares else ""


def _most_telling(groups: Sequence[TrajectoryGroup]) -> TrajectoryGroup | None:
    mixed = [group for group in groups if not is_constant(group.get_total_rewards())]
    return next(iter([*mixed, *groups]), None)


def _transcript(group: TrajectoryGroup, text: TokenText) -> tuple[str, Text]:
    """Returns a heading, and the prompt with the best and, if it earned less, the worst episode."""
    rewards = group.get_total_rewards()
    best = max(range(len(rewards)), key=rewards.__getitem__)
    worst = min(range(len(rewards)), key=rewards.__getitem__)
    mean = sum(rewards) / len(rewards)
    title = f"{plural(len(rewards), 'sample')} after "
    title += f"{plural(group.sampling_client_step, 'update')}, mean reward {number(mean)}"
    body = Text()
    members = [best] if is_constant(rewards) else [best, worst]
    for place, member in enumerate(members):
        trajectory = group.trajectories_G[member]
        if place == 0 and trajectory.transitions:
            prompt = plain(text.prompt(trajectory.transitions[0].ob))
            # The question stands at the end of a prompt, behind system messages and examples.
            cut = "…" if len(prompt) > _PROMPT_CHARS else ""
            body.append(cut + visible(prompt[-_PROMPT_CHARS:]).rstrip() + "\n", style="dim")
        style = "green" if member == best and len(members) == 2 else ""
        style = "red" if place == 1 else style
        head = "best" if place == 0 else "worst"
        head += f": reward {number(rewards[member])}, {trajectory.stop_reason}"
        body.append(f"── {head} ──\n", style=f"bold {style}".strip())
        body.append(_episode(text, group, member) + "\n")
    body.rstrip()
    return title, body


def _episode(text: TokenText, group: TrajectoryGroup, member: int) -> str:
    episode = text.episode(group.trajectories_G[member])
    parts: list[list[Piece]] = []
    for index, turn in enumerate(episode.turns):
        parts += [turn.answer] if index == 0 else [turn.prompt, turn.answer]
    whole = visible("".join(plain(part) for part in [*parts, episode.final])).strip()
    if len(whole) <= _EPISODE_CHARS:
        return whole or "(nothing)"
    half = _EPISODE_CHARS // 2
    return f"{whole[:half]}\n… {len(whole) - 2 * half:,} characters …\n{whole[-half:]}"


def _value(metrics: Metrics, key: str) -> float | None:
    value = metrics.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def _curve(values: Sequence[float]) -> str:
    """Returns the last values as bars between their own lowest and highest."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / span * top)] for value in finite)


def _compact(value: float) -> str:
    """Three figures or fewer: ``1.21``, ``0.0003``, ``-2e-06``."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.1 else f"{value:.2g}"


def _short_time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_seconds(seconds)
