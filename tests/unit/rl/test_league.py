"""Exact measures of play: Elo, the league table, and the exploitability of Kuhn poker."""

from __future__ import annotations

import numpy as np
import pytest

from recipes.multiplayer_rl.text_arena import kuhn
from recipes.multiplayer_rl.text_arena.ratings import elo, league_table


def test_elo_reproduces_ratings_from_expected_results():
    """Points as the ratings predict them, with so many games that the prior has no weight."""
    true = {"a": 1000.0, "b": 1200.0, "c": 900.0}
    results = {}
    for player, opponent in (("a", "b"), ("a", "c"), ("b", "c")):
        share = 1 / (1 + 10 ** ((true[opponent] - true[player]) / 400))
        wins = round(share * 10**6)
        results[player, opponent] = (wins, 0, 10**6 - wins)
    assert elo(results) == pytest.approx(true, abs=0.1)


def test_elo_of_a_player_who_wins_all_games_is_finite():
    ratings = elo({("new", "old"): (16, 0, 0)})
    assert ratings["new"] == 1000
    assert -500 < ratings["old"] < 900
    assert elo({}) == {}


def test_the_table_shows_both_sides_of_a_pair():
    results = {("step 1", "step 0"): (3, 2, 1)}
    table = league_table(results, elo(results))
    rows = [line for line in table.splitlines() if line.startswith("| step")]
    assert rows[0].endswith("|  | 0.67 |")
    assert rows[1].endswith("| 0.33 |  |")


def value_by_simulation(first: kuhn.Strategy, second: kuhn.Strategy, games: int) -> float:
    """Chips of the first player a game, by playing it: independent of the formulas."""
    rng = np.random.default_rng(0)
    total = 0
    for _ in range(games):
        mine, yours = rng.permutation(3)[:2]
        sign = 1 if mine > yours else -1
        own, other = kuhn.CARDS[mine], kuhn.CARDS[yours]
        if rng.random() < first[own, ""]:
            total += 2 * sign if rng.random() < second[other, "bet"] else 1
        elif rng.random() < second[other, "check"]:
            total += 2 * sign if rng.random() < first[own, "check-bet"] else -1
        else:
            total += sign
    return total / games


def test_kuhn_value_is_that_of_played_games():
    rng = np.random.default_rng(1)
    first, second = ({s: float(rng.random()) for s in kuhn.SITUATIONS} for _ in range(2))
    played = value_by_simulation(first, second, 40_000)
    assert kuhn.value(first, second) == pytest.approx(played, abs=0.02)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_kuhn_equilibria_have_the_known_value_and_cannot_be_exploited(alpha):
    strategy = kuhn.equilibrium(alpha)
    assert kuhn.value(strategy, strategy) == pytest.approx(-1 / 18)
    assert kuhn.exploitability(strategy) == pytest.approx(0, abs=1e-12)


def test_kuhn_exploitability_of_known_policies():
    # The value that OpenSpiel reports for the uniform policy: NashConv 0.9167.
    assert kuhn.exploitability(dict.fromkeys(kuhn.SITUATIONS, 0.5)) == pytest.approx(11 / 24)
    always_bet = dict.fromkeys(kuhn.SITUATIONS, 1.0)
    assert kuhn.exploitability(always_bet) > 0.3


def test_the_average_of_strategies_is_the_mixture_of_players():
    rng = np.random.default_rng(2)
    many = [{s: float(rng.random()) for s in kuhn.SITUATIONS} for _ in range(4)]
    reply = {s: float(rng.random()) for s in kuhn.SITUATIONS}
    mean = kuhn.average(many)
    assert kuhn.value(mean, reply) == pytest.approx(np.mean([kuhn.value(s, reply) for s in many]))
    assert kuhn.value(reply, mean) == pytest.approx(np.mean([kuhn.value(reply, s) for s in many]))
