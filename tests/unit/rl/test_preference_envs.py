"""Answers that are judged in pairs: who meets whom, what it earns, and where it can be played."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import chz
import pytest

from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison, PreferenceModel
from tinker_cookbook.renderers import get_renderer, get_text_content
from tinker_cookbook.rl.envs.preference_envs import (
    LazyPreferenceModel,
    PairwisePreferenceDataset,
    PairwisePreferenceGroupBuilder,
    PairwisePreferenceRLDatasetBuilder,
    PreferenceEnv,
    TournamentPattern,
)
from tinker_cookbook.rl.rollouts.group import do_group_rollout, run_group, set_rollout_executor
from tinker_cookbook.rl.rollouts.strategy import RetryOnFailure
from tinker_cookbook.tokenizer_utils import get_tokenizer

BOTH_WAYS, ONE_WAY = TournamentPattern
CONVO = [{"role": "user", "content": "2+3?"}]


def text_of(completion) -> str:
    return "|".join(get_text_content(message) for message in completion)


class ByNumber(PreferenceModel):
    """Prefers the larger number: tanh of the difference, and a liking for the second place."""

    def __init__(self, bias: float = 0.0) -> None:
        self.bias = bias
        self.asked: list[tuple[str, str]] = []
        self.at_once = self.most_at_once = 0

    async def __call__(self, comparison: Comparison) -> float:
        first, second = text_of(comparison.completion_A), text_of(comparison.completion_B)
        assert comparison.prompt_conversation == CONVO
        self.asked.append((first, second))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        difference = float(second.strip() or 0) - float(first.strip() or 0)
        return max(-1.0, min(1.0, difference / 10 + self.bias))


class Says(TokenCompleter):
    """Answers member i with ``texts[i]``; a text that ends with an ellipsis is cut off."""

    def __init__(self, renderer, *texts: str) -> None:
        self.renderer, self.texts = renderer, texts

    async def __call__(self, model_input, stop):
        return (await self.sample_many(model_input, stop, 1))[0]

    async def sample_many(self, model_input, stop, num_samples):
        assert self.renderer.codec.decode(model_input.to_ints()).endswith(
            "User: 2+3?\n\nAssistant:"
        )
        return [self._answer(text) for text in self.texts[:num_samples]]

    def _answer(self, text: str) -> TokensWithLogprobs:
        ended = not text.endswith("…")
        ending = "\n\nUser:" if ended else ""
        tokens = self.renderer.codec.encode(f" {text.rstrip('…')}{ending}")
        return TokensWithLogprobs(tokens, [0.0] * len(tokens), "stop" if ended else "length")


def group(renderer, judge, num_envs, **settings):
    settings = {"tournament_pattern": BOTH_WAYS, **settings}
    return PairwisePreferenceGroupBuilder(
        convo_prefix=CONVO,
        policy_renderer=renderer,
        preference_model=judge,
        num_envs=num_envs,
        **settings,
    )


def play(builder, policy, **options):
    return asyncio.run(do_group_rollout(builder, policy, **options))


# --- what a group earns ----------------------------------------------------------------------


def test_the_reward_is_what_the_formula_says(renderer):
    judge = ByNumber()
    played = play(group(renderer, judge, 3), Says(renderer, "5", "3", "9…"))
    # 5 beats 3 by .2 and loses to 9 by .4; both twice.
    expected = [(0.2 - 0.4) / 2, (-0.2 - 0.6) / 2, (0.4 + 0.6) / 2 - 1]
    assert played.get_total_rewards() == pytest.approx(expected)
    assert [m["format"] for m in played.metrics_G] == [1, 1, 0]
    assert sum(m["win_minus_loss"] for m in played.metrics_G) == pytest.approx(0)
    for metrics in played.metrics_G:
        assert metrics["judge_confidence"] == pytest.approx(0.4)
        assert metrics["judge_position_bias"] == pytest.approx(0)
        assert "win_rate" not in metrics
    assert len(judge.asked) == 6
    assert judge.most_at_once == 6  # none waits for another


@pytest.mark.parametrize(("pattern", "kept"), [(BOTH_WAYS, 0.0), (ONE_WAY, 0.3)])
def test_position_bias_cancels_in_both_orders(renderer, pattern, kept):
    fair, biased = (
        play(
            group(renderer, ByNumber(bias), 2, tournament_pattern=pattern),
            Says(renderer, "1", "2"),
        )
        for bias in (0.0, 0.3)
    )
    assert biased.get_total_rewards()[1] - fair.get_total_rewards()[1] == pytest.approx(kept)
    assert biased.metrics_G[0]["judge_position_bias"] == pytest.approx(
        0.3 if pattern is BOTH_WAYS else 0.4
    )


@pytest.mark.parametrize("text", ["", "  ", "9…"])
def test_no_answer_costs_the_format(renderer, text):
    played = play(group(renderer, ByNumber(), 2), Says(renderer, text, "2"))
    assert [m["format"] for m in played.metrics_G] == [0, 1]
    win = played.metrics_G[0]["win_minus_loss"]
    assert played.get_total_rewards()[0] == pytest.approx(win - 1)


def _last_word(text: str) -> str:
    return text.split()[-1]


def test_a_judge_that_fails_ends_the_group_and_its_other_questions(renderer):
    class Breaks(ByNumber):
        async def __call__(self, comparison):
            if text_of(comparison.completion_A) == "2":
                raise RuntimeError("no judgement")
            await asyncio.sleep(3600)
            return 0.0

    with pytest.raises(Exception, match="compute_group_rewards of PairwisePreferenceGroupBuilder"):
        play(group(renderer, Breaks(), 2), Says(renderer, "1", "2"))


# --- played elsewhere ------------------------------------------------------------------------


@chz.chz
class NumberJudgeBuilder:
    """Counts what it made."""

    def __call__(self) -> PreferenceModel:
        _made.append(self)
        return ByNumber()


_made: list[NumberJudgeBuilder] = []


def test_a_lazy_judge_is_made_once_when_first_asked_and_travels_as_its_builder(renderer):
    _made.clear()
    judge = LazyPreferenceModel(NumberJudgeBuilder())
    builder = group(renderer, judge, 4)
    assert not _made
    first = play(builder, Says(renderer, "1", "2", "3", "4"))
    assert len(_made) == 1
    copy = pickle.loads(pickle.dumps(judge))
    assert copy.builder == NumberJudgeBuilder()
    assert len(_made) == 1
    again = play(builder, Says(renderer, "1", "2", "3", "4"))
    assert again.get_total_rewards() == first.get_total_rewards()
    assert len(_made) == 1


@pytest.mark.slow
def test_a_group_is_judged_in_another_process(stories_model):
    renderer = get_renderer("role_colon", get_tokenizer(stories_model))
    builder = group(renderer, LazyPreferenceModel(NumberJudgeBuilder()), 2)

    async def elsewhere():
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            set_rollout_executor(pool)
            return await run_group(builder, Says(renderer, "1", "4"), strategy=RetryOnFailure())

    _made.clear()
    assert asyncio.run(elsewhere()).get_total_rewards() == pytest.approx([-0.3, 0.3])
    assert not _made


# --- datasets --------------------------------------------------------------------------------


def labeled(prompt: str, label: str = "A") -> LabeledComparison:
    answers = ([{"role": "assistant", "content": text}] for text in ("5", "6"))
    return LabeledComparison(Comparison([{"role": "user", "content": prompt}], *answers), label)  # pyright: ignore[reportArgumentType]


@chz.chz
class Sums(ComparisonDatasetBuilder):
    num_train: int = 5
    labels: str = ""

    def get_labeled_comparisons(self):
        test = [labeled("2+3?", label) for label in self.labels.split()]
        return [labeled(f"{i}+{i}?") for i in range(self.num_train)], test or None


@pytest.fixture
def make_builder(stories_model):
    def make(**settings):
        return PairwisePreferenceRLDatasetBuilder(
            **{
                "comparison_builder": Sums(labels="B Tie A"),
                "batch_size": 2,
                "policy_renderer_name": "role_colon",
                "policy_model_name": stories_model,
                "group_size": 6,
                "preference_model_builder": NumberJudgeBuilder(),
                **settings,
            }
        )

    return make


def test_batches_are_groups_over_the_prompts(make_builder):
    train, test = asyncio.run(make_builder(matchup_group_size=3, content_preprocessor=_last_word)())
    assert isinstance(train, PairwisePreferenceDataset)
    assert len(train) == 3
    groups = [one for batch in range(3) for one in train.get_batch(batch)]
    assert [one.convo_prefix[0]["content"] for one in groups] == [f"{i}+{i}?" for i in range(5)]
    for one in groups:
        assert (one.num_envs, one.matchup_group_size, one.eval_target_completion_A) == (6, 3, None)
        assert one.content_preprocessor is _last_word
        assert one.logging_tags() == ["pair_pref"]
        (env,) = {type(env) for env in asyncio.run(one.make_envs())}
        assert env is PreferenceEnv
    assert test is not None
    preferred = [one.eval_target_completion_A[0]["content"] for one in test.get_batch(0)]
    assert preferred == ["6", "5"]  # what each label prefers; a tie prefers nothing
    train.set_epoch(1)
    shuffled = [one.convo_prefix for batch in range(3) for one in train.get_batch(batch)]
    assert shuffled != [one.convo_prefix for one in groups]
