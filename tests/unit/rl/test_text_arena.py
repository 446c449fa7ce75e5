"""Games of TextArena: their random numbers, seats that wait for each other, opponents, rewards."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
import tinker
from byte_tokenizer import NAME, registered

from recipes.multiplayer_rl.text_arena import pool
from recipes.multiplayer_rl.text_arena.pool import Snapshots, snapshots
from recipes.multiplayer_rl.text_arena.tictactoe import (
    ModelPlayer,
    OptimalOpponent,
    RandomOpponent,
)
from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.rollouts.group import do_group_rollout
from tinker_cookbook.rl.rollouts.strategy import RetryOnFailure
from tinker_cookbook.tokenizer_utils import get_tokenizer

textarena = pytest.importorskip("textarena", reason="the extra multiplayer-rl is not installed")

from recipes.multiplayer_rl.text_arena.env import (  # noqa: E402
    ILLEGAL_MOVE_REWARD,
    STOP_CONDITION,
    TextArenaDatasetBuilder,
    TextArenaEnv,
    TextArenaGroupBuilder,
    TwoPlayerCoordinator,
    TwoPlayerEnv,
    TwoPlayerEnvGroupBuilder,
    trained,
)
from recipes.multiplayer_rl.text_arena.games import (  # noqa: E402
    Game,
    GameError,
    GameSettings,
    legal_moves,
    startable,
)

TICTACTOE = GameSettings()
with registered():
    RENDERER = get_renderer("role_colon", get_tokenizer(NAME))


class Scripted(TokenCompleter):
    """Answers by the moves that the prompt offers: the n-th, or what ``answer`` returns."""

    def __init__(self, answer=lambda text: legal_moves(text)[0]):
        self.answer, self.prompts = answer, []

    async def __call__(self, model_input, stop, *, max_tokens=None):
        await asyncio.sleep(0)  # as a sampler, it lets the other games go on
        text = RENDERER.tokenizer.decode(model_input.to_ints())
        self.prompts.append(text)
        tokens = RENDERER.tokenizer.encode(f" {self.answer(text)}\n", add_special_tokens=False)
        return TokensWithLogprobs(tokens, [0.0] * len(tokens))


def group(builder, policy, strategy=None):
    work = do_group_rollout(builder, policy, strategy=strategy)
    return asyncio.run(asyncio.wait_for(work, 300))


# Games and their random numbers.


def test_a_game_does_not_depend_on_others_that_run_at_the_same_time():
    settings = GameSettings(game_name="PigDice-v0")

    def moves(disturb):
        game, seen = Game.start(settings, 3), []
        for _ in range(12):
            if game.game_done:
                break
            disturb()
            seen.append(game.observe())
            game.move("[roll]")
        return seen

    before = random.getstate()
    alone = moves(lambda: None)
    assert random.getstate() == before
    other = Game.start(settings, 4)
    assert moves(lambda: (random.seed(0), other.observe(), other.move("[roll]"))) == alone


def test_a_game_that_does_not_exist_is_named_with_the_nearest():
    with pytest.raises(ConfigurationError, match=r"TicTacTo-v0.*TicTacToe-v0"):
        _ = GameSettings(game_name="TicTacTo-v0").seats
    with pytest.raises(ConfigurationError, match="num_players=5"):
        _ = GameSettings(num_players=5).seats


# Two players.


def test_self_play_trains_both_seats_of_a_game():
    builder = TwoPlayerEnvGroupBuilder("TicTacToe-v0", RENDERER, 2, self_play=True)
    result = group(builder, Scripted())
    # 0 2 4 6 and 1 3 5: the diagonal 2 4 6 wins for the player who began.
    assert [len(t.transitions) for t in result.trajectories_G] == [4, 3]
    assert result.get_total_rewards() == [1, -1]
    assert [m["win"] for m in result.metrics_G] == [1, 0]


def test_an_illegal_move_ends_the_game_for_both():
    policy = Scripted(lambda text: "[0]")
    builder = TwoPlayerEnvGroupBuilder("TicTacToe-v0", RENDERER, 4, self_play=True)
    result = group(builder, policy)
    assert result.get_total_rewards() == [0, ILLEGAL_MOVE_REWARD] * 2


def test_coordinator_by_its_official_names():
    env = textarena.make("TicTacToe-v0")
    env.reset(num_players=2)
    table = TwoPlayerCoordinator(shared_env=env)
    assert (table.current_player_id, table.game_done, table.rewards) == (0, False, None)
    with pytest.raises(ValueError, match="expected one of player 0"):
        asyncio.run(table.make_move(1, "[3]"))
    asyncio.run(table.make_move(0, "[4]"))
    asyncio.run(table.wait_across_env(1))
    one = TwoPlayerEnv(
        player_id=1, coordinator=table, self_play=True, renderer=RENDERER, opponent_policy=None
    )
    assert "Player 1" in RENDERER.tokenizer.decode(one.get_observation().to_ints())
    assert (one.stop_condition, one.compute_reward()) == (STOP_CONDITION, 0.0)


# Any number of players.


def test_three_seats_two_of_them_trained():
    settings = GameSettings(game_name="ThreePlayerGOPS-v0")
    seats = [trained, RandomOpponent, trained]
    builder = TextArenaGroupBuilder(settings, seats, RENDERER, 2, seed_path=(5,))
    policy = Scripted()
    result = group(builder, policy)
    assert len(result.trajectories_G) == 4
    assert all(len(t.transitions) > 3 for t in result.trajectories_G)
    # The games of a group start alike and their players have other random numbers.
    first = [t.transitions[0].ob.to_ints() for t in result.trajectories_G]
    assert first[0] == first[2]


def test_an_opponent_whose_context_is_full_ends_the_game_without_a_result():
    class Client:
        asked = 0

        async def sample(self, prompt, num_samples, sampling_params):
            self.asked += 1
            if self.asked > 1:
                raise DataValidationError("prompt: 791 tokens, but the model's context is 512")
            text = RENDERER.tokenizer.decode(prompt.to_ints())
            tokens = RENDERER.tokenizer.encode(f" {legal_moves(text)[0]}\n")
            sequence = tinker.SampledSequence(
                stop_reason="stop",
                sequence_id="s",
                _tokens_list=tokens,
                _logprobs_list=[0.0] * len(tokens),
            )
            return tinker.SampleResponse(sequences=[sequence])

    client: Any = Client()
    player = ModelPlayer(TinkerTokenCompleter(client, 9), RENDERER)
    seats = [trained, lambda seed: player]
    result = group(TextArenaGroupBuilder(TICTACTOE, seats, RENDERER, 1), Scripted())
    assert client.asked == 2
    assert result.get_total_rewards() == [0.0]
    assert result.metrics_G[0]["unfinished"] == 1.0


def test_games_advance_together():
    """All games of a batch ask for their moves at the same time, so a sampler can batch them."""

    class Counting(Scripted):
        waiting = most = 0

        async def __call__(self, model_input, stop, *, max_tokens=None):
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            for _ in range(50):
                await asyncio.sleep(0)
            self.waiting -= 1
            return await super().__call__(model_input, stop)

    policy = Counting()
    group(TextArenaGroupBuilder(TICTACTOE, [trained, trained], RENDERER, 24), policy)
    assert policy.most == 24


def test_the_baseline_of_a_seat_keeps_the_mean_reward():
    seats = [trained, trained]
    builder = TextArenaGroupBuilder(TICTACTOE, seats, RENDERER, 3)
    rng = random.Random(0)
    result = group(builder, Scripted(lambda text: rng.choice(legal_moves(text))))
    raw = [t.reward for t in result.trajectories_G]
    total = result.get_total_rewards()
    assert sum(total) == pytest.approx(sum(raw))
    for number in (0, 1):
        of_seat = total[number::2]
        assert sum(of_seat) / 3 == pytest.approx(sum(raw) / 6)


def test_a_rollout_that_fails_is_retried_with_the_other_seat():
    """The failure is no one's fault: both seats get a new game."""
    fails = iter([True])

    def answer(text):
        if "cell 0" in text and next(fails, False):
            raise OSError("the sampler is down")
        return legal_moves(text)[0]

    builder = TextArenaGroupBuilder(TICTACTOE, [trained, trained], RENDERER, 2)
    result = group(builder, Scripted(answer), RetryOnFailure(max_retries=1))
    assert [t.reward for t in result.trajectories_G] == [1, -1, 1, -1]
    kinds = sorted(error.error_type for error in result.rollout_errors)
    assert len(kinds) == 2
    assert "GameAbandonedError" in str(result.rollout_errors)


# Opponents.


def play(*players) -> Game:
    game = Game.start(TICTACTOE, 0)
    game.players = list(players)
    asyncio.run(game.play_others())
    return game


def test_the_optimal_opponent_never_loses():
    outcomes = []
    for number in range(20):
        outcomes.append(play(OptimalOpponent(number), RandomOpponent(number)).outcome(0))
        outcomes.append(play(RandomOpponent(number), OptimalOpponent(number)).outcome(1))
    assert "loss" not in outcomes
    assert outcomes.count("win") > 20


# Batches.


def dataset_builder(**settings: Any) -> TextArenaDatasetBuilder:
    values = {
        "model_name": NAME, "renderer_name": "role_colon", "batch_size": 16, "group_size": 4,
        "num_train_datapoints": 160, "num_test_datapoints": 4, "test_opponent": "random",
        "backend": "local",
    }  # fmt: skip
    return TextArenaDatasetBuilder(**(values | settings))


def test_groups_use_the_opponents_in_rotation_and_both_seats(tmp_path):
    opponents = ("self", "pool", "random")
    builder = dataset_builder(opponents=opponents, log_path=str(tmp_path))
    with registered():
        train, test = asyncio.run(builder())
        assert len(train) == 10
        batches = [train.get_batch(i) for i in range(3)]
        groups: list[Any] = [group for batch in batches for group in batch]
        assert test is not None
        (games,) = test.get_batch(0)
    assert [group.logging_tags()[0] for group in groups[:6]] == [
        "self", "pool", "random", "self", "pool", "random"
    ]  # fmt: skip
    assert {len(group.players) * group.num_games for group in groups} == {4, 8}
    own = [[p is trained for p in g.players].index(True) for g in groups if g.tags == ["random"]]
    assert set(own) == {0, 1}
    assert {env.player_id for env in asyncio.run(games.make_envs())} == {0, 1}


class Saver:
    """Saves weights under a path that names the run."""

    def __init__(self, run: str) -> None:
        self.run = run

    async def save_weights_for_sampler(self, name: str) -> Any:
        return SimpleNamespace(path=f"tinker://{self.run}/{name[-1]}")


def test_a_run_that_was_killed_replaces_the_snapshots_after_its_checkpoint(tmp_path, monkeypatch):
    """The snapshot of step 3 was saved and its checkpoint was not: the run goes on from step 2."""
    evaluator = Snapshots(str(tmp_path))
    for run, steps in (("OLD", range(4)), ("NEW", range(3, 7))):
        for step in steps:
            monkeypatch.setattr(pool, "current_step", lambda step=step: step)
            assert asyncio.run(evaluator(Saver(run))) == {}  # pyright: ignore
    for step, members in ((0, ["OLD/0"]), (4, ["OLD/0", "NEW/3", "NEW/4"])):
        assert snapshots(str(tmp_path), step, 3) == [f"tinker://{path}" for path in members]
    assert len(snapshots(str(tmp_path), 6, 20)) == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"opponents": ("slef",)}, "opponents: got 'slef'.*'self'"),
        ({"game_name": "Wordle-v0"}, "Wordle-v0 cannot start"),
        ({"game_name": "Sudoku-v0", "opponents": ("random",)}, "opponents: got 'random'"),
        ({"game_name": "Nim-v0", "test_opponent": "optimal"}, "got 'optimal' for Nim-v0"),
        ({"group_size": 3}, "group_size: got 3"),
        ({"batch_size": 6}, "batch_size: got 6"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        dataset_builder(**settings).check()


@pytest.mark.slow
def test_every_game_that_starts_offline_takes_a_move():
    """Costs 10 s: 95 games, of which 73 start without network on Python 3.11."""
    reasons = startable()
    started = [name for name, reason in reasons.items() if not reason]
    assert len(started) >= 73, {name: reason for name, reason in reasons.items() if reason}
    assert all("game_name:" in reason for reason in reasons.values() if reason)
    broken = []
    for name in started:
        text = Game.start(GameSettings(game_name=name), 1).observe()
        for move in [*legal_moves(text)[:1], "[no such move]"]:
            game = Game.start(GameSettings(game_name=name), 1)
            seat = game.current_player_id
            env = TextArenaEnv(seat, game, RENDERER, STOP_CONDITION)
            assert env.get_observation().length > 100
            try:
                asyncio.run(game.make_move(seat, move))
            except GameError as error:
                broken.append((name, str(error)))
            assert not game.game_done or game.outcome(seat) in ("win", "draw", "loss")
    # Its own error: State.add_observation() misses an argument.
    assert {name for name, _ in broken} <= {"CharacterConclave-v0"}
