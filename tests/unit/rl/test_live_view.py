"""What a person sees while a run goes on: live lines, plain lines, transcripts."""

from __future__ import annotations

import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console
from talk_samples import ASK, END, answers, group_of, talk, tokenizer

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
        "rl: step 1/50  ETA 10:03  reward 0.431  mixed 62% good 25% bad 12%  KL 0.00031  "
        "entropy 1.21  "
        "step 12.3 s: sampling 61% (412 tok/s) train 32% (18k tok/s) grading 5% other 2%"
    ]


def test_plain_lines_come_every_ten_seconds_first_and_last_always():
    progress, out, clock = make(steps=12)
    with progress:
        for step in range(1, 13):
            clock.now += 2
            progress.update(step, METRICS)
    lines = out.getvalue().splitlines()
    assert [line.split()[2] for line in lines] == ["1/12", "6/12", "11/12", "12/12"]


def test_a_resumed_run_counts_from_where_it_resumed():
    progress, out, clock = make(initial_step=40)
    with progress:
        clock.now += 5
        progress.update(41, {})
    assert out.getvalue() == "rl: step 41/50  ETA 0:45\n"


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
        assert lines[1].startswith("reward 1.000 ▁▂▃▄▅▆▇█  mixed 62% good 25% bad 12%  KL 0.00031")
        assert lines[1].endswith("entropy 1.21")
        assert lines[2].startswith("sampling 5/8 groups, 40/41 episodes; waiting for AgentTool")
        assert lines[3].startswith("step 12.3 s: sampling 61% (412 tok/s) train 32% (18k tok/s)")
        assert "…" not in "".join(lines)


def test_the_last_line_has_the_time_of_the_run():
    progress, out, clock = make(terminal=True)
    with progress, progress._activity.phase("training"):
        clock.now += 75
    assert "done: 1:15" in out.getvalue()


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


def test_the_test_reward_stays_until_the_next_one():
    progress, out, _ = make(min_interval_s=0)
    progress.update(1, {"test/env/all/reward/total": 0.25, **METRICS})
    progress.update(2, METRICS)
    assert out.getvalue().count("test 0.250") == 2


def test_on_a_terminal_nothing_is_printed_line_by_line():
    progress, out, clock = make(terminal=True)
    with progress:
        clock.now += 1
        progress.update(1, METRICS)
    text = out.getvalue()
    assert "━" in text
    assert "rl: step" not in text
    assert "done: 1.0 s" in text


def test_a_transcript_shows_the_best_and_the_worst():
    progress, out, _ = make()
    group = group_of(
        talk((f"{ASK}sys\nWhat is 6*7?", f"41{END}", 0.0)),
        talk((f"{ASK}sys\nWhat is 6*7?", f"42{END}", 1.0), (f"{ASK}sure?", f"yes{END}", 0.5)),
        sampling_client_step=7,
    )
    assert progress.show_transcript(group, tokenizer())
    assert out.getvalue().splitlines() == [
        "rl: 2 samples after 7 updates, mean reward 0.750",
        f"  | {ASK}sys",
        "  | What is 6*7?",
        "  | ── best: reward 1.500, completed ──",
        f"  | 42{END}{ASK}sure?yes{END}",
        "  | ── worst: reward 0.000, completed ──",
        f"  | 41{END}",
    ]


def test_transcripts_are_not_shown_too_often():
    progress, _, clock = make()
    group = answers(0.0, 1.0)
    shown = [progress.show_transcript(group, tokenizer())]
    for seconds in (5, 9, 2):
        clock.now += seconds
        shown.append(progress.show_transcript(group, tokenizer()))
    assert shown == [True, False, False, True]
    assert progress.show_transcript(group, tokenizer(), force=True)


def test_of_several_groups_the_first_mixed_one_is_shown():
    progress, out, _ = make()
    progress.show_transcript(
        [answers(0.0, 0.0), answers(1.0, 0.0, text="chosen"), answers(0.0, 1.0)], tokenizer()
    )
    assert "chosen 0" in out.getvalue()
    assert not progress.show_transcript([], tokenizer(), force=True)


@pytest.mark.parametrize("terminal", [True, False])
def test_long_and_nasty_text_is_cut_and_harmless(terminal):
    progress, out, _ = make(terminal=terminal)
    answer = "\x1b[2J[bold]" + "x" * 5000 + END
    prompt = "system " * 300 + "What is it?"
    progress.show_transcript(group_of(talk((prompt, answer, 0.0))), tokenizer())
    text = out.getvalue()
    assert len(text) < 3000
    assert "␛[2J[bold]" in text
    assert "\x1b[2J" not in text
    assert "What is it?" in text
    assert "characters …" in text
    if terminal:
        assert max(map(len, text.splitlines())) <= 80 + 30  # with colour codes


def test_an_empty_answer_is_said_to_be_one():
    progress, out, _ = make()
    progress.show_transcript(group_of(talk(("q", "", 0.0))), tokenizer())
    assert "(nothing)" in out.getvalue()
