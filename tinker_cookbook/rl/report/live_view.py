"""Live view of a reinforcement learning run.

On a terminal, four lines that are updated in place::

    rl ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ step 12/50  ETA 3:10  test 0.520
    reward 0.431 ▁▂▃▃▅▆▇█  mixed 62% good 25% bad 13%  KL 0.00031  entropy 1.21
    sampling 5/8 groups, 23/32 episodes; waiting for LetterEnv.step 2.1 s
    step 12.3 s: sampling 61% (412 tok/s) train 32% (1,830 tok/s) grading 5% other 2%

Otherwise one plain line, at most every 10 seconds.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.panel import Panel
from rich.text import Text

from tinker_cookbook.rl.advantages import is_constant
from tinker_cookbook.rl.report.transcript_text import Piece, TokenText, number, plain, plural
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.utils.activity import activity, short_time
from tinker_cookbook.utils.logtree.nodes import visible
from tinker_cookbook.utils.terminal import Pace, ProgressDisplay

if TYPE_CHECKING:
    from rich.console import Console

REWARD = "env/all/reward/total"
TEACHER_KL = "teacher_kl"
TOTAL_TIME = "time/total"
_TOKENS_PER_SECOND = {
    "sampling": "time/sampled_tokens_per_second",
    "train": "time/trained_tokens_per_second",
}
_SHARES = {"mixed": "frac_mixed", "good": "frac_all_good", "bad": "frac_all_bad"}
_PROMPT_CHARS, _EPISODE_CHARS = 400, 1000

Metrics = Mapping[str, float | int | str]


class RLProgress:
    """Shows the progress of a run inside a ``with`` block.

    Without a terminal, lines are at least ``min_interval_s`` apart, except for the first and the
    last step. Transcripts are at least ``transcript_interval_s`` apart. ``clock`` is in seconds.
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
        self._rewards: deque[float] = deque(maxlen=8)  # as many as the small curve shows
        self._metrics: Metrics = {}
        self._test_reward: float | None = None
        self._activity, self._ended = activity(), ""
        self._began = clock()

    def __enter__(self) -> Self:
        self._activity = activity()
        self._began = self._clock()
        self._pace = Pace(self._began, self._step)
        self._display.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        took = short_time(self._clock() - self._began)
        self._ended = f"{'done' if error is None else 'stopped'}: {took}"
        self._display.stop()

    def sampling(self, done_groups: int, total_groups: int) -> None:
        """Reports how many groups of rollouts are finished."""
        self._activity.details["sampling"] = f"{done_groups}/{total_groups} groups"

    def update(self, step: int, metrics: Metrics) -> None:
        """Reports that ``step`` updates are finished, with the logged metrics of the last one."""
        self._step, self._metrics = step, metrics
        reward = _value(metrics, REWARD)
        if reward is not None:
            self._rewards.append(reward)
        # The last test reward stays visible until the next evaluation.
        tests = [key for key in metrics if key.endswith(f"/{REWARD}")]
        self._test_reward = _value(metrics, tests[0]) if tests else self._test_reward
        # The estimate uses the last 20 updates: a slow first step or an evaluation soon drops out.
        self._pace.update(self._clock(), step)
        parts = [f"step {step}/{self.total_steps}", *self._pace.describe(self.total_steps)]
        if self._test_reward is not None:
            parts.append(f"test {number(self._test_reward)}")
        details = [*self._facts(), self._time_split()]
        self._display.update(step, "  ".join(parts), "  ".join(filter(None, details)))

    def show_transcript(self, groups: Sequence[TrajectoryGroup], tokenizer: Any) -> bool:
        """Prints the best and the worst episode of the first group with different rewards.

        Nothing is printed soon after the last transcript. Returns whether something was printed.
        """
        now = self._clock()
        recent = self._shown_at is not None and now - self._shown_at < self._transcript_interval
        # A group with different rewards shows what is learned.
        mixed = [one for one in groups if not is_constant(one.get_total_rewards())]
        chosen = next(iter([*mixed, *groups]), None)
        if recent or chosen is None or not chosen.trajectories_G:
            return False
        self._shown_at = now
        title, body = _transcript(chosen, TokenText(tokenizer))
        console = self._display.console
        if console.is_terminal:
            console.print(Panel(body, title=Text(title), title_align="left"))
        else:
            # Without markup: brackets in sampled text are not styles.
            console.print(f"rl: {title}", markup=False, soft_wrap=True)
            indented = "\n".join(f"  | {line}" for line in body.plain.splitlines())
            console.print(indented, markup=False, soft_wrap=True)
        return True

    def _lines(self) -> list[Text]:
        """Returns the lines below the progress bar."""
        now = self._ended or self._activity.line()
        lines = ["  ".join(self._facts(curve=True)), now, self._time_split()]
        return [Text(line) for line in lines if line]

    def _facts(self, curve: bool = False) -> list[str]:
        """Returns reward, kinds of groups, KLs and entropy, as far as they are known."""
        facts: list[str] = []
        reward = _value(self._metrics, REWARD)
        if reward is not None:
            facts.append(f"reward {number(reward)}")
            # NaN and infinity have no bar.
            finite = [value for value in self._rewards if math.isfinite(value)]
            if curve and finite:
                # From the lowest to the highest of the last rewards, but small differences stay
                # small: 0.9 and 1.0 must not look like nothing and all.
                low = min(finite)
                span = max(max(finite) - low, max(map(abs, finite)) / 2) or 1.0
                bars = ["▁▂▃▄▅▆▇█"[round((value - low) / span * 7)] for value in finite]
                facts[-1] += f" {''.join(bars)}"
        shares = {
            name: _value(self._metrics, f"env/all/by_group/{key}") for name, key in _SHARES.items()
        }
        known = [f"{name} {share:.0%}" for name, share in shares.items() if share is not None]
        # With a teacher, groups of constant reward are normal and not worth a line.
        if known and (shares["mixed"] or _value(self._metrics, TEACHER_KL) is None):
            facts.append(" ".join(known))
        for name, key in (
            ("teacher KL", TEACHER_KL),
            ("KL", "optim/kl_sample_train_v1"),
            ("entropy", "optim/entropy"),
        ):
            value = _value(self._metrics, key)
            if value is None:
                continue
            if math.isfinite(value) and abs(value) >= 1000:
                facts.append(f"{name} {value:,.0f}")
            else:
                digits = 3 if abs(value) >= 0.1 else 2
                facts.append(f"{name} {value:.{digits}g}")
        return facts

    def _time_split(self) -> str:
        """Returns the parts of the last step's time: each ``time/NAME`` except the total."""
        total = _value(self._metrics, TOTAL_TIME)
        if not total:
            return ""
        # These are not parts of the step: its total, the evaluations, and rates.
        others = {TOTAL_TIME, "time/eval", *_TOKENS_PER_SECOND.values()}
        parts = {
            key.removeprefix("time/"): float(value) / total
            for key, value in self._metrics.items()
            if key.startswith("time/") and key not in others and isinstance(value, (int, float))
        }
        speeds = {name: _value(self._metrics, key) for name, key in _TOKENS_PER_SECOND.items()}
        shares: list[str] = []
        for name, share in parts.items():
            # Shares that would be shown as 0% are left out.
            if share >= 0.005:
                rate = speeds.get(name)
                speed = f" ({_short_count(rate)} tok/s)" if rate is not None else ""
                shares.append(f"{name} {share:.0%}{speed}")
        return f"step {short_time(total)}: {' '.join(shares)}" if shares else ""


def _transcript(group: TrajectoryGroup, text: TokenText) -> tuple[str, Text]:
    """Returns a title, and the prompt with the best and, if its reward is lower, the worst
    episode."""
    rewards = group.get_total_rewards()
    best = max(range(len(rewards)), key=rewards.__getitem__)
    worst = min(range(len(rewards)), key=rewards.__getitem__)
    title = f"{plural(len(rewards), 'sample')} after "
    title += f"{plural(group.sampling_client_step, 'update')}, "
    title += f"mean reward {number(sum(rewards) / len(rewards))}"
    body = Text()
    first = group.trajectories_G[best].transitions
    if first:
        prompt = plain(text.prompt(first[0].ob))
        # The question is at the end of a prompt, after system messages and examples.
        cut = "…" if len(prompt) > _PROMPT_CHARS else ""
        body.append(cut + visible(prompt[-_PROMPT_CHARS:]).rstrip() + "\n", style="dim")
    shown = [("best", best, "green"), ("worst", worst, "red")]
    if is_constant(rewards):
        shown = [("best", best, "")]
    for name, member, style in shown:
        trajectory = group.trajectories_G[member]
        head = f"{name}: reward {number(rewards[member])}, {trajectory.stop_reason}"
        body.append(f"── {head} ──\n", style=f"bold {style}".strip())
        # The first prompt is shown above; later ones show what the environment answered.
        episode = text.episode(trajectory)
        parts: list[list[Piece]] = []
        for index, turn in enumerate(episode.turns):
            parts += [turn.answer] if index == 0 else [turn.prompt, turn.answer]
        whole = visible("".join(plain(part) for part in [*parts, episode.final])).strip()
        if len(whole) > _EPISODE_CHARS:
            half = _EPISODE_CHARS // 2
            dropped = len(whole) - 2 * half
            whole = f"{whole[:half]}\n… {dropped:,} characters …\n{whole[-half:]}"
        body.append((whole or "(nothing)") + "\n")
    body.rstrip()
    return title, body


def _value(metrics: Metrics, key: str) -> float | None:
    value = metrics.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def _short_count(number: float) -> str:
    # Few digits, so that the line fits a terminal of 80 columns.
    return f"{number:,.0f}" if number < 1e4 else f"{number / 1e3:,.0f}k"
