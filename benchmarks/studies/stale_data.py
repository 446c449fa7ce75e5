"""Reward on stale data by loss: ``python benchmarks/studies/stale_data.py run MODEL_FOLDER``.

Trains the 260k-parameter story model to use the letter "o" with samples of weights that are exactly
``staleness`` updates old: the loop keeps the sampling clients of the last updates and samples with
the oldest of them. Each run appends its rewards to ``stale-data.jsonl``; runs that are in the file
are not repeated. ``python benchmarks/studies/stale_data.py`` alone prints the table and plots
``stale-data.png``.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).parents[2] / "docs" / "benchmarks"
POINTS = HERE / "stale-data.jsonl"
LOSSES = ("stable_reinforce", "importance_sampling", "ppo")
STALENESS = (0, 4, 16)
SEEDS = (0, 1, 2)
STEPS, GROUP_SIZE, MAX_TOKENS, LEARNING_RATE = 32, 8, 16, 4e-3
EVERY = 4  # steps between two measurements of the newest weights
OPENINGS = (
    "Once upon a time, there was a little",
    "One day, Lily went to the park and saw a",
    "Tom was in the garden with his",
    "Mom said: look, there is a",
    "Ben and Mia wanted to play with the",
    "In the house there lived a small",
    "The sun was warm. On the grass sat a",
    "Sue had a new friend. It was a",
)


def reward(text: str) -> float:
    """The share of the letter o, which every sample has some of."""
    return text.lower().count("o") / max(len(text), 1)


def make_datum(prompt: list[int], sequence: Any, advantage: float) -> Any:
    """The prompt and a sample, with an advantage on each sampled token."""
    import numpy as np
    import tinker

    sampled, before = list(sequence.tokens), len(prompt) - 1
    whole = prompt + sampled
    zeros = [0.0] * before
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(whole[1:], dtype=np.int64)),
            "logprobs": tinker.TensorData.from_numpy(
                np.array([*zeros, *sequence.logprobs], dtype=np.float32)
            ),
            "advantages": tinker.TensorData.from_numpy(
                np.array([*zeros, *[advantage] * len(sampled)], dtype=np.float32)
            ),
        },
    )


def train(model: str, loss: str, staleness: int, seed: int) -> list[float]:
    """The mean reward of samples of the newest weights, before every fourth step and at the end.

    These samples are not trained on: training takes those of weights ``staleness`` updates old.
    """
    import tinker

    from tinker_cookbook.backends import connect
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    tokenizer = get_tokenizer(model)
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in OPENINGS]

    def sample(client: Any, step: int, kind: int) -> list[Any]:
        params = [
            tinker.SamplingParams(
                max_tokens=MAX_TOKENS, temperature=1.0, seed=kind + 2 * (i + 8 * (step + 99 * seed))
            )
            for i in range(len(prompts))
        ]
        futures = [
            client.sample(tinker.ModelInput.from_ints(prompt), GROUP_SIZE, one)
            for prompt, one in zip(prompts, params, strict=True)
        ]
        return [future.result().sequences for future in futures]

    def rewards_of(groups: list[Any]) -> list[list[float]]:
        return [[reward(tokenizer.decode(s.tokens)) for s in group] for group in groups]

    curve: list[float] = []

    def measure(client: Any, step: int) -> None:
        values = rewards_of(sample(client, step, 1))
        curve.append(round(mean(mean(group) for group in values), 4))

    with connect("local", device="cpu", dtype="float32") as connection:
        client = connection.service.create_lora_training_client(model, rank=32, seed=seed).result()
        kept: deque[Any] = deque(maxlen=staleness + 1)
        for step in range(STEPS):
            kept.append(client.save_weights_and_get_sampling_client())
            if step % EVERY == 0:
                measure(kept[-1].result(), step)
            groups = sample(kept[0].result(), step, 0)
            rewards = rewards_of(groups)
            data = [
                make_datum(prompt, sequence, value - mean(values))
                for prompt, group, values in zip(prompts, groups, rewards, strict=True)
                for sequence, value in zip(group, values, strict=True)
            ]
            client.forward_backward(data, loss)
            client.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE, eps=1e-8)).result()
        measure(client.save_weights_and_get_sampling_client().result(), STEPS)
    return curve


def run(model: str) -> None:
    """All runs that the file lacks."""
    done = {(row["loss"], row["staleness"], row["seed"]) for row in read()}
    for seed in SEEDS:
        for staleness in STALENESS:
            for loss in LOSSES:
                if (loss, staleness, seed) in done:
                    continue
                began = time.monotonic()
                curve = train(model, loss, staleness, seed)
                row = {"loss": loss, "staleness": staleness, "seed": seed, "rewards": curve}
                with POINTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(loss, staleness, seed, curve[-1], f"{time.monotonic() - began:.0f} s")


def read() -> list[dict[str, Any]]:
    """The runs of the file."""
    if not POINTS.exists():
        return []
    return [json.loads(line) for line in POINTS.read_text(encoding="utf-8").splitlines()]


def report() -> None:
    """Prints the table and plots the figure: a panel for each staleness, a line for each loss."""
    from matplotlib.figure import Figure

    rows = read()
    print("| staleness | loss | reward at the end, mean | range over seeds | highest |")
    print("|---|---|---|---|---|")
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    panels = figure.subplots(1, len(STALENESS), sharey=True)
    for axes, staleness in zip(panels, STALENESS, strict=True):
        for loss in LOSSES:
            curves = [
                row["rewards"]
                for row in rows
                if row["loss"] == loss and row["staleness"] == staleness
            ]
            if not curves:
                continue
            ends = [curve[-1] for curve in curves]
            best = mean(max(curve) for curve in curves)
            print(
                f"| {staleness} | `{loss}` | {mean(ends):.3f} | {min(ends):.3f} to "
                f"{max(ends):.3f} | {best:.3f} |"
            )
            steps = range(0, STEPS + 1, EVERY)
            each = list(zip(*curves, strict=True))
            (line,) = axes.plot(steps, [mean(values) for values in each], label=loss)
            axes.fill_between(
                steps,
                [min(v) for v in each],
                [max(v) for v in each],
                color=line.get_color(),
                alpha=0.2,
            )
        axes.set_title(f"samples of weights {staleness} updates old")
        axes.set_xlabel("updates")
    panels[0].set_ylabel("reward of the newest weights")
    panels[0].legend()
    figure.savefig(HERE / "stale-data.png", dpi=110)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2])
    report()
