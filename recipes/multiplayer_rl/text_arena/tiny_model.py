"""Trains a very small model on the moves of tic-tac-toe, for learning curves on a CPU core.

    python -m recipes.multiplayer_rl.text_arena.tiny_model output=DIR

The model is a Llama of 0.1 million parameters whose vocabulary has only the words of the game. It
is trained for a minute on games that a program played: a move is optimal with probability
``optimal_share``, else a random legal move. A general model of 135 million parameters rarely makes
a legal move in these games, so reinforcement learning would have nothing to reinforce.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.completers import derived_seed
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import Game, GameSettings
from tinker_cookbook.recipes.multiplayer_rl.text_arena.tictactoe import (
    OptimalOpponent,
    RandomOpponent,
)
from tinker_cookbook.recipes.tiny_models.llama import (
    Row,
    TinyModelSettings,
    new_folder,
    train,
    word_tokenizer,
)
from tinker_cookbook.renderers import get_renderer, get_text_content
from tinker_cookbook.training.config import number, peak_rate
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line

RENDERER = "role_colon"
# A token is a move, a quoted word, a role, the rest of a line, or a line break: a prompt of
# tic-tac-toe has about 25 of them.
_PIECES = (
    r"(?:User|Assistant):"
    r"| ?'?\[[^\[\]\s]+\]'?,?"
    r"| ?'\w+'"
    r"| ?(?!User:|Assistant:)[^\s\[\]'](?:[^\n\[\]']*[^\s\[\]'])?"
    r"| *\n+| +|[\[\]']"
)


@chz.chz
class CLIConfig(TinyModelSettings):
    """Settings of the model."""

    optimal_share: float = chz.field(default=0.5, doc="Share of optimal moves in the example games")
    num_games: int = number(3000, "Example games", low=1)
    steps: int = number(1500, "Training steps", low=1)
    batch_size: int = number(64, "Positions per step", low=1)
    learning_rate: float = peak_rate(2e-3, "Peak learning rate")
    num_layers: int = number(3, "Layers", low=1)


async def example_moves(config: CLIConfig) -> list[tuple[str, str]]:
    """Returns (prompt, move) of all moves of the example games."""
    rng = random.Random(config.seed)
    # Without the rules: the model learns them from the examples.
    settings = GameSettings(game_name="TicTacToe-v0-train", show_rules=False)
    moves: list[tuple[str, str]] = []
    for index in range(config.num_games):
        game = Game.start(settings, derived_seed(config.seed, index))
        players = [
            kind(derived_seed(config.seed, index, chair))
            for chair, kind in enumerate((RandomOpponent, OptimalOpponent), 1)
        ]
        while not game.game_done:
            text = game.observe()
            player = players[rng.random() < config.optimal_share]
            moves.append(
                (text, get_text_content(await player([{"role": "user", "content": text}])))
            )
            game.move(moves[-1][1])
    return moves


def make_tokenizer(moves: Sequence[tuple[str, str]], folder: Path) -> Any:
    """Writes the tokenizer of all pieces in the examples, and returns it."""
    contents = {text for move in moves for text in move}
    # The parts that the renderer encodes separately.
    texts = ["User:", "Assistant:", *(f" {text}\n\n" for text in contents)]
    return word_tokenizer(
        texts, _PIECES, folder, ("<unk>", "<s>", "</s>"), bos_token="<s>", eos_token="</s>"
    )


def make_rows(moves: Sequence[tuple[str, str]], tokenizer: Any) -> list[Row]:
    """Returns each prompt with its move, which is one token and the only one with a weight."""
    renderer, rows = get_renderer(RENDERER, tokenizer), []
    for text, move in moves:
        prompt = renderer.build_generation_prompt([{"role": "user", "content": text}]).to_ints()
        token = tokenizer.encode(f" {move}", add_special_tokens=False)[0]
        rows.append(([*prompt, token], [0.0] * len(prompt) + [1.0]))
    return rows


async def main(config: CLIConfig) -> None:
    """Plays the example games, trains the model and writes it."""
    with new_folder(config.output) as folder:
        moves = await example_moves(config)
        print_line(f"{config.num_games} example games, {len(moves)} moves")
        tokenizer = make_tokenizer(moves, folder)
        rows = make_rows(moves, tokenizer)
        loss = await asyncio.to_thread(train, config, rows, tokenizer, folder)
    print_line(f"loss of a move: {loss:.3f} nats\nmodel: {config.output}")


if __name__ == "__main__":
    run_entrypoint(main)
