"""Exact measures of play: Elo, the league table, and the exploitability of Kuhn poker."""

from __future__ import annotations

import importlib
import inspect
import json
from types import SimpleNamespace

import numpy as np
import pytest
from byte_tokenizer import NAME, registered

from recipes.multiplayer_rl.text_arena import kuhn
from recipes.multiplayer_rl.text_arena.pool import Pool, PoolSettings
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


class Service:
    """Opens any path, and notes which."""

    def __init__(self):
        self.opened = []

    def create_sampling_client(self, model_path):
        self.opened.append(model_path)
        return SimpleNamespace(result=lambda: f"client of {model_path}")


def pool_of(folder, service, **settings) -> Pool:
    with registered():
        return Pool(
            PoolSettings(
                model_name=NAME,
                renderer_name="role_colon",
                log_path=str(folder),
                max_tokens=1,
                **settings,
            ),
            service,
        )


def row(step: int, path: str = "") -> dict:
    return {"step": step, "games": {}, "path": path or f"tinker://RUN/sampler_weights/{step}"}


def test_a_pool_that_is_opened_again_gives_the_same_opponents(tmp_path):
    service = Service()
    pool = pool_of(tmp_path, service)
    assert pool.choose(5, 1) is None
    for step in (0, 10, 20):
        pool.add(row(step), f"client of tinker://RUN/sampler_weights/{step}")  # pyright: ignore
    chosen = [pool.choose(step, n).sampling_client for step in (9, 20) for n in range(20)]
    assert service.opened == []  # the process that made them keeps their clients
    assert len(set(chosen[:20])) == 1
    assert len(set(chosen[20:])) == 3
    again = pool_of(tmp_path, service)
    assert [again.choose(s, n).sampling_client for s in (9, 20) for n in range(20)] == chosen
    assert len(service.opened) == 3


def test_a_run_that_was_killed_replaces_the_snapshots_after_its_checkpoint(tmp_path):
    """The row of step 20 was written and its checkpoint was not: the run goes on from step 10."""
    first = pool_of(tmp_path, Service())
    for step in (0, 10, 20):
        first.add(row(step, f"tinker://OLD/{step}"), "client")  # pyright: ignore
    resumed = pool_of(tmp_path, Service())
    assert [member["step"] for member in resumed.members(15)] == [0, 10]
    resumed.add(row(20, "tinker://NEW/20"), "client")  # pyright: ignore
    lines = (tmp_path / "opponents.jsonl").read_text().splitlines()
    assert [json.loads(line)["path"] for line in lines] == [
        "tinker://OLD/0",
        "tinker://OLD/10",
        "tinker://NEW/20",
    ]


OFFICIAL = {
    "env.TwoPlayerCoordinator": "shared_env",
    "env.TwoPlayerEnv": "player_id coordinator self_play renderer opponent_policy",
    "env.TwoPlayerEnvGroupBuilder": "game_name renderer num_envs self_play opponent_policy",
    "env.TwoPlayerTextArenaDataset": "batch_size builder num_datapoints",
    "env.TwoPlayerTextArenaDatasetBuilder": "batch_size num_train_datapoints num_test_datapoints "
    "base_url model_name game_name renderer_name test_opponent",
    "tictactoe.RandomOpponent": "",
    "tictactoe.OptimalOpponent": "",
    "tictactoe.make_opponent": "opponent_type model_name renderer base_url stop_condition",
    "play.play_game": "renderer model_token_completer human_player_id game_name",
    "play.eval_model": "renderer model_token_completer opponent_policy opponent_name game_name "
    "num_games",
    "play.PlayConfig": "checkpoint_path model_name renderer_name game_name mode opponent "
    "human_player_id num_games",
    "train.build_config": "cli_config",
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_names_and_parameters_of_the_official_recipe(name):
    """They work without textarena: a game is loaded when it starts."""
    module, _, attribute = name.partition(".")
    found = getattr(
        importlib.import_module(f"recipes.multiplayer_rl.text_arena.{module}"), attribute
    )
    assert set(OFFICIAL[name].split()) <= set(inspect.signature(found).parameters)
