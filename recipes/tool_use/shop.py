"""Questions about a shop; only its tools know prices and stock.

Every question has a new database, so an answer without the right calls is a guess.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import chz

from tinker_cookbook.grading.numbers import last_number
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.envs.problem_dataset import ProblemDatasetBuilder
from tinker_cookbook.rl.types import Env
from tinker_cookbook.tool_use import (
    FunctionTool,
    ToolEpisode,
    ToolResult,
    build_agent_tool_env,
    error_tool_result,
    tool,
)
from tinker_cookbook.training.config import number

_NAMES = (
    "basket bell blanket book bottle bowl bread broom bucket butter candle chair cheese clock comb "
    "cup drum flute honey jam kettle kite knife lamp lemon mirror needle onion paper pear"
)
ITEMS = tuple(_NAMES.split())
MAX_NUMBER = 49
Kind = Literal["price", "stock", "total"]
KINDS: tuple[Kind, ...] = ("price", "stock", "total")


class Shop:
    """Database of a shop, with its tools."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.prices = {item: rng.randint(1, MAX_NUMBER) for item in ITEMS}
        self.stocks = {item: rng.randint(1, MAX_NUMBER) for item in ITEMS}

    @tool
    def price(self, item: str) -> int | ToolResult:
        """Price of an item"""
        return _look_up(self.prices, item)

    @tool
    def stock(self, item: str) -> int | ToolResult:
        """Pieces of an item in stock"""
        return _look_up(self.stocks, item)

    @tool
    def add(self, a: int, b: int) -> int:
        """Sum of two numbers"""
        return a + b

    @property
    def tools(self) -> list[FunctionTool]:
        """All tools."""
        return [self.price, self.stock, self.add]


def _look_up(table: dict[str, int], item: str) -> int | ToolResult:
    if item in table:
        return table[item]
    return error_tool_result(f"no item {item}", error_type="execution_failed")


@dataclass(frozen=True)
class Question:
    """One question: the kind, the items it is about, and the seed of the database."""

    kind: Kind
    items: tuple[str, ...]
    seed: int

    @property
    def text(self) -> str:
        """The question as the model reads it."""
        if self.kind == "price":
            return f'Price of "{self.items[0]}"?'
        if self.kind == "stock":
            return f'How many of "{self.items[0]}"?'
        return f'Price of "{self.items[0]}" and "{self.items[1]}"?'

    def calls(self) -> list[tuple[str, dict[str, str | int]]]:
        """Returns the calls that answer the question, in order, as (tool, arguments)."""
        if self.kind != "total":
            return [(self.kind, {"item": self.items[0]})]
        prices = Shop(self.seed).prices
        first, second = (prices[item] for item in self.items)
        looked_up: list[tuple[str, dict[str, str | int]]] = [
            ("price", {"item": item}) for item in self.items
        ]
        return [*looked_up, ("add", {"a": first, "b": second})]

    def answer(self) -> int:
        """Returns the right answer."""
        shop = Shop(self.seed)
        table = shop.stocks if self.kind == "stock" else shop.prices
        return sum(table[item] for item in self.items)


def make_questions(count: int, seed: int, kinds: Sequence[Kind] = KINDS) -> list[Question]:
    """Returns questions of all kinds in turn, each about a new database."""
    rng = random.Random(seed)
    return [
        Question(
            kind := kinds[i % len(kinds)],
            tuple(rng.sample(ITEMS, 2 if kind == "total" else 1)),
            rng.randrange(2**31),
        )
        for i in range(count)
    ]


async def reward(
    question: Question, call_coef: float, history: list[Message], episode: ToolEpisode
) -> tuple[float, dict[str, float]]:
    """Returns 1 for the right answer, plus ``call_coef`` times the share of needed calls made.

    The metric ``right_calls`` is the share of the calls made that the question needs; a call that
    is repeated counts once.
    """
    needed = question.calls()
    made = [(call.name, call.arguments) for call in episode.calls]
    found = sum(call in made for call in needed)
    right = last_number(get_text_content(history[-1])) == str(question.answer())
    right = right and history[-1]["role"] == "assistant"
    metrics = {
        "right_answer": float(right),
        "right_calls": found / max(len(made), len(needed)),
        f"right_answer/{question.kind}": float(right),
    }
    return float(right) + call_coef * found / len(needed), metrics


def make_episode(question: Question, renderer: Renderer, max_turns: int, call_coef: float) -> Env:
    """Returns one episode about a question, with its own database."""
    shop = Shop(question.seed)
    specs = [one.to_spec() for one in shop.tools]
    prefix = renderer.create_conversation_prefix_with_tools(specs)
    return build_agent_tool_env(
        renderer,
        list(shop.tools),
        [*prefix, Message(role="user", content=question.text)],
        partial(reward, question, call_coef),
        max_turns=max_turns,
    )


@chz.chz
class ShopSettings:
    """How many questions, and how an episode goes; of the dataset and the recipe."""

    n_batches: int = number(200, "Steps per epoch", low=1)
    num_test: int = number(60, "Questions to evaluate on; 0: no evaluation")
    max_turns: int = number(5, "Maximum answers of an episode, including tool calls", low=1)
    call_coef: float = chz.field(default=0.2, doc="Additional reward for making all needed calls")


@chz.chz
class ShopDatasetBuilder(ShopSettings, ProblemDatasetBuilder):
    """Questions to train on, and others to evaluate on."""

    def load(self) -> tuple[list[Question], list[Question]]:
        """Returns the questions to train on and to evaluate on."""
        count = self.n_batches * self.batch_size
        # The same test questions for all seeds, so that their curves can be compared.
        return make_questions(count, self.seed), make_questions(self.num_test, 10**9)

    def env_thunk(self, problem: Question, renderer: Renderer) -> Callable[[], Env]:
        """Returns an episode about a question."""
        return partial(make_episode, problem, renderer, self.max_turns, self.call_coef)

    def tag(self, problem: Question) -> str:
        """Returns the kind of the question."""
        return problem.kind
