"""Learning from one teacher whose answers are long: `long_answers.py MODEL
FOLDER SEED…`.

MODEL is the folder of a small model of stories. The teacher is this model after RL that rewards
a dog or a cat in 48 tokens. For each seed students learn the same by RL, on-policy from the teacher
(its judgement of the sampled token, or its distribution), and off-policy from texts that are new
at each step; 64 answers a step, a linear learning rate, 20 steps. After each update 256 answers of
the student's are sampled in the same way for all methods: their KL from the teacher in nats an
answer, and the share with a dog or a cat. FOLDER/points.jsonl gets a line for each.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import chz
import numpy as np
import tinker

from tinker_cookbook.backends import SamplingClient, connect
from tinker_cookbook.checkpoint_utils import get_last_checkpoint
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, TeacherConfig
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.supervised import train as supervised_train
from tinker_cookbook.supervised.common import datum_from_tokens_weights
from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "recipes"))
from naming_task import NamingDatasetBuilder
from test_rl_learning import OPENINGS

STEPS, GROUPS, SIZE, TOKENS, RATES = 20, 8, 8, 48, (1e-3, 2e-3)
WORDS = ["dog", "cat"]
LOCAL: dict[str, Any] = {"backend": "local", "device": "cpu", "dtype": "float32"}


def main(model: str, folder: Path, seeds: list[int]) -> None:
    """All runs, in turn, and their points."""
    taught = folder / "teacher"
    go(rl_train, rl_config(model, taught, num_batches=12, seed=100, group_size=16))
    last = get_last_checkpoint(str(taught))
    assert last is not None
    assert last.sampler_path is not None
    teacher, points = last.sampler_path, []
    for seed in seeds:
        texts = folder / f"texts{seed}.json"
        if not texts.exists():
            asyncio.run(write_texts(model, teacher, seed, texts))
        for rate in RATES:
            common: dict[str, Any] = {
                **LOCAL,
                "learning_rate": rate,
                "lr_schedule": "linear",
                "seed": seed,
                "eval_every": 1,
                "evaluator_builders": [Distance(model=model, teacher=teacher)],
            }
            for way, module in WAYS.items():
                log_path = folder / f"{way}-{rate:g}-{seed}"
                go(module, config_of(way, model, teacher, texts, log_path, common))
                points += [{"way": way, "rate": rate, "seed": seed, **p} for p in rows(log_path)]
        text = "".join(json.dumps(point) + "\n" for point in points)
        (folder / "points.jsonl").write_text(text, encoding="utf-8")


WAYS = {
    "on-policy, distributions": train_on_policy,
    "on-policy, sampled tokens": train_on_policy,
    "off-policy": supervised_train,
    "rl": rl_train,
}


def config_of(
    way: str, model: str, teacher: str, texts: Path, log_path: Path, common: dict[str, Any]
) -> Any:
    """The run of a way to learn."""
    if way == "rl":
        return rl_config(model, log_path, **common)
    if way == "off-policy":
        builder = Texts(file=str(texts))
        return supervised_train.Config(
            model_name=model, log_path=str(log_path), dataset_builder=builder, **common
        )
    part = DistillationDatasetConfig(
        dataset_builder=naming(model, STEPS, SIZE),
        teacher_config=TeacherConfig(base_model=model, load_checkpoint_path=teacher),
        groups_per_batch=GROUPS,
    )
    way_settings = {"n_teacher_targets": 50} if "distributions" in way else {}
    return train_on_policy.Config(
        model_name=model,
        log_path=str(log_path),
        dataset_configs=[part],
        max_tokens=TOKENS,
        reward_coef=0,
        center_teacher_kl=not way_settings,
        **way_settings,
        **common,
    )


def rl_config(
    model: str, log_path: Path, num_batches: int = STEPS, group_size: int = SIZE, **settings: Any
) -> rl_train.Config:
    """RL on the reward for a dog or a cat."""
    return rl_train.Config(
        model_name=model,
        log_path=str(log_path),
        dataset_builder=naming(model, num_batches, group_size),
        max_tokens=TOKENS,
        **{"learning_rate": 2e-3, **LOCAL, **settings},
    )


def naming(model: str, num_batches: int, group_size: int) -> NamingDatasetBuilder:
    """The openings of stories."""
    return NamingDatasetBuilder(
        model=model,
        words=WORDS,
        openings=OPENINGS,
        num_batches=num_batches,
        groups_per_batch=GROUPS,
        group_size=group_size,
    )


def go(module: Any, config: Any) -> None:
    """A run to its end, if it has not come there before."""
    last = get_last_checkpoint(config.log_path)
    if last is None or not last.final:
        asyncio.run(module.main(config))


def rows(log_path: Path) -> list[dict[str, Any]]:
    """What the evaluator found after each number of updates."""
    text = (log_path / "metrics.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line) for line in text.splitlines()]
    return [
        {"step": row["step"], "kl": row["distance/kl"], "right": row["distance/right"]}
        for row in found
        if "distance/kl" in row
    ]


async def answers(
    client: SamplingClient, model: str, count: int, seed: int
) -> list[tuple[list[int], list[int], list[float]]]:
    """Returns ``count`` answers for each opening: both tokens, and log-probabilities."""
    complete = TinkerTokenCompleter(client, TOKENS, 1.0, seed=seed)
    prompts = [get_tokenizer(model).encode(opening) for opening in OPENINGS]
    found = await asyncio.gather(
        *(
            complete.derived(i).sample_many(tinker.ModelInput.from_ints(prompt), [], count)
            for i, prompt in enumerate(prompts)
        )
    )
    return [
        (prompt, answer.tokens, answer.logprobs)
        for prompt, group in zip(prompts, found, strict=True)
        for answer in group
    ]


async def write_texts(model: str, teacher: str, seed: int, file: Path) -> None:
    """A batch of the teacher's answers for each step."""
    connection = connect(**LOCAL)
    client = await connection.service.create_sampling_client(model_path=teacher)
    batches = [await answers(client, model, SIZE, seed * 1000 + step) for step in range(STEPS)]
    connection.close()
    file.write_text(json.dumps([row[:2] for batch in batches for row in batch]), encoding="utf-8")


@chz.chz
class Texts(SupervisedDatasetBuilder):
    """The teacher's answers, in the order in which it wrote them."""

    file: str

    def __call__(self) -> tuple[SupervisedDataset, None]:
        """A batch a step."""
        found = json.loads(Path(self.file).read_text(encoding="utf-8"))
        dataset = SupervisedDatasetFromHFDataset(
            found,
            GROUPS * SIZE,
            map_fn=lambda row: datum_from_tokens_weights(
                row[0] + row[1], [0.0] * len(row[0]) + [1.0] * len(row[1])
            ),
        )
        return dataset, None


@chz.chz
class Distance:
    """Builds the evaluator of all methods."""

    model: str
    teacher: str

    def __call__(self) -> DistanceEvaluator:
        """An evaluator."""
        return DistanceEvaluator(self.model, self.teacher)


class DistanceEvaluator(SamplingClientEvaluator):
    """``distance/kl``, nats an answer of the student's, and ``distance/right``."""

    def __init__(self, model: str, teacher: str) -> None:
        self._model, self._path = model, teacher
        self._teacher: SamplingClient | None = None

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Of 32 answers to each opening."""
        if self._teacher is None:
            service = connect(**LOCAL).service
            self._teacher = await service.create_sampling_client(model_path=self._path)
        found = await answers(sampling_client, self._model, 32, seed=7)
        inputs = [tinker.ModelInput.from_ints(prompt + tokens) for prompt, tokens, _ in found]
        futures = [self._teacher.compute_logprobs(text) for text in inputs]
        kls = [
            sum(logprobs) - np.sum((await future)[len(prompt) :])
            for (prompt, _, logprobs), future in zip(found, futures, strict=True)
        ]
        texts = [get_tokenizer(self._model).decode(tokens) for _, tokens, _ in found]
        right = [any(word in text for word in WORDS) for text in texts]
        return {"distance/kl": float(np.mean(kls)), "distance/right": float(np.mean(right))}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(seed) for seed in sys.argv[3:]])
