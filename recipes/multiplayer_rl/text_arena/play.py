"""Play against a checkpoint in the terminal, or evaluate it in many games against an opponent.

    python -m recipes.multiplayer_rl.text_arena.play checkpoint_path=tinker://RUN/sampler_weights/NAME
    python -m recipes.multiplayer_rl.text_arena.play checkpoint_path=… human_player_id=1
    python -m recipes.multiplayer_rl.text_arena.play checkpoint_path=… mode=eval opponent=optimal

Without ``checkpoint_path`` the base model plays. The game's settings must be those of the training
(``show_rules=False max_tokens=1`` for a model of ``text_arena.tiny_model``).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Literal

import chz

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.backends.sampler_options import SamplerOptions
from tinker_cookbook.completers import MessageCompleter, TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.official.rl_play_w_env import ManualPolicy, print_trajectory_summary
from tinker_cookbook.recipes.multiplayer_rl.text_arena.env import (
    STOP_CONDITION,
    TextArenaGroupBuilder,
    trained,
)
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import GameSettings
from tinker_cookbook.recipes.multiplayer_rl.text_arena.tictactoe import (
    BY_RULES,
    ModelPlayer,
    OpponentType,
)
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollouts import do_group_rollout, do_single_rollout
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model
from tinker_cookbook.training.config import BackendSettings, number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line


@chz.chz
class PlayConfig(GameSettings, BackendSettings, SamplerOptions):
    """Who plays, and how often."""

    checkpoint_path: str | None = weights_field(
        "sampler_weights", "Weights for sampling; default: the base model"
    )
    model_name: str | None = chz.field(
        default=None, doc="Base model; default: the base of checkpoint_path"
    )
    renderer_name: str | None = chz.field(
        default=None, doc="Chat format; default: the one of the run, else the model's"
    )
    mode: Literal["human_vs_model", "eval"] = chz.field(
        default="human_vs_model", doc="human_vs_model or eval"
    )
    opponent: OpponentType = chz.field(
        default="random", doc="Opponent of mode=eval: random, optimal or base_model"
    )
    human_player_id: int = number(0, "Your seat, 0 or 1", below=2)
    num_games: int = chz.field(default=20, doc="Games of mode=eval; the model changes its seat")
    max_tokens: int = chz.field(default=64, doc="Maximum tokens of a move")
    temperature: float = chz.field(default=1.0, doc="Sampling temperature; 0: greedy")
    stop_condition: str | None = chz.field(
        default=STOP_CONDITION[0], doc="Text that ends a move; None: the renderer's stop sequences"
    )
    seed: int = chz.field(default=0, doc="Seed of the games and moves")

    @property
    def game(self) -> GameSettings:
        """The game; an illegal move of a person may be repeated."""
        fields = {name: getattr(self, name) for name in chz.chz_fields(GameSettings)}
        if self.mode == "human_vs_model":
            fields["on_illegal"] = "game"
        return GameSettings(**fields)


async def play_game(
    renderer: Renderer,
    model_token_completer: TinkerTokenCompleter,
    human_player_id: int,
    game_name: str,
    *,
    game: GameSettings | None = None,
    stop: list[str] | None = None,
) -> None:
    """Lets a person play one game of two players against a model, and prints the result.

    ``game`` replaces the default settings of ``game_name``, ``stop`` what ends a move.
    """
    game = game or GameSettings(game_name=game_name, on_illegal="game")
    stop = STOP_CONDITION if stop is None else stop
    seed = (model_token_completer.seed or 0,)
    builder = TextArenaGroupBuilder(game, [trained, trained], renderer, 1, seed, stop)
    envs = await builder.make_envs()
    print_line(f"You are player {human_player_id}. Type moves like: [4]")
    human = ManualPolicy(renderer.tokenizer, multiline=False)
    policies: list[TokenCompleter] = [model_token_completer, model_token_completer]
    policies[human_player_id] = human
    played = await asyncio.gather(*map(do_single_rollout, policies, envs))
    print_trajectory_summary(played[human_player_id])
    words = {"win": "You win.", "draw": "A draw.", "loss": "You lose."}
    print_line(words[envs[0].coordinator.outcome(human_player_id)])


async def eval_model(
    renderer: Renderer,
    model_token_completer: TinkerTokenCompleter,
    opponent_policy: MessageCompleter,
    opponent_name: str,
    game_name: str,
    num_games: int = 20,
    *,
    game: GameSettings | None = None,
    stop: list[str] | None = None,
) -> Counter[str]:
    """Plays games at the same time, prints and returns the model's wins, draws and losses.

    The model alternates between the seats of a game for two players.
    """
    builder = TextArenaGroupBuilder(
        game or GameSettings(game_name=game_name),
        [trained, lambda seed: opponent_policy],
        renderer,
        num_games,
        (model_token_completer.seed or 0,),
        STOP_CONDITION if stop is None else stop,
        same_start=False,
        rotate=True,
    )
    group = await do_group_rollout(builder, model_token_completer)
    for seat in (0, 1):
        of_seat = group.trajectories_G[seat::2]
        counts = ", ".join(
            f"{sum(int(t.metrics[name]) for t in of_seat)} {word}"
            for name, word in (("win", "won"), ("draw", "drawn"), ("loss", "lost"))
        )
        print_line(f"as player {seat} against {opponent_name}: {counts}")
    illegal = sum(int(t.metrics["illegal_move"]) for t in group.trajectories_G)
    print_line(f"games with an illegal move of the model: {illegal} of {num_games}")
    return Counter(
        name for t in group.trajectories_G for name in ("win", "draw", "loss") if t.metrics[name]
    )


async def main(config: PlayConfig) -> None:
    """Opens the model and plays."""
    game, stop = config.game, [] if config.stop_condition is None else [config.stop_condition]
    _ = game.seats  # a game that does not start is an error before the model is loaded
    settings = SamplingModelSettings.of(
        config,
        model_path=config.checkpoint_path,
        model_name=config.model_name,
        renderer_name=config.renderer_name,
    )
    settings.check()
    with settings.connect() as connection:
        model = await open_sampling_model(connection, settings)

        def completer(client: SamplingClient, seed: int) -> TinkerTokenCompleter:
            return TinkerTokenCompleter(client, config.max_tokens, config.temperature, seed=seed)

        policy = completer(model.client, config.seed)
        if config.mode == "human_vs_model":
            where = config.human_player_id, config.game_name
            await play_game(model.renderer, policy, *where, game=game, stop=stop)
            return
        if config.opponent in BY_RULES:
            opponent: MessageCompleter = BY_RULES[config.opponent](config.seed)
        else:
            client = await connection.service.create_sampling_client(base_model=model.model_name)
            opponent = ModelPlayer(completer(client, config.seed + 1), model.renderer, stop)
        what = opponent, config.opponent, config.game_name, config.num_games
        await eval_model(model.renderer, policy, *what, game=game, stop=stop)


if __name__ == "__main__":
    run_entrypoint(main)
