"""Tasks of the package ``inspect_evals`` on the bundled engine, from local files (15 s)."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import pytest
from inspect_ai.log import read_eval_log
from inspect_models import builder

from tinker_cookbook.exceptions import ConfigurationError, DataError


def evals_builder(stories_model, task, data, folder, **settings):
    return builder(
        stories_model, f"inspect_evals/{task}", folder, data_path=str(data), max_tokens=24,
        **settings,
    )  # fmt: skip


def test_ifeval_of_inspect_evals_has_the_verdicts_of_ours(
    stories, stories_model, shared_dir, tmp_path
):
    from tinker_cookbook.eval.benchmarks import REGISTRY, BenchmarkConfig

    data = shared_dir / "data"
    evaluator = evals_builder(stories_model, "ifeval", data, tmp_path, limit=12)()
    metrics = asyncio.run(evaluator(stories))
    ours = REGISTRY["ifeval"]
    examples = {
        example.logs["input"]: example
        for example in ours.load_examples(BenchmarkConfig(data_path=str(data)))
    }
    samples = read_eval_log(evaluator.last_logs[0].location).samples
    assert len(samples) == 12
    grades = [ours.grade(s.output.completion, examples[s.input]) for s in samples]
    for sample, grade in zip(samples, grades, strict=True):
        value = sample.scores["instruction_following"].value
        assert value["inst_level_strict"] == grade.metrics["num_strict"]
        assert value["inst_level_loose"] == grade.metrics["num_loose"]
    assert metrics["google/IFEval/prompt_strict_acc"] == sum(g.reward for g in grades) / 12
    assert "instruction_following_eval" not in sys.modules


def test_gsm8k_of_inspect_evals_reads_local_files(stories, stories_model, shared_dir, tmp_path):
    data = shared_dir / "data"
    evaluator = evals_builder(
        stories_model, "gsm8k", data, tmp_path, limit=3, task_args='{"fewshot": 0}'
    )()
    metrics = asyncio.run(evaluator(stories))
    assert (metrics["openai/gsm8k/num_examples"], metrics["openai/gsm8k/num_errors"]) == (3, 0)
    lines = (data / "gsm8k" / "test.jsonl").read_text().splitlines()[:3]
    samples = read_eval_log(evaluator.last_logs[0].location).samples
    assert [s.input for s in samples] == [json.loads(line)["question"] for line in lines]


def test_data_that_is_nowhere_is_an_error_within_seconds(
    stories, stories_model, tmp_path, monkeypatch
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    evaluator = evals_builder(stories_model, "gsm8k", tmp_path, tmp_path)()
    begun = time.monotonic()
    with pytest.raises(DataError, match="'openai/gsm8k' is not in the Hub's local cache and not"):
        asyncio.run(evaluator(stories))
    assert time.monotonic() - begun < 20


def test_an_unknown_task_is_a_sentence(stories, stories_model, tmp_path):
    evaluator = builder(stories_model, "inspect_evals/gsm8j", tmp_path)()
    with pytest.raises(ConfigurationError, match="tasks: got"):
        asyncio.run(evaluator(stories))
