"""Games of TextArena: their random numbers, seats that wait for each other, opponents, rewards."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import tinker
from byte_tokenizer import NAME, registered

from recipes.multiplayer_rl.text_arena import kuhn
from recipes.multiplayer_rl.text_arena.players import ModelPlayer, RandomOpponent
from recipes.multiplayer_rl.text_arena.tictactoe import (
    OptimalOpponent,
)
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.rollouts.group import do_group_rollout
from tinker_cookbook.rl.rollouts.strategy import RetryOnFailure
from tinker_cookbook.tokenizer_utils import get_tokenizer

textarena = pytest.importorskip("textarena", reason="the extra multiplayer-rl is not installed")

from recipes.multiplayer_rl.text_arena.env import (  # noqa: E402
    ILLEGAL_MOVE_REWARD,
    STOP_CONDITION,
    TwoPlayerCoordinator,
    TwoPlayerEnv,
    TwoPlayerEnvGroupBuilder,
)
from recipes.multiplayer_rl.text_arena.games import (  # noqa: E402
    Game,
    GameError,
    GameSettings,
    legal_moves,
    startable,
)
from recipes.multiplayer_rl.text_arena.table import Table  # noqa: E402
from recipes.multiplayer_rl.text_arena.text_arena_env import (  # noqa: E402
    TextArenaEnv,
    TextArenaGroupBuilder,
)

TICTACTOE = GameSettings()
KUHN = GameSettings(game_name=kuhn.GAME, game_options={"max_rounds": 1}, score="chips")
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
    return asyncio.run(asyncio.wait_for(work, 20))


def trained():
    return None


# Games and their random numbers.


def test_a_game_does_not_depend_on_others_that_run_at_the_same_time():
    settings = GameSettings(game_name="PigDice-v0")

    def moves(disturb):
        game, seen = Game.start(settings, 3), []
        for _ in range(12):
            if game.done:
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
        GameSettings(game_name="TicTacTo-v0").check()
    with pytest.raises(ConfigurationError, match="player_chips"):
        GameSettings(score="chips").check()
    with pytest.raises(ConfigurationError, match="num_players=5"):
        GameSettings(num_players=5).check()


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
    assert one.get_done_step().episode_done
    with pytest.raises(ConfigurationError, match="opponent_policy"):
        TwoPlayerEnv(1, table, True, RENDERER, RandomOpponent())


# Any number of players.


def test_three_seats_two_of_them_trained():
    settings = GameSettings(game_name="ThreePlayerGOPS-v0")
    seats = [trained, lambda: RandomOpponent(1), trained]
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
    seats = [trained, lambda: ModelPlayer(client, RENDERER, 9)]
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


def test_the_optimal_opponent_never_loses():
    async def play(seat, number):
        players = [RandomOpponent(number), RandomOpponent(number)]
        players[seat] = OptimalOpponent(number)
        table = Table(Game.start(TICTACTOE, number), players)
        await table.start()
        return table.outcome(seat)

    outcomes = [asyncio.run(play(seat, number)) for seat in (0, 1) for number in range(20)]
    assert "loss" not in outcomes
    assert outcomes.count("win") > 20


def test_a_bet_and_a_call_cost_a_chip():
    """TextArena leaves them out of the pot; the sign is that of the seat that moves first."""
    for moves, chips in (
        ("[check] [check]", 1),
        ("[check] [bet] [call]", 2),
        ("[bet] [call]", 2),
        ("[check] [bet] [fold]", 1),
        ("[bet] [fold]", 1),
    ):
        game = Game.start(KUHN, seed=3)
        for move in moves.split():
            assert game.move(move)
        assert sorted(game.rewards().values()) == [-chips, chips]


def test_kuhn_rewards_are_the_chips_of_the_deal():
    """The expected reward of two equilibrium players is the known value, -1/18."""

    async def play(number):
        players = [kuhn.KuhnOpponent(number + shift) for shift in (10**6, 2 * 10**6)]
        game = Game.start(KUHN, number)
        first = game.turn
        table = Table(game, players)
        await table.start()
        assert sum(game.rewards().values()) == 0
        return game.rewards()[first]

    rewards = [asyncio.run(play(number)) for number in range(600)]
    assert set(rewards) <= {-2, -1, 1, 2}
    assert sum(rewards) / 600 == pytest.approx(kuhn.VALUE_FIRST, abs=0.16)  # 3 standard errors


@pytest.mark.slow
def test_every_game_that_starts_offline_takes_a_move():
    """Costs 15 s: 95 games, of which 73 start without network on Python 3.11."""
    reasons = startable()
    started = [name for name, reason in reasons.items() if not reason]
    assert len(started) >= 73, {name: reason for name, reason in reasons.items() if reason}
    assert all("game_name:" in reason for reason in reasons.values() if reason)
    broken = []
    for name in started:
        text = Game.start(GameSettings(game_name=name), 1).observe()
        for move in [*legal_moves(text)[:1], "[no such move]", ""]:
            game = Game.start(GameSettings(game_name=name), 1)
            env = TextArenaEnv(Table(game, [None] * len(game.chairs)), game.turn, RENDERER)
            assert env.get_observation().length > 100
            try:
                asyncio.run(env.table.make_move(game.turn, move))
            except GameError as error:
                broken.append((name, str(error)))
            assert not env.table.over or env.table.outcome(game.turn) in ("win", "draw", "loss")
    # Its own error: State.add_observation() misses an argument.
    assert {name for name, _ in broken} <= {"CharacterConclave-v0"}
