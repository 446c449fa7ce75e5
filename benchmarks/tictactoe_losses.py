"""Exact share of tic-tac-toe games lost to the optimal player: `tictactoe_losses.py RUN …`.

For each snapshot of the opponent pool of a run's folder, all games are followed in which the policy
decodes greedily and the opponent chooses among its best moves, each with the same probability. So
the result has no sampling error: 0 means that no such game can be lost.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
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
Policy = Callable[[list[str]], list[str]]
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


def greedy_policy(client: Any, model_name: str) -> Policy:
    """The moves of a snapshot for several prompts, which are sampled in one batch."""
    renderer = get_renderer("role_colon", get_tokenizer(model_name))
    known: dict[str, str] = {}

    def moves(texts: list[str]) -> list[str]:
        futures = {
            text: client.sample(
                renderer.build_generation_prompt([{"role": "user", "content": text}]), 1, GREEDY
            )
            for text in dict.fromkeys(texts)
            if text not in known
        }
        for text, future in futures.items():
            (sample,) = future.result().sequences
            known[text] = get_text_content(renderer.parse_response(sample.tokens)[0])
        return [known[text] for text in texts]

    return moves


def share_lost(policy: Policy, seat: int) -> float:
    """Probability that the policy loses as player ``seat``."""
    lost = 0.0
    positions: dict[Moves, float] = {(): 1.0}
    """Moves so far, and the probability of this beginning."""
    while positions:
        after: dict[Moves, float] = {}
        waiting: dict[Moves, str] = {}
        """Positions in which the policy moves, and their prompts."""
        for moves, share in positions.items():
            game = game_after(moves)
            if game is None or game.game_done:
                # Only the policy makes illegal moves.
                lost += share * (game is None or game.reward(seat) < 0)
                continue
            text = game.observe()
            if game.current_player_id == seat:
                waiting[moves] = text
            else:
                best = best_moves(read_board(text), own_mark(text))
                after |= {(*moves, f"[{move}]"): share / len(best) for move in best}
        for moves, move in zip(waiting, policy(list(waiting.values())), strict=True):
            after[(*moves, move)] = positions[moves]
        positions = after
    return lost


def game_after(moves: Moves) -> Game | None:
    """The game after ``moves``; ``None`` if the last one is illegal."""
    game = Game.start(GameSettings(game_name="TicTacToe-v0-train", show_rules=False), 0)
    for move in moves:
        game.observe()
        if not game.move(move):
            return None
    return game


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
