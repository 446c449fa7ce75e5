"""Run in an environment that has a client: ``python openai_clients.py CLIENT URL KEY MODEL``.

The model has random weights, so an answer is valid only if the server constrains it. Prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    size: int = Field(ge=0, le=999)
    kind: Literal["town", "père"]
    large: bool


def langchain(url: str, key: str, model: str) -> list[Any]:
    """Structured output in its three modes; JSON mode has no schema."""
    from langchain_openai import ChatOpenAI
    from openai import LengthFinishReasonError

    found = []
    for seed in range(3):
        common = {"base_url": url, "api_key": key, "max_retries": 0, "max_tokens": 250}
        chat = ChatOpenAI(model=model, temperature=1, seed=seed, **common)
        for method in ("json_mode", "json_schema", "function_calling"):
            for more in ({}, {"strict": True}) if method != "json_mode" else ({},):
                asked = chat.with_structured_output(City, method=method, include_raw=True, **more)
                try:
                    answer = asked.invoke("Describe a city.")
                except LengthFinishReasonError:
                    if method != "json_mode":  # strings of random weights have no end
                        raise
                    continue
                parsed = answer["parsed"] and answer["parsed"].model_dump()
                found.append([method, parsed, answer["raw"].content])
    return found


def inspect(url: str, key: str, model: str) -> list[Any]:
    """Tools with Inspect's defaults, which mark every tool as strict; chat and responses."""
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.tool import tool

    @tool
    def double():
        async def execute(number: int, loud: bool) -> str:
            """Doubles a number.

            Args:
                number: The number.
                loud: Whether it is loud.
            """
            return str(2 * number)

        return execute

    async def ask() -> list[Any]:
        found = []
        for name, more in (
            (f"openai-api/local/{model}", {}),
            (f"openai/{model}", {"responses_api": True}),
        ):
            served = get_model(name, base_url=url, api_key=key, **more)
            for choice in ("auto", "any"):
                config = GenerateConfig(max_tokens=250, seed=1)
                output = await served.generate(
                    "Double 4.", tools=[double()], tool_choice=choice, config=config
                )
                calls = output.message.tool_calls or []
                found.append([name.split("/")[0], choice, [call.arguments for call in calls]])
        return found

    return asyncio.run(ask())


if __name__ == "__main__":
    client = {"langchain": langchain, "inspect": inspect}[sys.argv[1]]
    print("FOUND " + json.dumps(client(*sys.argv[2:])))
