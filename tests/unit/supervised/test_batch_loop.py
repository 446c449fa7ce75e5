"""The loop over batches: skipped batches, the length of a run, and changed settings on resuming.

Each run of the 260k-parameter model takes about 0.2 s.
"""

from __future__ import annotations

import json
from pathlib import Path

import chz
import pytest
from homes import new_home
from loop_runs import config_of, rows, run

from tinker_cookbook.backends import connect
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError, DataValidationError
from tinker_cookbook.supervised.batch_loop import Batch
from tinker_cookbook.supervised.train import CrossEntropy
from tinker_cookbook.training.config import checkpoint_interval


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(tmp_path / "home"))


# --- batches without a token to train on ---------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True])
def test_an_empty_batch_is_skipped_and_counted(stories_model, tmp_path, capsys, plain):
    config = config_of(stories_model, tmp_path, empty=[1, 3], plain=plain, num_epochs=2)
    found = run(config)
    assert [row["step"] for row in found] == list(range(1, 9))
    skipped = [row["step"] for row in found if row.get("num_skipped_batches")]
    assert skipped == [2, 4, 6, 8]
    assert [row["num_sequences"] for row in found] == [2, 0] * 4
    assert all("train_mean_nll" in row for row in found if row["step"] not in skipped)
    assert found[-1]["progress"] == 1.0
    said = capsys.readouterr().out
    assert "step 2: batch 1 of epoch 0 is skipped" in said
    assert said.count("is skipped") == 1
    assert "further ones are only counted" in said
    assert "4 of 8 batches were skipped" in said


def test_a_resumed_run_skips_the_same_batches(stories_model, tmp_path, monkeypatch, capsys):
    straight = run(config_of(stories_model, tmp_path / "a", empty=[1], num_epochs=2))
    config = config_of(stories_model, tmp_path / "b", empty=[1], num_epochs=2)
    stop_at(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(tmp_path / "home"))
    capsys.readouterr()
    assert run(config) == straight
    assert "2 of 8 batches were skipped" in capsys.readouterr().out


def test_data_without_anything_to_train_is_refused_before_a_model_is_loaded(
    stories_model, tmp_path, monkeypatch
):
    config = config_of(stories_model, tmp_path, empty=[0, 1, 2, 3])
    with pytest.raises(DataValidationError, match="none of the examples in 4 batches"):
        run(config)
    assert not Path(config.log_path).exists()


# --- the length of a run -------------------------------------------------------------------------


def test_max_steps_beyond_the_data_goes_through_it_again(stories_model, tmp_path):
    config = config_of(stories_model, tmp_path, max_steps=10, eval_every=0)
    found = run(config)
    assert [row["epoch"] for row in found] == [0] * 4 + [1] * 4 + [2] * 2
    # The schedule is that of the real length.
    assert found[5]["learning_rate"] == pytest.approx(0.01 * (1 - 5 / 10))
    assert [row["progress"] for row in found] == pytest.approx([k / 10 for k in range(1, 11)])


# --- evaluations ---------------------------------------------------------------------------------


def evaluated(found: list[dict]) -> list[int]:
    return [row["step"] for row in found if "test/nll" in row]


def test_eval_every_0_evaluates_at_neither_end(stories_model, tmp_path):
    for every, steps in ((0, []), (3, [0, 3, 4])):
        folder = tmp_path / str(every)
        found = run(config_of(stories_model, folder, test=1, eval_every=every))
        assert evaluated(found) == steps


def test_max_steps_0_evaluates_the_weights_that_are_given(stories_model, tmp_path):
    trained = config_of(stories_model, tmp_path / "a", test=1, eval_every=4)
    last = run(trained)[-1]
    path = json.loads((Path(trained.log_path) / "checkpoints.jsonl").read_text().splitlines()[-1])
    settings = {"test": 1, "max_steps": 0, "load_checkpoint_path": path["state_path"]}
    (row,) = run(config_of(stories_model, tmp_path / "b", **settings))
    assert row["step"] == 0
    assert row["test/nll"] == last["test/nll"]
    assert not (tmp_path / "b" / "run" / "checkpoints.jsonl").exists()


@pytest.mark.parametrize("settings", [{}, {"test": 1, "eval_every": 0, "infrequent_eval_every": 0}])
def test_max_steps_0_without_an_evaluation(stories_model, tmp_path, settings):
    with pytest.raises(ConfigurationError, match="nothing to evaluate"):
        run(config_of(stories_model, tmp_path, max_steps=0, **settings))


# --- resuming when checkpoints are gone ----------------------------------------------------------


def test_a_run_resumes_from_the_newest_checkpoint_that_exists(
    stories_model, tmp_path, monkeypatch, capsys
):
    settings = {"num_epochs": 2, "rolling_save_every": 1}
    straight = run(config_of(stories_model, tmp_path / "a", **settings))
    config = config_of(stories_model, tmp_path / "b", **settings)
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        with pytest.raises(KeyboardInterrupt):
            run(config)
    file = Path(config.log_path) / "checkpoints.jsonl"
    saved = [json.loads(line)["state_path"] for line in file.read_text().splitlines()]
    names = [path.rpartition("/")[2] for path in saved]
    assert names[:2] == ["000002", "000004"]
    remove(saved[1:])
    capsys.readouterr()
    assert run(config) == straight
    said = capsys.readouterr().out
    assert f"later checkpoints that no longer exist: {len(saved) - 1}; the last one: " in said
    assert f"continuing after step 2 from {saved[0]}" in said
    assert saved[1] not in file.read_text()
    assert saved[1] in file.with_name(f"{file.name}.pre_resume_000002").read_text()


def test_a_run_without_any_checkpoint_left_is_refused(stories_model, tmp_path, monkeypatch):
    config = config_of(stories_model, tmp_path)
    run(config)
    longer = chz.replace(config, num_epochs=2)
    listed = (Path(config.log_path) / "checkpoints.jsonl").read_text()
    rest = "tinker_cookbook.backends.local_rest.LocalRestClient.get_weights_info_by_tinker_path"
    with monkeypatch.context() as patch:
        # A lost connection does not show that a checkpoint is gone.
        patch.setattr(rest, raise_connection_error)
        with pytest.raises(ConnectionError):
            run(longer)
    remove([json.loads(line)["state_path"] for line in listed.splitlines()])
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints exists any more"):
        run(longer)
    assert (Path(config.log_path) / "checkpoints.jsonl").read_text() == listed


def remove(paths: list[str]) -> None:
    with connect("local", device="cpu") as connection:
        rest = connection.service.create_rest_client()
        for path in paths:
            rest.delete_checkpoint_from_tinker_path(path).result()


def raise_connection_error(*_: object) -> None:
    raise ConnectionError


# --- the end of a run ----------------------------------------------------------------------------


# --- resuming with other settings ----------------------------------------------------------------


def test_settings_that_decide_what_a_step_means_are_refused_by_name(
    stories_model, tmp_path, capsys
):
    config = config_of(stories_model, tmp_path)
    before = run(config)
    files = {path: path.read_bytes() for path in Path(config.log_path).glob("*.json*")}
    capsys.readouterr()
    other = chz.replace(config, learning_rate=0.5, lora_rank=8, seed=1, max_steps=9)
    with pytest.raises(ConfigurationError) as refused:
        run(other)
    message = str(refused.value)
    for change in ("learning_rate: 0.01 → 0.5", "lora_rank: 4 → 8", "seed: 0 → 1"):
        assert change in message
    assert "allow_config_change=true" in message
    assert "max_steps" not in message
    # Neither is the command repeated that just failed, nor was anything changed.
    assert "continue with" not in capsys.readouterr().out
    assert {path: path.read_bytes() for path in files} == files
    assert rows(config) == before
    assert len(run(chz.replace(config, learning_rate=0.5, allow_config_change=True))) == 4


def test_another_dataset_is_refused(stories_model, tmp_path):
    config = config_of(stories_model, tmp_path)
    run(config)
    builder = chz.replace(config.dataset_builder, empty=[2])
    with pytest.raises(ConfigurationError, match=r"empty: \[\] → \[2\]"):
        run(chz.replace(config, dataset_builder=builder))


def test_a_longer_run_is_allowed_and_reported(stories_model, tmp_path, capsys):
    config = config_of(stories_model, tmp_path)
    run(config)
    capsys.readouterr()
    found = run(chz.replace(config, num_epochs=2, save_every=3, eval_every=7))
    assert [row["step"] for row in found] == list(range(1, 9))
    said = capsys.readouterr().out
    assert "changed since the run began: num_epochs: 1 → 2" in said
    assert "save_every:" not in said


def stop_at(monkeypatch, step: int) -> None:
    """Ctrl-C as the pass of this step is submitted."""
    calls = 0
    submit = CrossEntropy.submit

    def counted(self, client, batch: Batch):
        nonlocal calls
        calls += 1
        if calls == step:
            raise KeyboardInterrupt
        return submit(self, client, batch)

    monkeypatch.setattr(CrossEntropy, "submit", counted)


def test_a_run_prints_the_settings_that_are_changed(stories_model, tmp_path, capsys):
    config = config_of(stories_model, tmp_path, count=40, save_every=None)
    run(config)
    said = capsys.readouterr().out
    first, *settings = said.split("(all settings")[0].split()
    assert {"learning_rate=0.01", "lora_rank=4", "save_every=15"} <= {first, *settings}
    assert "seed=" not in said
    assert "num_epochs" not in said
    assert "renderer_name is not set" in said
    assert checkpoint_interval(config, 900) == 45
