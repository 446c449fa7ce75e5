"""Exact share of tic-tac-toe games lost to the optimal player: `tictactoe_losses.py RUN …`.

For each snapshot of the opponent pool of a run's folder, all games are followed in which the policy
decodes greedily and the opponent chooses among its best moves, each with the same probability. So
the result has no sampling error: 0 means that no such game can be lost.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tinker

from tinker_cookbook.backends import connect
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import Game, GameSettings
from tinker_cookbook.recipes.multiplayer_rl.text_arena.tictactoe import (
    best_moves,
    own_mark,
    read_board,
)
from tinker_cookbook.renderers import get_renderer, get_text_content
from tinker_cookbook.tokenizer_utils import get_tokenizer

Moves = tuple[str, ...]
GREEDY = tinker.SamplingParams(max_tokens=1, temperature=0.0)


def main(folders: list[Path]) -> None:
    """A line for each snapshot: run, step, share lost as first and as second player."""
    with connect("local", dtype="float32") as connection:
        for folder in folders:
            config = json.loads((folder / "config.json").read_text())
            for line in (folder / "opponents.jsonl").read_text().splitlines():
                row = json.loads(line)
                client = connection.service.create_sampling_client(model_path=row["path"])
                policy = greedy_policy(client, config["model_name"])
                lost = [share_lost(policy, seat) for seat in (0, 1)]
                print(folder.name, row["step"], *(f"{share:.5f}" for share in lost), flush=True)


def greedy_policy(client: Any, model_name: str) -> Callable[[str], str]:
    """The move of a snapshot for a prompt."""
    renderer = get_renderer("role_colon", get_tokenizer(model_name))

    @cache
    def move(text: str) -> str:
        prompt = renderer.build_generation_prompt([{"role": "user", "content": text}])
        (sample,) = client.sample(prompt, 1, GREEDY).result().sequences
        return get_text_content(renderer.parse_response(sample.tokens)[0])

    return move


def share_lost(policy: Callable[[str], str], seat: int, moves: Moves = ()) -> float:
    """Probability that the policy loses as player ``seat`` after ``moves``."""
    game = Game.start(GameSettings(game_name="TicTacToe-v0-train", show_rules=False), 0)
    for move in moves:
        game.observe()
        if not game.move(move):
            return 1.0  # only the policy makes illegal moves
    if game.done:
        return float(game.rewards()[seat] < 0)
    text = game.observe()
    if game.turn == seat:
        return share_lost(policy, seat, (*moves, policy(text)))
    best = best_moves(read_board(text), own_mark(text))
    return sum(share_lost(policy, seat, (*moves, f"[{move}]")) for move in best) / len(best)


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
