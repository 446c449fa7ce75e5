"""Three ways to learn from one teacher: `distillation_runs.py FOLDER SEED…`.

The teacher is what `recipes.rl_basic` trains. For each seed a student learns the same sums
on-policy from it, by RL on the task's reward, and off-policy from the teacher's answers, with 64
answers a step; all begin with the same adapter. RL has its recipe's learning rate, the two ways of
distillation both recipes'. FOLDER/points.jsonl gets a line for each step: the student's KL from the
teacher on its own answers (nats an answer) and the share of held-out sums that are right. What is
finished is not run again.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tinker_cookbook.backends import connect
from tinker_cookbook.checkpoint_utils import get_last_checkpoint, load_checkpoints_file
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STEPS, GROUPS, SIZE, EVERY = 20, 8, 8, 5
SAMPLED, SUPERVISED = "3.3e-4", "1.3e-3"  # learning rates of recipes that sample, and of others
OWN_ANSWERS = "recipes.distillation.on_policy_distillation"
FROM_TEXTS = "recipes.distillation.off_policy_reasoning"


def main(folder: Path, seeds: list[int]) -> None:
    """All runs, in turn, and their points."""
    run("recipes.rl_basic", folder / "teacher", max_steps=STEPS, seed=100)
    teacher = get_last_checkpoint(str(folder / "teacher"))
    assert teacher is not None
    teacher_settings = {"teacher_checkpoint": teacher.sampler_path}
    points = []
    for seed in seeds:
        place = folder / f"seed{seed}"
        length = {"max_steps": STEPS, "eval_every": EVERY, "save_every": EVERY, "seed": seed}
        # A weight that changes no gradient to speak of, so that the teacher only measures.
        rewarded = {"kl_penalty_coef": 1e-9, "reward_coef": 1}
        own = {("on-policy", SAMPLED): {}, ("on-policy", SUPERVISED): {}, ("rl", SAMPLED): rewarded}
        for (way, rate), more in own.items():
            log_path = place / f"{way}-{rate}"
            run(OWN_ANSWERS, log_path, **teacher_settings, **length, **more, learning_rate=rate)
            points += [dict(way=way, rate=rate, seed=seed, **p) for p in own_points(log_path)]
        data = place / "answers.jsonl"
        if not data.exists():
            asyncio.run(sample(str(teacher.sampler_path), seed, data))
        texts = {"dataset_path": data, "test_size": GROUPS * SIZE, "batch_size": GROUPS * SIZE}
        for rate in (SAMPLED, SUPERVISED):
            log_path = place / f"off-policy-{rate}"
            run(FROM_TEXTS, log_path, **length, **texts, learning_rate=rate)
            found = measured(log_path, teacher_settings, seed)
            points += [dict(way="off-policy", rate=rate, seed=seed, **p) for p in found]
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


async def sample(teacher: str, seed: int, file: Path) -> None:
    """The teacher's answers to the sums of all steps, and to as many for evaluation."""
    renderer = get_renderer("smollm2", get_tokenizer(MODEL))
    sums = ArithmeticDatasetBuilder(
        model_name_for_tokenizer=MODEL,
        renderer_name="smollm2",
        batch_size=GROUPS,
        group_size=SIZE,
        n_batches=STEPS + 1,
        seed=seed,
    )
    connection = connect("local")
    client = await connection.service.create_sampling_client(model_path=teacher)
    complete = TinkerTokenCompleter(client, 12, 1.0, seed=seed)

    async def sample(number: int, x: int, y: int) -> list[dict[str, Any]]:
        question = {"role": "user", "content": f"What is {x} + {y}?"}
        prompt = renderer.build_generation_prompt([question])
        stop = renderer.get_stop_sequences()
        answers = await complete.derived(number).sample_many(prompt, stop, SIZE)
        messages = (renderer.parse_response(answer.tokens)[0] for answer in answers)
        return [
            {"messages": [question, {"role": "assistant", "content": m["content"]}]}
            for m in messages
        ]

    found = await asyncio.gather(*(sample(i, x, y) for i, (x, y) in enumerate(sums.training())))
    connection.close()
    rows = [json.dumps(row) for group in found for row in group if row["messages"][1]["content"]]
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")


def rows_of(log_path: Path) -> list[dict[str, Any]]:
    """What a run logged."""
    text = (log_path / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def own_points(log_path: Path) -> list[dict[str, Any]]:
    """Step n of the log is sampled with the weights of n - 1 updates, and evaluated after n."""
    points: dict[int, dict[str, Any]] = {}
    for row in rows_of(log_path):
        if "teacher_kl/per_episode" in row:
            before = points.setdefault(row["step"] - 1, {"step": row["step"] - 1})
            before["kl"] = row["teacher_kl/per_episode"]
        if "test/env/all/correct" in row:
            after = points.setdefault(row["step"], {"step": row["step"]})
            after["right"] = row["test/env/all/correct"]
    return [points[step] for step in sorted(points)]


def measured(trained: Path, teacher_settings: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """The same two figures of each checkpoint of the off-policy run: what one step without any
    learning, of the other recipe, says of it."""
    found = [own_points(trained.parent / f"on-policy-{SAMPLED}")[0]]
    for record in load_checkpoints_file(str(trained)):
        log_path = trained.with_name(f"{trained.name}-{record.batch}")
        settings = {**teacher_settings, "load_checkpoint_path": record.state_path, "seed": seed}
        run(OWN_ANSWERS, log_path, **settings, max_steps=1, learning_rate=1e-12)
        found.append({**own_points(log_path)[0], "step": record.batch})
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]])
