"""Opponent pool of a self-play run: earlier weights of the policy, and the games between them.

Every ``snapshot_every`` steps the current weights are added to the pool. They are saved as a
sampling checkpoint, and its path and results are one row of ``opponents.jsonl`` in the run's
folder. In the process that made it, a snapshot shares tensors with the run, so it needs no second
model.

The opponents of batch b are snapshots of the first b updates. The choice depends only on the seed
and on b, so a run that was killed and resumed gets the same opponents.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.backends import SamplingClient, ServiceClient, TrainingClient
from tinker_cookbook.backends.connect import make_once
from tinker_cookbook.backends.sampler_options import SamplerOptions
from tinker_cookbook.completers import MessageCompleter, StopCondition, derived_seed
from tinker_cookbook.eval.evaluators import TrainingClientEvaluator
from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.recipes.multiplayer_rl.text_arena import kuhn
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import Game, GameSettings
from tinker_cookbook.recipes.multiplayer_rl.text_arena.players import (
    ModelPlayer,
    RandomOpponent,
    seat,
)
from tinker_cookbook.recipes.multiplayer_rl.text_arena.ratings import Results, elo, league_table
from tinker_cookbook.recipes.multiplayer_rl.text_arena.table import Table
from tinker_cookbook.recipes.multiplayer_rl.text_arena.tictactoe import BaseModel, OptimalOpponent
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.run.current import current_step
from tinker_cookbook.run.jsonl import encode_row, read_rows
from tinker_cookbook.run.paths import local_path, write_atomically
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import BackendSettings

OPPONENTS_FILE = "opponents.jsonl"
LEAGUE_FILE = "league.md"


def optimal_opponent(game_name: str, seed: int | None = None) -> MessageCompleter:
    """Returns the optimal player of a game that has one."""
    known = {"TicTacToe": OptimalOpponent, "KuhnPoker": kuhn.KuhnOpponent}
    kind = known.get(game_name.partition("-")[0])
    if kind is None:
        raise ConfigurationError(
            f"opponent: got 'optimal' for {game_name}, expected it for {' or '.join(known)} only; "
            "use random or base_model"
        )
    return kind(seed)


@chz.chz
class PoolSettings(BackendSettings, SamplerOptions):
    """How earlier weights play."""

    model_name: str = chz.field(doc="Base model of the run")
    renderer_name: str = chz.field(doc="Its chat format")
    log_path: str = chz.field(doc="Folder of the run, which holds opponents.jsonl")
    max_tokens: int = chz.field(doc="Maximum tokens of a move")
    temperature: float = chz.field(default=1.0, doc="Sampling temperature")
    stop_condition: tuple[str, ...] = chz.field(default=(), doc="Text that ends a move")
    pool_size: int = chz.field(
        default=20, doc="Snapshots to play against: the first and the newest ones"
    )
    seed: int = chz.field(default=0, doc="Seed of the opponents' moves and of their choice")

    def pool(self) -> Pool:
        """Returns the pool of the run, the same object at each call."""
        return make_once(self, lambda service: Pool(self, service))


class Pool:
    """Snapshots of a run; any thread may use it."""

    def __init__(self, settings: PoolSettings, service: ServiceClient) -> None:
        self.settings, self._service = settings, service
        self._file = local_path(settings.log_path) / OPPONENTS_FILE
        self._lock = threading.Lock()
        self._clients: dict[str, SamplingClient] = {}
        tokenizer = get_tokenizer(settings.model_name)
        self.renderer: Renderer = get_renderer(settings.renderer_name, tokenizer)
        self.rows: list[dict[str, Any]] = read_rows(self._file)

    def members(self, step: int) -> list[dict[str, Any]]:
        """Returns the rows of the snapshots of the first ``step`` updates: first and newest."""
        rows = [row for row in self.rows if row["step"] <= step]
        size = self.settings.pool_size
        return rows if len(rows) <= size else [rows[0], *rows[len(rows) - size + 1 :]]

    def choose(self, step: int, *path: int) -> ModelPlayer | None:
        """Returns one of the snapshots of the first ``step`` updates; ``None``: there is none."""
        members = self.members(step)
        if not members:
            return None
        return self.player(members[derived_seed(self.settings.seed, step, *path) % len(members)])

    def player(self, row: Mapping[str, Any]) -> ModelPlayer:
        """Returns the player of a snapshot."""
        with self._lock:
            path = row["path"]
            # After a restart the weights are read from their checkpoint.
            if path not in self._clients:
                opened = self._service.create_sampling_client(model_path=path)
                self._clients[path] = opened.result()
            return self.model_player(self._clients[path])

    def model_player(self, client: SamplingClient) -> ModelPlayer:
        """Returns a player with the settings of the pool."""
        settings = self.settings
        stop: StopCondition = list(settings.stop_condition)
        return ModelPlayer(
            client, self.renderer, settings.max_tokens, stop, settings.temperature, settings.seed
        )

    def add(self, row: dict[str, Any], client: SamplingClient) -> None:
        """Adds a snapshot and writes the file; replaces rows of a run that was killed later on."""
        with self._lock:
            self._clients[row["path"]] = client
            self.rows = [old for old in self.rows if old["step"] < row["step"]] + [row]
            write_atomically(self._file, b"".join(encode_row(each) for each in self.rows))

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self._file.parent


@chz.chz
class LeagueBuilder:
    """Builds the evaluation that adds snapshots to the pool and lets them play each other."""

    pool: PoolSettings = chz.field(doc="The pool")
    game: GameSettings = chz.field(doc="The game")
    opponents: tuple[str, ...] = chz.field(
        default=("random",), doc="Additional opponents: random, optimal, base_model"
    )
    num_games: int = chz.field(default=16, doc="Games against each opponent; 0: none")

    def __call__(self) -> League:
        """Returns the evaluator."""
        return League(self)


class League(TrainingClientEvaluator):
    """Adds the present weights to the pool after games against its members.

    Metrics: ``league/elo`` (the first snapshot has 1000), ``league/score_vs_NAME`` (wins plus half
    of the draws, per game), ``league/losses_vs_NAME`` (share), for the first and the previous
    snapshot, the whole pool and each additional opponent. Kuhn poker of one round also has the
    exact ``kuhn/exploitability`` of the weights and of the average over the pool. ``league.md`` in
    the run's folder has the win-rate matrix.
    """

    def __init__(self, settings: LeagueBuilder) -> None:
        self._settings = settings

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        """Plays, saves the snapshot, and returns the metrics."""
        settings, step = self._settings, current_step()
        pool = await asyncio.to_thread(settings.pool.pool)
        client = await training_client.save_weights_and_get_sampling_client()
        # 1. The current weights against the pool and against additional opponents.
        rows = pool.members(step - 1)
        opponents: dict[str, MessageCompleter] = {
            snapshot_name(row["step"]): await asyncio.to_thread(pool.player, row) for row in rows
        }
        for name in settings.opponents:
            opponents[name] = await asyncio.to_thread(self._further, name)
        player = pool.model_player(client)
        results = await asyncio.gather(
            *(
                self._match(player, opponent, step, number)
                for number, opponent in enumerate(opponents.values())
            )
        )
        games = dict(zip(opponents, results, strict=True))
        row: dict[str, Any] = {"step": step, "games": games}
        metrics = self._metrics(games, rows)
        # 2. Kuhn poker has an exact measure.
        if is_small_kuhn(settings.game):
            texts = await asyncio.to_thread(kuhn.prompts, settings.game)
            strategy, legal = await kuhn.strategy_of(client, pool.renderer, texts)
            row["kuhn"] = [strategy[where] for where in kuhn.SITUATIONS]
            every = [*(old for old in pool.rows if old["step"] < step), row]
            metrics |= _kuhn_metrics([one["kuhn"] for one in every if "kuhn" in one], legal)
        # 3. The row is written last: it proves that the snapshot can be opened.
        saved = await training_client.save_weights_for_sampler(f"opponent-{step:06d}")
        await asyncio.to_thread(pool.add, {**row, "path": saved.path}, client)
        ratings = elo(self._results(pool.rows))
        metrics["league/elo"] = ratings[snapshot_name(step)]
        metrics["league/snapshots"] = float(len(pool.rows))
        table = league_table(self._results(pool.rows), ratings)
        await asyncio.to_thread(write_atomically, pool.folder / LEAGUE_FILE, table.encode())
        return metrics

    def _further(self, name: str) -> MessageCompleter:
        pool = self._settings.pool
        if name == "random":
            return RandomOpponent(pool.seed)
        if name == "optimal":
            return optimal_opponent(self._settings.game.game_name, pool.seed)
        if name == "base_model":
            return pool.pool().model_player(BaseModel.of(pool).client())
        known = ("random", "optimal", "base_model")
        raise ConfigurationError(
            f"league_opponents: got {name!r}, expected {', '.join(known)}{nearest(name, known)}"
        )

    async def _match(
        self, player: MessageCompleter, opponent: MessageCompleter, step: int, number: int
    ) -> list[int]:
        """Returns wins, draws and losses of ``player``, which has each seat equally often."""
        settings = self._settings
        seed = settings.pool.seed

        async def one(game_number: int) -> str:
            # The same games at every step, so that results differ by the weights.
            game = await asyncio.to_thread(
                Game.start, settings.game, derived_seed(seed, number, game_number)
            )
            own = game_number % len(game.chairs)
            players = [
                seat(player if chair == own else opponent, 1, step, number, game_number, chair)
                for chair in game.chairs
            ]
            table = Table(game, players)
            await table.start()
            return table.outcome(own)

        found = await asyncio.gather(*(one(n) for n in range(settings.num_games)))
        return [found.count(outcome) for outcome in ("win", "draw", "loss")]

    def _metrics(
        self, games: Mapping[str, list[int]], rows: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        named = {name: games[name] for name in self._settings.opponents}
        if rows:
            named["first"] = games[snapshot_name(rows[0]["step"])]
            named["previous"] = games[snapshot_name(rows[-1]["step"])]
            of_pool = [games[snapshot_name(row["step"])] for row in rows]
            named["pool"] = [sum(counts) for counts in zip(*of_pool, strict=True)]
        metrics: dict[str, float] = {}
        for name, (wins, draws, losses) in named.items():
            played = wins + draws + losses
            if played:
                metrics[f"league/score_vs_{name}"] = (wins + draws / 2) / played
                metrics[f"league/losses_vs_{name}"] = losses / played
        return metrics

    @staticmethod
    def _results(rows: Sequence[Mapping[str, Any]]) -> Results:
        return {
            (snapshot_name(row["step"]), name): tuple(counts)
            for row in rows
            for name, counts in row["games"].items()
        }


def snapshot_name(step: int) -> str:
    """Returns the name of a snapshot in the table."""
    return f"step {step}"


def is_small_kuhn(game: GameSettings) -> bool:
    """Returns whether a game is Kuhn poker of one round, so that exploitability can be computed."""
    return game.game_name.startswith("KuhnPoker") and game.game_options.get("max_rounds") == 1


def _kuhn_metrics(snapshots: Sequence[Sequence[float]], legal: float) -> dict[str, float]:
    strategies = [dict(zip(kuhn.SITUATIONS, one, strict=True)) for one in snapshots]
    now, mean = strategies[-1], kuhn.average(strategies)
    return {
        "kuhn/exploitability": kuhn.exploitability(now),
        "kuhn/exploitability_of_average": kuhn.exploitability(mean),
        "kuhn/value_first": kuhn.value(now, now),
        "kuhn/legal_share": legal,
    }
