"""A run that was killed and continued equals one that was never killed, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
KILL_AT = Path(__file__).with_name("kill_at.py")

JSON_LOGGER = "tinker_cookbook.utils.loggers.json_logger:append_row"
CHECKPOINT_LINE = "tinker_cookbook.utils.checkpoints.saving:append_row"
STORE_WRITE = "tinker_cookbook.engine.store_files:write_durably"
STORE_RENAME = "tinker_cookbook.engine.store_files:replace_folder"
OPTIM_STEP = "tinker_cookbook.engine.training_run:TrainingRun.optim_step"
EVALUATE = "tinker_cookbook.training.session:run_evaluators"

KILL_POINTS = [
    pytest.param(OPTIM_STEP, 2, "after", id="before the first checkpoint"),
    pytest.param(OPTIM_STEP, 6, "after", id="between an update and its row"),
    pytest.param(EVALUATE, 3, "before", id="before an evaluation", marks=pytest.mark.slow),
    pytest.param(JSON_LOGGER, 4, "after", id="between a row and its checkpoint"),
    pytest.param(STORE_WRITE, 6, "before", id="in the middle of writing a checkpoint"),
    pytest.param(STORE_RENAME, 2, "after", id="between a checkpoint and its line"),
    pytest.param(CHECKPOINT_LINE, 2, "after", id="right after a checkpoint's line"),
    pytest.param(OPTIM_STEP, 9, "before", id="in the second epoch", marks=pytest.mark.slow),
    pytest.param(STORE_RENAME, 5, "before", id="at the final checkpoint", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, stories_model):
    """A folder with a small data set, and the finished run that was never killed."""
    folder = tmp_path_factory.mktemp("resume")
    rows = (REPO / "example_data" / "conversations.jsonl").read_text().splitlines()
    (folder / "train.jsonl").write_text("\n".join(rows[:22]) + "\n")
    (folder / "test.jsonl").write_text("\n".join(rows[30:36]) + "\n")
    place = Workplace(folder, stories_model)
    assert place.run("straight").returncode == 0
    return place


class Workplace:
    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model = folder, model

    def arguments(self, name: str, behavior: str = "raise") -> list[str]:
        # 22 conversations in batches of 4: six steps an epoch, the last one partial.
        return [
            f"model_name={self.model}",
            f"dataset_path={self.folder / 'train.jsonl'}",
            f"test_path={self.folder / 'test.jsonl'}",
            f"log_path={self.folder / name}",
            f"behavior_if_log_dir_exists={behavior}",
            "renderer_name=role_colon",
            "batch_size=4",
            "num_epochs=2",
            "save_every=3",
            "eval_every=4",
            "lora_rank=4",
            "learning_rate=0.005",
            "show_samples=0",
            "warmup_steps=2",
            "device=cpu",
            "dtype=float32",
            "grad_clip_norm=3",
            "weight_decay=0.01",
            "submit_ahead=2",
        ]

    def environment(self) -> dict[str, str]:
        # Each module of the test run shares one checkpoint root, as a user's runs do.
        home = str(self.folder / "home")
        return {**os.environ, "TINKER_COOKBOOK_HOME": home, "PYTHONPATH": str(REPO)}

    def run(self, name: str, behavior: str = "raise", kill: list[str] | None = None):
        program = [str(KILL_AT), *kill] if kill else ["-m"]
        return subprocess.run(
            [sys.executable, *program, "recipes.sl_basic", *self.arguments(name, behavior)],
            cwd=REPO,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def rows(self, name: str) -> list[dict]:
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]

    def adapter(self, name: str) -> bytes:
        lines = (self.folder / name / "checkpoints.jsonl").read_text().splitlines()
        final = json.loads(lines[-1])
        assert final["final"]
        run, kind, checkpoint = final["state_path"].removeprefix("tinker://").split("/")
        folder = self.folder / "home" / "runs" / run / kind / checkpoint
        return (folder / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(("point", "count", "when"), KILL_POINTS)
def test_killed_and_resumed_equals_never_killed(workplace, request, point, count, when):
    name = request.node.callspec.id.replace(" ", "-")
    killed = workplace.run(name, kill=[point, str(count), when])
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    resumed = workplace.run(name, "resume")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert workplace.rows(name) == workplace.rows("straight")
    assert workplace.adapter(name) == workplace.adapter("straight")


def test_the_same_config_gives_the_same_metrics(workplace):
    assert workplace.run("again").returncode == 0
    assert workplace.rows("again") == workplace.rows("straight")
    assert workplace.adapter("again") == workplace.adapter("straight")


def test_the_straight_run_is_what_it_says(workplace):
    rows = workplace.rows("straight")
    assert [row["step"] for row in rows] == list(range(13))
    assert rows[-1]["progress"] == 1.0
    assert [row["step"] for row in rows if "test/nll" in row] == [0, 4, 8, 12]
    # The last, partial batch trains: 4+4+4+4+4+2 conversations an epoch.
    assert [row["num_sequences"] for row in rows[1:7]] == [4, 4, 4, 4, 4, 2]
    assert rows[-1]["test/nll"] < rows[0]["test/nll"]
    lines = (workplace.folder / "straight" / "checkpoints.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch"] for line in lines] == [3, 6, 9, 12]


def test_a_finished_run_is_left_alone(workplace):
    before = (workplace.folder / "straight" / "metrics.jsonl").read_bytes()
    again = workplace.run("straight", "resume")
    assert again.returncode == 0
    assert "complete" in again.stdout
    assert (workplace.folder / "straight" / "metrics.jsonl").read_bytes() == before


def test_an_existing_folder_is_never_overwritten_silently(workplace):
    for behavior in ("raise", "ask"):
        refused = workplace.run("straight", behavior)
        assert refused.returncode == 1
        assert "behavior_if_log_dir_exists" in refused.stderr
