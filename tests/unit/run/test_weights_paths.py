"""Names of weights in settings: ``LOG_PATH``, ``LOG_PATH@STEP`` and ``tinker://`` paths."""

from __future__ import annotations

import json

import chz
import pytest

from recipes.rl_basic import CLIConfig
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.preference.train_dpo import Config as DPOConfig
from tinker_cookbook.run.config import dump_config, load_config
from tinker_cookbook.run.weights_paths import check_tinker_path, resolve_weights
from tinker_cookbook.sampling_model import SamplingModelSettings
from tinker_cookbook.weights.settings import CheckpointSettings

STATE, SAMPLER = "tinker://r/weights/", "tinker://r/sampler_weights/"
LINES = [
    {"name": "000010", "batch": 10, "state_path": STATE + "000010"},
    {"name": "best", "batch": 10, "best": True, "state_path": STATE + "best-000010",
     "sampler_path": SAMPLER + "best-000010"},
    {"name": "000020", "batch": 20, "state_path": STATE + "000020"},
    {"name": "000020", "batch": 20, "sampler_path": SAMPLER + "000020"},
    {"name": "final", "batch": 30, "final": True, "state_path": STATE + "final",
     "sampler_path": SAMPLER + "final"},
]  # fmt: skip


def folder(path, lines):
    path.mkdir()
    (path / "checkpoints.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "step", "state", "sampler"),
    [
        (5, "", "final", "final"),
        (5, "@final", "final", "final"),
        (5, "@30", "final", "final"),
        (5, "@best", "best-000010", "best-000010"),
        (5, "@20", "000020", "000020"),
        (5, "@000020", "000020", "000020"),
        # The state that stays; only the best one was saved for sampling.
        (5, "@10", "000010", "best-000010"),
        # A run that was stopped: its newest checkpoint, which need not be for sampling.
        (3, "", "000020", STATE + "000020"),
        (1, "@10", "000010", STATE + "000010"),
        # The best one is older, so it is taken only if there is no other.
        (2, "", "000010", STATE + "000010"),
    ],
)
def test_a_run_and_a_step_name_a_path(tmp_path, lines, step, state, sampler):
    name = f"{folder(tmp_path / 'my@run', LINES[:lines])}{step}"
    assert resolve_weights(name, "weights", "x") == STATE + state
    expected = sampler if sampler.startswith("tinker") else SAMPLER + sampler
    assert resolve_weights(name, "sampler_weights", "x") == expected


def test_invalid_weights_paths_are_refused(tmp_path, monkeypatch):
    run = folder(tmp_path / "run", LINES)
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no checkpoint of step '7'; expected a step of"):
        resolve_weights("run@7", "sampler_weights", "x")
    with pytest.raises(ConfigurationError, match=r"10, 10 \(best\), 20, 30 \(final\)$"):
        resolve_weights("run@7", "weights", "x")
    with pytest.raises(ConfigurationError, match="got 'run@' without a step"):
        resolve_weights("run@", "weights", "x")
    with pytest.raises(ConfigurationError, match="x: got '', expected the log_path of a run"):
        resolve_weights("", "weights", "x")
    with pytest.raises(ConfigurationError, match="it has no such checkpoint yet"):
        resolve_weights(str(folder(tmp_path / "new", [])), "weights", "x")
    # Not a run: a model's name or folder stays, and a setting of weights refuses it.
    for name, why in (
        ("Qwen/Qwen3-0.6B", "no such folder: Qwen/Qwen3-0.6B"),
        ("model", "model has no checkpoints.jsonl"),
        ("nope@20", "no such folder: nope$"),
        ("tinker://r/final", "expected tinker://RUN/weights/NAME"),
    ):
        assert resolve_weights(name, "weights", "x") == name
        with pytest.raises(ConfigurationError, match=why):
            check_tinker_path("x", name, "weights", "the run")
    assert resolve_weights(None, "weights", "x") is None
    # A setting has the path, so that the record of a run stays right when the run continues.
    for settings, field, path in (
        (TeacherConfig(base_model="m", load_checkpoint_path="run@20"), "load_checkpoint_path",
         SAMPLER + "000020"),
        (CLIConfig(load_checkpoint_path=f"{run}"), "load_checkpoint_path", STATE + "final"),
        (CLIConfig(kl_reference_path="run@10"), "kl_reference_path", SAMPLER + "best-000010"),
        (DPOConfig(model_name="m", reference_model_name="run"), "reference_model_name",
         SAMPLER + "final"),
        (DPOConfig(model_name="m", reference_model_name="model"), "reference_model_name", "model"),
        (SamplingModelSettings(model_path="run"), "model_path", SAMPLER + "final"),
        (CheckpointSettings(model_path="run@best"), "model_path", SAMPLER + "best-000010"),
    ):  # fmt: skip
        assert getattr(settings, field) == path
        assert dump_config(settings)[field] == path
        assert load_config(dump_config(settings)) == chz.replace(settings, **{field: path})
