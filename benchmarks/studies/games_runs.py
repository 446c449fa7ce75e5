"""Self-play in tic-tac-toe with a very small model: `games_runs.py FOLDER`.

A model of `text_arena.tiny_model`, then runs of three seeds, one with random rewards, self-play
without the pool, and two runs that end without losses, whose snapshots `tictactoe_losses.py`
checks. FOLDER/games.jsonl gets a line for each measured step. What is finished is not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tinker_cookbook.checkpoint_utils import get_last_checkpoint

RECIPE = "recipes.multiplayer_rl.text_arena"
RUN: dict[str, Any] = {
    "game_name": "TicTacToe-v0-train",
    "opponents": "self,pool,optimal",
    "test_opponent": "optimal",
    "batch_size": 256,
    "group_size": 16,
    "learning_rate": 4e-3,
    "lora_rank": 32,
    "snapshot_every": 10,
    "eval_every": 5,
    "num_test_datapoints": 100,
    "max_steps": 100,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "0": {"seed": 0},
    "1": {"seed": 1},
    "2": {"seed": 2},
    "control": {"seed": 0, "random_rewards": True},
    "self only": {"seed": 0, "opponents": "self"},
}
NO_LOSSES: dict[str, Any] = {
    "opponents": "optimal",
    "kl_penalty_coef": 0.2,
    "lr_schedule": "linear",
    "batch_size": 512,
    "num_train_datapoints": 512 * 300,
    "max_steps": 300,
    "eval_every": 10,
    "eval_temperature": 0.0,
    "num_test_datapoints": 400,
}
MEASURES = ("test/env/all/loss", "test/env/all/draw", "test/env/all/illegal_move")


def main(folder: Path) -> None:
    """All runs, in turn, and their points."""
    model = folder / "tictactoe-model"
    if not (model / "model.safetensors").exists():
        command(f"{RECIPE}.tiny_model", output=model, steps=1000, num_games=3000)
    more = {f"no losses {seed}": {**NO_LOSSES, "seed": seed} for seed in (0, 1)}
    for name, variant in (VARIANTS | more).items():
        log_path = folder / "tictactoe" / name.replace(" ", "-")
        last = get_last_checkpoint(str(log_path))
        if last is None or not last.final:
            settings = {**RUN, **variant}
            command(
                f"{RECIPE}.train",
                model_name=model,
                renderer_name="role_colon",
                show_rules=False,
                max_tokens=1,
                dtype="float32",
                backend="local",
                log_path=log_path,
                behavior_if_log_dir_exists="resume",
                save_every=20,
                num_groups_to_log=0,
                rollout_json_export=False,
                **settings,
            )
        collect(folder)


def command(module: str, **settings: Any) -> None:
    """A program to its end, as its command line would."""
    words = [f"{name}={value}" for name, value in settings.items()]
    subprocess.run([sys.executable, "-m", module, *words], check=True)


def collect(folder: Path) -> None:
    """Writes the measured steps of all runs."""
    points = []
    for metrics in sorted(folder.glob("*/*/metrics.jsonl")):
        game, run = metrics.parent.parent.name, metrics.parent.name.replace("-", " ")
        for line in metrics.read_text().splitlines():
            row = json.loads(line)
            found = {name: round(row[name], 5) for name in MEASURES if name in row}
            if found:
                points.append({"game": game, "run": run, "step": row["step"], **found})
    lines = "".join(json.dumps(point) + "\n" for point in points)
    (folder / "games.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
