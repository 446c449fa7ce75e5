"""Comparisons that are too long for the judge are left out, not met in the middle of a run. 2 s."""

from __future__ import annotations

import asyncio
import logging

import pytest
from comparisons import labeled

from tinker_cookbook.backends import connect
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.preference.comparison import (
    ComparisonRendererFromChatRenderer,
    comparisons_that_fit,
)
from tinker_cookbook.preference.preference_model import PreferenceModelEvaluator
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

LONG = "a very long story " * 200


@pytest.fixture(scope="module")
def renderer(stories_model):
    return get_renderer("role_colon", get_tokenizer(stories_model))


def length(renderer, one) -> int:
    build = ComparisonRendererFromChatRenderer(renderer).build_label_prompt
    return build(one.comparison).length + 1


def test_the_limit_is_the_length_of_prompt_answers_and_label(renderer, caplog):
    data = [labeled("A"), labeled("B", prompt=LONG), labeled("A", b=LONG)]
    exact = length(renderer, data[0])
    with caplog.at_level(logging.WARNING):
        assert comparisons_that_fit(data, renderer, exact) == data[:1]
    assert "2 of 3 comparisons" in caplog.text
    assert comparisons_that_fit(data, renderer, None) == data
    with pytest.raises(DataValidationError, match=f"the shortest has {exact}"):
        comparisons_that_fit(data, renderer, exact - 1)


def test_answers_that_will_be_sampled_count_with_their_limit(renderer):
    data = [labeled("A"), labeled("A", b=LONG)]
    # With two new answers those of the data do not matter, with one the longer one does.
    assert comparisons_that_fit(data, renderer, 300, new_answers=2, answer_tokens=50) == data
    assert comparisons_that_fit(data, renderer, 300, new_answers=1, answer_tokens=50) == data[:1]
    with pytest.raises(DataValidationError):
        comparisons_that_fit(data, renderer, 300, new_answers=2, answer_tokens=150)


def test_a_reward_model_is_evaluated_on_the_comparisons_that_fit(stories_model, renderer):
    data = [labeled("A"), labeled("B", prompt=LONG)]
    with connect("local", device="cpu", dtype="float32") as connection:
        service = connection.service
        client = service.create_sampling_client(base_model=stories_model).result()
        evaluator = PreferenceModelEvaluator(data, renderer, max_length=512)
        metrics = asyncio.run(evaluator(client))
    assert metrics["rm/num_judgements"] == 2
    assert metrics["rm/num_too_long"] == 1
