"""Questions about a shop; only its tools know prices and stock.

Every question has a new database, so an answer without the right calls is a guess.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.grading.numbers import last_number
from tinker_cookbook.renderers import Message, Renderer, get_renderer, get_text_content
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import (
    FunctionTool,
    ToolEpisode,
    ToolResult,
    build_agent_tool_env,
    error_tool_result,
    tool,
)
from tinker_cookbook.utils.command_line.keys import also_named

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


@dataclass(frozen=True)
class ShopGroupBuilder(EnvGroupBuilder):
    """Episodes about one question."""

    question: Question
    renderer: Renderer
    group_size: int
    max_turns: int
    call_coef: float

    async def make_envs(self) -> Sequence[Env]:
        """Returns all episodes of the group."""
        return [await self.make_env(i) for i in range(self.group_size)]

    async def make_env(self, index: int) -> Env:
        """Returns one episode with its own database."""
        shop = Shop(self.question.seed)
        specs = [one.to_spec() for one in shop.tools]
        prefix = self.renderer.create_conversation_prefix_with_tools(specs)
        return build_agent_tool_env(
            self.renderer,
            list(shop.tools),
            [*prefix, Message(role="user", content=self.question.text)],
            partial(reward, self.question, self.call_coef),
            max_turns=self.max_turns,
        )

    def logging_tags(self) -> list[str]:
        """Returns the kind of the question."""
        return [self.question.kind]


@also_named(batch_size="groups_per_batch", n_batches="num_batches")
@chz.chz
class ShopDatasetBuilder(RLDatasetBuilder):
    """Questions to train on, and others to evaluate on."""

    model_name_for_tokenizer: str = chz.field(doc="Model of the tokenizer")
    renderer_name: str = chz.field(doc="Chat format with tools")
    groups_per_batch: int = chz.field(doc="Questions per step")
    group_size: int = chz.field(doc="Episodes per question")
    num_batches: int = chz.field(default=100, doc="Steps per epoch")
    num_test: int = chz.field(default=60, doc="Questions to evaluate on; 0: no evaluation")
    max_turns: int = chz.field(default=5, doc="Maximum answers of an episode, including tool calls")
    call_coef: float = chz.field(default=0.2, doc="Additional reward for making all needed calls")
    seed: int = chz.field(default=0, doc="Seed of the questions")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for a number out of range."""
        for name, low in (("num_batches", 1), ("num_test", 0), ("max_turns", 1)):
            if getattr(self, name) < low:
                raise ConfigurationError(
                    f"{name}: got {getattr(self, name)}, expected at least {low}"
                )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Returns the training set, and the test set if there are test questions."""
        self.check()
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))
        count = self.num_batches * self.groups_per_batch
        train = ProblemDataset(
            make_questions(count, self.seed),
            partial(self._group, renderer, self.group_size),
            self.groups_per_batch,
        )
        if not self.num_test:
            return train, None
        # The same questions for all seeds, so that their curves can be compared.
        test = make_questions(self.num_test, 10**9)
        group = partial(self._group, renderer, 1)
        return train, ProblemDataset(test, group, len(test), shuffle=False)

    def _group(self, renderer: Renderer, size: int, question: Question) -> EnvGroupBuilder:
        return ShopGroupBuilder(question, renderer, size, self.max_turns, self.call_coef)
