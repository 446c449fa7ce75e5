"""Exact value and exploitability of a policy in Kuhn poker.

There are three cards J, Q, K. Each player antes one chip and gets one card, and there is one bet of
one chip. In equilibrium the player who moves first loses 1/18 chip per game (Kuhn, 1950). The game
has twelve information sets: three cards times four histories. The exploitability of a policy is
what a best response wins more than the equilibrium value, averaged over both seats (NashConv / 2).
It is 0 only in equilibrium.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Iterable, Sequence
from itertools import permutations, product
from typing import Any

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.completers import derived_seed
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import Game, GameSettings
from tinker_cookbook.recipes.multiplayer_rl.text_arena.players import Player, prompt_text
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.utils.imports import tinker

GAME = "KuhnPoker-v0"
VALUE_FIRST = -1 / 18
"""Average chips per game that the first player wins if both play perfectly."""

CARDS = "JQK"
HISTORIES = {"": ("check", "bet"), "check-bet": ("fold", "call")}
"""Situations of the first player, with the passive and the active move."""
HISTORIES_SECOND = {"check": ("check", "bet"), "bet": ("fold", "call")}

Strategy = dict[tuple[str, str], float]
"""(card, history) -> probability of the active move: bet or call."""

SITUATIONS = [(card, history) for history in (*HISTORIES, *HISTORIES_SECOND) for card in CARDS]


def equilibrium(alpha: float = 0.2) -> Strategy:
    """Returns an equilibrium; there is one for each ``alpha`` from 0 to 1/3."""
    return {
        ("J", ""): alpha,
        ("Q", ""): 0.0,
        ("K", ""): 3 * alpha,
        ("J", "check-bet"): 0.0,
        ("Q", "check-bet"): alpha + 1 / 3,
        ("K", "check-bet"): 1.0,
        ("J", "check"): 1 / 3,
        ("Q", "check"): 0.0,
        ("K", "check"): 1.0,
        ("J", "bet"): 0.0,
        ("Q", "bet"): 1 / 3,
        ("K", "bet"): 1.0,
    }


def value(first: Strategy, second: Strategy) -> float:
    """Returns the chips per game that the first player wins, averaged over the six deals."""
    total = 0.0
    for mine, yours in permutations(CARDS, 2):
        sign = 1 if CARDS.index(mine) > CARDS.index(yours) else -1
        bet, call = first[mine, ""], first[mine, "check-bet"]
        raised, called = second[yours, "check"], second[yours, "bet"]
        # A fold loses the ante of one chip, a call makes the showdown about two.
        after_check = (1 - raised) * sign + raised * (call * 2 * sign - (1 - call))
        after_bet = called * 2 * sign + (1 - called)
        total += (1 - bet) * after_check + bet * after_bet
    return total / 6


def exploitability(strategy: Strategy) -> float:
    """Returns what best responses to both seats win together, divided by two; 0: equilibrium."""
    best_first = _best(strategy, HISTORIES, lambda reply: value(reply, strategy))
    best_second = _best(strategy, HISTORIES_SECOND, lambda reply: -value(strategy, reply))
    return (best_first + best_second) / 2


def _best(strategy: Strategy, histories: Iterable[str], gain: Any) -> float:
    """Returns the most that one seat can win; each card is a separate decision."""
    best = dict(strategy)
    for card in CARDS:
        replies = [
            {**best, **{(card, h): move for h, move in zip(histories, moves, strict=True)}}
            for moves in product((0.0, 1.0), repeat=2)
        ]
        best = max(replies, key=gain)
    return gain(best)


def average(strategies: Sequence[Strategy]) -> Strategy:
    """Returns the strategy of a player who picks one of ``strategies`` before each game.

    The second decision of the first player is weighted by how often it is reached.
    """
    mean = {s: sum(one[s] for one in strategies) / len(strategies) for s in SITUATIONS}
    for card in CARDS:
        reached = [1 - one[card, ""] for one in strategies]
        if sum(reached) > 0:
            weighted = zip(reached, strategies, strict=True)
            total = sum(weight * one[card, "check-bet"] for weight, one in weighted)
            mean[card, "check-bet"] = total / sum(reached)
    return mean


def situation(text: str) -> tuple[str, str]:
    """Returns (card, history) of the last round of a prompt."""
    card = re.findall(r"Your card is: '([JQK])'", text)
    start = text.rfind("Your card is:")
    moves = re.findall(r"submitted move: '\[(\w+)\]'", text[start:])
    if not card:
        raise ConfigurationError(
            f"opponent: got 'optimal' for a prompt without a card of Kuhn poker; expected the "
            f"game {GAME}, or another opponent. The prompt: {text[-200:]!r}"
        )
    return card[-1], "-".join(moves)


class KuhnOpponent(Player):
    """Plays an equilibrium of Kuhn poker."""

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        self._strategy = equilibrium()

    def seated(self, *path: int) -> KuhnOpponent:
        """Returns the player of one game."""
        return self if self._seed is None else type(self)(derived_seed(self._seed, *path))

    async def __call__(self, messages: list[Message]) -> Message:
        """Returns a move as an assistant's message."""
        where = situation(prompt_text(messages))
        passive, active = (HISTORIES | HISTORIES_SECOND)[where[1]]
        move = active if self._rng.random() < self._strategy[where] else passive
        return {"role": "assistant", "content": f"[{move}]"}


def prompts(settings: GameSettings) -> dict[tuple[str, str], str]:
    """Returns the prompt of each situation, as the game itself shows it."""
    found: dict[tuple[str, str], str] = {}
    for seed in range(1000):
        for moves in (["[check]", "[bet]"], ["[bet]"]):
            game = Game.start(settings, seed)
            for move in [*moves, ""]:
                text = game.observe()
                found.setdefault(situation(text), text)
                if move:
                    game.move(move)
        if len(found) == len(SITUATIONS):
            return found
    raise ConfigurationError(
        f"game_name: got {settings.game_name}, expected {GAME} with game_options.max_rounds=1: its "
        f"situations were not found (only {sorted(found)})"
    )


async def strategy_of(
    client: SamplingClient, renderer: Renderer, texts: dict[tuple[str, str], str]
) -> tuple[Strategy, float]:
    """Returns a model's strategy from its probabilities, and the share of them on legal moves."""

    async def probability(text: str, move: str) -> float:
        prompt = renderer.build_generation_prompt([{"role": "user", "content": text}])
        head, answer = prompt.to_ints(), answer_tokens(renderer, text, f"[{move}]")
        whole = tinker.ModelInput.from_ints([*head, *answer])
        logprobs = await client.compute_logprobs(whole)
        return math.exp(sum(value or 0.0 for value in logprobs[len(head) :]))

    moves = HISTORIES | HISTORIES_SECOND
    wanted = [(where, move) for where in SITUATIONS for move in moves[where[1]]]
    values = await asyncio.gather(*(probability(texts[where], move) for where, move in wanted))
    of = dict(zip(wanted, values, strict=True))
    strategy, legal = {}, 0.0
    for where in SITUATIONS:
        passive, active = (of[where, move] for move in moves[where[1]])
        legal += (passive + active) / len(SITUATIONS)
        strategy[where] = active / (passive + active) if passive + active > 0 else 0.5
    return strategy, legal


def answer_tokens(renderer: Renderer, text: str, move: str) -> list[int]:
    """Returns the tokens of an answer up to the one that completes the move."""
    user: Message = {"role": "user", "content": text}
    answer: Message = {"role": "assistant", "content": move}
    head = renderer.build_generation_prompt([user]).to_ints()
    model_input, _ = renderer.build_supervised_example([user, answer])
    tokens = model_input.to_ints()[len(head) :]
    for end in range(1, len(tokens) + 1):
        if move in str(renderer.tokenizer.decode(tokens[:end])):
            return tokens[:end]
    return tokens
