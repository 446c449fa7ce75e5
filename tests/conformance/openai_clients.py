"""Run in an environment that has Inspect: ``python openai_clients.py URL KEY MODEL``.

The model has random weights, so an answer is valid only if the server constrains it. Prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


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
    print("FOUND " + json.dumps(inspect(*sys.argv[1:])))
