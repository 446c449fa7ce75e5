"""A benchmark inside of the SFT, RL and DPO loops, on a small real model (15 s)."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import chz
import pytest
import tinker

from tinker_cookbook.eval import BenchmarkEvaluator
from tinker_cookbook.eval.benchmarks import BenchmarkConfig, Example, ExampleBenchmark, Grade
from tinker_cookbook.exceptions import BenchmarkNotFoundError
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.envs.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.common import datum_from_tokens_weights
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

TEXTS = ("Where is Lily?", "Who is there?", "What now?")
ANSWER = " The dog"


class Dogs(ExampleBenchmark):
    """An answer is right if it is about the dog."""

    name = "dogs"

    def load_examples(self, config):
        return [Example(text, [{"role": "user", "content": text}], None, ANSWER) for text in TEXTS]

    def grade(self, response, example):
        return Grade(float("dog" in response), {"length": len(response)})


class AnswersAboutDogs(SupervisedDataset):
    def __init__(self, renderer):
        self._renderer = renderer

    def get_batch(self, index):
        data = []
        for text in TEXTS:
            prompt = self._renderer.build_generation_prompt([{"role": "user", "content": text}])
            before = prompt.to_ints()
            whole = before + self._renderer.tokenizer.encode(ANSWER, add_special_tokens=False)
            weights = [0.0] * (len(before) - 1) + [1.0] * (len(whole) - len(before))
            data.append(
                tinker.Datum(
                    model_input=tinker.ModelInput.from_ints(whole[:-1]),
                    loss_fn_inputs={"target_tokens": whole[1:], "weights": weights},
                )
            )
        return data

    def __len__(self):
        return 30


@chz.chz
class Builder(SupervisedDatasetBuilder):
    model: str

    def __call__(self):
        return AnswersAboutDogs(get_renderer("role_colon", get_tokenizer(self.model))), None


def test_a_supervised_run_logs_the_benchmark_and_its_score_rises(stories_model, tmp_path):
    renderer = get_renderer("role_colon", get_tokenizer(stories_model))
    build = partial(
        BenchmarkEvaluator, Dogs(), renderer, max_tokens=8, temperature=0.0, concurrency=4
    )
    config = train.Config(
        log_path=str(tmp_path),
        model_name=stories_model,
        dataset_builder=Builder(model=stories_model),
        learning_rate=0.01,
        lora_rank=8,
        eval_every=30,
        evaluator_builders=[build],
        show_samples=0,
        backend="local",
        device="cpu",
        dtype="float32",
    )
    asyncio.run(train.main(config))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if "eval/dogs/score" in row]
    assert found[0]["eval/dogs/score"] < 1
    last = found[-1]
    assert last["eval/dogs/score"] == 1
    assert (last["eval/dogs/num_examples"], last["eval/dogs/num_correct"]) == (3, 3)
    assert (last["eval/dogs/num_errors"], last["eval/dogs/num_truncated"]) == (0, 3)
    # Wilson's interval of 3 of 3.
    assert last["eval/dogs/ci_low"] == pytest.approx(0.4385, abs=1e-4)
    assert last["eval/dogs/ci_high"] == 1


def settings_of(model, folder):
    """Settings that the three loops share: three evaluations, before, during and after training."""
    renderer = get_renderer("role_colon", get_tokenizer(model))
    build = partial(
        BenchmarkEvaluator, Dogs(), renderer, max_tokens=8, temperature=0.0, concurrency=4
    )
    return {
        "log_path": str(folder),
        "model_name": model,
        "lora_rank": 4,
        "eval_every": 2,
        "save_every": 0,
        "evaluator_builders": [build],
        "backend": "local",
        "device": "cpu",
        "dtype": "float32",
    }


def check_evaluations(folder):
    """Every row of an evaluation has the benchmark's metrics, and the score is their quotient."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [row for row in rows if "eval/dogs/score" in row]
    assert [row["step"] for row in found] == [0, 2, 4]
    for row in found:
        counts = [row[f"eval/dogs/{name}"] for name in ("num_examples", "num_errors")]
        assert counts == [3, 0]
        assert row["eval/dogs/score"] == row["eval/dogs/num_correct"] / 3
        assert row["eval/dogs/ci_low"] <= row["eval/dogs/score"] <= row["eval/dogs/ci_high"]
    return [row["eval/dogs/score"] for row in found]


class DogProblems(RLDataset):
    """The benchmark's own problems, with its grader as the reward."""

    def __init__(self, renderer):
        self._renderer = renderer

    def get_batch(self, index):
        def make(position):
            return Dogs().make_envs(self._renderer, BenchmarkConfig())[position]

        return [ProblemGroupBuilder(partial(make, i), 4) for i in range(len(TEXTS))]

    def __len__(self):
        return 4


@chz.chz
class DogProblemsBuilder(RLDatasetBuilder):
    model: str

    async def __call__(self):
        return DogProblems(get_renderer("role_colon", get_tokenizer(self.model))), None


def test_an_rl_run_logs_the_benchmark(stories_model, tmp_path):
    config = rl_train.Config(
        **settings_of(stories_model, tmp_path),
        dataset_builder=DogProblemsBuilder(model=stories_model),
        learning_rate=0.01,
        max_tokens=8,
    )
    asyncio.run(rl_train.main(config))
    check_evaluations(tmp_path)


class DogsBeforeCats(SupervisedDataset):
    """Pairs: the answer about the dog, then the one about a cat."""

    def __init__(self, renderer):
        self._renderer = renderer

    def get_batch(self, index):
        data, encode = [], self._renderer.tokenizer.encode
        for text in TEXTS:
            prompt = self._renderer.build_generation_prompt([{"role": "user", "content": text}])
            for answer in (ANSWER, " The cat"):
                tokens = encode(answer, add_special_tokens=False)
                weights = [0.0] * prompt.length + [1.0] * len(tokens)
                data.append(datum_from_tokens_weights([*prompt.to_ints(), *tokens], weights))
        return data

    def __len__(self):
        return 4


@chz.chz
class PairsBuilder(SupervisedDatasetBuilder):
    model: str

    def __call__(self):
        return DogsBeforeCats(get_renderer("role_colon", get_tokenizer(self.model))), None


def test_a_dpo_run_logs_the_benchmark(stories_model, tmp_path):
    config = train_dpo.Config(
        **settings_of(stories_model, tmp_path),
        dataset_builder=PairsBuilder(model=stories_model),
        learning_rate=0.02,
        show_samples=0,
    )
    asyncio.run(train_dpo.main_async(config))
    scores = check_evaluations(tmp_path)
    assert scores[-1] >= scores[0]


def test_several_samples_and_names(stories_model):
    from tinker_cookbook.backends import connect

    renderer = get_renderer("role_colon", get_tokenizer(stories_model))
    evaluator = BenchmarkEvaluator(Dogs(), renderer, 2, 8, 1.0, num_samples=4)
    service = connect("local", device="cpu", dtype="float32").service
    client = service.create_sampling_client(base_model=stories_model).result()
    metrics = asyncio.run(evaluator(client))
    service.close()
    assert metrics["eval/dogs/num_examples"] == 8
    assert {"eval/dogs/pass@1", "eval/dogs/pass@4", "eval/dogs/mixed_share"} <= set(metrics)
    with pytest.raises(BenchmarkNotFoundError, match="did you mean 'gsm8k'"):
        BenchmarkEvaluator("gsm8", renderer)
