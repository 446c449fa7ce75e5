"""The counting task of the numerics check, and the KL by context length (under 1 s)."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import tinker

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataValidationError,
)
from tinker_cookbook.recipes.rl_numerics_check.env import (
    CountingTaskConfig,
    build_prompt,
    closeness_reward,
    count_word,
    generate_corpus,
    parse_answer,
    sample_problem,
)
from tinker_cookbook.rl.metrics import compute_kl_sample_train, kl_sample_train_by_depth

SHORT = CountingTaskConfig(num_pages_min=3, num_pages_max=5, page_chars=200)


def datum(length: int, seed: int) -> tinker.Datum:
    rng = np.random.default_rng(seed)
    mask = (rng.random(length) < 0.5).astype(np.float32)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1] * length),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.ones(length, dtype=np.int64)),
            "logprobs": tinker.TensorData.from_numpy((-rng.random(length) * mask).astype("f4")),
            "advantages": tinker.TensorData.from_numpy(mask),
            "mask": tinker.TensorData.from_numpy(mask),
        },
    )


def test_the_kl_of_each_range_is_that_of_its_tokens():
    data = [datum(30, 0), datum(50, 1)]
    rng = np.random.default_rng(2)
    learner = [-rng.random(30), -rng.random(50)]
    found = kl_sample_train_by_depth(data, learner, (10, 40))
    for low, high, name in ((0, 10, "0_10"), (10, 40, "10_40"), (40, math.inf, "40_up")):
        differences = []
        for one, scores in zip(data, learner, strict=True):
            mask = one.loss_fn_inputs["mask"].to_numpy()
            sampled = one.loss_fn_inputs["logprobs"].to_numpy()
            for position in range(len(mask)):
                if mask[position] and low <= position + 1 < high:
                    differences.append(sampled[position] - scores[position])
        assert found[f"optim/kl_tokens/{name}"] == len(differences)
        assert found[f"optim/kl_sample_train_v1/{name}"] == pytest.approx(np.mean(differences))
        v2 = np.mean(np.square(differences)) / 2
        assert found[f"optim/kl_sample_train_v2/{name}"] == pytest.approx(v2)
    # The ranges add up to the whole.
    names = ("0_10", "10_40", "40_up")
    whole = compute_kl_sample_train(data, learner)["optim/kl_sample_train_v1"]
    weighted = sum(
        found[f"optim/kl_tokens/{n}"] * found[f"optim/kl_sample_train_v1/{n}"] for n in names
    )
    assert weighted / sum(found[f"optim/kl_tokens/{n}"] for n in names) == pytest.approx(whole)
    assert not any(
        name.endswith("60_up") for name in kl_sample_train_by_depth(data, learner, (60,))
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [("Answer: 42", 42), ("answer : **1,024**", 1024), ("Answer: 3\nAnswer: 4", 4), ("42", None)],
)
def test_the_last_answer_counts(text, count):
    assert parse_answer(text) == count


def test_the_reward_falls_with_the_error():
    rewards = [closeness_reward(predicted, 50, 0.2) for predicted in (50, 55, 60, 100)]
    assert rewards == pytest.approx([1, 0.5, 0, 0])


def test_a_problem_counts_the_pages_of_its_document():
    corpus = generate_corpus(500)
    problem = sample_problem(random.Random(1), corpus, SHORT)
    assert sample_problem(random.Random(1), corpus, SHORT) == problem
    assert 3 <= problem.num_pages <= 5
    assert len(problem.pages) == SHORT.max_turns
    counts = [count_word(page, problem.word) for page in problem.pages[: problem.num_pages]]
    assert problem.true_count == sum(counts)
    assert f'"{problem.word}"' in problem.prompt
    with pytest.raises(DataValidationError, match="corpus: has 1,000 characters"):
        sample_problem(random.Random(1), corpus[:1000], SHORT)


def test_a_hidden_length_is_the_same_for_all_problems():
    hidden = CountingTaskConfig(
        num_pages_min=3, num_pages_max=9, page_chars=50, num_pages_hint="range"
    )
    corpus = generate_corpus(500)
    found = {sample_problem(random.Random(i), corpus, hidden).num_pages for i in range(5)}
    assert found == {hidden.hidden_num_pages}
    assert "between 3 and 9 pages" in build_prompt(hidden, "time", 5)
    letters = CountingTaskConfig(word_hint="first_last")
    assert 'starts with "t" and ends with "e"' in build_prompt(letters, "time", 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_pages_min": 5, "num_pages_max": 3}, "got 5 and 3, expected 1 <= min <= max"),
        ({"word_hint": "hidden"}, "expected a single word"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        CountingTaskConfig(**settings)
