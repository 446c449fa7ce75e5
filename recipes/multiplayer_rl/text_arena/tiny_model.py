"""A very small model that knows the moves of one game, for learning curves on a CPU core.

    python -m recipes.multiplayer_rl.text_arena.tiny_model output=DIR
    python -m recipes.multiplayer_rl.text_arena.tiny_model output=DIR game_name=KuhnPoker-v0 \\
        game_options.max_rounds=1

It is a Llama of 0.1 million parameters with a vocabulary of the game's own words, trained for a
minute on games that code has played: a move is optimal with probability ``optimal_share``, else
random among the legal ones. A general model of 135 million parameters rarely makes a legal move in
these games, so reinforcement learning would have nothing to reinforce.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chz

from tinker_cookbook.completers import derived_seed
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import Game, GameSettings, legal_moves
from tinker_cookbook.recipes.multiplayer_rl.text_arena.players import RandomOpponent, seat
from tinker_cookbook.recipes.multiplayer_rl.text_arena.pool import optimal_opponent
from tinker_cookbook.renderers import get_renderer, get_text_content
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console

if TYPE_CHECKING:
    import torch

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
_SPECIAL = ("<unk>", "<s>", "</s>")


@chz.chz
class CLIConfig:
    """Settings of the model."""

    output: str = chz.field(doc="Folder of the model; it must be empty or absent")
    game_name: str = chz.field(default="TicTacToe-v0-train", doc="The game")
    game_options: dict[str, Any] = chz.field(default_factory=dict, doc="Arguments of the game")
    optimal_share: float = chz.field(default=0.5, doc="Share of optimal moves in the example games")
    num_games: int = chz.field(default=3000, doc="Example games")
    steps: int = chz.field(default=1500, doc="Training steps")
    batch_size: int = chz.field(default=64, doc="Positions a step")
    learning_rate: float = chz.field(default=2e-3, doc="Highest learning rate")
    hidden_size: int = chz.field(default=64, doc="Width")
    num_layers: int = chz.field(default=3, doc="Layers")
    seed: int = chz.field(default=0, doc="Seed of games and weights")

    @property
    def game(self) -> GameSettings:
        """The game, without its rules: the model learns them from the examples."""
        return GameSettings(
            game_name=self.game_name, game_options=self.game_options, show_rules=False
        )


async def example_moves(config: CLIConfig) -> list[tuple[str, str]]:
    """Returns (prompt, move) of all moves of the example games."""
    rng = random.Random(config.seed)
    rand = RandomOpponent(config.seed)
    best = optimal_opponent(config.game_name, config.seed) if config.optimal_share > 0 else rand
    moves: list[tuple[str, str]] = []
    for number in range(config.num_games):
        game = Game.start(config.game, derived_seed(config.seed, number))
        players = [seat(player, number) for player in (rand, best)]
        while not game.done:
            text = game.observe()
            player = players[rng.random() < config.optimal_share]
            move = get_text_content(await player([{"role": "user", "content": text}]))
            moves.append((text, move))
            if not game.move(move):
                raise ConfigurationError(
                    f"game_name: {config.game_name} did not accept the move {move}; expected a "
                    "game whose prompts list the legal moves"
                )
    return moves


def make_tokenizer(moves: Sequence[tuple[str, str]], folder: Path) -> Any:
    """Writes the tokenizer of all pieces in the examples, and returns it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The parts that the renderer encodes one by one.
    contents = {text for move in moves for text in move}
    texts = ["User:", "Assistant:", *(f" {text}\n\n" for text in contents)]
    pieces = sorted({piece for text in texts for piece in re.findall(_PIECES, text)})
    vocabulary = {piece: number for number, piece in enumerate([*_SPECIAL, *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)
    return fast


def train(config: CLIConfig, moves: Sequence[tuple[str, str]], folder: Path) -> float:
    """Trains the model, writes it into ``folder``, and returns its mean loss at the end."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_tokenizer(moves, folder)
    renderer = get_renderer(RENDERER, tokenizer)
    torch.manual_seed(config.seed)
    rows = [
        (
            renderer.build_generation_prompt([{"role": "user", "content": text}]).to_ints(),
            tokenizer.encode(f" {move}", add_special_tokens=False)[0],
        )
        for text, move in moves
    ]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=3 * config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=config.steps
    )
    rng, losses = random.Random(config.seed), []
    for _ in range(config.steps):
        loss = _loss(model, rng.choices(rows, k=config.batch_size))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    model.save_pretrained(folder)
    last = losses[-100:]
    return sum(last) / len(last)


def _loss(model: Any, batch: Sequence[tuple[list[int], int]]) -> torch.Tensor:
    """Mean loss of the move after each prompt."""
    import torch

    longest = max(len(prompt) for prompt, _ in batch)
    # Padding on the right: the last token of a prompt sees only what is before it.
    tokens = torch.tensor([prompt + [2] * (longest - len(prompt)) for prompt, _ in batch])
    last = torch.tensor([len(prompt) - 1 for prompt, _ in batch])
    hidden = model.model(tokens)[0]
    logits = model.lm_head(hidden[torch.arange(len(batch)), last])
    return torch.nn.functional.cross_entropy(logits, torch.tensor([move for _, move in batch]))


async def main(config: CLIConfig) -> None:
    """Plays the example games, trains the model and writes it."""
    folder = Path(config.output).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"output: {folder} is not empty; expected a new folder")
    config.game.check()
    if not legal_moves(Game.start(config.game, 0).observe()):
        raise ConfigurationError(
            f"game_name: the prompts of {config.game_name} list no moves; expected a game that "
            "does, such as TicTacToe-v0-train"
        )
    folder.mkdir(parents=True, exist_ok=True)
    moves = await example_moves(config)
    console = get_console()
    console.print(f"{config.num_games} example games, {len(moves)} moves", highlight=False)
    loss = await asyncio.to_thread(train, config, moves, folder)
    console.print(f"loss of a move: {loss:.3f} nats\nmodel: {folder}", highlight=False)


if __name__ == "__main__":
    run_entrypoint(main)
