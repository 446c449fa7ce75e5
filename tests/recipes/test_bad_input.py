"""Input that cannot work: the message says which setting, what came, what was expected.

Wrong settings and data are tried through the recipe's own entry point in this process, where it is
also seen that no model was loaded; disks, networks and second runs in processes of their own.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from json_server import json_server
from recipe_runs import RecipeRuns, count_lines, finish, wait_for

from recipes import sl_basic
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

pytestmark = pytest.mark.slow

CHECKPOINT_LINE = "tinker_cookbook.run.checkpoints:append_row"
REMOTE = ("device=auto", "dtype=auto")


@pytest.fixture(scope="module")
def recipe_runs(tmp_path_factory, stories_model):
    return RecipeRuns(tmp_path_factory.mktemp("bad"), stories_model)


@pytest.fixture(scope="module")
def trained(recipe_runs):
    """Two steps of training, a checkpoint after each."""
    done = recipe_runs.run("trained", "raise", "max_steps=2", "save_every=1")
    assert done.returncode == 0, done.stderr[-2000:]
    return recipe_runs


@pytest.fixture
def refused(recipe_runs, monkeypatch, capsys):
    """Runs the recipe with arguments that cannot work; gives the message."""
    import tinker_cookbook.engine.model.base_model as base_model

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(base_model.BaseModel, "__init__", never)

    def run(
        *arguments: str, name: str = "refused", behavior: str = "raise", home: Path | None = None
    ) -> str:
        line = recipe_runs.words(name, behavior, *arguments)
        monkeypatch.setenv("TINKER_COOKBOOK_HOME", str(home or recipe_runs.folder / "home"))
        monkeypatch.setattr(sys, "argv", ["sl_basic", *line])
        with pytest.raises(SystemExit) as ended:
            run_entrypoint(sl_basic.main)
        printed = capsys.readouterr()
        assert ended.value.code == 1
        assert "Traceback" not in printed.err
        return printed.err.strip()

    return run


@pytest.fixture
def nobody():
    """Address of a server that knows nobody."""
    with json_server(lambda body, headers: (401, {})) as address:
        yield address


# --- behavior_if_log_dir_exists=delete: nothing is lost where the new run cannot start -----------


@pytest.mark.parametrize(
    "wrong",
    [
        "dataset_path=/nope",
        "device=cuda",
        "wandb_project=x",
        "load_checkpoint_path=tinker://foo/weights/bar",
        "backend=http://127.0.0.1:9",
        "learning_rate=-1",
    ],
)
def test_delete_and_a_run_that_cannot_start(
    refused, recipe_runs, monkeypatch, tmp_path, wrong, nobody
):
    monkeypatch.setenv("TINKER_API_KEY", "tml-nobody")
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("WANDB_MODE", "online")
    # It answers; without an answer the run would be logged offline.
    monkeypatch.setenv("WANDB_BASE_URL", nobody)
    old = tmp_path / "run"
    old.mkdir()
    (old / "metrics.jsonl").write_text('{"step": 1, "old": true}\n')
    remote = REMOTE if wrong.startswith("backend") else ()
    refused(wrong, *remote, f"log_path={old}", behavior="delete")
    assert (old / "metrics.jsonl").read_text() == '{"step": 1, "old": true}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


# --- settings: refused before anything is read, let alone loaded -----------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["renderer_name=qwen33"], ["renderer_name: got 'qwen33'", "role_colon", "mean 'qwen3'"]),
        (["dataset=exampel"], ["dataset=exampel", "dataset_path=", "leave one out"]),
        (["model_name=smollm"], ["model_name: got 'smollm'", "folder", "SmolLM2-135M-Instruct"]),
        (["max_length=513"], ["max_length: got 513", "context", "at most 512"]),
        (["backend=local", "base_url=http://x"], ["backend=local", "base_url=http://x", "leave"]),
        (["backend=tinker", *REMOTE], ["TINKER_API_KEY: got none", "export", "backend=local"]),
        (["test_size=3"], ["test_size=3", "test_path=", "leave one out"]),
        (["load_checkpoint_path=best"], ["load_checkpoint_path: got 'best'", "tinker://RUN"]),
        (["log_path=s3://bucket/run"], ["log_path=s3://bucket/run", "local path"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_settings(refused, monkeypatch, arguments, words):
    from tinker_cookbook.supervised import conversation_file

    def never(*args: object) -> None:
        raise AssertionError("the data was read")

    monkeypatch.setattr(conversation_file, "read_conversations", never)
    message = refused(*arguments)
    for word in words:
        assert word in message, message


def test_a_log_path_that_cannot_be_written(refused, recipe_runs):
    message = refused(f"log_path={recipe_runs.folder / 'train.jsonl' / 'run'}")
    assert "log_path=" in message
    assert "cannot be written: Not a directory" in message
    assert "choose another folder" in message


# --- data ------------------------------------------------------------------------------------

GOOD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f"{GOOD}\n{GOOD}\n{{oops\n", ["bad.jsonl:3: not JSON", "expected lines like"]),
        (f"{GOOD}\n{GOOD}\n", ["batch_size: got 4", "at most 2", "set batch_size=2"]),
    ],
    ids=["not JSON", "few"],
)
def test_data(refused, recipe_runs, content, words):
    path = recipe_runs.folder / "bad.jsonl"
    path.write_text(content)
    message = refused(f"dataset_path={path}")
    for word in words:
        assert word in message, message


# --- checkpoints -----------------------------------------------------------------------------


def last_state(place: RecipeRuns) -> str:
    lines = (place.folder / "trained" / "checkpoints.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["state_path"]


def test_weights_that_are_not_there(refused, trained):
    message = refused("load_checkpoint_path=tinker://nobody/weights/000001")
    assert "'nobody'" in message
    path = last_state(trained).replace("/final", "/finel")
    message = refused(f"load_checkpoint_path={path}")
    assert "finel" in message
    assert "final" in message


def test_a_refused_run_can_be_started_again_at_once(refused, trained):
    wrong = "load_checkpoint_path=tinker://nobody/weights/000001"
    assert refused(wrong, name="again") == refused(wrong, name="again")
    assert (trained.folder / "again" / "config.json").exists()
    done = trained.run("again", "raise", "max_steps=2")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "already holds a run" in refused(name="again")


def test_weights_of_another_shape(refused, trained):
    message = refused(f"load_checkpoint_path={last_state(trained)}", "lora_rank=8")
    assert "lora_rank: got 8, but the adapter in" in message
    assert "set lora_rank=4" in message


@pytest.mark.parametrize("how", ["load", "resume"])
def test_weights_of_another_model(refused, trained, how):
    other = trained.folder / f"other-model-{how}"
    shutil.copytree(trained.model, other)
    if how == "load":
        message = refused(f"load_checkpoint_path={last_state(trained)}", f"model_name={other}")
    else:
        log = reopened(trained, f"other-{how}")
        message = refused(f"model_name={other}", name=log, behavior="resume")
        assert f"model_name: {trained.model} → {other}" in message
        # Allowed or not, weights of another model do not fit.
        allowed = "allow_config_change=true"
        message = refused(f"model_name={other}", allowed, name=log, behavior="resume")
    assert f"model_name: got {other}" in message
    assert f"was trained on {trained.model}" in message
    assert f"set model_name={trained.model}" in message


@pytest.mark.parametrize("how", ["load", "resume"])
@pytest.mark.parametrize("file", ["adapter_model.safetensors", "state.json"])
def test_truncated_weights(refused, trained, how, file):
    home = trained.folder / f"home-{how}-{file}"
    shutil.copytree(trained.folder / "home", home)
    log = reopened(trained, f"cut-{how}-{file}")
    lines = (trained.folder / log / "checkpoints.jsonl").read_text().splitlines()
    path = json.loads(lines[-1])["state_path"]
    damaged = trained.weights(path, home) / file
    damaged.write_bytes(damaged.read_bytes()[:-20])
    if how == "load":
        message = refused(f"load_checkpoint_path={path}", home=home)
    else:
        message = refused(name=log, behavior="resume", home=home)
    assert str(damaged) in message
    assert "CheckpointError" in message


def reopened(place: RecipeRuns, name: str) -> str:
    """A copy of the run that stopped before its last step."""
    shutil.copytree(place.folder / "trained", place.folder / name)
    checkpoints = place.folder / name / "checkpoints.jsonl"
    checkpoints.write_text(checkpoints.read_text().splitlines()[0] + "\n")
    return name


# --- two runs at once, full disks, no network ------------------------------------------------


def test_two_runs_on_one_log_path(refused, recipe_runs):
    process = recipe_runs.start(recipe_runs.command("busy", "raise", "num_epochs=500"))
    try:
        wait_for(lambda: count_lines(recipe_runs.folder / "busy" / "metrics.jsonl") > 1, process)
        before = (recipe_runs.folder / "busy" / "config.json").read_bytes()
        for behavior in ("raise", "resume", "delete", "ask"):
            message = refused(name="busy", behavior=behavior)
            assert f"in use by another run (pid {process.pid}" in message
            assert "log_path=…" in message
        assert process.poll() is None
        assert (recipe_runs.folder / "busy" / "config.json").read_bytes() == before
    finally:
        process.kill()
        finish(process)


@pytest.fixture(scope="module")
def plenty(recipe_runs):
    """The rows of a run of 12 steps whose disk was large enough."""
    assert recipe_runs.run("plenty").returncode == 0
    return recipe_runs.rows("plenty")


@pytest.fixture
def small_disk(recipe_runs, tmp_path):
    """An empty file system of 4 MB; skips where this user may not mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("which", ["log_path", "checkpoints"])
def test_a_disk_that_fills_up(recipe_runs, plenty, small_disk, which):
    name, extra = f"disk-{which}", {}
    log = recipe_runs.folder / name
    if which == "log_path":
        log.symlink_to(small_disk / "log")
        (small_disk / "log").mkdir()
    else:
        extra = {"TINKER_COOKBOOK_HOME": str(small_disk / "home")}
    process, paused = recipe_runs.start_paused(CHECKPOINT_LINE, 1, name, **extra)
    fill(small_disk / "filler")
    paused.unlink()
    stopped = finish(process)
    assert stopped.returncode == 1
    assert "Traceback" not in stopped.stderr
    message = stopped.stderr.strip().splitlines()[-1]
    assert "intact" in message
    assert "space" in message
    rows = recipe_runs.rows(name)  # every line is whole
    assert 1 < len(rows) < len(plenty)
    assert rows == plenty[: len(rows)]
    (small_disk / "filler").unlink()
    continued = finish(recipe_runs.start(recipe_runs.command(name, "resume"), **extra))
    assert continued.returncode == 0, continued.stderr[-2000:]
    assert recipe_runs.rows(name) == plenty


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"\0" * size) == size:
                    pass
            except OSError:
                continue


def test_no_network_and_nothing_cached(recipe_runs, tmp_path):
    silent = socket.create_server(("127.0.0.1", 0))  # takes calls and never answers
    silent_hub = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
    closed = "http://127.0.0.1:9"
    no_index = {"PIP_INDEX_URL": closed, "PIP_CONFIG_FILE": "/dev/null", "PIP_EXTRA_INDEX_URL": ""}
    demo = "HuggingFaceTB/SmolLM2-135M-Instruct"
    cases = {
        "offline": ("Qwen/Qwen3-0.6B", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        "closed": ("Qwen/Qwen3-0.6B", {"HF_ENDPOINT": closed}, f"Hub ({closed})"),
        "silent": ("Qwen/Qwen3-0.6B", silent_hub, "Hub (http://127.0.0.1"),
        "demo": (demo, {"HF_ENDPOINT": closed, **no_index}, "demo package: pip could not fetch"),
    }
    begun = time.monotonic()
    running = {}
    for name, (model, environment, words) in cases.items():
        command = recipe_runs.command(name, "raise", f"model_name={model}", "learning_rate=None")
        home = {"HF_HOME": str(tmp_path / "hub"), "TINKER_COOKBOOK_HOME": str(tmp_path / name)}
        environment = {"HF_HUB_OFFLINE": "0", **home, **environment}
        process = recipe_runs.start(command, fresh=True, **environment)
        running[name] = (process, words, model)
    for name, (process, words, model) in running.items():
        stopped = finish(process)
        assert stopped.returncode == 1, name
        assert "Traceback" not in stopped.stderr
        assert f"model {model!r} was not found" in stopped.stderr
        assert words in stopped.stderr, stopped.stderr
        assert "Next step:" in stopped.stderr
    assert time.monotonic() - begun < 200  # all four; a busy machine needs 10 s for one
    silent.close()
