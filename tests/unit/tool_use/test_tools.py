"""Tools from functions: declarations, checked arguments, limits, and faulty tools (under 2 s)."""

from __future__ import annotations

import asyncio
import functools
import json
import pickle
import threading
import time
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from tinker_cookbook.exceptions import ConfigurationError, SandboxError
from tinker_cookbook.renderers import ToolCall
from tinker_cookbook.tool_use import (
    FunctionTool,
    Tool,
    ToolInput,
    ToolResult,
    handle_tool_call,
    simple_tool_result,
    tool,
)


def call(one, arguments="{}", name=None):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    body = ToolCall.FunctionBody(name=name or one.name, arguments=text)
    return asyncio.run(handle_tool_call({one.name: one}, ToolCall(function=body, id="call_1")))


def text(result: ToolResult) -> str:
    (message,) = result.messages
    assert message["role"] == "tool"
    assert message.get("tool_call_id") == "call_1"
    return message["content"]


class Place(BaseModel):
    city: str


@tool
async def search(
    query: Annotated[str, "What to look for"],
    copy: Literal["a", "b"] = "a",
    near: Place | None = None,
    limit: Annotated[int, Field(ge=1, description="Results")] = 3,
) -> ToolResult:
    """Searches the corpus.

    Args:
        query: Not used, the hint has its description.
        copy (str): Which of the
            two copies.

    Returns:
        Rows of JSON.
    """
    found = [query, copy, near.city if near else None, limit]
    return simple_tool_result(json.dumps(found), metrics={"results": limit})


@tool(name="plus", timeout_seconds=5)
def add(a: int, b: int = 1) -> int:
    """Adds.

    :param a: First summand.
    """
    return a + b


def test_the_declaration_comes_from_hints_and_docstring():
    assert search.to_spec() == {
        "name": "search",
        "description": "Searches the corpus.\n\nReturns:\n    Rows of JSON.",
        "parameters": {
            "type": "object",
            "required": ["query"],
            "$defs": {
                "Place": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}},
                    "required": ["city"],
                }
            },
            "properties": {
                "query": {"type": "string", "description": "What to look for"},
                "copy": {
                    "type": "string",
                    "enum": ["a", "b"],
                    "default": "a",
                    "description": "Which of the two copies.",
                },
                "near": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}], "default": None},
                "limit": {"type": "integer", "minimum": 1, "default": 3, "description": "Results"},
            },
        },
    }
    assert (add.name, add.description) == ("plus", "Adds.")
    assert add.parameters_schema["properties"]["a"]["description"] == "First summand."
    assert isinstance(search, FunctionTool)
    assert isinstance(search, Tool)
    assert add(2, b=3) == 5  # still a function


def half(of: float | None) -> float:
    return (of or 0) / 2


def test_arguments_have_their_types_when_they_arrive():
    assert json.loads(text(call(search, {"query": "x", "near": {"city": "Bern"}}))) == [
        "x",
        "a",
        "Bern",
        3,
    ]
    for number in ("1e400", "NaN"):
        assert "finite number" in text(call(tool(half), {"of": number}))
    result = call(add, {"a": "2"})
    assert (text(result), result.error_type, result.messages[0]["name"]) == ("3", None, "plus")


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ('{"query": ', "json_decode_failed", "Failed to parse tool arguments"),
        ("[" * 10**5, "json_decode_failed", "Failed to parse tool arguments"),
        ("[1]", "validation_failed", "got list, expected an object"),
        ("{}", "validation_failed", "query: Field required"),
        ('{"query": "x", "limit": 0}', "validation_failed", "limit: Input should be greater"),
        ('{"query": "x", "copy": "c"}', "validation_failed", "copy: Input should be 'a' or 'b'"),
        ('{"query": "x", "limt": 5}', "validation_failed", "limt: no such parameter; did you mean"),
        (r'{"query": "\ud83d"}', "validation_failed", "half of a character"),
        ('{"query": ' + "[" * 200 + "]" * 200 + "}", "validation_failed", "nested too deeply"),
        ('{"query": ' + "1" * 5000 + "}", "json_decode_failed", "limit"),
    ],
)
def test_a_call_that_cannot_be_run_gets_a_result_that_says_why(arguments, kind, said):
    result = call(search, arguments)
    assert result.error_type == kind
    assert said in json.loads(text(result))["error"]


class Callable:
    """Adds to a state."""

    start = 10

    def __call__(self, n: int) -> int:
        return self.start + n


class Library:
    @tool
    @staticmethod
    def fixed(n: int) -> int:
        """Static."""
        return n

    @tool
    @classmethod
    def named(cls, n: int) -> str:
        """Of the class."""
        return f"{cls.__name__} {n}"


def power(base: int, n: int) -> Place:
    """Power."""
    return Place(city=str(base**n))


@pytest.mark.parametrize(
    ("made", "name", "expected"),
    [
        (FunctionTool(functools.partial(power, 2)), "power", '{"city": "8"}'),
        (FunctionTool(functools.partial(power, base=2)), "power", '{"city": "8"}'),
        (tool(Callable()), "Callable", "13"),
        (tool(name="add")(Callable()), "add", "13"),
        (Library.fixed, "fixed", "3"),
        (Library().fixed, "fixed", "3"),
        (Library.named, "named", "Library 3"),
        (Library().named, "named", "Library 3"),
    ],
)
def test_every_callable_can_be_a_tool(made, name, expected):
    for one in (made, pickle.loads(pickle.dumps(made))):
        assert one.name == name
        assert list(one.parameters_schema["properties"]) == ["n"]
        assert one.description
        assert text(call(one, {"n": 3})) == expected


def raising(error):
    def faulty():
        """Raises."""
        raise error

    async def faulty_async():
        """Raises."""
        raise error

    return [faulty, faulty_async]


@pytest.mark.parametrize("index", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (RuntimeError("no"), "execution_failed", "Tool execution failed: no"),
        (ValueError(), "execution_failed", "Tool execution failed: ValueError"),
        (SystemExit(3), "execution_failed", "called sys.exit(3)"),
        (StopIteration(), "execution_failed", "StopIteration"),
        (asyncio.CancelledError(), "execution_failed", "work was cancelled"),
        (RuntimeError("x" * 10**7), "execution_failed", "characters left out"),
        (SandboxError("gone"), "unavailable", "Tool is unavailable: gone"),
        (ConnectionRefusedError("refused"), "unavailable", "Tool is unavailable: refused"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_of_the_tool_is_a_result(index, error, kind, said):
    result = call(FunctionTool(raising(error)[index]))
    assert result.error_type == kind
    assert said in text(result)
    assert len(text(result)) < 20_000


def test_a_long_text_keeps_its_ends_and_no_surrogate_reaches_the_tokenizer():
    result = call(FunctionTool(lambda: "head" + "x" * 10_000_000 + "\ud800tail", name="big"))
    assert len(text(result)) < 16_500
    assert text(result).startswith("head")
    assert text(result).endswith("?tail")
    assert "[... 9983625 characters left out ...]" in text(result)
    assert call(FunctionTool(lambda: {"a": None}, name="json")).messages[0]["content"] == (
        '{"a": null}'
    )


def test_tools_that_hang_end_at_their_timeout_and_do_not_block_the_loop():
    release = threading.Event()

    @tool(timeout_seconds=0.1)
    def stuck():
        release.wait(3600)

    @tool(timeout_seconds=0.1)
    async def waits():
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(3600)
        finally:
            running -= 1

    async def main():
        calls = [stuck] * 20 + [waits] * 80
        return await asyncio.gather(*(one.run(ToolInput({})) for one in calls))

    running = most = 0
    results = asyncio.run(main())
    release.set()
    assert {result.error_type for result in results} == {"timed_out"}
    assert most > 40  # 1 where they run one after another


def test_calls_that_still_run_after_their_timeout_are_limited():
    release = threading.Event()

    @tool(timeout_seconds=0.01)
    def stuck():
        release.wait(3600)

    async def main():
        first = await asyncio.gather(*(stuck.run(ToolInput({})) for _ in range(32)))
        return first, await stuck.run(ToolInput({}))

    first, refused = asyncio.run(main())
    assert {result.error_type for result in first} == {"timed_out"}
    assert refused.error_type == "unavailable"
    assert "32 earlier calls of tool 'stuck' still run" in refused.messages[0]["content"]
    release.set()
    deadline = time.monotonic() + 120
    while refused.error_type == "unavailable" and time.monotonic() < deadline:
        time.sleep(0.01)
        refused = asyncio.run(stuck.run(ToolInput({})))
    # A busy machine may exceed the short limit again.
    assert refused.error_type in (None, "timed_out")


def most_at_once(make, settings, expected):
    """The largest number of 8 calls that ran at the same time; they wait for that many."""
    running = most = 0
    lock, met = threading.Lock(), threading.Event()

    def hold():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if most >= expected:
            met.set()
        met.wait(60)
        time.sleep(0.005)  # so that a call above the limit is seen
        with lock:
            running -= 1

    one = make(hold, tool(**settings))

    async def main():
        await asyncio.gather(*(one.run(ToolInput({})) for _ in range(8)))

    asyncio.run(main())
    return most


def function(hold, decorate):
    @decorate
    def work():
        hold()

    return work


def method(hold, decorate):
    class Tools:
        @decorate
        def work(self):
            hold()

    keeper = Tools()
    one = keeper.work
    one.keeper = keeper
    return one


class Shop:
    def __init__(self, stock):
        self.stock = stock

    @tool
    def buy(self, item: str) -> str:
        """Buys one piece."""
        self.stock[item] -= 1
        return f"{self.stock[item]} left"


def test_methods_share_the_state_of_their_object_and_tools_pickle():
    shop, other = Shop({"tea": 3}), Shop({"tea": 9})
    assert text(call(shop.buy, {"item": "tea"})) == "2 left"
    assert shop.stock == {"tea": 2}
    assert other.stock == {"tea": 9}
    assert "item" in shop.buy.parameters_schema["properties"]
    again = pickle.loads(pickle.dumps([shop.buy, search]))
    assert text(call(again[0], {"item": "tea"})) == "1 left"
    assert shop.stock == {"tea": 2}
    assert again[1] is search


def test_invalid_tools_are_refused_at_definition():
    def many(*queries):
        pass

    def odd(callback: threading.Thread):
        pass

    with pytest.raises(ConfigurationError, match="parameter 'queries' is variadic"):
        tool(many)
    with pytest.raises(ConfigurationError, match="no JSON schema"):
        tool(odd)
    with pytest.raises(ConfigurationError, match="did you mean 'timeout_seconds'"):
        tool(timeout_second=3)
    with pytest.raises(ConfigurationError, match="max_concurrency: got 0"):
        tool(max_concurrency=0)
