"""Training under torchrun against one process: numbers, refusals, a killed rank, the server.

Most ranks are forks with torchrun's variables, because torchrun and its ranks import for 15 s of
CPU; it starts the killed rank and the server itself.
"""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import new_home
from safetensors.torch import load_file

REPO = Path(__file__).resolve().parents[3]
sys.path.append(str(REPO / "tests" / "recipes"))
sys.path.append(str(REPO / "tests"))
import forks  # noqa: E402
from engine_reference import CPU, load_base, make_model  # noqa: E402
from environments import python_with  # noqa: E402
from recipe_runs import RecipeRuns, finish  # noqa: E402
from serving import Caller, Serving  # noqa: E402
from tiny_model import make_tiny_model  # noqa: E402

from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec  # noqa: E402
from tinker_cookbook.engine.training.examples import Example  # noqa: E402
from tinker_cookbook.engine.training.optimizer import AdamSettings  # noqa: E402
from tinker_cookbook.engine.training.run import TrainingRun  # noqa: E402

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).with_name("data_parallel_driver.py")
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LOSSES = [
    f"{n} {k}" for n in ("cross_entropy", "ppo", "importance_sampling") for k in ("plain", "shared")
]
PASSES = [*LOSSES, "forward", "coupled", "pairs", "one datum", "after errors"]
PASSES += [f"{rows} rows, rank {rank}" for rows in ("long", "short") for rank in (0, 1)]


class Programs:
    """A folder with a model and a checkpoint root, in which programs run."""

    def __init__(
        self, folder: Path, python: str = sys.executable, base_dtype: str = "auto"
    ) -> None:
        self.folder, self.model = folder, str(folder / "model")
        self.python, self.base_dtype, self.replay = python, base_dtype, False
        make_tiny_model(folder / "model")

    def environment(self, shard: bool = False) -> dict[str, str]:
        return {
            **os.environ,
            "DATA_PARALLEL_SHARD": str(int(shard)),
            "DATA_PARALLEL_BASE_DTYPE": self.base_dtype,
            "DATA_PARALLEL_REPLAY": str(int(self.replay)),
            "TINKER_COOKBOOK_HOME": new_home(self.folder / "home"),
            "PYTHONPATH": f"{REPO}{os.pathsep}{DRIVER.parent}",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *words: str, ranks: int, shard: bool = False) -> subprocess.Popen[str]:
        """Starts a module as a person does, with torchrun if there are two ranks."""
        launcher = TWO if ranks == 2 else ()
        start = functools.partial(subprocess.Popen, text=True) if launcher else forks.Popen
        return start(
            [self.python, *launcher, "-m", *words],
            env=self.environment(shard),
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *words: str, ranks: int, shard: bool = False) -> subprocess.CompletedProcess[str]:
        return finish(self.start(*words, ranks=ranks, shard=shard))

    def run_forked(
        self, *words: str, shard: bool = False
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs two ranks in forks, with the variables that torchrun gives them."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        given = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started = [
            forks.Popen(
                [self.python, "-m", *words],
                env={**self.environment(shard), **given, "RANK": rank, "LOCAL_RANK": rank},
                cwd=REPO,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in ("0", "1")
        ]
        return [*map(finish, started)]

    def train(
        self, name: str, ranks: int, *checkpoint: str, shard: bool = False, model: str = ""
    ) -> dict[str, Any]:
        """Runs the driver; with ``shard`` each process has a part of the base model."""
        words = DRIVER.stem, model or self.model, str(self.folder / name), *checkpoint
        if ranks == 2:
            done = self.run_forked(*words, shard=shard)
        else:
            done = [self.run(*words, ranks=ranks, shard=shard)]
        for one in done:
            assert one.returncode == 0, one.stderr[-3000:]
        return pickle.loads((self.folder / name).read_bytes())

    def checkpoint(self, path: str, file: str) -> dict[str, Any]:
        run, kind, name = path.removeprefix("tinker://").split("/")
        return load_file(self.folder / "home" / "runs" / run / kind / name / file)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module")
def one(programs: Programs) -> dict[str, Any]:
    return programs.train("one", 1)


@pytest.fixture(scope="module")
def two(programs: Programs) -> dict[str, Any]:
    return programs.train("two", 2)


def assert_same_pass(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for logprobs, reference in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(logprobs, reference, rtol=tolerance, atol=tolerance)
    assert found[1] == pytest.approx(expected[1], rel=tolerance, abs=tolerance)


def assert_same_bits(programs: Programs, name: str, found: dict[str, Any]) -> None:
    # The weights before the first step and after each that is noted, except after the last one of
    # the first run.
    received = (programs.folder / f"{name}.rank1").read_text().split()
    assert list(dict.fromkeys(received)) == [one for one in found["digests"] if one in received]
    assert len(set(received)) == len(found["digests"]) - 1 > 6


def test_two_processes_say_so(two):
    assert "processes: 2 of torchrun; each trains a part of every batch" in two["reasons"]


@pytest.mark.parametrize("name", PASSES)
def test_losses_and_log_probabilities_equal_those_of_one_process(one, two, name):
    assert_same_pass(two[name], one[name])


def test_steps_have_the_same_gradient_norms(one, two):
    steps = [name for name in one if name.endswith(" step")]
    assert len(steps) == 10
    for name in steps:
        assert two[name] == pytest.approx(one[name], rel=1e-5), name


def assert_same_checkpoint(programs: Programs, path: str, reference: str, file: str) -> None:
    expected, found = (programs.checkpoint(at, file) for at in (reference, path))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(1.0, tensor.abs().max().item())
        np.testing.assert_allclose(found[name], tensor, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("path", ["path", "queued path"])
@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors"])
def test_checkpoints_equal_those_of_one_process(programs, one, two, file, path):
    """Also one that was queued when the script ended, like the passes and the step before it."""
    assert_same_checkpoint(programs, two[path], one[path], file)


def test_ranks_have_the_same_weights_to_the_bit(programs, two):
    assert_same_bits(programs, "two", two)


def test_samples_equal_those_of_one_process(one, two):
    assert two["samples"] == one["samples"]
    assert two["scores"] == pytest.approx(one["scores"], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("program", ["two", "divided"])
def test_an_error_of_one_rank_refuses_the_pass_and_the_step(one, program, request):
    """Also in the middle of the layers, whose matrices the ranks of a divided base gather."""
    errors = request.getfixturevalue(program)["errors"]
    assert errors == one["errors"]
    assert errors["datum"].startswith("DataValidationError: datum 6: advantages is nan")
    assert errors["coupled"] == errors["grouped"] == "ZeroDivisionError: of the caller's loss"
    places = "before the layers", "in a layer", "in a layer's backward pass"
    for place in places:
        for loss in ("ppo", "all", "groups"):
            assert errors[f"{place}, {loss}"] == (
                f"ValueError: this rank cannot compute that datum, {place}"
            )
    assert len(errors) == 2 * (3 + 3 * len(places))
    for name, text in errors.items():
        if name.startswith("after "):
            assert text.startswith("TrainingError: optim_step: a forward_backward")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_goes_on_with_another_number_of_processes(programs, one, two, ranks):
    # That of two processes in one, and that of one process in two.
    path = two["path"] if ranks == 1 else one["path"]
    resumed = programs.train(f"resumed-{ranks}", ranks, path)
    for name in ("resumed", "and on"):
        assert_same_pass(resumed[name], one[name])
        assert_same_pass(two[name], one[name])


@pytest.fixture(scope="module")
def divided(programs: Programs) -> dict[str, Any]:
    return programs.train("divided", 2, shard=True)


def test_each_rank_has_half_of_a_divided_base(divided):
    local, total = divided["kept"]
    assert local * 2 == total > 0
    assert any(
        reason.endswith("and keeps a part of the base model") for reason in divided["reasons"]
    )


def assert_same_numbers(
    programs: Programs, name: str, found: dict[str, Any], one: dict[str, Any]
) -> None:
    for passed in (*PASSES, "resumed", "and on"):
        assert_same_pass(found[passed], one[passed])
    for step in (step for step in one if step.endswith(" step")):
        assert found[step] == pytest.approx(one[step], rel=1e-5), step
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        for path in ("path", "queued path"):
            assert_same_checkpoint(programs, found[path], one[path], file)
    assert found["samples"] == one["samples"]
    assert found["scores"] == pytest.approx(one["scores"], rel=1e-5, abs=1e-5)
    assert found["errors"] == one["errors"]
    assert_same_bits(programs, name, found)


def test_a_divided_base_gives_the_numbers_of_one_process(programs, one, divided):
    assert_same_numbers(programs, "divided", divided, one)


def test_experts_give_the_numbers_of_one_process(tmp_path):
    """Also if each rank has half of a layer's routed experts; with router replay. 60 s."""
    programs = Programs(tmp_path)
    programs.replay = True
    model = str(make_model("qwen3_moe", programs.folder / "experts"))
    for file in Path(programs.model).glob("tokenizer*"):
        shutil.copy(file, model)
    one, two = (programs.train(f"experts-{ranks}", ranks, model=model) for ranks in (1, 2))
    divided = programs.train("experts-divided", 2, shard=True, model=model)
    local, total = divided["kept"]
    assert local * 2 == total > 0
    for name, found in (("experts-2", two), ("experts-divided", divided)):
        assert_same_numbers(programs, name, found, one)
        for passed in ("replayed", "replayed, custom"):
            assert_same_pass(found[passed], one[passed])
    sampled = sum(2 + len(answer) for answer in one["samples"])
    assert one["replayed"][1]["router_replayed_tokens:sum"] == sampled


def test_a_quantised_divided_base_gives_the_numbers_of_one_process(tmp_path):
    python = python_with("quantized")
    programs = Programs(tmp_path, str(python), "nf4")
    one = programs.train("one", 1)
    divided = programs.train("divided", 2, shard=True)
    local, total = divided["kept"]
    assert local * 2 == total > 0
    assert_same_numbers(programs, "divided", divided, one)


@pytest.mark.parametrize("shard", [False, True])
def test_a_checkpoint_goes_on_where_the_base_is_divided_or_whole(programs, one, divided, shard):
    # That of a divided base in one process, and that of one process with a divided base.
    path, ranks = (one["path"], 2) if shard else (divided["path"], 1)
    resumed = programs.train(f"resumed-shard-{ranks}", ranks, path, shard=shard)
    for name in ("resumed", "and on"):
        assert_same_pass(resumed[name], one[name])


@pytest.fixture(scope="module")
def runs(programs: Programs) -> RecipeRuns:
    """A recipe, and a run of it in one process."""
    found = RecipeRuns(programs.folder, programs.model)
    straight = programs.run(found.recipe, *found.words("straight"), ranks=1)
    assert straight.returncode == 0, straight.stderr[-2000:]
    return found


def test_a_killed_rank_ends_the_recipe_which_resumes_with_one_process(programs, runs):
    died = programs.folder / "died"
    words = runs.words("killed")
    killed = programs.start(DRIVER.stem, runs.recipe, str(died), *words, ranks=2)
    assert killed.stderr is not None
    said = next((line for line in killed.stderr if "torchrun: rank 1 of 2 (process " in line), "")
    seconds = time.time() - float(died.read_text())
    assert "start the same command again to resume from the last one" in said
    assert seconds < 60
    assert killed.wait(60) != 0
    resumed = programs.run(runs.recipe, *runs.words("killed", "resume"), ranks=1)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    for found, expected in zip(runs.rows("killed"), runs.rows("straight"), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_help_and_a_wrong_setting_end_all_ranks(programs):
    settings = [f"model_name={programs.model}", f"log_path={programs.folder / 'none'}"]
    first, second = programs.run_forked("recipes.sl_basic", "device=cuda:1", *settings)
    assert first.returncode == 1
    said = first.stderr + second.stderr
    assert said.count("device: got 'cuda:1' for 2 processes of torchrun") == 1


def test_the_server_trains_on_all_ranks_and_ends_on_sigterm(programs):
    settings = {"model_name": programs.model}
    serving = Serving(programs.folder / "server", settings, launcher=TWO, seconds=300)
    serving.start()
    assert any(line.startswith("processes    2 of torchrun") for line in serving.said)
    caller = Caller(serving, serving.key())
    model = caller.model(programs.model)
    rows = [[1, 44, 101, 7], [1, 30, 60], [1, 90, 30, 20, 10]]
    data = [Example(np.array(row), {"target_tokens": np.array([*row[1:], 2])}) for row in rows]
    data = [Example(one.tokens, {**one.inputs, "weights": np.ones(len(one))}) for one in data]
    sent = [(row, [*row[1:], 2]) for row in rows]
    base = load_base(programs.model)
    run = TrainingRun("run", base, Adapter.create(AdapterSpec(4), base.targets, 0, CPU), 1000)
    for number in (1, 3, 5):
        answer = caller.result(caller.train(model, number, data=sent))
        expected = run.forward_backward(data, "cross_entropy")
        assert answer["metrics"] == pytest.approx(expected.metrics, rel=1e-5)
        caller.result(caller.step(model, number + 1))
        run.optim_step(AdamSettings(learning_rate=0.01))
    serving.stop()
    assert not any("has ended" in line for line in serving.said), serving.said


@pytest.mark.gpu
@pytest.mark.parametrize("shard", [False, True])
def test_two_gpus_over_nccl_train_as_one_does(programs, monkeypatch, shard):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs for NCCL, found {torch.cuda.device_count()}")
    monkeypatch.setenv("DATA_PARALLEL_DEVICE", "cuda")
    name = f"two gpus, shard_base={shard}"
    one, two = programs.train("one gpu", 1), programs.train(name, 2, shard=shard)
    for passed in PASSES:
        assert_same_pass(two[passed], one[passed], tolerance=1e-4)
    assert_same_bits(programs, name, two)
    if shard:
        local, total = two["kept"]
        assert local * 2 == total > 0
