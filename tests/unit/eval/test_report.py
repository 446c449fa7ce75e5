"""Tables of results (under 1 s)."""

from __future__ import annotations

from tinker_cookbook.eval.benchmarks import BenchmarkResult, StoredTrajectory
from tinker_cookbook.eval.report import comparison_lines, curve_table, result_table
from tinker_cookbook.eval.run.answers import summarize
from tinker_cookbook.eval.statistics import compare_rewards
from tinker_cookbook.utils.terminal import get_console


def shown(table, capsys):
    get_console().print(table)
    return [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_a_row_for_each_task(capsys):
    one = BenchmarkResult("gsm8k", 0.3, 200, 60, 1, 7, {"ci_low": 0.24, "ci_high": 0.37}, 75.0)
    many = BenchmarkResult(
        "math500",
        0.5,
        800,
        400,
        metrics={"num_problems": 100, "maj@2": 0.5, "maj@8": 0.6},
        pass_at_k={k: k / 10 for k in range(1, 9)},
    )
    lines = shown(result_table({"gsm8k": one, "math500": many}), capsys)
    assert lines[2] == ["gsm8k", "200", "30.0%", "24.0%", "to", "37.0%", "1", "7", "1:15"]
    assert lines[3] == ["math500", "100", "x", "8", "50.0%", "-", "0", "0", "0:00"]
    lines = shown(curve_table({"gsm8k": one, "math500": many}), capsys)
    assert lines[0] == ["task", "k", "=", "1", "k", "=", "2", "k", "=", "4", "k", "=", "8"]
    assert lines[2] == ["math500", "pass@k", "10.0%", "20.0%", "40.0%", "80.0%"]
    assert lines[3] == ["math500", "maj@k", "50.0%", "60.0%"]
    assert curve_table({"gsm8k": one}) is None
    rows = [
        StoredTrajectory(i, "x", f"x{i}", sample=s, error="grading: failed" if i < 8 else None)
        for i in range(24)
        for s in range(2)
    ]
    (_, _, line) = shown(result_table({"x": summarize("x", rows)}), capsys)
    assert line[:4] == ["x", "24", "x", "2"]
    assert line[-3] == "16"


def test_verdicts_in_words():
    better = compare_rewards([[0.0]] * 40, [[1.0]] * 20 + [[0.0]] * 20)
    lines = comparison_lines("gsm8k", better)
    assert lines[0].startswith("gsm8k: b is better than a on 40 examples (exact McNemar")
    assert "a 0.0%, b 50.0%: difference +50.0%" in lines[1]
    assert len(lines) == 3
    few = comparison_lines("gsm8k", compare_rewards([[0.0, 0.5]] * 3, [[0.5, 0.5]] * 3))
    assert "sign-flip test finds no difference: 3 examples differ; it needs at least 6" in few[3]
    assert "about 6 examples would show it" in few[4]
