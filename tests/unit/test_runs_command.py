"""The commands of ``tinker_cookbook.runs``: list, show, compare, rm, prune."""

from __future__ import annotations

import json
import socket
import sys
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from homes import new_home

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.record.files import record_file
from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.run.paths import existing_parent
from tinker_cookbook.run.scan import read_run_folder
from tinker_cookbook.runs import remove
from tinker_cookbook.runs.__main__ import COMMANDS
from tinker_cookbook.runs.compare import compare_metric
from tinker_cookbook.utils.command_line.subcommands import run_subcommand

HOST = socket.gethostname()


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(tmp_path / "home"))
    monkeypatch.setenv("TINKER_COOKBOOK_RUNS_DIR", str(tmp_path / "logs"))
    return tmp_path / "home"


def run(*words):
    return run_subcommand("tinker_cookbook.runs", COMMANDS, words, default="list")


def answer(capsys, *words):
    run(*words, "json=true")
    return json.loads(capsys.readouterr().out)


def weights(home, run_id, log_path, host: str | None = HOST):
    folder = home / "runs" / run_id / "weights" / "final"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"x" * 1000)
    metadata = {"recipe": "sl_basic", "log_path": str(log_path)} | ({"host": host} if host else {})
    about = {"run_id": run_id, "created_at": 1.0, "base_model": "m", "lora_rank": 1}
    file = home / "runs" / run_id / "run.json"
    file.write_text(json.dumps(about | {"user_metadata": metadata}))
    return home / "runs" / run_id


def logs(folder, run_id, values=(3.0, 2.0, 1.0), config=None, final=True):
    folder.mkdir(parents=True)
    settings = {"_type": "m:C", "recipe_name": "sl_basic", "learning_rate": 0.1} | (config or {})
    (folder / "config.json").write_text(json.dumps(settings))
    rows = [{"step": i, "train_mean_nll": v, "test/nll": v} for i, v in enumerate(values)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved = {"name": "final", "batch": 2, "state_path": f"tinker://{run_id}/weights/final"}
    if run_id:
        (folder / "checkpoints.jsonl").write_text(json.dumps(saved | {"final": final}) + "\n")
    return folder


def test_list_and_show(home, tmp_path, capsys):
    a = logs(tmp_path / "logs" / "a", "ra")
    weights(home, "ra", a)
    # Elsewhere, known by its weights; and weights whose folder is gone.
    b = logs(tmp_path / "else" / "b", "rb", (1.0, 2.0), {"best_metric": "test/nll"}, final=False)
    weights(home, "rb", b)
    weights(home, "gone", tmp_path / "logs" / "gone")
    found = answer(capsys)
    rows = {row["name"]: row for row in found["runs"]}
    assert set(rows) == {"a", "b"}
    assert [rows["a"][key] for key in ("state", "step", "metric", "last", "best")] == [
        "finished", 2, "test/nll", 1.0, 1.0,
    ]  # fmt: skip
    assert (rows["b"]["state"], rows["b"]["last"], rows["b"]["best"]) == ("stopped", 2.0, 1.0)
    assert rows["a"]["weights"] == ["ra"]
    assert rows["a"]["weights_bytes"] > 1000
    assert [one["run_id"] for one in found["weights_without_log_folder"]] == ["gone"]
    assert [row["name"] for row in answer(capsys, "list", str(tmp_path / "else"))["runs"]] == ["b"]
    run()
    assert "1 weights without log folder" in capsys.readouterr().out

    run("show", "a")
    said = capsys.readouterr().out
    assert f"{a}@final  step 2: tinker://ra/weights/final" in said
    assert f"tinker_cookbook.chat model_path={a}" in said
    with pytest.raises(ConfigurationError, match="got 'aa', expected a log folder or its name"):
        run("show", "aa")
    with pytest.raises(ConfigurationError, match=r"got 'sow', expected one of .*did you mean 'sho"):
        run("sow")
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        run("list", str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("b", "verdict"),
    [
        # Means 2 and 1; standard errors 1/sqrt(3) each, of the difference 0.816.
        ((2.0, 1.0, 0.0), "no clear difference: B - A is -1 with a standard error of 0.82"),
        ((1.5, 0.5, -0.5), "no clear difference: B - A is -1.5 "),
        ((0.5, -0.5, -1.5), "B is better (lower) by 2.5, more than 2 standard errors"),
        ((13.0, 12.0, 11.0), "A is better (lower) by 10"),
        ((3.0, 2.0, 1.0), "equal"),
    ],
)
def test_compare(home, tmp_path, capsys, b, verdict):
    logs(tmp_path / "logs" / "a", "ra", config={"_working_folder": "/a"})
    logs(tmp_path / "logs" / "b", "rb", b, {"learning_rate": 0.2, "_working_folder": "/b"})
    found = answer(capsys, "compare", "a", "b", "metrics=train_mean_nll,test/nll")
    assert found["settings"] == {"learning_rate": ["0.1", "0.2"]}
    trained, tested = found["metrics"]
    assert verdict in trained["verdict"]
    assert trained["a"]["error"] == pytest.approx(0.57735, abs=1e-4)
    # The last evaluation counts, and nothing says how noisy it is.
    assert (tested["b"]["value"], tested["b"]["error"]) == (b[-1], None)
    run("compare", "a", "b")
    assert "learning_rate  0.1  0.2" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match=r"'loss' is in no row .* It has: step,"):
        run("compare", "a", "b", "metrics=loss")


@pytest.mark.parametrize(
    ("rewards", "error", "of"),
    [
        ([1.0] * 4, 0.153, "4 test episodes"),  # sqrt(6/8 * 2/8 / 8)
        ([0.0, 1.0] * 50, 0.049, "100 test episodes"),  # sqrt(1/4 / 104)
        ([0.5, 0.25, 1.0], None, "3 test episodes, too few or too equal for an error"),
        ([0.5] * 20, None, "20 test episodes, too few or too equal for an error"),
    ],
)
def test_the_error_of_few_test_episodes_is_not_0(tmp_path, rewards, error, of):
    name = "test/env/all/reward/total"
    folder = logs(tmp_path / "a", "ra")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 5, name: fmean(rewards)}) + "\n")
    # Two turns of each episode.
    rows = [(i, 0, turn, reward) for i, reward in enumerate(rewards) for turn in range(2)]
    names = ("group", "member", "turn", "episode_reward")
    path = record_file(folder, 5, "eval_test")
    path.parent.mkdir()
    pq.write_table(pa.table([*zip(*rows, strict=True)], names=names), path)
    _, end, *_ = compare_metric(name, *[read_run_folder(folder)] * 2, last=10)
    assert (end.error, end.of) == (error and pytest.approx(error, abs=5e-4), of)


def test_rm_takes_the_log_folder_and_the_weights_and_nothing_in_use(
    home, tmp_path, capsys, monkeypatch
):
    a = logs(tmp_path / "logs" / "a", "ra")
    first, second = weights(home, "ra", a), weights(home, "ra2", a)
    with open(a / "checkpoints.jsonl", "a") as file:  # resumed
        file.write('{"name": "x", "state_path": "tinker://ra2/weights/x"}\n')
    b = logs(
        tmp_path / "logs" / "b", "rb", config={"load_checkpoint_path": "tinker://ra/weights/x"}
    )
    kept = weights(home, "rb", b)
    with RunLock(a), pytest.raises(ConfigurationError, match="is in use"):
        run("rm", "a", "yes=true")
    # Without an answer nothing is removed.
    with pytest.raises(ConfigurationError, match="no terminal to ask on; add yes=true"):
        run("rm", str(a))
    assert f"the settings of {b} name these weights" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    run("rm", "a")
    assert a.exists()
    capsys.readouterr()
    assert len(answer(capsys, "rm", "a")["remove"]) == 3
    assert a.exists()
    assert first.exists()
    monkeypatch.setattr("builtins.input", lambda _: "y")
    run("rm", "a")
    assert not a.exists()
    assert not first.exists()
    assert not second.exists()
    assert b.exists()
    # Weights alone, by the RUN of their path.
    run("rm", "rb", "yes=true")
    assert not kept.exists()
    assert b.exists()
    # Another program's folder.
    other = tmp_path / "logs" / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigurationError, match="is not removed because it has metrics"):
        run("rm", str(other), "yes=true")
    monkeypatch.chdir(b)
    with pytest.raises(ConfigurationError, match="is not removed because it is or holds the curr"):
        run("rm", str(b), "yes=true")


def test_what_another_folder_uses_or_holds_stays(home, tmp_path, capsys):
    root = tmp_path / "logs"
    running, base = logs(root / "running", "r1"), logs(root / "base", "r2")
    inside = logs(base / "part2", "r3")
    copied, copy = logs(root / "copied", "r4"), logs(root / "copy", "r4")
    outside = logs(root / "user", "r5", config={"load_checkpoint_path": "tinker://gone/weights/x"})
    made = {name: weights(home, name, root / "x") for name in ("r1", "r2", "r3", "r4", "r5")}
    made["gone"] = weights(home, "gone", tmp_path / "F" / "base")
    (tmp_path / "F").mkdir()
    # Weights by the RUN of their path, of a run that is going on.
    with RunLock(running), pytest.raises(ConfigurationError, match=r"logs/running is in use"):
        run("rm", "r1", "yes=true")
    # A log folder inside another one, whether its run is going on or not.
    with RunLock(inside), pytest.raises(ConfigurationError, match=r"contains the log folders of"):
        run("rm", str(base), "yes=true")
    assert answer(capsys, "list", str(base))["weights_without_log_folder"] == []
    # Weights that a copy of the log folder lists too.
    run("rm", str(copied), "yes=true")
    assert f"kept: weights r4, which {copy} lists too" in capsys.readouterr().out
    # A folder elsewhere is shown and removed with its weights.
    elsewhere = logs(tmp_path / "elsewhere", "r6")
    weights(home, "r6", root / "moved")
    with open(elsewhere / "metrics.jsonl", "a") as file:  # continued after its end, and killed
        file.write('{"step": 9}\n')
    shown = answer(capsys, "show", str(elsewhere))
    assert (shown["state"], shown["weights"]) == ("stopped", ["r6"])
    run("rm", str(elsewhere), "yes=true")
    assert not (home / "runs" / "r6").exists()
    # Weights of a folder, which a run outside of it began with.
    run("prune", str(tmp_path / "F"), "gone=true", "yes=true")
    assert "kept: 1 weights that settings of other runs name" in capsys.readouterr().out
    assert outside.exists()
    assert not copied.exists()
    assert all(folder.exists() for folder in made.values())


def test_prune_takes_only_what_no_run_needs(home, tmp_path, capsys):
    root = tmp_path / "logs"
    a = logs(root / "a", "ra")
    keep = [weights(home, "ra", a)]
    # Another run has the folder now; the folder is gone; a teacher is used by a run.
    gone = [weights(home, "old", a), weights(home, "gone", root / "gone")]
    moved = str(gone[1])
    b = logs(root / "b", "rb", config={"teacher": {"path": "tinker://teacher/sampler_weights/x"}})
    keep += [weights(home, "rb", b), weights(home, "teacher", root / "teacher")]
    # A client of a server, and a run that may be one.
    keep += [weights(home, "c1", "/their/run", host="other"), weights(home, "c2", "/x", host=None)]
    # A run before its first checkpoint.
    running = logs(root / "running", "", values=())
    keep.append(weights(home, "new", running))
    early = logs(root / "early", "", values=())
    (early / "metrics.jsonl").unlink()
    with RunLock(early):  # leaves its file
        pass
    template = logs(root / "template", "", values=())
    (template / "metrics.jsonl").unlink()
    with RunLock(running):
        assert moved not in {one["path"] for one in answer(capsys, "prune")["remove"]}
        planned = answer(capsys, "prune", "gone=true")
        assert {one["path"] for one in planned["remove"]} == {*map(str, gone), str(early)}
        assert all(folder.exists() for folder in (*gone, early))
        run("prune", "gone=true", "yes=true")
        said = capsys.readouterr().out
    assert "kept: 1 weights that settings of other runs name" in said
    assert "kept: 2 weights of other or unknown machines" in said
    assert not any(folder.exists() for folder in (*gone, early))
    assert all(folder.exists() for folder in (*keep, a, b, running, template))
    assert remove.PruneSettings().folder is None
    assert existing_parent(home / "x" / "y") == home
