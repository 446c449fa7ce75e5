"""Prompts from files and from the Hub: what is read, what is refused, what is left out."""

from __future__ import annotations

import asyncio
import json

import pytest

from tinker_cookbook.distillation import datasets as prompts_module
from tinker_cookbook.distillation.datasets import (
    PromptOnlyDataset,
    PromptOnlyDatasetBuilder,
    PromptOnlyEnv,
    load_prompts,
)
from tinker_cookbook.exceptions import (
    DataValidationError,
)
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer


def write(path, *rows) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def builder(model, file, **settings) -> PromptOnlyDatasetBuilder:
    given = {"groups_per_batch": 2, "group_size": 3, "renderer_name": "chatml", **settings}
    return PromptOnlyDatasetBuilder(dataset_name=str(file), model_name_for_tokenizer=model, **given)


def test_prompts_and_conversations_up_to_the_last_question(tmp_path):
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    file = write(tmp_path / "p.jsonl", {"prompt": "one"}, "", {"messages": talk}, {"problem": "x"})
    assert load_prompts(file) == [
        [{"role": "user", "content": "one"}],
        talk[:4],
        [{"role": "user", "content": "x"}],
    ]
    assert load_prompts(file, 1) == [[{"role": "user", "content": "one"}]]


def test_hub_names_read_the_hubs_dataset(monkeypatch):
    asked = []

    def load(path, split, name=None, instead=""):
        asked.append((path, split))
        return [{"question": "1?", "final_answer": "1"}, {"question": "2?"}]

    monkeypatch.setattr(prompts_module, "load_hf_dataset", load)
    assert [prompt[0]["content"] for prompt in load_prompts("deepmath")] == ["1?", "2?"]
    assert asked == [("zwhe99/DeepMath-103K", "train")]


def test_a_dataset_of_texts_as_code_for_the_official_package_makes_it(model):
    tokenizer = get_tokenizer(model)
    renderer = get_renderer("chatml", tokenizer)
    prefix = [{"role": "system", "content": "s"}]
    dataset = PromptOnlyDataset(
        prompts=["one", "two", "three", "x" * 300], batch_size=2, group_size=3, renderer=renderer,
        tokenizer=tokenizer, max_prompt_tokens=200, convo_prefix=prefix, dataset_name="mine",
    )  # fmt: skip
    assert len(dataset) == 2
    first, second = dataset.get_batch(0)
    assert (first.num_envs, first.dataset_name, second.env_thunk().prompt) == (3, "mine", "two")
    observation, _ = asyncio.run(first.env_thunk().initial_observation())
    ask = [*prefix, {"role": "user", "content": "one"}]
    assert observation.to_ints() == renderer.build_generation_prompt(ask).to_ints()
    with pytest.raises(DataValidationError, match="problems: got none"):
        PromptOnlyDataset([], 2, 3, renderer, max_prompt_tokens=5)


def test_a_prompt_is_asked_and_nothing_is_paid(model, tmp_path):
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    file = write(tmp_path / "p.jsonl", {"messages": talk})
    prefix = [{"role": "system", "content": "s"}]
    dataset, _ = asyncio.run(builder(model, file, convo_prefix=prefix)())
    (group,) = dataset.get_batch(0)
    envs = asyncio.run(group.make_envs())
    assert [type(env) for env in envs] == [PromptOnlyEnv] * 3
    assert envs[0].messages == [*prefix, *talk]
    ob, _ = asyncio.run(envs[0].initial_observation())
    renderer = get_renderer("chatml", get_tokenizer(model))
    assert ob.to_ints() == renderer.build_generation_prompt([*prefix, *talk]).to_ints()
    result = asyncio.run(envs[0].step([10]))
    assert (result.reward, result.episode_done, result.metrics) == (0.0, True, {})
    assert group.logging_tags() == ["prompts"]
