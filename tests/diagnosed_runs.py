"""Small real runs: broken on purpose, each in one way, and healthy.

    MODEL=…/stories260k python tests/diagnosed_runs.py FOLDER [NAME …]

trains them with the 260k-parameter story model or that of the tutorials (half an hour on two
cores) and writes what the causes read of their rows to
``tests/unit/training/diagnosed_runs.jsonl``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chz
import tinker

from recipes import sl_basic
from recipes.preference.dpo import train as dpo
from recipes.tool_use import train as tool_use
from recipes.vlm_classifier import train as vlm
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import (
    DistillationDatasetConfig,
    PromptOnlyDatasetBuilder,
    TeacherConfig,
)
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.rl import train as rl
from tinker_cookbook.rl.envs.problem_env import ProblemEnv
from tinker_cookbook.rl.task import TaskConfig
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.supervised import train as sl
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.diagnosis.history import RANGE, READ
from tinker_cookbook.tutorials.model import RENDERER, SOUNDS, tutorial_model

OPENINGS = (
    "Once upon a time, there was a little",
    "One day, Lily went to the park and saw a",
    "Tom was playing in the garden with his",
    "Mom said: look, there is a small",
)
COMMON = {
    "backend": "local", "device": "cpu", "dtype": "float32", "save_every": 0, "lora_rank": 8,
}  # fmt: skip


def animal(text: str) -> float:
    return float("dog" in text or "cat" in text)


def words(text: str) -> float:
    return len(text.split()) / 20


# Rewards of a continuation [the text, whether it ended], with the metrics that they are made of.
REWARDS: dict[str, Callable[[str, str], tuple[float, dict[str, float]]]] = {
    "animal": lambda text, start: (animal(text), {"correct": animal(text)}),
    "one": lambda text, start: (1.0, {}),
    "zero": lambda text, start: (0.0, {}),
    "sentence": lambda text, start: (float(len(text.split()) > 3 and "." in text), {}),
    "answer_line": lambda text, start: (-0.1 if "####" not in text else 1.0,
                                        {"format": float("####" in text)}),
    "two_parts": lambda text, start: (animal(text) + 100 * words(text),
                                      {"animal": animal(text), "length": words(text)}),
    "length": lambda text, start: (words(text), {}),
    "brevity": lambda text, start: (1 / (1 + len(text.split())), {}),
    "opening": lambda text, start: (float(start in OPENINGS[:2]), {}),
}  # fmt: skip


class ContinueEnv(Env):
    """One turn: the model goes on with an opening, until it ends a sentence if ``stop``."""

    def __init__(self, data: Continue, opening: str) -> None:
        self._data, self._opening = data, opening
        self._tokenizer = get_tokenizer(data.model)

    async def initial_observation(self):
        ids = self._tokenizer.encode(self._opening, add_special_tokens=True)
        return tinker.ModelInput.from_ints(ids), ["."] if self._data.stop else []

    async def step(self, action):  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(self._data.delay)
        text = str(self._tokenizer.decode(action))
        reward, metrics = REWARDS[self._data.reward](text, self._opening)
        return StepResult(
            reward=reward,
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[],
            metrics=metrics,
        )


class Group(EnvGroupBuilder):
    def __init__(self, data: Continue, opening: str) -> None:
        self.data, self.opening = data, opening

    async def make_envs(self):
        return [ContinueEnv(self.data, self.opening) for _ in range(self.data.group_size)]

    def logging_tags(self):
        return ["story"]


class Batches(RLDataset):
    def __init__(self, data: Continue, number: int) -> None:
        self._data, self._number = data, number

    def __len__(self) -> int:
        return self._number

    def get_batch(self, index: int):
        count = self._data.groups_per_batch
        return [Group(self._data, OPENINGS[i % len(OPENINGS)]) for i in range(count)]


@chz.chz
class Continue(RLDatasetBuilder):
    model: str
    reward: str = "animal"
    test_reward: str = ""
    groups_per_batch: int = 8
    group_size: int = 8
    num_batches: int = 30
    stop: bool = False
    delay: float = 0.0

    async def __call__(self):
        test = None
        if self.test_reward:
            test = Batches(chz.replace(self, reward=self.test_reward), 1)
        return Batches(self, self.num_batches), test


def story(data: dict[str, Any] | None = None, **settings: Any):
    def build(model: str, folder: Path, seed: int) -> Any:
        defaults = {**COMMON, "learning_rate": 2e-3, "max_tokens": 16, "eval_every": 0}
        return rl.main, rl.Config(
            log_path=str(folder),
            model_name=model,
            seed=seed,
            dataset_builder=Continue(model=model, **(data or {})),
            **{**defaults, **settings},
        )

    return build


def variety(question: str, answer: str) -> float:
    """Different last letters of words: meant for variety, but best with random characters."""
    return len({word.strip(".,!?")[-1:] for word in answer.split()}) / 8


def sound(question: str, answer: str) -> float:
    return float(next(sound for name, sound in SOUNDS.items() if name in question) in answer)


def likes(question: str, answer: str) -> float:
    """Kind words: meant for a kind answer, but best with one sentence again and again."""
    return min(1.0, sum(answer.count(word) for word in ("nice", "good", "like")) / 4)


def animals(grade: Callable[[str, str], float], **settings: Any):
    """A run with the tutorials' model, which is certain of its short answers at the start."""

    class Tell(ProblemEnv):
        def __init__(self, animal: str, renderer: Any) -> None:
            super().__init__(renderer)
            self.animal = animal

        def get_question(self) -> str:
            return f"Tell me about the {self.animal}."

        def check_answer(self, sample_str: str) -> float:
            return grade(self.get_question(), sample_str)

    def build(model: str, folder: Path, seed: int) -> Any:
        defaults = {
            **COMMON,
            "max_tokens": 40,
            "eval_every": 0,
            "groups_per_batch": 6,
            "group_size": 8,
        }
        return rl.main, chz.replace(
            chz.Blueprint(TaskConfig)
            .apply({**defaults, "log_path": str(folder), "model_name": tutorial_model(),
                    "renderer_name": RENDERER, "seed": seed, **settings})
            .make(),
            env=Tell,
            problems=list(SOUNDS)[:6],
        )  # fmt: skip

    return build


def chat(rows: Callable[[list[str]], list[str]] | None = None, **settings: Any):
    def build(model: str, folder: Path, seed: int) -> Any:
        own = {}
        if rows is not None:
            source = Path(sl_basic.__file__).parent / "example_data"
            lines = (source / "conversations.jsonl").read_text().splitlines()
            path = folder.parent / f"{folder.name}.jsonl"
            path.write_text("\n".join(rows(lines)) + "\n")
            own = {
                "dataset_path": str(path), "test_path": str(source / "conversations_test.jsonl"),
            }  # fmt: skip
        defaults = {**COMMON, "max_steps": 30, "max_length": 128, "eval_every": 5}
        defaults |= {"show_samples": 0, "renderer_name": "role_colon"}
        return sl_basic.main, sl_basic.CLIConfig(
            log_path=str(folder),
            model_name=model,
            seed=seed,
            behavior_if_log_dir_exists="delete",
            **{**defaults, **own, **settings},
        )

    return build


class OneBadBatch(SupervisedDataset):
    """The batches of another dataset; the tokens of the 18th are random."""

    def __init__(self, inner: SupervisedDataset) -> None:
        self._inner = inner
        self.set_epoch, self.data_sources = inner.set_epoch, inner.data_sources

    def __len__(self) -> int:
        return len(self._inner)

    def get_batch(self, index: int):
        batch = self._inner.get_batch(index)
        if index != 17:
            return batch
        draw = random.Random(0)
        bad = []
        for datum in batch:
            tokens = [draw.randrange(3, 500) for _ in range(datum.model_input.length)]
            inputs = dict(datum.loss_fn_inputs)
            inputs["target_tokens"] = tinker.TensorData(
                data=[*tokens[1:], 5], dtype="int64", shape=[len(tokens)]
            )
            bad.append(
                tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
            )
        return bad


@chz.chz
class WithOneBadBatch(SupervisedDatasetBuilder):
    inner: SupervisedDatasetBuilder

    def __call__(self):
        train_set, test_set = self.inner()
        return OneBadBatch(train_set), test_set


def garbage(model: str, folder: Path, seed: int) -> Any:
    _, config = chat()(model, folder, seed)
    resolved = config.resolved()
    bad = WithOneBadBatch(inner=resolved.dataset_builder)
    return sl.main, chz.replace(resolved, dataset_builder=bad)


def pairs(**settings: Any):
    def build(model: str, folder: Path, seed: int) -> Any:
        defaults = {**COMMON, "max_steps": 24, "max_length": 160, "batch_size": 4, "eval_every": 6}
        defaults |= {"show_samples": 0, "renderer_name": "role_colon"}
        return train_dpo.main_async, dpo.CLIConfig(
            log_path=str(folder),
            model_name=model,
            seed=seed,
            behavior_if_log_dir_exists="delete",
            **{**defaults, **settings},
        )

    return build


def teacher(prompt: str | None, **settings: Any):
    def build(model: str, folder: Path, seed: int) -> Any:
        prompts = folder.parent / f"{folder.name}.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in OPENINGS * 30))
        part = DistillationDatasetConfig(
            dataset_builder=PromptOnlyDatasetBuilder(
                dataset_name=str(prompts),
                groups_per_batch=4,
                group_size=8,
                model_name_for_tokenizer=model,
                renderer_name="role_colon",
            ),
            teacher_config=TeacherConfig(base_model=model, system_prompt=prompt),
            groups_per_batch=4,
        )
        defaults = {**COMMON, "max_tokens": 16, "learning_rate": 2e-3, "eval_every": 0}
        return train_on_policy.main, train_on_policy.Config(
            log_path=str(folder),
            model_name=model,
            renderer_name="role_colon",
            dataset_configs=[part],
            seed=seed,
            **{**defaults, "center_teacher_kl": True, **settings},
        )

    return build


def tools(model: str, folder: Path, seed: int) -> Any:
    return tool_use.main, tool_use.CLIConfig(
        log_path=str(folder), seed=seed, max_steps=25, behavior_if_log_dir_exists="delete"
    )


def digits(model: str, folder: Path, seed: int) -> Any:
    return vlm.main, vlm.ExperimentConfig(
        log_path=str(folder), seed=seed, max_steps=60, run_sampling_evaluator=False,
        behavior_if_log_dir_exists="delete",
    )  # fmt: skip


BAD_TEACHER = "Tom had a big red ball and a dog. The dog was happy."

BROKEN: dict[str, tuple[str, Any]] = {
    "rl_rate_high": ("learning_rate_too_high", story(learning_rate=0.1)),
    "rl_rate_30_times": (
        "learning_rate_too_high", animals(sound, learning_rate=0.15, max_steps=12),
    ),
    "rl_rate_10_times": (
        "learning_rate_too_high", animals(sound, learning_rate=0.05, max_steps=9, seed=3),
    ),
    "hacked": ("reward_hacking", animals(variety, learning_rate=5e-3, max_steps=20)),
    "repeats": ("reward_hacking", animals(likes, learning_rate=5e-3, max_steps=24)),
    "rl_rate_low": ("learning_rate_too_low", story(learning_rate=1e-7)),
    "reward_one": ("all_good", story({"reward": "one", "num_batches": 8})),
    "reward_zero": (
        "all_bad",
        story({"reward": "zero", "num_batches": 8, "stop": True}, max_tokens=40),
    ),
    "cut_off": (
        "cut_off",
        story({"reward": "sentence", "stop": True, "num_batches": 8}, max_tokens=3),
    ),
    "format": ("format", story({"reward": "answer_line", "stop": True, "num_batches": 8},
                               max_tokens=60)),
    "same_text": ("same_text", story({"num_batches": 8}, temperature=0.001)),
    "constant_groups": ("all_constant", story({"reward": "opening", "num_batches": 8})),
    "reward_part": ("reward_part", story({"reward": "two_parts", "stop": True, "num_batches": 12},
                                         max_tokens=40, learning_rate=3e-4)),
    "stale": (
        "stale_samples",
        story(
            {"num_batches": 20},
            async_config=rl.AsyncConfig(
                max_steps_off_policy=8, groups_per_batch=8, stale_groups="train"
            ),
            learning_rate=5e-3,
        ),
    ),
    "kl_jump": ("high_kl", story(num_substeps=8, learning_rate=0.01)),
    "entropy": ("entropy_collapse", story(random_rewards=True, learning_rate=1e-2)),
    "length": (
        "length_drift", story({"reward": "length", "stop": True, "num_batches": 12}, max_tokens=40),
    ),
    "held_out": (
        "held_out_falls",
        story(
            {"reward": "brevity", "test_reward": "sentence", "num_batches": 15},
            eval_every=3,
            max_tokens=20,
        ),
    ),
    "sl_rate_high": ("learning_rate_too_high", chat(learning_rate=0.5)),
    "sl_rate_low": ("learning_rate_too_low", chat(learning_rate=1e-7)),
    "duplicates": ("duplicates", chat(lambda rows: rows[:100] * 3)),
    "overfitting": (
        "overfitting",
        chat(lambda rows: rows[:8], max_steps=None, num_epochs=80, eval_every=10),
    ),
    "garbage": ("loss_spike", garbage),
    "dpo_rate_high": ("learning_rate_too_high", pairs(learning_rate=0.1)),
    "chosen_falls": ("chosen_falls", pairs(learning_rate=6e-3, dpo_beta=0.02)),
    "dpo_rate_low": ("learning_rate_too_low", pairs(learning_rate=1e-7)),
    "teacher_equal": ("teacher_agrees", teacher(None, max_steps=6)),
    "teacher_rate_high": ("learning_rate_too_high", teacher(BAD_TEACHER, learning_rate=0.1)),
}  # fmt: skip

HEALTHY: dict[str, Any] = {
    "sl": chat(),
    # Ten steps solve it; much longer runs are told that.
    "rl": story({"test_reward": "animal", "num_batches": 20}, eval_every=5),
    "dpo": pairs(),
    "distillation": teacher(BAD_TEACHER),
    "tools": tools,
    "vision": digits,
}


def run(
    build: Any, model: str, folder: Path, seed: int = 0, **changed: Any
) -> list[dict[str, Any]]:
    """Trains, with ``changed`` settings; gives the rows of ``metrics.jsonl``."""
    main, config = build(model, folder, seed)
    asyncio.run(main(chz.replace(config, **changed)))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


RECORDED = Path(__file__).parent / "unit" / "training" / "diagnosed_runs.jsonl"
# What the causes read.
_METRICS = READ | {
    "env/all/by_group/frac_all_good", "env/all/by_group/frac_all_bad", "env/all/format",
    "env/all/by_group/frac_same_text", "env/all/by_group/size", "env/all/frac_untrained",
    "env/all/total_turns", "optim/num_steps", "parse_error", "progress/batch", "num_sequences",
    "progress", "progress/done_frac",
}  # fmt: skip
_SETTINGS = (
    "recipe_name", "learning_rate", "num_epochs", "warmup_steps", "max_tokens", "temperature",
    "num_substeps", "kl_penalty_coef", "dpo_beta", "async_config",
)  # fmt: skip


def recorded(folder: Path) -> dict[str, Any]:
    """What the causes read of a run, by metric: each value or null for each row."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    config = json.loads((folder / "config.json").read_text())
    names = sorted({k for row in rows for k in row if k in _METRICS or k.startswith(RANGE)})
    return {
        "run": folder.name,
        "config": {name: config[name] for name in _SETTINGS if name in config},
        "steps": [row["step"] for row in rows],
        "metrics": {name: [_short(row.get(name)) for row in rows] for name in names},
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def rows_of(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of such a run."""
    return [
        {"step": step}
        | {k: values[i] for k, values in recorded["metrics"].items() if values[i] is not None}
        for i, step in enumerate(recorded["steps"])
    ]


if __name__ == "__main__":
    out, *names = sys.argv[1:]
    os.environ.setdefault("TINKER_COOKBOOK_HOME", f"{out}/home")
    Path(out).mkdir(parents=True, exist_ok=True)
    jobs = [(name, build, 0) for name, (_, build) in BROKEN.items()]
    jobs += [(name, build, seed) for seed in range(3) for name, build in HEALTHY.items()]
    for name, build, seed in jobs:
        folder = Path(out) / f"{name}-{seed}"
        # Runs that are there are kept.
        if not (names and name not in names) and not (folder / "metrics.jsonl").exists():
            run(build, os.environ["MODEL"], folder, seed)
    folders = [Path(out) / f"{name}-{seed}" for name, _, seed in jobs]
    lines = [json.dumps(recorded(folder)) for folder in folders if folder.exists()]
    RECORDED.write_text("\n".join(lines) + "\n")
