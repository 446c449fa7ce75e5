"""Replays and forks of recorded runs of supervised training and of preferences."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import chz
import numpy as np
import pytest
from homes import new_home
from loop_runs import config_of, rows

from tinker_cookbook import fork
from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.record.read import open_record
from tinker_cookbook.replay.command import ReplaySettings, compare
from tinker_cookbook.replay.compared import Result
from tinker_cookbook.run.config import load_config
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.common import datum_from_tokens_weights
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder


class Pairs(SupervisedDataset):
    """Four batches of three pairs: random prompts, answers of different lengths."""

    def get_batch(self, index):
        rng, data = np.random.default_rng(index), []
        for _ in range(3):
            prompt = rng.integers(3, 500, size=rng.integers(3, 9))
            for _ in range(2):
                answer = rng.integers(3, 500, size=rng.integers(2, 9))
                weights = np.r_[np.zeros(len(prompt)), np.ones(len(answer))]
                data.append(datum_from_tokens_weights(np.r_[prompt, answer], weights))
        return data

    def __len__(self):
        return 4


@chz.chz
class PairsBuilder(SupervisedDatasetBuilder):
    def __call__(self):
        return Pairs(), Pairs()


MAINS = {"supervised": train.main, "dpo": train_dpo.main_async}


def config_for(kind, model, folder):
    """A run of four steps with a checkpoint after the second."""
    config = config_of(model, folder, empty=[2], lr_schedule="linear", test=2, eval_every=4)
    if kind == "supervised":
        return config
    settings = {name: getattr(config, name) for name in ("model_name", "lora_rank", "log_path")}
    settings |= {"backend": "local", "device": "cpu", "dtype": "float32", "save_every": 2}
    return train_dpo.Config(
        dataset_builder=PairsBuilder(),
        learning_rate=0.01,
        show_samples=0,
        eval_every=4,
        **settings,
    )


@pytest.fixture(scope="module", params=list(MAINS))
def recorded(request, stories_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_COOKBOOK_HOME", new_home(folder / "home"))
        config = config_for(request.param, stories_model, folder)
        asyncio.run(MAINS[request.param](config))
        yield request.param, Path(config.log_path)


@pytest.fixture(autouse=True)
def _home_of_the_run(recorded, monkeypatch):
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(recorded[1].parent / "home"))


def replayed(folder, step) -> Result:
    return asyncio.run(compare(ReplaySettings(run=str(folder), step=step)))


def test_an_update_is_repeated(recorded):
    kind, folder = recorded
    # Step 4 is trained with a checkpoint after it, from the one after step 2.
    results = {step: replayed(folder, step) for step in (2, 4)}
    for step, result in results.items():
        assert result.identical, list(result.lines())
        assert len(result.compared) == (6 if kind == "dpo" else 2)
        assert result.also, f"the adapter after step {step}"
    with pytest.raises(
        ConfigurationError, match="5 recorded steps" if kind == "dpo" else "no token"
    ):
        replayed(folder, 5 if kind == "dpo" else 3)


def test_the_record_has_the_columns_of_its_loss(recorded):
    kind, folder = recorded
    record, metrics = open_record(folder), read_rows(folder / "metrics.jsonl")
    for row in metrics[1:]:
        table = record.table(row["step"])
        if table is None:  # a batch without a token to train on
            assert "num_skipped_batches" in row
            continue
        data = table.to_pylist()
        if kind == "supervised":
            assert mean_loss(data) == pytest.approx(row["train_mean_nll"], rel=1e-5)
            continue
        assert [(one["pair"], one["chosen"]) for one in data][:3] == [
            (0, True),
            (0, False),
            (1, True),
        ]
        margins = [one["margin"] for one in data]
        assert np.mean(margins) == pytest.approx(row["margin"], abs=1e-9)
        first = data[0]
        answered = np.asarray(first["weights"]) > 0
        difference = np.subtract(first["logprobs"], first["reference_logprobs"])[answered].sum()
        assert first["reward"] == pytest.approx(0.1 * difference, abs=1e-6)
    for row in (metrics[0], metrics[-1]):
        held_out = record.table(row["step"], "eval_test")
        assert held_out is not None
        data = held_out.to_pylist()
        scored = data if kind == "supervised" else data[::2]
        assert mean_loss(scored) == pytest.approx(row["test/nll"], rel=1e-5)
        if kind == "dpo":
            margins = [one["margin"] for one in data]
            assert np.mean(margins) == pytest.approx(row["test/margin"], abs=1e-9)


def mean_loss(rows):
    weights, logprobs = (
        np.concatenate([one[name] for one in rows]) for name in ("weights", "logprobs")
    )
    return -(weights * logprobs).sum() / weights.sum()


def test_weights_that_expired_are_trained_again(recorded):
    folder = recorded[1]
    checkpoints = folder / "checkpoints.jsonl"
    text = checkpoints.read_text()
    first = json.loads(text.splitlines()[0])
    gone = first | {"state_path": first["state_path"].replace("000002", "000099")}
    missing = folder / "record" / "step_000001.train.parquet"
    try:
        checkpoints.write_text("\n".join([json.dumps(gone), *text.splitlines()[1:]]) + "\n")
        assert replayed(folder, 4).identical
        content = missing.read_bytes()
        missing.unlink()
        with pytest.raises(DataError, match=r"record has no step 1; replay a step up to 1"):
            replayed(folder, 4)
        missing.write_bytes(content)
    finally:
        checkpoints.write_text(text)


def test_a_fork_repeats_the_rest_of_its_run(recorded, tmp_path):
    kind, folder = recorded
    target = tmp_path / "fork"
    fork.make_fork(fork.ForkSettings(run=str(folder), step=2, log_path=str(target)))
    config = chz.replace(
        load_config(target), log_path=str(target), behavior_if_log_dir_exists="resume"
    )
    asyncio.run(MAINS[kind](config))
    assert rows(config) == rows(chz.replace(config, log_path=str(folder)))
    tables = [open_record(one).table(4) for one in (target, folder)]
    assert tables[0] is not None
    assert tables[0].equals(tables[1])
