"""A benchmark inside of a loop, on a small real model (5 s)."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest

from tinker_cookbook.eval import BenchmarkEvaluator
from tinker_cookbook.eval.benchmarks import Example, ExampleBenchmark, Grade
from tinker_cookbook.exceptions import BenchmarkNotFoundError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.conversation_file import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

TEXTS = ("Where is Lily?", "Who is there?", "What now?")
ANSWER = "The dog"


class Dogs(ExampleBenchmark):
    """An answer is right if it is about the dog."""

    name = "dogs"

    def load_examples(self, config):
        return [Example(text, [{"role": "user", "content": text}], None, ANSWER) for text in TEXTS]

    def grade(self, response, example):
        return Grade(float("dog" in response), {"length": len(response)})


def test_a_supervised_run_logs_the_benchmark_and_its_score_rises(stories_model, tmp_path):
    renderer = get_renderer("role_colon", get_tokenizer(stories_model))
    rows = [
        {"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": ANSWER}]}
        for t in TEXTS
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 30))
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=stories_model,
        renderer_name="role_colon",
        max_length=128,
        batch_size=3,
    )
    build = partial(
        BenchmarkEvaluator, Dogs(), renderer, max_tokens=8, temperature=0.0, concurrency=4
    )
    config = train.Config(
        log_path=str(tmp_path / "run"),
        model_name=stories_model,
        dataset_builder=FromConversationFileBuilder(
            common_config=common, file_path=str(tmp_path / "rows.jsonl")
        ),
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
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if "eval/dogs/score" in row]
    assert found[0]["eval/dogs/score"] < 1
    last = found[-1]
    assert last["eval/dogs/score"] == 1
    assert (last["eval/dogs/num_examples"], last["eval/dogs/num_correct"]) == (3, 3)
    assert (last["eval/dogs/num_errors"], last["eval/dogs/num_truncated"]) == (0, 3)
    # Wilson's interval of 3 of 3.
    assert last["eval/dogs/ci_low"] == pytest.approx(0.4385, abs=1e-4)
    assert last["eval/dogs/ci_high"] == 1


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
