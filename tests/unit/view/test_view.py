"""The page of runs: in a report, in a headless Chromium, and from the server (10 s)."""

from __future__ import annotations

import json
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tinker
from browser import Browser, find_chromium
from fastapi.testclient import TestClient

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.record.episodes import RecordedGroup, TrainedDatum, turn_table
from tinker_cookbook.record.write import RecordWriter
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition
from tinker_cookbook.utils import logtree
from tinker_cookbook.utils.trace import IterationWindow, save_gantt_chart_html
from tinker_cookbook.view.app import make_app
from tinker_cookbook.view.page import page_html
from tinker_cookbook.view.report import write_report

TEXTS = {
    1: b"What is 2 + 2?",
    2: b"<script>document.title='run'</script>",
    3: b"<img src=x onerror=alert(1)>",
    4: "a\u202eb\x1b[31m".encode(),
    5: "\u00e9".encode()[:1],
    6: "\u00e9".encode()[1:],
    7: b"4",
}


def trajectory(tokens, reward):
    turn = Transition(
        tinker.ModelInput.from_ints([1]),
        TokensWithLogprobs(tokens, [-0.5] * len(tokens), seed=1),
        reward,
        True,
        logs={"note": "</script><b>bold</b>"},
    )
    return Trajectory([turn], tinker.ModelInput.empty())


def members():
    return [trajectory([2, 3, 4, 5, 6], 0.0), trajectory([7], 1.0)]


def write_run(folder, steps=2, groups=2):
    """A run with ``groups`` groups of two at each of its steps."""
    folder.mkdir(parents=True)
    rows = [{"step": i, "reward/total": i / 2, "optim/entropy": 0.5} for i in range(steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"_type": "tinker_cookbook.rl.config:Config", "model_name": "m", "seed": 3}
    (folder / "config.json").write_text(json.dumps(config))
    with RecordWriter(folder) as writer:
        for step in range(1, steps + 1):
            recorded = [
                RecordedGroup(
                    index,
                    TrajectoryGroup(
                        [trajectory([2, 3, 4, 5, 6], 0.0), trajectory([7], 1.0)],
                        [0.0, 0.0],
                        [{}, {}],
                    ),
                    ["sums"],
                    [-0.5, 0.5],
                )
                for index in range(groups)
            ]
            data = [
                TrainedDatum(
                    0, 1, [(0, 0)], pa.array([0.5]).to_numpy(), pa.array([-0.7]).to_numpy(), 0, 0
                )
            ]
            writer.write(step, "train", lambda groups=recorded, data=data: turn_table(groups, data))
    table = pa.table({"token": pa.array(TEXTS, pa.int32()), "bytes": list(TEXTS.values())})
    pq.write_table(table, folder / "record" / "vocabulary.parquet")


@pytest.fixture
def browser(tmp_path):
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    running = Browser(program, tmp_path / "profile")
    yield running
    running.close()


def shown(browser, hash_, wanted):
    """The text of the page at an address, once it contains ``wanted``."""
    browser.run(f"location.hash = {json.dumps(hash_)}, 1")
    browser.wait(f"document.body.innerText.includes({json.dumps(wanted)})")
    return browser.run("document.body.innerText")


def test_a_report_shows_text_as_text(tmp_path, browser):
    write_run(tmp_path / "runs" / "one")
    write_run(tmp_path / "runs" / "two")
    report = write_report(tmp_path / "runs", tmp_path / "report.html")
    browser.open(report.as_uri())
    assert "one" in shown(browser, "", "2 of 2 runs")
    assert "reward/total" in shown(browser, "run=one&tab=curves", "optim/entropy")
    assert "2 of 4 episodes" not in shown(browser, "run=one&tab=episodes&step=2", "4 of 4 episodes")
    text = shown(browser, "run=one&tab=episodes&step=2&split=train&group=0", "member 1")
    # Markup, terminal codes and marks of direction are shown; halves of a letter are joined.
    for part in (*(TEXTS[i].decode() for i in (1, 2, 3)), "a⟨U+202e⟩b⟨U+001b⟩[31m", "é", "bold"):
        assert part in text
    assert "over the steps" in shown(
        browser, f"run=one&tab=episodes&problem={problem_of(tmp_path)}", "back"
    )
    assert "seed" in shown(browser, "run=one&tab=settings", "model_name")
    assert browser.run("document.title") != "run"
    assert browser.problems == []


def problem_of(folder) -> str:
    table = pq.read_table(folder / "runs" / "one" / "record" / "step_000001.train.parquet")
    return table["problem"].to_pylist()[0]


def test_ten_thousand_episodes_open_within_a_second(tmp_path, browser):
    write_run(tmp_path / "runs" / "big", steps=10, groups=500)
    report = write_report(tmp_path / "runs", tmp_path / "report.html")
    browser.open(report.as_uri())
    begin = time.monotonic()
    shown(browser, "run=big&tab=episodes&step=7&split=train", "1000 of 1000 episodes")
    assert time.monotonic() - begin < 5.0  # 0.5 s on an idle machine


def test_the_server_reads_and_needs_its_key(tmp_path):
    write_run(tmp_path / "runs" / "one")
    client = TestClient(make_app(tmp_path / "runs", key="secret"))
    assert client.get("/api/runs").status_code == 403
    found = client.get("/api/runs", params={"key": "secret"}).json()
    assert [run["name"] for run in found["runs"]] == ["one"]
    # The key is a cookie from then on.
    place = {"name": "one", "step": 1, "split": "train"}
    assert len(client.get("/api/episodes", params=place).json()["episodes"]) == 4
    group = client.get("/api/group", params={**place, "group": 0}).json()
    assert group["members"][1]["turns"][0]["trainer"] == [-0.7]
    assert client.get("/api/run", params={"name": "../../etc"}).status_code == 404
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write", "://"):
        assert name not in page_html()[0].replace("http://www.w3.org/2000/svg", "")


def test_spans_and_logs_of_a_run_have_tabs(tmp_path, browser):
    folder = tmp_path / "runs" / "one"
    write_run(folder)
    for step in (1, 2, 2):  # a resumed run writes a step again
        window = IterationWindow()
        window.record_span("train_step", 10.0, 10.0 + step)
        for _ in range(3):
            window.record_span("rollout", 9.0, 10.0)
        window.write_spans_jsonl(folder / "timing_spans.jsonl", step)
    with (folder / "timing_spans.jsonl").open("a") as file:
        file.write('{"step": 3, "spans": [{"na')  # a crash
    with logtree.init_trace("Step") as trace:
        with logtree.scope_header("grading"):
            logtree.log_text(TEXTS[2].decode() + TEXTS[4].decode())
            logtree.log_html("<b>bold</b>" + TEXTS[2].decode() + TEXTS[3].decode())
        logtree.log_formatter(logtree.ConversationFormatter([{"role": "user", "content": "2?"}]))
    logtree.write_trace_json(trace, folder / "iteration_000001" / "train_logtree.json")
    report = write_report(tmp_path / "runs", tmp_path / "report.html")
    browser.open(report.as_uri())
    text = shown(browser, "run=one&tab=timing", "train_step")
    assert "rollout\t3\t3\t1\t1" in text
    # Three spans at once are in three lanes.
    lanes = "new Set([...document.querySelectorAll('rect')].map((bar) => bar.y.baseVal.value))"
    assert browser.run(f"{lanes}.size") == 4
    browser.run("document.querySelector('[aria-label=\"step before\"]').click(), 1")
    browser.wait("location.hash.includes('step=1')")
    text = shown(browser, "run=one&tab=tree", "grading")
    for part in (TEXTS[2].decode() + "a⟨U+202e⟩b⟨U+001b⟩[31m", "bold", "2?"):
        assert part in text
    assert browser.run("document.querySelectorAll('main script, main img[src]').length") == 0
    # A report of logtree and the chart of a step are pages of their own.
    chart = tmp_path / "chart.html"
    save_gantt_chart_html(window, 2, chart)
    browser.open(chart.as_uri())
    browser.wait("document.querySelectorAll('rect').length === 4")
    assert "Settings" not in browser.run("document.body.innerText")
    with logtree.init_trace("Report", tmp_path / "tree.html"), logtree.scope_header("grading"):
        logtree.log_text(TEXTS[2].decode())
    browser.open((tmp_path / "tree.html").as_uri())
    browser.wait("document.querySelector('section h2').innerText === 'grading'")
    assert browser.run("document.querySelectorAll('script').length") == 0
    # The policy of the page refuses code in logged HTML.
    assert [one for one in browser.problems if "inline event handler violates" not in one] == []
