"""The page with requests of other sites, and files of other programs or damaged ones (2 s)."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from test_view import write_evaluation, write_run, write_sweep

from tinker_cookbook.record.images import image_file
from tinker_cookbook.record.schema import VERSION_KEY
from tinker_cookbook.run.scan import find_run_folders
from tinker_cookbook.view.app import make_app
from tinker_cookbook.view.report import write_report

PLACE = {"name": "good", "step": 1, "split": "train"}


def client_of(folder, **settings):
    return TestClient(make_app(folder, **settings), "http://localhost:7788")


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "runs" / "good")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:7788", 200), ("localhost", 200), ("[::1]:80", 200), ("evil.example", 403),
     ("127.0.0.1.evil.example:7788", 403), ("localhost@evil.example", 403), ("", 403)],
)  # fmt: skip
def test_without_a_key_only_names_of_loopback_are_answered(runs, host, status):
    assert client_of(runs).get("/api/runs", headers={"host": host}).status_code == status


def test_a_wrong_key_may_have_any_character(runs):
    client = client_of(runs, key="secret")
    assert client.get("/api/runs?key=é").status_code == 403
    assert client.get("/api/runs", headers=[(b"cookie", b"view_key=\xff")]).status_code == 403
    assert client.get("/", params={"key": "secret"}, headers={"host": "box"}).status_code == 200


@pytest.mark.parametrize("outside", ["../../other/sums", "{}/other/sums", "x" * 5000, "\0"])
def test_folders_outside_of_the_root_are_not_read(runs, outside):
    write_evaluation(runs.parent / "other", 1.0)
    write_evaluation(runs / "ev", 1.0)
    client, name = client_of(runs), outside.format(runs.parent)
    assert len(client.get("/api/answers?name=ev&task=sums").json()["answers"]) == 8
    for request in ({"name": "ev", "task": name}, {"name": name, "task": "sums"}):
        assert client.get("/api/answers", params=request).status_code == 404
    assert client.get("/api/run", params={"name": name}).status_code == 404


@pytest.mark.parametrize(("name", "kind"), [("../../secret", "png"), ("0" * 64, "../x"), (None, 1)])
def test_an_image_names_only_a_file_of_the_record(tmp_path, name, kind):
    assert image_file(tmp_path, {"sha256": name, "format": kind}) is None
    digest = "0a" * 32
    found = image_file(tmp_path, {"sha256": digest, "format": "png"})
    assert found == tmp_path / "record" / "images" / f"{digest}.png"


DEEP = '{"a":' * 3000 + "1" + "}" * 3000
FOREIGN = {
    "no object": ("metrics.jsonl", "[1]\n[2]\n"),
    "text for a number": ("metrics.jsonl", '{"step": 1, "time/total": "abc", "cost": [1]}\n'),
    "list for a number": ("metrics.jsonl", '{"step": 1, "time/total": [1], "diagnosis": 3}\n'),
    "400 digits": ("metrics.jsonl", f'{{"step": 1, "reward/total": {"9" * 400}}}\n'),
    "step of 400 digits": ("metrics.jsonl", f'{{"step": {"9" * 400}, "reward/total": 1}}\n'),
    "odd nonfinite": ("metrics.jsonl", '{"step": 1, "a": null, "nonfinite": {"a": [1]}}\n'),
    "list nonfinite": ("metrics.jsonl", '{"step": 1, "a": null, "nonfinite": ["a"]}\n'),
    "NaN": ("metrics.jsonl", '{"step": 1, "reward/total": NaN, "time/total": Infinity}\n'),
    "surrogate": ("metrics.jsonl", '{"step": 1, "x\\ud800y": 1}\n'),
    "deep settings": ("config.json", DEEP),
    "list of settings": ("config.json", '{"best_metric": [], "model_name": "\\ud800"}'),
    "checkpoints": ("checkpoints.jsonl", '{"batch": "x", "final": 1}\n'),
    "spans": ("timing_spans.jsonl", '{"step": 1, "spans": [{"name": "x"}]}\n{"step": 2, x\n'),
    "empty tree": ("iteration_000001/train_logtree.json", ""),
    "tree": ("iteration_000001/train_logtree.json", "[1]"),
    "foreign answers": ("sums/trajectories.jsonl", "[1]\n"),
    "other answers": ("sums/trajectories.jsonl", '{"idx": "x"}\n'),
    "result": ("sums/result.json", "[1]"),
    "sweep": (".sweep/one.json", ""),
    "foreign sweep": (".sweep/one.json", '{"settings": [1]}'),
}


def test_a_bad_folder_does_not_hide_the_others(runs):
    for number, (name, content) in enumerate(FOREIGN.values()):
        file = runs / f"bad{number}" / name
        file.parent.mkdir(parents=True)
        (runs / f"bad{number}" / "metrics.jsonl").write_text('{"step": 1, "reward/total": 0.5}\n')
        (file.parent / "trajectories.jsonl").write_text("") if name.endswith("result.json") else 0
        file.write_text(content)
    client = client_of(runs)
    listed = client.get("/api/runs").json()
    assert {run["name"] for run in listed["runs"]} == {path.name for path in runs.iterdir()}
    for number, (case, (name, _)) in enumerate(FOREIGN.items()):
        found = client.get(f"/api/run?name=bad{number}").json()
        if name != "metrics.jsonl":
            assert found["metrics"]["reward/total"]["values"] == [0.5], case
        for kind in found["has"]:
            assert client.get(f"/api/{kind}?name=bad{number}").status_code == 200, case
    assert all(one["problem"] for one in listed["evaluations"])
    for name in listed["sweeps"]:
        assert "one.json" in client.get("/api/sweep", params={"name": name}).json()["problem"]
    write_report(runs, runs / "report.html")


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def with_other_bits(file):
    content = bytearray(file.read_bytes())
    at = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    content[at : at + 40] = b"\xff" * 40  # "Couldn't deserialize thrift"
    file.write_bytes(content)


def of_a_later_version(file):
    table = pq.read_table(file).replace_schema_metadata({VERSION_KEY: b"2"})
    pq.write_table(table, file)


def without_columns(file):
    pq.write_table(pq.read_table(file).drop_columns(["member", "problem"]), file)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [(cut, "is damaged"), (with_other_bits, "is damaged"), (of_a_later_version, "has version 2"),
     (without_columns, "KeyError: 'member'")],
)  # fmt: skip
def test_a_damaged_step_leaves_the_others(runs, tmp_path, damage, problem):
    damage(runs / "good" / "record" / "step_000001.train.parquet")
    client = client_of(runs)
    assert problem in client.get("/api/episodes", params=PLACE).json()["problem"]
    assert problem in client.get("/api/group", params={**PLACE, "group": 0}).json()["detail"]
    assert len(client.get("/api/episodes", params={**PLACE, "step": 2}).json()["episodes"]) == 4
    found = client.get("/api/run?name=good").json()
    assert found["metrics"]["reward/total"]["values"] == [0, 0.5, 1]
    key = client.get("/api/episodes", params={**PLACE, "step": 2}).json()["episodes"][0]["problem"]
    request = {"name": "good", "problem": key}
    assert len(client.get("/api/problem", params=request).json()["rows"]) == 2
    write_report(runs, tmp_path / "report.html")


def test_tokens_without_texts_are_numbers(runs):
    (runs / "good" / "record" / "vocabulary.parquet").write_bytes(b"garbage")
    assert client_of(runs).get("/api/episodes", params=PLACE).json()["episodes"][1]["text"] == "[7]"


def test_lone_surrogates_are_kept(runs):
    file = runs / "good" / "record" / "step_000001.train.parquet"
    table = pq.read_table(file)
    logs = pa.array([json.dumps({"note": "x\ud800y"})] * len(table))
    at = table.column_names.index("logs")
    pq.write_table(table.set_column(at, "logs", logs), file)
    found = client_of(runs).get("/api/group", params={**PLACE, "group": 0}).text
    assert "x\\ud800y" in found


def test_a_foreign_record_of_a_sweep_leaves_the_others(runs):
    write_sweep(runs / "sweep")
    (runs / "sweep" / ".sweep" / "x.json").write_text("")
    found = client_of(runs).get("/api/sweep?name=sweep").json()
    assert len(found["rows"]) == 2
    assert "x.json" in found["problem"]


def test_a_folder_that_cannot_be_read_is_left_out(runs, monkeypatch):
    (runs / "closed").mkdir()

    # Root, as whom tests may run, can read every folder.
    def access(path, mode):
        return path.name != "closed"

    monkeypatch.setattr("os.access", access)
    monkeypatch.setattr(
        "tinker_cookbook.run.scan.is_run_folder",
        lambda path: path.name == "good" if path.name != "closed" else 1 / 0,
    )
    assert [run["name"] for run in client_of(runs).get("/api/runs").json()["runs"]] == ["good"]


def test_a_slow_search_is_not_repeated_at_once(runs, monkeypatch):
    client = client_of(runs)

    def names():
        return {run["name"] for run in client.get("/api/runs").json()["runs"]}

    assert names() == {"good"}
    write_run(runs / "second")
    now = time.monotonic()

    def search(roots):
        nonlocal now
        now += 1
        return find_run_folders(roots)

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("tinker_cookbook.view.data.time", clock)
    monkeypatch.setattr("tinker_cookbook.view.data.find_run_folders", search)
    assert names() == {"good", "second"}
    write_run(runs / "third")
    assert names() == {"good", "second"}
    now += 10
    assert names() == {"good", "second", "third"}
