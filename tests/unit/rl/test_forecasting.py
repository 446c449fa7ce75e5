"""Forecasts of markets: data, split by time, reward, AUC and calibration (under 2 s)."""

from __future__ import annotations

import asyncio
import csv
import json
from datetime import UTC, datetime

import numpy as np
import pytest
from scripted_policy import play

from tinker_cookbook.exceptions import DataFormatError, DataValidationError
from tinker_cookbook.recipes.forecasting import synthetic
from tinker_cookbook.recipes.forecasting.data import (
    COLUMNS,
    load_prophet_arena_examples,
    load_prophet_arena_split,
    parse_utc_datetime,
)
from tinker_cookbook.recipes.forecasting.env import (
    ForecastEvaluator,
    ForecastGroupBuilder,
    ForecastRLDataset,
    brier_reward,
    parse_forecast,
    render_prompt,
    roc_auc,
)

pytestmark = pytest.mark.usefixtures("bytes_registered")

SPLIT = datetime(2025, 10, 20, tzinfo=UTC)


@pytest.fixture(scope="module")
def markets(tmp_path_factory):
    return synthetic.synthetic_markets(str(tmp_path_factory.mktemp("markets")), num_markets=400)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.7", 0.7),
        (" .25 ", 0.25),
        ("70%", 0.7),
        ("I think so.\n\nForecast: **0.9**.\n", 0.9),
        ("Probability of YES = 1e-2", 0.01),
        ("**Final answer: 30 %**", 0.3),
        ("1.5", None),
        ("-0.1", None),
        ("about 0.7", None),
        ("0.7 or 0.8", None),
        ("", None),
        ("nan", None),
    ],
)
def test_forecasts_are_read_from_the_last_line(text, value):
    assert parse_forecast(text) == (None if value is None else pytest.approx(value))


def test_brier_reward_is_best_at_the_true_probability():
    true = 0.3
    expected = [
        true * brier_reward(p, 1) + (1 - true) * brier_reward(p, 0) for p in np.linspace(0, 1, 101)
    ]
    assert np.argmax(expected) == 30


def test_synthetic_markets_resolve_as_often_as_they_should(tmp_path):
    path = synthetic.synthetic_markets(str(tmp_path), num_markets=4000)
    examples = load_prophet_arena_examples(path)
    for word, true in synthetic.TRUE_PROBABILITIES.items():
        found = [one.outcome for one in examples if f"It is {word}." in one.reference_material]
        assert np.mean(found) == pytest.approx(true, abs=0.05)
    assert synthetic.best_reward() == pytest.approx(0.83)
    again = synthetic.synthetic_markets(str(tmp_path / "again"), num_markets=4000)
    assert path.read_bytes() == again.read_bytes()
    taught = synthetic.write_format_examples(path, 20).read_text().splitlines()
    answers = [json.loads(line)["messages"][1]["content"] for line in taught]
    assert all(parse_forecast(answer) is not None for answer in answers)


def test_no_outcome_is_known_when_a_validation_market_is_forecast(markets):
    split = load_prophet_arena_split(markets, split_time=SPLIT, max_train_questions=None)
    latest = max(one.close_time for one in split.train)
    assert latest < SPLIT <= min(one.snapshot_time for one in split.validation)
    events = [{one.event_ticker for one in part} for part in (split.train, split.validation)]
    assert not events[0] & events[1]
    assert split.excluded_crossing_events > 0
    total = len(load_prophet_arena_examples(markets))
    assert len(split.train) + len(split.validation) + split.excluded_crossing_events == total
    for one in split.train[:20]:
        assert "outcome" not in render_prompt(one).lower()


def row(**changes):
    values = {
        "submission_id": "s1",
        "event_ticker": "E",
        "title": "A match",
        "snapshot_time": "2025-07-01T00:00:00",
        "close_time": "2025-07-09T00:00:00Z",
        "market_outcome": '{"A": 1, "B": 0}',
        "category": "Sports",
        "markets": '["A", "B"]',
        "sources": '[{"title": "T", "summary": "S", "ranking": 2}, {"title": "First"}]',
    }
    return {**values, **changes}


def write(path, *rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_each_market_is_used_at_its_earliest_snapshot(tmp_path):
    later = row(submission_id="s2", snapshot_time="2025-07-02T00:00:00+00:00")
    # As the published file has it: Python literals in some rows.
    literal = row(market_outcome="{'A': 1, 'B': 0}", snapshot_time="2025-06-30T23:00:00-05:00")
    found = load_prophet_arena_examples(write(tmp_path / "m.csv", later, literal))
    assert [(one.market, one.outcome, one.submission_id) for one in found] == [
        ("A", 1, "s1"),
        ("B", 0, "s1"),
    ]
    assert found[0].snapshot_time == datetime(2025, 7, 1, 4, tzinfo=UTC)
    assert found[0].reference_material == "1. First\n\n\n2. T\nS"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"snapshot_time": "2025-07-10"}, "row 2: snapshot_time .* is not before close_time"),
        ({"market_outcome": '{"A": 1}'}, "expected the same names"),
        ({"market_outcome": '{"A": 0.5, "B": 0}'}, "each with 0 or 1"),
        ({"sources": "[]"}, "sources: got '\\[\\]'"),
        ({"markets": "A and B"}, "got 'A and B', expected a JSON list"),
        ({"title": " "}, "title is empty"),
        ({"close_time": "soon"}, "close_time: got 'soon', expected a date"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, change, message):
    with pytest.raises(DataFormatError, match=message):
        load_prophet_arena_examples(write(tmp_path / "m.csv", row(**change)))


def test_invalid_files_and_dates_are_refused(tmp_path, markets):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataFormatError, match="lacks the columns submission_id"):
        load_prophet_arena_examples(tmp_path / "other.csv")
    changed = row(submission_id="s2", market_outcome='{"A": 0, "B": 0}')
    with pytest.raises(DataFormatError, match="differ from an earlier row"):
        load_prophet_arena_examples(write(tmp_path / "m.csv", row(), changed))
    with pytest.raises(DataValidationError, match="0 to evaluate on"):
        load_prophet_arena_split(markets, split_time=parse_utc_datetime("2030-01-01"))


def test_forecasts_are_scored_and_other_answers_get_0(renderer, markets):
    example = load_prophet_arena_examples(markets)[0]
    builder = ForecastGroupBuilder(example, renderer, 1)
    for answer, reward, valid in (("0.8", brier_reward(0.8, example.outcome), 1), ("Yes!", 0, 0)):
        (env,) = asyncio.run(builder.make_envs())
        trajectory = play(env, answer)
        assert trajectory.reward == pytest.approx(reward)
        ((extra, metrics),) = asyncio.run(builder.compute_group_rewards([trajectory], [env]))
        assert (extra, metrics["format_valid"]) == (0.0, valid)


class Oracle:
    """A sampling client that forecasts the true probability of the word that it reads."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def sample(self, prompt, num_samples, sampling_params, **others):
        from tinker import types

        text = self.tokenizer.decode(prompt.to_ints())
        (true,) = [p for w, p in synthetic.TRUE_PROBABILITIES.items() if f"It is {w}." in text]
        tokens = self.tokenizer.encode(f" {true}\n\nUser:")
        sequence = types.SampledSequence(
            stop_reason="stop",
            sequence_id="s",
            _tokens_list=tokens,
            _logprobs_list=[0.0] * len(tokens),
        )
        return types.SampleResponse(sequences=[sequence] * num_samples)


def test_the_evaluator_measures_order_and_calibration_over_all_markets(renderer, markets, capsys):
    split = load_prophet_arena_split(markets, split_time=SPLIT)
    dataset = ForecastRLDataset(split.validation, batch_size=7, group_size=2, renderer=renderer)
    evaluator = ForecastEvaluator(dataset, max_tokens=20)
    metrics = asyncio.run(evaluator(Oracle(renderer.tokenizer)))
    pairs = [(synthetic.true_probability(one), one.outcome) for one in split.validation]
    assert metrics["test/env/all/auc"] == pytest.approx(roc_auc(pairs))
    rewards = [brier_reward(p, y) for p, y in pairs]
    assert metrics["test/env/all/brier_reward"] == pytest.approx(np.mean(rewards))
    assert metrics["test/env/all/calibration_error"] < 0.15  # of about 130 markets
    assert {"test/env/weather/auc", "test/env/sports/auc"} <= metrics.keys()
    counts = [int(line.split()[3]) for line in capsys.readouterr().out.splitlines()[2:]]
    assert sum(counts) == 2 * len(pairs)
