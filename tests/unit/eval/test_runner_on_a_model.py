"""Running benchmarks on a real model, by the official interface (under 5 s)."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
import tinker

from tinker_cookbook.eval.benchmarks import (
    BenchmarkBuilder,
    BenchmarkConfig,
    Example,
    ExampleBenchmark,
    Grade,
    load_trajectories,
    run_benchmark,
)
from tinker_cookbook.record.read import open_record


@pytest.fixture(scope="module")
def client(stories_model):
    from tinker_cookbook.backends import connect

    service = connect("local", device="cpu", dtype="float32").service
    yield service.create_sampling_client(base_model=stories_model).result()
    service.close()


@pytest.fixture(scope="module")
def renderer(stories_model):
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    return get_renderer("role_colon", get_tokenizer(stories_model))


class Stories(ExampleBenchmark):
    """Continues stories; an answer is right if it is what the model says greedily."""

    name = "stories"

    def load_examples(self, config):
        texts = ["Once there was a dog.", "Lily went out.", "The sun is"]
        return [Example(t, [{"role": "user", "content": t}], None, None) for t in texts]

    def grade(self, response, example):
        return Grade(float(len(response) > 3), logs={"extracted": response})


def test_a_model_is_evaluated_by_the_official_interface(client, renderer, tmp_path):
    config = BenchmarkConfig(temperature=0.0, max_tokens=8, save_dir=str(tmp_path), num_samples=2)
    result = asyncio.run(run_benchmark(Stories(), client, renderer, config))
    assert (result.num_examples, result.num_truncated) == (6, 6)
    rows = load_trajectories(str(tmp_path), "stories")
    # Greedy: both answers are alike, and equal to the model's own.
    for i, example in enumerate(Stories().load_examples(config)):
        prompt = renderer.build_generation_prompt(example.messages)
        stop = renderer.get_stop_sequences()
        greedy = tinker.SamplingParams(max_tokens=8, temperature=0.0, stop=stop)
        tokens = client.sample(prompt, 1, greedy).result().sequences[0].tokens
        text = renderer.parse_response(tokens)[0]["content"]
        assert {row.turns[-1].content for row in rows if row.idx == i} == {text}
    # The same weights again: nothing is sampled.
    before = (tmp_path / "stories" / "trajectories.jsonl").read_bytes()
    asyncio.run(run_benchmark(Stories(), client, renderer, config))
    assert (tmp_path / "stories" / "trajectories.jsonl").read_bytes() == before


def recorded(folder, name):
    table = open_record(folder / name).table(0, f"eval_{name}")
    assert table is not None
    return table.to_pylist()


def test_the_sampled_tokens_are_recorded(client, renderer, tmp_path):
    settings = {"max_tokens": 8, "save_dir": str(tmp_path), "seed": 3}
    for benchmark in (Stories(), OwnEnvs()):
        for count, limit in ((1, 2), (2, None)):  # the second run samples what is missing
            config = BenchmarkConfig(num_samples=count, max_examples=limit, **settings)
            asyncio.run(run_benchmark(benchmark, client, renderer, config))
        turns = recorded(tmp_path, benchmark.name)
        places = [(turn["group"], turn["member"]) for turn in turns]
        assert places == [(group, member) for group in range(3) for member in range(2)]
        stored = {(r.idx, r.sample): r for r in load_trajectories(str(tmp_path), benchmark.name)}
        for place, turn in zip(places, turns, strict=True):
            answer = renderer.parse_response(turn["answer"])[0]["content"]
            assert answer == stored[place].turns[-1].content
            assert turn["episode_reward"] == stored[place].reward
            if isinstance(benchmark, Stories):  # the environments keep their prompt only
                roles = [message["role"] for message in json.loads(turn["episode_messages"])]
                assert roles == ["user", "assistant"]
            params = tinker.SamplingParams(
                max_tokens=8, temperature=0.6, seed=turn["seed"], stop=renderer.get_stop_sequences()
            )
            prompt = tinker.ModelInput.from_ints(turn["prompt"])
            again = client.sample(prompt, turn["sample"] + 1, params).result()
            assert again.sequences[turn["sample"]].tokens == turn["answer"]
    # Answers with other settings replace those of the folder.
    config = BenchmarkConfig(max_examples=1, temperature=1.0, record="summary", **settings)
    asyncio.run(run_benchmark(Stories(), client, renderer, config))
    (row,) = recorded(tmp_path, "stories")
    assert "answer" not in row


class OwnEnvs(BenchmarkBuilder):
    """The same problems through environments of the builder."""

    name = "own_envs"

    def make_envs(self, renderer, config):
        return Stories().make_envs(renderer, config)


def test_a_builder_with_its_own_environments_gives_the_same_answers(client, renderer, tmp_path):
    config = BenchmarkConfig(temperature=0.0, max_tokens=8, save_dir=str(tmp_path))
    own = asyncio.run(run_benchmark(OwnEnvs(), client, renderer, config))
    same = asyncio.run(run_benchmark(Stories(), client, renderer, config))
    for field in ("score", "num_truncated", "num_examples"):
        assert getattr(own, field) == getattr(same, field)
    a, b = (load_trajectories(str(tmp_path), name) for name in ("own_envs", "stories"))
    assert [r.turns[-1].content for r in a] == [r.turns[-1].content for r in b]
    assert [r.example_id for r in a] == [r.example_id for r in b]
    before = (tmp_path / "own_envs" / "trajectories.jsonl").read_bytes()
    asyncio.run(run_benchmark(OwnEnvs(), client, renderer, config))
    assert (tmp_path / "own_envs" / "trajectories.jsonl").read_bytes() == before
    # Environments of another version run again.
    changed = OwnEnvs()
    changed.grader_version = "2"
    asyncio.run(run_benchmark(changed, client, renderer, config))
    assert (tmp_path / "own_envs" / "trajectories.jsonl").read_bytes() != before


class Choices(ExampleBenchmark):
    """Which word continues the text?"""

    name = "choices"

    def load_examples(self, config):
        choices = (" dog", " little girl named Lily", " cat", " the")
        contexts = ["Once upon a time, there was a", "She saw a big"]
        return [
            Example(c, [], 1, None, choices=choices, answer_index=i, context=c)
            for i, c in enumerate(contexts)
        ]

    def grade(self, response, example):
        raise AssertionError("choices are not graded by text")


def test_choices_are_scored_by_the_models_log_probabilities(
    client, renderer, stories_model, tmp_path
):
    import torch
    from transformers import AutoModelForCausalLM

    config = BenchmarkConfig(scoring="logprob", save_dir=str(tmp_path))
    result = asyncio.run(run_benchmark(Choices(), client, renderer, config))
    model = AutoModelForCausalLM.from_pretrained(stories_model)
    tokenizer = renderer.tokenizer
    rows = load_trajectories(str(tmp_path), "choices")
    right = right_by_length = 0
    for row, example in zip(rows, Choices().load_examples(config), strict=True):
        expected = []
        for choice in example.choices:
            before = tokenizer.encode(example.context)
            whole = tokenizer.encode(example.context + choice)
            with torch.no_grad():
                logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            at = range(len(before), len(whole))
            expected.append(sum(float(logprobs[i - 1, whole[i]]) for i in at))
        assert row.logs["choice_logprobs"] == pytest.approx(expected, abs=1e-3)
        lengths = [len(choice.strip()) for choice in example.choices]
        best = max(range(4), key=lambda i: expected[i])
        best_by_length = max(range(4), key=lambda i: expected[i] / lengths[i])
        right += best == example.answer_index
        right_by_length += best_by_length == example.answer_index
    assert result.num_correct == right
    assert result.metrics["acc_norm"] == right_by_length / 2


def test_the_identity_of_weights_follows_the_adapter(client, stories_model):
    from tinker_cookbook.backends import connect

    service = connect("local", device="cpu", dtype="float32").service
    trainer = service.create_lora_training_client(stories_model, rank=2, seed=1).result()
    digests = {client.weights_digest()}
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 5, 9]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=[5, 9, 4], dtype="int64", shape=[3]),
            "weights": tinker.TensorData(data=[1.0, 1.0, 1.0], dtype="float32", shape=[3]),
        },
    )
    for _ in range(2):
        trainer.forward_backward([datum], "cross_entropy").result()
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        digests.add(trainer.save_weights_and_get_sampling_client().result().weights_digest())
    assert len(digests) == 3
    assert all(digest.startswith(stories_model) for digest in digests)
    same = trainer.save_weights_and_get_sampling_client().result().weights_digest()
    assert same in digests
    service.close()


def test_other_weights_in_the_same_folder_are_another_model(stories_model, tmp_path):
    import safetensors.torch

    from tinker_cookbook.backends import connect

    model = tmp_path / "model"
    shutil.copytree(stories_model, model, copy_function=shutil.copyfile)
    file = next(model.glob("*.safetensors"))
    before = file.stat()
    digests = []
    for number in (0, 0, 1):
        if number:
            # The same size: one value in the middle of the file differs.
            tensors = safetensors.torch.load_file(file)
            name = sorted(tensors)[len(tensors) // 2]
            tensors[name].view(-1)[0] += 1
            safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
            assert file.stat().st_size == before.st_size
        service = connect("local", device="cpu", dtype="float32").service
        client = service.create_sampling_client(base_model=str(model)).result()
        digests.append(client.weights_digest())
        service.close()
    assert digests[0] == digests[1] != digests[2]
