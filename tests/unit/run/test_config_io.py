from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from config_samples import FileBuilder, HubBuilder, Level, Retry, Run, Shape, Tools, double
from hypothesis import given
from hypothesis import strategies as st

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.config import dump_config, load_config, lost_fields, write_config


def round_trip(config):
    return load_config(json.loads(json.dumps(dump_config(config), allow_nan=False)))


def full_run(builder=FileBuilder) -> Run:
    return Run(
        learning_rate=3e-4,
        dataset_builder=builder(file_path="b.jsonl", shape=Shape.ALL),
        evaluators=[FileBuilder(batch_size=1), HubBuilder(shape=Shape.LAST)],
        nested=[[FileBuilder(), None], [], [HubBuilder(batch_size=9)]],
        by_name={"a": HubBuilder(), "b": {"c": [1, 2.5, None, "x"]}},
        level=Level.HIGH,
        map_fn=double,
        retry=Retry(times=1, levels=(Level.LOW, Level.HIGH)),
        out_dir=Path("/data/out"),
    )


def test_polymorphic_run_round_trips_to_an_equal_object():
    run = full_run()
    loaded = round_trip(run)
    assert loaded == run
    assert type(loaded.dataset_builder) is FileBuilder
    assert loaded.dataset_builder.shape is Shape.ALL
    assert loaded.level is Level.HIGH
    assert loaded.map_fn is double
    assert type(loaded.nested[2][0]) is HubBuilder
    assert isinstance(loaded.out_dir, Path)


def test_plain_fields_stand_at_their_own_place():
    data = dump_config(full_run())
    assert data["learning_rate"] == 3e-4
    assert data["_type"] == "config_samples:Run"
    assert data["dataset_builder"]["shape"] == "all_assistant_messages"
    assert data["level"] == 2
    assert data["map_fn"] == "config_samples:double"
    assert data["out_dir"] == "/data/out"
    assert data["renderer_name"] is None
    assert data["log_path"] == str(Path.home() / "x")  # the value in force


@pytest.mark.parametrize(
    "odd",
    [
        {1, 2, 3},
        frozenset({"x"}),
        math.inf,
        functools.partial,
        Shape,
        Tools.make,
        len,
        [None, True, 0, ""],
        {"deep": [{"level": Level.LOW, "file": FileBuilder()}]},
    ], ids=repr,
)  # fmt: skip
def test_odd_values_round_trip(odd):
    run = Run(dataset_builder=FileBuilder(), odd=odd)
    loaded = round_trip(run)
    assert loaded == run
    assert type(loaded.odd) is type(odd)


plain = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
keys = st.text(max_size=4) | st.integers() | st.sampled_from(["_type", "_kinds", "a/b", "~1"])
values = st.recursive(
    plain | st.sampled_from([*Shape, *Level, double, Path("p/q"), FileBuilder()]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_any_nesting_round_trips(odd):
    run = Run(dataset_builder=FileBuilder(), odd=odd)
    assert round_trip(run) == run


def test_lambda_closure_and_live_object_are_marked_and_refused():
    factor = 3
    run = Run(
        dataset_builder=FileBuilder(),
        map_fn=lambda x: x * factor,
        by_name={"stream": [sys.stdout]},
    )
    data = json.loads(json.dumps(dump_config(run)))
    assert lost_fields(data) == ["by_name.stream.0", "map_fn"]
    assert "<lambda>" in data["map_fn"]["_not_rebuildable"]
    with pytest.raises(ConfigurationError, match=r"by_name\.stream\.0 was .*top level of a module"):
        load_config(data)


def test_file_and_folder_are_read(tmp_path):
    run = full_run()
    assert write_config(tmp_path / "config.json", run) == []
    assert load_config(tmp_path) == run
    assert load_config(str(tmp_path / "config.json")) == run


def test_errors_name_field_and_next_step(tmp_path):
    data = dump_config(full_run())
    with pytest.raises(ConfigurationError, match=r"'lerning_rate'; did you mean 'learning_"):
        load_config({**data, "lerning_rate": 1.0})
    gone = json.loads(json.dumps(data).replace("HubBuilder", "LostBuilder"))
    with pytest.raises(ConfigurationError, match=r"evaluators\.1: config_samples:LostBuilder c"):
        load_config(gone)
    with pytest.raises(ConfigurationError, match="neither a chz class"):
        load_config({"_type": "os:getcwd"})
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_config(tmp_path / "absent.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_config(tmp_path)


def test_a_recipe_run_with_dash_m_names_its_module_not_main(tmp_path):
    (tmp_path / "recipe_x.py").write_text(
        "import chz, json, sys\n"
        "from tinker_cookbook.run.config import dump_config, load_config\n"
        "@chz.chz\nclass Cli:\n    rate: float = 0.5\n    fn: object = None\n"
        "def pick(): pass\n"
        "if __name__ == '__main__':\n"
        "    config = Cli(fn=pick)\n"
        "    assert load_config(dump_config(config)) == config\n"
        "    print(json.dumps(dump_config(config)))\n"
    )
    repo = Path(__file__).resolve().parents[3]
    environment = {"PYTHONPATH": f"{tmp_path}:{repo}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-m", "recipe_x"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["_type"] == "recipe_x:Cli"
    assert json.loads(done.stdout)["fn"] == "recipe_x:pick"
