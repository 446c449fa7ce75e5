"""Games of TextArena as commands: a tiny model, self-play with a pool, killing it, and playing.

Costs about 40 s: six short processes with a model of 0.1 million parameters.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import forks
import pytest
from recipe_runs import REPO, RecipeRuns

pytest.importorskip("textarena", reason="the extra multiplayer-rl is not installed")
pytestmark = pytest.mark.slow

RECIPE = "recipes.multiplayer_rl.text_arena"
GROUP_DONE = "tinker_cookbook.rl.loop.sources:RolloutWorker.count"


GAME = "game_name=TicTacToe-v0-train show_rules=False max_tokens=1"
OPTIONS = f"""{GAME} batch_size=16 group_size=4 max_steps=6 save_every=3 snapshot_every=2
    eval_every=3 num_test_datapoints=8 test_opponent=optimal learning_rate=0.01"""


def python(runs: RecipeRuns, module: str, *words: str, keys: str = "") -> str:
    """Runs a program to its end and returns what it prints; ``keys`` is typed."""
    command = [sys.executable, "-m", f"{RECIPE}.{module}", *words]
    done = forks.run(command, cwd=REPO, env=runs.environment(), input=keys, timeout=200)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> RecipeRuns:
    """The model, and the finished run that was never killed."""
    folder: Path = tmp_path_factory.mktemp("games")
    place = RecipeRuns(folder, str(folder / "model"), f"{RECIPE}.train", OPTIONS)
    size = "num_games=200 steps=60 batch_size=32 hidden_size=32 num_layers=2"
    python(place, "tiny_model", f"output={place.model}", *size.split())
    straight = place.run("straight")
    assert straight.returncode == 0, straight.stderr[-2000:]
    return place


def test_killed_and_resumed_equals_never_killed(runs):
    """In the middle of sampling step 5, after a snapshot that no checkpoint has yet."""
    runs.check_killed_and_resumed("killed", GROUP_DONE, 18, "after")
    files = [runs.folder / name / "opponents.jsonl" for name in ("straight", "killed")]
    steps = [[json.loads(line)["step"] for line in file.read_text().splitlines()] for file in files]
    assert steps == [[0, 2, 4, 6]] * 2


def test_groups_play_against_themselves_and_against_snapshots(runs):
    metrics = runs.rows("straight")
    assert "env/self/win" in metrics[1]
    assert "env/pool/win" in metrics[1]
    assert "test/env/all/draw" in metrics[3]


def test_play_against_the_checkpoint(runs):
    lines = (runs.folder / "straight" / "checkpoints.jsonl").read_text().splitlines()
    path = json.loads(lines[-1])["sampler_path"]
    shared = f"checkpoint_path={path} {GAME} device=cpu dtype=float32 backend=local".split()
    out = python(runs, "play", *shared, "mode=eval", "opponent=optimal", "num_games=6")
    assert "as player 0 against optimal: " in out
    assert "as player 1 against optimal: 0 won" in out
    # All squares in turn: those that are taken are illegal and may be repeated.
    keys = "".join(f"[{cell}]\n" for cell in range(9) for _ in range(2))
    out = python(runs, "play", *shared, keys=keys)
    assert "Available Moves" in out
    assert any(result in out for result in ("You win.", "You lose.", "A draw."))


def test_a_wrong_game_is_refused_before_anything_is_deleted(runs):
    done = runs.run("straight", "delete", "game_name=TicTacTow-v0")
    assert done.returncode not in (0, -signal.SIGKILL)
    assert "TicTacToe-v0" in done.stderr + done.stdout
    assert (runs.folder / "straight" / "opponents.jsonl").exists()
