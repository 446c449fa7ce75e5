"""Learning from a trained judge: `rubric_curves.py FOLDER MODEL`.

Trains the judge of `recipes.rubric.train_judge` once, then `recipes.rubric.train` with three seeds
and with random rewards. FOLDER/points.jsonl gets a line for each step: the judge's mean score, the
share of criteria that the answers meet by the word lists which made the labels (no judge reads
them), and the same as the mean number of different words in an answer. What is finished is not run
again. Without arguments it draws docs/benchmarks/rubric-curves.png from the points there.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from tinker_cookbook.checkpoint_utils import get_last_checkpoint

ANIMALS = (
    "dog dogs cat cats bird birds bear bears frog frogs rabbit bunny fish duck ducks mouse cow "
    "horse pig lion fox owl bee squirrel butterfly monkey puppy kitten elephant"
)
HAPPY = "happy smiled smile laughed fun loved joy proud excited glad hugged"
CRITERIA = {
    "There is an animal in the story.": ANIMALS,
    "Somebody in the story is happy.": HAPPY,
}
"""Criteria of the stories of the example data, and the words that made their labels."""
STEPS, SEEDS = 12, (0, 1, 2)
DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"


def meets(answer: str, criterion: str) -> bool:
    """Returns whether a story meets one of ``CRITERIA``, by its words."""
    return not set(re.findall("[a-z]+", answer.lower())).isdisjoint(CRITERIA[criterion].split())


def main(folder: Path, model: str) -> None:
    """The judge, all runs in turn, and their points."""
    common = {"model_name": model, "renderer_name": "role_colon", "dtype": "float32"}
    judge = folder / "judge"
    run("recipes.rubric.train_judge", judge, **common, learning_rate=3e-3, num_epochs=6)
    saved = get_last_checkpoint(str(judge), "sampler_path")
    assert saved is not None
    settings = {**common, "grader_model_path": saved.sampler_path, "learning_rate": 2e-3}
    settings |= {"max_tokens": 48, "group_size": 16, "max_steps": STEPS, "num_groups_to_log": 0}
    settings |= {"eval_every": 0, "save_every": 4}
    runs: dict[str, dict[str, Any]] = {str(seed): {"seed": seed} for seed in SEEDS}
    runs["control"] = {"seed": 0, "random_rewards": True}
    points = []
    for name, more in runs.items():
        run("recipes.rubric.train", folder / name, **settings, **more)
        points += [{"run": name, **point} for point in points_of(folder / name)]
        lines = "".join(json.dumps(point) + "\n" for point in points)
        (folder / "points.jsonl").write_text(lines, encoding="utf-8")


def run(recipe: str, log_path: Path, **settings: Any) -> None:
    """A recipe to its end, as its command line would."""
    last = get_last_checkpoint(str(log_path))
    if last is not None and last.final:
        return
    words = [f"{name}={value}" for name, value in settings.items()]
    words += [f"log_path={log_path}", "behavior_if_log_dir_exists=resume", "backend=local"]
    subprocess.run([sys.executable, "-m", recipe, *words], check=True)


def points_of(log_path: Path) -> list[dict[str, float]]:
    """The points of each step, from all answers that it was trained on."""
    points = []
    for file in sorted(log_path.glob("iteration_*/train_rollout_summaries.jsonl")):
        steps = [json.loads(line)["steps"][0] for line in file.read_text().splitlines()]
        answers = [step["logs"]["answer"] for step in steps]
        met = [meets(answer, criterion) for answer in answers for criterion in CRITERIA]
        words = [len(set(re.findall("[a-z]+", answer.lower()))) for answer in answers]
        points.append(
            {
                "step": int(file.parent.name.removeprefix("iteration_")),
                "judge": round(mean([s["metrics"]["rubric_score"] for s in steps]), 4),
                "words": round(mean(met), 4),
                "different_words": round(mean(words), 2),
            }
        )
    return points


def mean(values: list[Any]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def draw() -> None:
    """Two panels: what is trained for, and the independent measure."""
    points = pd.read_json(DOCS / "rubric-curves.jsonl", lines=True, dtype={"run": str})
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    titles = {
        "judge": "mean score of the judge (the reward)",
        "words": "criteria met by the word lists (independent)",
    }
    for axes, (column, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for name in [*map(str, SEEDS), "control"]:
            line = points[points["run"] == name]
            style = {"linestyle": "--", "color": "gray"} if name == "control" else {}
            label = "random rewards" if name == "control" else f"seed {name}"
            axes.plot(line["step"], line[column], label=label, **style)
        axes.set(title=title, xlabel="step", ylim=(-0.03, 1.03))
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(DOCS / "rubric-curves.png", dpi=100)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(Path(sys.argv[1]), sys.argv[2])
    else:
        draw()
