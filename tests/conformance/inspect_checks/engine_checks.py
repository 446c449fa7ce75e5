"""Inspect on the bundled engine: log-probabilities, epochs, models by name, the evaluator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from inspect_ai import Epochs, Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import ChatMessageUser, GenerateConfig, Model, ModelAPI, get_model
from inspect_ai.scorer import includes, match
from inspect_ai.solver import generate
from inspect_models import ASK, ask, builder, evaluate, story_api, story_task

from tinker_cookbook.eval.inspect_bridge.evaluators import metrics_of
from tinker_cookbook.exceptions import ConfigurationError, EvalError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer


def test_a_long_answer_ends_at_the_models_context(stories, stories_model):
    api = story_api(stories, stories_model)
    long = [ChatMessageUser(content="the cat sat " * 60)]
    output = ask(api, long, max_tokens=5000, stop_seqs=["\x00"])
    assert output.stop_reason == "model_length"
    used = output.usage
    assert used.total_tokens == 512
    assert ask(api, max_tokens=5, temperature=0.0).stop_reason == "max_tokens"


def test_several_epochs_with_a_seed_are_several_samples_and_repeatable(
    stories, stories_model, tmp_path
):
    def completions() -> list[str]:
        model = Model(story_api(stories, stories_model), GenerateConfig(max_tokens=16, seed=3))
        task = story_task(2, epochs=Epochs(3, ["mean", "pass_at_2"]))
        (log,) = asyncio.run(eval_async(task, model=model, log_dir=str(tmp_path)))
        samples = read_eval_log(log.location).samples
        return [s.output.completion for s in sorted(samples, key=lambda s: (s.id, s.epoch))]

    first = completions()
    assert len(set(first)) == 6
    assert completions() == first


def test_a_model_is_opened_by_its_name(stories_model, tmp_path):
    model = get_model(
        f"tinker-sampling/{stories_model}", renderer_name="role_colon", backend="local",
        device="cpu", config=GenerateConfig(max_tokens=8),
    )  # fmt: skip
    assert isinstance(model.api, ModelAPI)
    (log,) = asyncio.run(eval_async(story_task(3), model=model, log_dir=str(tmp_path)))
    assert log.status == "success"
    assert log.eval.model == f"tinker-sampling/{stories_model}"

    async def count_and_close():
        counted = await model.count_tokens("Once upon a time")
        counted_messages = await model.count_tokens(list(ASK))
        await model.api.aclose()
        return counted, counted_messages

    counted, counted_messages = asyncio.run(count_and_close())
    assert counted == len(get_tokenizer(stories_model).encode("Once upon a time"))
    assert counted_messages > counted


def test_metrics_are_those_of_every_scorer_and_reducer(stories, stories_model, tmp_path):
    tasks = [
        story_task(4, scorer=[includes(), match()], name="both"),
        Task(
            dataset=[Sample(input="Once", target="a")], solver=generate(), scorer=includes(),
            epochs=Epochs(2, ["mean", "max"]), name="reduced",
        ),
    ]  # fmt: skip
    evaluator = builder(stories_model, tasks, tmp_path)()
    metrics = asyncio.run(evaluator(stories))
    assert metrics["cats/accuracy"] == metrics["cats/includes/accuracy"]
    assert metrics["cats/match/accuracy"] == 0.0
    assert metrics["cats/num_examples"] == 4
    assert metrics["cats/num_errors"] == 0
    assert {"reduced/includes/mean/accuracy", "reduced/includes/max/accuracy"} <= set(metrics)
    logs = [read_eval_log(log.location) for log in evaluator.last_logs]
    assert metrics_of(logs) == metrics
    assert len(logs[0].samples) == 4


def test_an_error_in_a_scorer_ends_it_or_is_counted(stories, stories_model, tmp_path):
    from inspect_ai.scorer import Score, accuracy, scorer

    @scorer(metrics=[accuracy()])
    def breaks() -> Callable:
        async def score(state, target):
            if state.sample_id == 1:
                raise ValueError("no score for this one")
            return Score(value="C")

        return score

    task = story_task(3, scorer=breaks())
    with pytest.raises((ValueError, EvalError), match="no score for this one"):
        evaluate(builder(stories_model, task, tmp_path), stories)
    tolerant = builder(stories_model, task, tmp_path, debug_errors=False)
    metrics = evaluate(tolerant, stories)
    assert (metrics["cats/num_examples"], metrics["cats/num_errors"]) == (3, 1)
    assert metrics["cats/accuracy"] == 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tasks": "no/such/file.py"}, "no file no/such/file.py"),
        ({"tasks": " , "}, "tasks: got none"),
        ({"limit": 0}, "limit: got 0"),
        ({"task_args": "x"}, "task_args: got 'x'"),
    ],
)
def test_wrong_settings_are_errors_before_anything_runs(tmp_path, settings, words):
    with pytest.raises(ConfigurationError, match=words):
        builder("m", **{"tasks": "mmlu", "folder": tmp_path, **settings})()


def test_it_evaluates_in_a_training_loop_and_logs_into_the_runs_folder(stories_model, tmp_path):
    from tinker_cookbook.supervised import train
    from tinker_cookbook.supervised.conversation_file import FromConversationFileBuilder
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

    ask_and_answer = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hey"}]
    data = tmp_path / "rows.jsonl"
    data.write_text((json.dumps({"messages": ask_and_answer}) + "\n") * 4)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=stories_model,
        renderer_name="role_colon",
        max_length=128,
        batch_size=2,
    )
    inline = builder(stories_model, story_task(2), None, log_dir=None)
    config = train.Config(
        log_path=str(tmp_path / "run"),
        model_name=stories_model,
        recipe_name="inline",
        renderer_name="role_colon",
        dataset_builder=FromConversationFileBuilder(common_config=common, file_path=str(data)),
        learning_rate=1e-3,
        lora_rank=2,
        eval_every=1,
        save_every=0,
        backend="local",
        device="cpu",
        evaluator_builders=[inline],
    )
    asyncio.run(train.main(config))
    written = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in written]
    assert [row["cats/num_examples"] for row in metrics if "cats/num_examples" in row] == [2, 2, 2]
    assert len(list((tmp_path / "run" / "inspect-logs").glob("*.eval"))) == 3


def test_a_benchmark_has_the_same_answers_and_scores_in_both(stories, stories_model, tmp_path):
    from tinker_cookbook.eval.benchmarks import BenchmarkConfig, load_trajectories, run_benchmark

    rows = [{"question": f"{n} cats?", "answer": f"#### {n}"} for n in range(6)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    renderer = get_renderer("role_colon", get_tokenizer(stories_model))
    config = BenchmarkConfig(
        temperature=0.0, max_tokens=40, data_path=str(tmp_path), save_dir=str(tmp_path / "ours"),
        context_window=512,
    )  # fmt: skip
    result = asyncio.run(run_benchmark("gsm8k", stories, renderer, config))
    evaluator = builder(
        stories_model,
        "tinker_cookbook/eval/inspect_bridge/tasks.py@benchmark",
        tmp_path / "theirs",
        task_args=json.dumps({"name": "gsm8k", "data_path": str(tmp_path)}), max_tokens=40,
    )()  # fmt: skip
    metrics = asyncio.run(evaluator(stories))
    assert metrics["gsm8k/accuracy"] == result.score
    samples = {
        sample.id: sample for sample in read_eval_log(evaluator.last_logs[0].location).samples
    }
    answers = load_trajectories(str(tmp_path / "ours"), "gsm8k")
    assert len(answers) == len(samples) == 6
    for answer in answers:
        sample = samples[answer.example_id]
        assert sample.output.completion == answer.turns[-1].content
        assert sample.scores["benchmark_grader"].value == answer.reward
