"""The page of runs: in a report, in a headless Chromium, and from the server (20 s)."""

from __future__ import annotations

import base64
import json
import math
import shutil
import threading
import time
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tinker
import uvicorn
from browser import Browser, find_chromium
from fastapi.testclient import TestClient

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.eval.run.answers import AnswerFile, summarize
from tinker_cookbook.eval.run.types import StoredTrajectory, StoredTurn
from tinker_cookbook.record.episodes import RecordedGroup, TrainedDatum, turn_table
from tinker_cookbook.record.write import RecordWriter
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition
from tinker_cookbook.run.jsonl import encode_row
from tinker_cookbook.sweep.arguments import Point
from tinker_cookbook.sweep.runs import SweepRun
from tinker_cookbook.training import session
from tinker_cookbook.utils import logtree
from tinker_cookbook.utils.trace import IterationWindow, save_gantt_chart_html
from tinker_cookbook.view.app import make_app
from tinker_cookbook.view.episodes import episodes
from tinker_cookbook.view.evaluations import evaluation
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
MARKUP = "<img src=x onerror=alert(2)>\u202e"
SHOWN = MARKUP.replace("\u202e", "⟨U+202e⟩")


def trajectory(tokens, reward):
    turn = Transition(
        tinker.ModelInput.from_ints([1]),
        TokensWithLogprobs(tokens, [-0.5] * len(tokens), seed=1, entropies=[1.5] * len(tokens)),
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
    rows[-1] |= {MARKUP: 1.0, "optim/loss": math.nan}
    (folder / "metrics.jsonl").write_bytes(b"".join(map(encode_row, rows)))
    config = {"_type": "tinker_cookbook.rl.config:Config", "model_name": "m", "note": MARKUP}
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
    write_vocabulary(folder)


def write_vocabulary(folder):
    table = pa.table({"token": pa.array(TEXTS, pa.int32()), "bytes": list(TEXTS.values())})
    pq.write_table(table, folder / "record" / "vocabulary.parquet")


def write_evaluation(folder, reward):
    """An evaluation with 8 answers."""
    stored = AnswerFile(folder / "sums", {"model": "m"})
    for i in range(8):
        turns = [StoredTurn("user", f"{i} + 1?"), StoredTurn("assistant", f"{i} {MARKUP}")]
        stored.add(StoredTrajectory(i, "sums", str(i), turns, reward))
    stored.write_result(summarize("sums", list(stored.rows.values())))


def write_sweep(folder):
    """Two runs of a sweep with their states."""
    for rate in ("1e-3", "1e-2"):
        name = f"learning_rate={rate}"
        write_run(folder / name)
        settings = {"learning_rate": rate}
        SweepRun(
            Point(name, settings, settings), "recipes.rl_basic", settings, folder / name
        ).finish(0)


def test_a_row_has_the_prompt_and_the_answer_of_one_turn(tmp_path):
    first, second = trajectory([7], 0.5).transitions + trajectory([2], 0.5).transitions
    second.ob = tinker.ModelInput.from_ints([1, 7, 3])
    group = TrajectoryGroup([Trajectory([first, second], tinker.ModelInput.empty())], [0.0], [{}])
    with RecordWriter(tmp_path) as writer:
        recorded = RecordedGroup(0, group, [], [0.0])
        writer.write(1, "train", lambda: turn_table([recorded], []))
    write_vocabulary(tmp_path)
    [row] = episodes(tmp_path, 1, "train")["episodes"]
    assert (row["prompt"], row["text"], row["turns"]) == ("What is 2 + 2?", "4", 2)


def test_an_evaluation_names_the_checkpoint_and_not_only_the_base_model(tmp_path):
    write_evaluation(tmp_path, 1.0)
    assert evaluation(tmp_path)["model"] == "m"
    (tmp_path / "settings.json").write_text('{"model_path": "tinker://run/weights/000005"}')
    assert evaluation(tmp_path)["model"] == "tinker://run/weights/000005"


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    running = Browser(program, tmp_path_factory.mktemp("chromium") / "profile")
    yield running
    running.close()


@pytest.fixture
def browser(process):
    process.problems.clear()
    return process


@contextmanager
def served(folder):
    """The address of the page of ``folder``."""
    server = uvicorn.Server(uvicorn.Config(make_app(folder), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join()


def shown(browser, hash_, wanted):
    """The text of the page at an address, once it contains ``wanted``."""
    browser.run(f"location.hash = {json.dumps(hash_)}, 1")
    browser.wait(f"document.body.innerText.includes({json.dumps(wanted)})")
    return browser.run("document.body.innerText")


def test_a_report_shows_text_as_text(tmp_path, browser):
    runs = tmp_path / "runs"
    for name in ("one", MARKUP):
        write_run(runs / name)
    write_evaluation(runs / "before", 0.0)
    write_evaluation(runs / "after", 1.0)
    report = write_report(runs, tmp_path / "report.html")
    browser.open(report.as_uri())
    assert SHOWN in shown(browser, "", "2 of 2 runs")
    text = shown(browser, "run=one&tab=curves&all=true", "4 of 4 metrics")
    assert SHOWN in text  # the name of a metric
    assert browser.run("document.querySelectorAll('svg .odd').length") == 1  # NaN is a cross
    assert "2 of 4 episodes" not in shown(browser, "run=one&tab=episodes&step=2", "4 of 4 episodes")
    text = shown(browser, "run=one&tab=episodes&step=2&split=train&group=0", "member 1")
    # Markup, terminal codes and marks of direction are shown; halves of a letter are joined.
    for part in (*(TEXTS[i].decode() for i in (1, 2, 3)), "a⟨U+202e⟩b⟨U+001b⟩[31m", "é", "bold"):
        assert part in text
    assert SHOWN in shown(browser, "run=one&tab=settings", "model_name")
    assert f"0 {SHOWN}" in shown(browser, "eval=before", "8 of 8 answers")
    assert "b is better than a" in shown(browser, "eval=before|after", "only")
    assert browser.run("document.querySelectorAll('main script, main img').length") == 0
    assert browser.run("document.title") != "run"
    assert browser.problems == []


def views(folder):
    """Addresses of all views, each with a text that it has."""
    place = "tab=episodes&step=2&split=train"
    return {
        "list=runs": "5 of 5 runs",
        "list=evaluations": "0.0% to 32.4%",  # Wilson's interval of 0 of 8
        "list=sweeps": "sweep",
        "sweep=sweep": "best",
        "run=one&tab=curves": "optim/entropy",
        "run=one|two&tab=curves": "two",
        "run=one|two&tab=settings": "0 settings in which these runs differ",
        f"run=one|two&{place}": "1 problems that these runs have in common",
        f"run=one&{place}": "4 of 4 episodes",
        f"run=one&{place}&group=1": "group 1",
        f"run=one&tab=episodes&problem={problem_of(folder)}": "of the words are the same",
        f"run=one|two&tab=episodes&problem={problem_of(folder)}": "two, step 2",
        "eval=before&task=sums": "8 of 8 answers",
        "eval=before|after": "b is better than a",
    }


def test_each_view_from_the_server(tmp_path, browser):
    runs = tmp_path / "runs"
    for name in ("one", "two", "gone"):
        write_run(runs / name)
    write_evaluation(runs / "before", 0.0)
    write_evaluation(runs / "after", 1.0)
    write_sweep(runs / "sweep")
    with served(runs) as url:
        browser.open(url)
        for width in (1200, 400):
            browser.size(width, 800)
            for number, (address, wanted) in enumerate(views(tmp_path).items()):
                shown(browser, address, wanted)
                picture = browser.call("Page.captureScreenshot", format="png")["data"]
                (tmp_path / f"{width}-{number}.png").write_bytes(base64.b64decode(picture))
                # Only tables scroll sideways.
                assert browser.run("document.documentElement.scrollWidth") <= width, address
        shown(browser, "run=one&tab=episodes&step=1&split=train&group=0", "group 0")
        for key, effect in (
            ("ArrowRight", "location.hash.includes('step=2')"),
            ("ArrowDown", "location.hash.includes('group=1')"),
            ("o", "location.hash.includes('overlay=')"),
            ("?", "help.open && document.body.innerText.includes('the next colouring')"),
        ):
            event = f"new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}})"
            browser.wait("Boolean(keys.o)")
            browser.run(f"document.body.dispatchEvent({event}), 1")
            browser.wait(effect)
        browser.run("(help.close(), 1)")
        # After the last group there is none; a member is marked; what is absent is named.
        last = "run=one&tab=episodes&step=2&split=train&group=1&member=1"
        shown(browser, last, "group 1")
        browser.wait("Boolean(document.querySelector('.episode.chosen') && keys.ArrowDown)")
        browser.run("keys.ArrowDown[0](), 1")
        assert browser.run("location.hash").endswith(last)
        chosen = "document.querySelector('.episode.chosen').getAttribute('aria-label')"
        assert browser.run(chosen) == "member 1"
        shown(browser, "run=one&tab=episodes&step=99", "Step 99 is not recorded; this is step 2.")
        shown(browser, "run=one&tab=episodes&split=other", "other is not recorded; this is train.")
        shown(browser, "run=one&tab=curves", "Causes were not looked for")
        # The server searches whole texts, and filters apply to the rest.
        shown(browser, "run=one&tab=episodes&step=2&split=train", "4 of 4 episodes")
        browser.fill("input[type=search]", "ONERROR")
        browser.wait("document.body.innerText.includes('2 of 4 episodes')")
        assert "text=ONERROR" in browser.run("location.hash")
        browser.fill("[aria-label='reward ≥']", "0.5")
        browser.wait("document.body.innerText.includes('0 of 4 episodes')")
        # A file that is cut off, and a run that is deleted while one looks at it.
        file = runs / "two" / "record" / "step_000001.train.parquet"
        file.write_bytes(file.read_bytes()[:-20])
        shown(browser, "run=two&tab=episodes&step=1", "the file is damaged")
        with (runs / "two" / "metrics.jsonl").open("a") as rows:
            rows.write('{"step": 9, "rew')
        assert "reward/total" in shown(browser, "run=two&tab=curves", "optim/entropy")
        shown(browser, "run=gone&tab=curves", "optim/entropy")
        shutil.rmtree(runs / "gone")
        browser.run("(redraw(), 1)")
        browser.wait("document.body.innerText.includes('no such run (any more)')")
    assert [one for one in browser.problems if "404" not in one] == []


def problem_of(folder) -> str:
    table = pq.read_table(folder / "runs" / "one" / "record" / "step_000001.train.parquet")
    return table["problem"].to_pylist()[0]


def test_the_curves_of_a_cause_stand_first_and_lines_have_gaps(tmp_path, browser):
    run = tmp_path / "runs" / "one"
    write_run(run, steps=1)
    held = ("margin", "test/nll", "test/chosen_reward")
    rows = [
        {"step": i, "num_sequences": 8, "dpo_loss": 0.5, "time/step": 1.0, "time/eval": 2.0}
        | dict.fromkeys(held if i < 4 or i == 9 else (), 1.0)
        for i in range(1, 11)
    ]
    rows[-1]["diagnosis"] = "chosen_falls since 2: it fell"
    (run / "metrics.jsonl").write_bytes(b"".join(map(encode_row, rows)))
    with served(tmp_path / "runs") as url:
        browser.open(url)
        text = shown(browser, "run=one&tab=curves", "chosen falls")
        order = [text.index(f"\n{name}\n") for name in (held[1], held[2], held[0], "dpo_loss")]
        assert order == sorted(order)
        assert "1 at step 9" in text
        # One line of three points, and a dot; test examples are not recorded, so nothing opens.
        figure = "document.querySelector('svg[aria-label=\"test/nll\"]')"
        assert browser.run(f"{figure}.querySelector('path').getAttribute('d')").count("M") == 2
        assert browser.run(f"{figure}.querySelectorAll('circle').length") == 1
        assert not browser.run(f"{figure}.classList.contains('live')")
        assert "⚠ chosen falls" in shown(browser, "list=runs", "30 s")


def test_ten_thousand_episodes_of_a_step_open_within_a_second(tmp_path, browser):
    write_run(tmp_path / "runs" / "big", steps=1, groups=5000)
    with served(tmp_path / "runs") as url:
        browser.open(url)
        begin = time.monotonic()
        shown(browser, "run=big&tab=episodes", "10000 of 10000 episodes")
    assert time.monotonic() - begin < 60  # 1 s on an idle machine


def test_a_report_that_fails_does_not_fail_the_run(tmp_path, monkeypatch, caplog):
    write_run(tmp_path / "one")
    (line,) = session._write_report(str(tmp_path / "one"))
    assert line.endswith("report.html")
    assert (tmp_path / "one" / "report.html").stat().st_size > 50_000
    monkeypatch.setattr("tinker_cookbook.view.data.Runs.list", lambda self: 1 / 0)
    assert session._write_report(str(tmp_path / "one")) == []
    assert "no report.html was written: ZeroDivisionError" in caplog.text


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
    turn = group["members"][1]["turns"][0]
    assert (turn["trainer"], turn["entropy"]) == ([-0.7], [1.5])
    assert client.get("/api/run", params={"name": "../../etc"}).status_code == 404
    assert len(page_html()[0].split("<script>")[1].encode()) < 60_000
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
    shown(browser, "run=one&tab=episodes&step=2&split=train&group=0", "over steps")
    browser.run(
        "[...document.querySelectorAll('a')].find((a) => a.innerText === 'logs').click(), 1"
    )
    browser.wait("document.body.innerText.includes('grading')")
    text = browser.run("document.body.innerText")
    assert "There are no logs" not in text
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
