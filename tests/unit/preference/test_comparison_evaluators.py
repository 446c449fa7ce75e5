"""Win rates of a real small policy under judges whose verdicts are known."""

from __future__ import annotations

import asyncio

import pytest
from comparisons import comparison

from tinker_cookbook.backends import connect
from tinker_cookbook.preference.comparison_policy_evaluator import (
    ComparisonEvaluator,
)
from tinker_cookbook.preference.types import PreferenceModel
from tinker_cookbook.renderers import get_text_content

OTHER = "The answer of the data."
COMPARISONS = [comparison(OTHER, "unused", f"Tell story {i}.") for i in range(6)]


class Judge(PreferenceModel):
    """Gives the verdict of a function of the two texts, and keeps what it saw."""

    def __init__(self, verdict):
        self.verdict, self.seen = verdict, []
        self.busy = self.most_busy = 0

    async def __call__(self, comparison):
        """The verdict."""
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        await asyncio.sleep(0.001)
        self.busy -= 1
        texts = [get_text_content(c[0]) for c in (comparison.completion_A, comparison.completion_B)]
        self.seen.append((comparison.prompt_conversation[0]["content"], *texts))
        return self.verdict(*texts)


@pytest.fixture(scope="module")
def policy(stories_model):
    with connect("local", device="cpu", dtype="float32").service as service:
        yield service.create_sampling_client(base_model=stories_model).result()


@pytest.fixture
def evaluator(stories_model):
    """Makes an evaluator with a judge."""

    def make(judge, comparisons=COMPARISONS, **settings):
        return ComparisonEvaluator(
            lambda: judge, comparisons, "role_colon", stories_model, max_tokens=12, **settings
        )

    return make


def against_the_data(a, b):
    """1 where the answer of the data is A, -1 where it is B."""
    return float(a == OTHER) - float(b == OTHER)


async def test_a_policy_that_is_always_preferred(policy, evaluator):
    judge = Judge(against_the_data)
    metrics = await evaluator(judge)(policy)
    assert metrics["win_rate"] == 1.0
    assert metrics["stderr"] == 0.0
    assert metrics["win_rate_low"] < 1.0 == metrics["win_rate_high"]
    assert metrics["num_comparisons"] == 6
    assert 1 <= metrics["answer_tokens"] <= 12
    assert len(judge.seen) == 12
    assert sorted({prompt for prompt, _, _ in judge.seen}) == [f"Tell story {i}." for i in range(6)]
    assert sum(a == OTHER for _, a, _ in judge.seen) == 6


async def test_position_bias_cancels_in_both_orders(policy, evaluator):
    biased = Judge(lambda a, b: 1.0)
    assert (await evaluator(biased)(policy))["win_rate"] == 0.5
    assert (await evaluator(biased, both_ways=False)(policy))["win_rate"] == 1.0


async def test_answers_depend_on_the_seed_alone(policy, evaluator):
    def answers(judge):
        return sorted((p, b) for p, a, b in judge.seen if a == OTHER)

    judges = [Judge(against_the_data) for _ in range(3)]
    for judge, seed in zip(judges, (0, 0, 1), strict=True):
        await evaluator(judge, seed=seed, max_concurrency=1 + 5 * seed)(policy)
    assert answers(judges[0]) == answers(judges[1]) != answers(judges[2])
    assert len({text for _, text in answers(judges[0])}) > 1


async def test_a_baseline_answers_in_place_of_the_data(policy, evaluator):
    judge = Judge(lambda a, b: 0.0)
    compare = evaluator(judge, baseline=policy)
    await compare(policy)
    assert all(OTHER not in texts for _, *texts in judge.seen)
    first = [a != b for _, a, b in judge.seen]
    assert any(first)  # the same policy draws other answers as its own baseline
    before = {(p, a) for p, a, _ in judge.seen[::2]}
    judge.seen.clear()
    await compare(policy)
    assert {(p, a) for p, a, _ in judge.seen[::2]} == before
