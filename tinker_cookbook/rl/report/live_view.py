"""Live view of a reinforcement learning run.

On a terminal, four lines that are updated in place::

    rl ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ step 12/50  ETA 3:10  test 0.520
    reward 0.431  mixed 62% all_good 25% all_bad 13%  KL 0.00031  entropy 1.21
    sampling 5/8 groups, 23/32 episodes; waiting for LetterEnv.step 2.1 s
    step 12.3 s: sampling 61% (412 tok/s) train 32% (1.83k tok/s) grading 5% other 2%

Otherwise one plain line, at most every 10 seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.text import Text

from tinker_cookbook.rl.advantages import is_constant
from tinker_cookbook.rl.report.transcript_text import TokenText, number, plural
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.training.estimate import short_count
from tinker_cookbook.utils.activity import activity, short_time
from tinker_cookbook.utils.logtree.nodes import visible
from tinker_cookbook.utils.terminal import Pace, ProgressDisplay

if TYPE_CHECKING:
    from rich.console import Console

REWARD = "env/all/reward/total"
TOTAL_TIME = "time/total"
_TOKENS_PER_SECOND = {
    "sampling": "time/sampled_tokens_per_second",
    "train": "time/trained_tokens_per_second",
}
_KINDS = ("mixed", "all_good", "all_bad")
_FACTS = {
    "teacher KL": "teacher_kl",
    "KL": "optim/kl_sample_train_v1",
    "entropy": "optim/entropy",
}
_TRANSCRIPT_SECONDS = 15.0
_PROMPT_CHARS, _EPISODE_CHARS = 400, 1000

Metrics = Mapping[str, float | int | str]


class RLProgress:
    """Shows the progress of a run inside a ``with`` block.

    Without a terminal, lines are at least ``min_interval_s`` apart, except for the first and the
    last step. ``clock`` is in seconds.
    """

    def __init__(
        self,
        total_steps: int,
        initial_step: int = 0,
        console: Console | None = None,
        min_interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self._step, self._clock = initial_step, clock
        self._display = ProgressDisplay(
            total_steps, initial_step, "rl", console, min_interval_s, clock, self._lines
        )
        self._pace = Pace(clock(), initial_step)
        self._shown_at: float | None = None
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
        self._metrics = metrics
        # The last test reward stays visible until the next evaluation.
        tests = [key for key in metrics if key.endswith(f"/{REWARD}")]
        self._test_reward = self._value(tests[0]) if tests else self._test_reward
        self._pace.update(self._clock(), step)
        parts = [f"step {step}/{self.total_steps}", *self._pace.describe(self.total_steps)]
        if self._test_reward is not None:
            parts.append(f"test {number(self._test_reward)}")
        details = filter(None, [self._facts(), self._time_split()])
        self._display.update(step, "  ".join(parts), "  ".join(details))

    def show_transcript(self, groups: Sequence[TrajectoryGroup], tokenizer: Any) -> bool:
        """Prints the best and the worst episode of the first group with different rewards.

        Nothing is printed soon after the last transcript. Returns whether something was printed.
        """
        now = self._clock()
        recent = self._shown_at is not None and now - self._shown_at < _TRANSCRIPT_SECONDS
        # A group with different rewards shows what is learned.
        mixed = [one for one in groups if not is_constant(one.get_total_rewards())]
        chosen = next(iter([*mixed, *groups]), None)
        if recent or chosen is None or not chosen.trajectories_G:
            return False
        self._shown_at = now
        # Without markup: brackets in sampled text are not styles.
        text = _transcript(chosen, TokenText(tokenizer))
        self._display.console.print(text, markup=False, soft_wrap=True)
        return True

    def _lines(self) -> list[Text]:
        """Returns the lines below the progress bar."""
        lines = [self._facts(), self._ended or self._activity.line(), self._time_split()]
        return [Text(line) for line in lines if line]

    def _facts(self) -> str:
        """Returns reward, kinds of groups, KLs and entropy, as far as they are known."""
        facts: list[str] = []
        reward = self._value(REWARD)
        if reward is not None:
            facts.append(f"reward {number(reward)}")
        shares = {name: self._value(f"env/all/by_group/frac_{name}") for name in _KINDS}
        known = [f"{name} {share:.0%}" for name, share in shares.items() if share is not None]
        # With a teacher, groups of constant reward are normal and not worth a line.
        if known and (shares["mixed"] or self._value("teacher_kl") is None):
            facts.append(" ".join(known))
        for name, key in _FACTS.items():
            if (value := self._value(key)) is not None:
                facts.append(f"{name} {value:.{3 if abs(value) >= 0.1 else 2}g}")
        return "  ".join(facts)

    def _time_split(self) -> str:
        """Returns the parts of the last step's time: each ``time/NAME`` except the total."""
        total = self._value(TOTAL_TIME)
        if not total:
            return ""
        # These are not parts of the step: its total, the evaluations, and rates.
        others = {TOTAL_TIME, "time/eval", *_TOKENS_PER_SECOND.values()}
        shares: list[str] = []
        for key in self._metrics:
            part = self._value(key) if key.startswith("time/") and key not in others else None
            # Shares that would be shown as 0% are left out.
            if part is not None and part / total >= 0.005:
                name = key.removeprefix("time/")
                rate = self._value(_TOKENS_PER_SECOND.get(name, ""))
                speed = "" if rate is None else f" ({short_count(rate)} tok/s)"
                shares.append(f"{name} {part / total:.0%}{speed}")
        return f"step {short_time(total)}: {' '.join(shares)}" if shares else ""

    def _value(self, key: str) -> float | None:
        value = self._metrics.get(key)
        return float(value) if isinstance(value, (int, float)) else None


def _transcript(group: TrajectoryGroup, text: TokenText) -> str:
    """Returns a prompt with the best and, if its reward is lower, the worst episode."""
    rewards = group.get_total_rewards()
    members = range(len(rewards))
    best, worst = max(members, key=rewards.__getitem__), min(members, key=rewards.__getitem__)
    lines = []
    if first := text.episode(group.trajectories_G[best]).turns:
        prompt = first[0].prompt
        # The question is at the end of a prompt, after system messages and examples.
        cut = "…" if len(prompt) > _PROMPT_CHARS else ""
        lines += f"{cut}{visible(prompt[-_PROMPT_CHARS:])}".rstrip().splitlines()
    shown = {"best": best} if is_constant(rewards) else {"best": best, "worst": worst}
    for name, member in shown.items():
        trajectory = group.trajectories_G[member]
        lines.append(f"── {name}: reward {number(rewards[member])}, {trajectory.stop_reason} ──")
        # The first prompt is shown above; later ones show what the environment answered.
        episode = text.episode(trajectory)
        parts = [part for turn in episode.turns for part in (turn.prompt, turn.answer)]
        whole = visible("".join([*parts[1:], episode.final])).strip() or "(nothing)"
        if len(whole) > _EPISODE_CHARS:
            half = _EPISODE_CHARS // 2
            dropped = len(whole) - 2 * half
            whole = f"{whole[:half]}\n… {dropped:,} characters …\n{whole[-half:]}"
        lines += whole.splitlines()
    title = f"rl: {plural(len(rewards), 'sample')} after "
    title += f"{plural(group.sampling_client_step, 'update')}, "
    title += f"mean reward {number(sum(rewards) / len(rewards))}"
    return "\n".join([title, *(f"  | {line}" for line in lines)])
