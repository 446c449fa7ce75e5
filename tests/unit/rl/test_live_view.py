"""What a person sees while a run goes on: live lines, plain lines, transcripts."""

from __future__ import annotations

import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console
from talk_samples import ASK, END, group_of, talk, tokenizer

from tinker_cookbook.rl.report.live_view import RLProgress
from tinker_cookbook.utils.activity import new_activity

METRICS = {
    "env/all/reward/total": 0.4312,
    "env/all/by_group/frac_mixed": 0.625,
    "env/all/by_group/frac_all_good": 0.25,
    "env/all/by_group/frac_all_bad": 0.125,
    "optim/kl_sample_train_v1": 0.000312,
    "optim/entropy": 1.2149,
    "time/total": 12.3,
    "time/sampling": 7.5,
    "time/train": 3.9,
    "time/grading": 0.6,
    "time/env": 0.001,
    "time/other": 0.3,
    "time/sampled_tokens_per_second": 412.3,
    "time/trained_tokens_per_second": 18300.0,
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(steps=50, terminal=False, width=80, **options):
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=width, force_terminal=terminal, highlight=False, height=30)
    with new_activity() as now:
        now.clock = clock
        return RLProgress(steps, console=console, clock=clock, **options), out, clock


def rendered(progress: RLProgress, width: int) -> list[str]:
    """The live lines as they stand now."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    with console.capture() as captured:
        console.print(progress._display._render())
    return captured.get().splitlines()


def test_without_a_terminal_there_is_one_plain_line():
    progress, out, clock = make()
    with progress:
        progress.sampling(1, 8)
        clock.now += 12.3
        progress.update(1, METRICS)
    assert out.getvalue().splitlines() == [
        "rl: step 1/50  ETA 10:03  reward 0.431  mixed 62% all_good 25% all_bad 12%  KL 0.00031  "
        "entropy 1.21  "
        "step 12.3 s: sampling 61% (412 tok/s) train 32% (18.3k tok/s) grading 5% other 2%"
    ]


@pytest.mark.parametrize("width", [80, 40, 200])
def test_the_live_lines_fit_the_terminal(width):
    progress, _, clock = make(width=width)
    clock.now += 100
    for step in range(1, 13):
        progress.update(step, {**METRICS, "env/all/reward/total": step / 12})
    now = progress._activity
    with now.phase("sampling"):
        progress.sampling(5, 8)
        now.finished, now.episodes[0] = 40, ("AgentToolMessageEnv.step", clock.now)
        clock.now += 4
        lines = rendered(progress, width)
    assert len(lines) == 4
    assert max(map(cell_len, lines)) <= width
    if width >= 80:
        assert "step 12/50" in lines[0]
        assert lines[1].startswith("reward 1.000  mixed 62% all_good 25% all_bad 12%  KL 0.00031")
        assert lines[1].endswith("entropy 1.21")
        assert lines[2].startswith("sampling 5/8 groups, 40/41 episodes; waiting for AgentTool")
        assert lines[3].startswith("step 12.3 s: sampling 61% (412 tok/s) train 32% (18.3k tok/s)")
        assert "…" not in "".join(lines[:3])


def test_what_is_missing_or_not_a_number_is_no_reason_to_fail():
    progress, out, clock = make(min_interval_s=0)
    with progress:
        clock.now += 1
        progress.update(1, {})
        progress.update(2, {**METRICS, "env/all/reward/total": math.nan, "optim/entropy": math.inf,
                            "time/total": 0.0, "name": "text"})  # fmt: skip
        assert rendered(progress, 80)
    assert "reward nan" in out.getvalue()
    assert "entropy inf" in out.getvalue()


def test_a_transcript_shows_the_best_and_the_worst():
    progress, out, _ = make()
    group = group_of(
        talk((f"{ASK}sys\nWhat is 6*7?", f"41{END}", 0.0)),
        talk((f"{ASK}sys\nWhat is 6*7?", f"42{END}", 1.0), (f"{ASK}sure?", f"yes{END}", 0.5)),
        sampling_client_step=7,
    )
    assert progress.show_transcript([group], tokenizer())
    assert out.getvalue().splitlines() == [
        "rl: 2 samples after 7 updates, mean reward 0.750",
        f"  | {ASK}sys",
        "  | What is 6*7?",
        "  | ── best: reward 1.500, completed ──",
        f"  | 42{END}{ASK}sure?yes{END}",
        "  | ── worst: reward 0.000, completed ──",
        f"  | 41{END}",
    ]


def test_long_and_nasty_text_is_cut_and_harmless():
    progress, out, _ = make(terminal=True)
    answer = "\x1b[2J[bold]" + "x" * 5000 + END
    prompt = "system " * 300 + "What is it?"
    progress.show_transcript([group_of(talk((prompt, answer, 0.0)))], tokenizer())
    text = out.getvalue()
    assert len(text) < 3000
    assert "␛[2J[bold]" in text
    assert "\x1b[2J" not in text
    assert "What is it?" in text
    assert "characters …" in text
