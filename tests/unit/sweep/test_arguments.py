"""What the sweep makes of its command line, before anything is started."""

from __future__ import annotations

import re

import pytest

from recipes import sl_loop
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.config import write_config
from tinker_cookbook.sweep.arguments import make_points, parse_sweep, run_name


def parse(*words: str):
    return parse_sweep(["recipes.sl_loop", *words])


def test_the_grid_is_the_product_of_all_values(tmp_path):
    sweep = parse(
        "learning_rate=1e-4,3e-4", "lora_rank=8,32", "seed=3", f"log_dir={tmp_path}", "jobs=2"
    )
    assert [point.name for point in sweep.points] == [
        "learning_rate=1e-4,lora_rank=8",
        "learning_rate=1e-4,lora_rank=32",
        "learning_rate=3e-4,lora_rank=8",
        "learning_rate=3e-4,lora_rank=32",
    ]
    assert sweep.points[1].settings == {"learning_rate": "1e-4", "lora_rank": "32", "seed": "3"}
    assert sweep.points[1].swept == {"learning_rate": "1e-4", "lora_rank": "32"}
    assert (sweep.keys.jobs, sweep.keys.server, sweep.keys.metric) == (2, None, None)
    assert sweep.models == ("HuggingFaceTB/SmolLM2-135M-Instruct",)
    assert not any(tmp_path.iterdir())


def test_models_and_the_keys_that_go_to_the_server(tmp_path):
    models, settings = "model_name=a/b,c/d,a/e", {"device": "cpu", "sampler": "builtin"}
    words = [f"{key}={value}" for key, value in settings.items()]
    sweep = parse_sweep(["recipes.rl_loop", models, *words, f"log_dir={tmp_path}"])
    assert sweep.models == ("a/b", "c/d", "a/e")
    assert sweep.server_settings == settings
    assert sweep.points[0].settings == {"model_name": "a/b"}


def test_a_file_of_settings_and_the_recorded_settings_of_a_run(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"lora_rank: [8, 32]\nseed: 3\nwandb_name: 'a, b'\nlog_dir: {tmp_path}\n")
    sweep = parse(f"config={file}", "seed=4")
    assert [point.name for point in sweep.points] == ["lora_rank=8", "lora_rank=32"]
    expected = {"lora_rank": "8", "seed": "4", "wandb_name": "a, b"}
    assert sweep.points[0].settings == expected
    assert sweep.log_dir == tmp_path
    recorded = sl_loop.Config(log_path=str(tmp_path), lora_rank=4, model_name="a/b")
    write_config(tmp_path / "config.json", recorded)
    sweep = parse(f"config={tmp_path}", "seed=1,2", f"log_dir={tmp_path}", "jobs=2")
    assert [point.name for point in sweep.points] == ["seed=1", "seed=2"]
    assert (sweep.models, sweep.keys.jobs) == (("a/b",), 2)
    with pytest.raises(ConfigurationError, match="did you mean 'seed'"):
        parse(f"config={tmp_path}", "sead=1,2", f"log_dir={tmp_path}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lora_rank=1,2"], "log_dir: got no value, and it is required"),
        (["learing_rate=1,2", "log_dir=x"], "did you mean 'learning_rate'"),
        (["job=2", "log_dir=x"], "did you mean 'jobs'"),
        (["lora_rank=1,x", "log_dir=x"], "lora_rank: got 'x', expected a whole number"),
        (["lora_rank=1,,2", "log_dir=x"], "expected values between the commas"),
        (["lora_rank=1,1", "log_dir=x"], "each value once"),
        (["seed=1", "seed=2", "log_dir=x"], "seed: got it twice"),
        (["log_path=y", "log_dir=x"], "log_path: got it, but the sweep sets it"),
        (["device=cpu,cuda", "log_dir=x"], "device: got 'cpu,cuda', expected auto, cuda"),
        (["device=cpu", "device=cuda", "log_dir=x"], "device: got it twice"),
        (["jobs=0", "log_dir=x"], "jobs: got 0, expected at least 1"),
        (["jobs=1,2", "log_dir=x"], "jobs: got '1,2', expected a whole number"),
        (["server=http://h", "log_dir=x"], "TINKER_API_KEY: got none"),
        (["server=http://h", "dtype=float32", "log_dir=x"], "dtype: the server"),
        (["log_dir=s3://bucket/x"], "log_dir=s3://bucket/x is a URL"),
        (["other", "log_dir=x"], "expected one recipe first"),
    ],
)
def test_invalid_settings_are_refused(words, message):
    with pytest.raises(ConfigurationError, match="^.*" + message):
        parse(*words)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("recipes.sl_lop", "did you mean 'sl_loop'"),
        ("nowhere.at_all", "is no program"),
        ("recipes.start", "has no main"),
        ("recipes.prompt_distillation.create_data", "there is no such key"),
    ],
)
def test_a_recipe_that_cannot_be_swept(recipe, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_sweep([recipe, "log_dir=x"])


def test_names_are_safe_and_apart():
    assert run_name({}) == "run"
    first, second = run_name({"model_name": "/models/a/x"}), run_name({"model_name": "/models/b/x"})
    assert first != second
    assert first.startswith("model_name=x-")
    for value in ("a b", "../..", "ü", "x" * 500, "a\nb"):
        assert re.fullmatch(r"[\w.=,-]{1,130}", run_name({"key": value}), re.ASCII)
    # A grid that grows finds its runs again: a name depends on its own point alone.
    few, more = make_points({"key": ["a/b", "c"]}), make_points({"key": ["d", "c", "a/b"]})
    assert {point.name for point in few} < {point.name for point in more}
    with pytest.raises(ConfigurationError, match="upper and lower case"):
        make_points({"key": ["Mean", "mean"]})
