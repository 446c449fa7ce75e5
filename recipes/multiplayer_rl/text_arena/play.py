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

from tinker_cookbook.backends.sampler_options import SamplerOptions
from tinker_cookbook.completers import MessageCompleter, TinkerTokenCompleter, derived_seed
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import Game, GameSettings
from tinker_cookbook.recipes.multiplayer_rl.text_arena.players import (
    STOP_CONDITION,
    HumanPlayer,
    ModelPlayer,
    RandomOpponent,
    seat,
)
from tinker_cookbook.recipes.multiplayer_rl.text_arena.pool import optimal_opponent
from tinker_cookbook.recipes.multiplayer_rl.text_arena.table import Table
from tinker_cookbook.recipes.multiplayer_rl.text_arena.tictactoe import BaseModel, OpponentType
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model
from tinker_cookbook.training.config import BackendSettings
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
    human_player_id: int = chz.field(default=0, doc="Your seat")
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

    def check(self) -> None:
        """Raises ``ConfigurationError`` for a setting that cannot work; loads no model."""
        self.game.check()
        seats = self.game.seats
        if not 0 <= self.human_player_id < seats:
            raise ConfigurationError(
                f"human_player_id: got {self.human_player_id}, expected 0 to {seats - 1}"
            )
        if self.num_games < 1:
            raise ConfigurationError(f"num_games: got {self.num_games}, expected at least 1")
        if self.mode == "eval" and self.opponent == "optimal":
            optimal_opponent(self.game_name)
        self.model.check()

    @property
    def model(self) -> SamplingModelSettings:
        """The model to open."""
        return SamplingModelSettings.of(
            self,
            model_path=self.checkpoint_path,
            model_name=self.model_name,
            renderer_name=self.renderer_name,
        )


async def play_game(
    renderer: Renderer,
    model_token_completer: TinkerTokenCompleter,
    human_player_id: int,
    game_name: str,
    *,
    game: GameSettings | None = None,
    stop: list[str] | None = None,
) -> None:
    """Lets a person play one game against a model, and prints the result.

    ``game`` replaces the default settings of ``game_name``. All seats but the person's are the
    model's.
    """
    settings = game or GameSettings(game_name=game_name, on_illegal="game")
    human = HumanPlayer()
    model = _model_player(renderer, model_token_completer, stop)
    start = await asyncio.to_thread(Game.start, settings, model_token_completer.seed or 0)
    players = [
        human if chair == human_player_id else seat(model, 0, chair) for chair in start.chairs
    ]
    table = Table(start, players)
    await table.start()
    reason = (getattr(table.game.state, "game_info", None) or {}).get(human_player_id, {})
    print_line(str(reason.get("reason") or ""))
    words = {"win": "You win.", "draw": "A draw.", "loss": "You lose."}
    print_line(words[table.outcome(human_player_id)])


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

    The model alternates between the seats.
    """
    settings = game or GameSettings(game_name=game_name)
    model = _model_player(renderer, model_token_completer, stop)
    seed = model_token_completer.seed or 0

    async def one(number: int) -> tuple[int, str, bool]:
        start = await asyncio.to_thread(Game.start, settings, derived_seed(seed, number))
        own = number % len(start.chairs)
        players = [
            seat(model if chair == own else opponent_policy, number, chair)
            for chair in start.chairs
        ]
        table = Table(start, players)
        await table.start()
        return own, table.outcome(own), table.illegal[own] > 0

    results = await asyncio.gather(*(one(number) for number in range(num_games)))
    for own in sorted({own for own, _, _ in results}):
        of_seat = [outcome for chair, outcome, _ in results if chair == own]
        counts = ", ".join(
            f"{of_seat.count(outcome)} {word}"
            for outcome, word in (("win", "won"), ("draw", "drawn"), ("loss", "lost"))
        )
        print_line(f"as player {own} against {opponent_name}: {counts}")
    illegal = sum(illegal for _, _, illegal in results)
    print_line(f"games with an illegal move of the model: {illegal} of {num_games}")
    return Counter(outcome for _, outcome, _ in results)


def _model_player(
    renderer: Renderer, completer: TinkerTokenCompleter, stop: list[str] | None
) -> ModelPlayer:
    return ModelPlayer(
        completer.sampling_client,
        renderer,
        completer.max_tokens,
        list(STOP_CONDITION) if stop is None else stop,
        completer.temperature,
        completer.seed,
    )


async def main(config: PlayConfig) -> None:
    """Opens the model and plays."""
    config.check()
    settings = config.model
    with settings.connect() as connection:
        model = await open_sampling_model(connection, settings)
        completer = TinkerTokenCompleter(
            model.client, config.max_tokens, config.temperature, seed=config.seed
        )
        stop = [] if config.stop_condition is None else [config.stop_condition]
        game = config.game
        if config.mode == "human_vs_model":
            await play_game(
                model.renderer, completer, config.human_player_id, "", game=game, stop=stop
            )
            return
        if config.opponent == "random":
            opponent: MessageCompleter = RandomOpponent(config.seed)
        elif config.opponent == "optimal":
            opponent = optimal_opponent(config.game_name, config.seed)
        else:
            base = BaseModel.of(config, model_name=model.model_name)
            client = await asyncio.to_thread(base.client)
            opponent = _model_player(
                model.renderer,
                TinkerTokenCompleter(
                    client, config.max_tokens, config.temperature, seed=config.seed + 1
                ),
                stop,
            )
        await eval_model(
            model.renderer,
            completer,
            opponent,
            config.opponent,
            config.game_name,
            config.num_games,
            game=game,
            stop=stop,
        )


if __name__ == "__main__":
    run_entrypoint(main)
