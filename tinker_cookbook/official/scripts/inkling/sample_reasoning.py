"""Samples Inkling on one problem at several thinking efforts, for a comparison.

    python -m tinker_cookbook.scripts.inkling.sample_reasoning efforts=0.3,0.9
    python -m tinker_cookbook.scripts.inkling.sample_reasoning prompt="Is 221 a prime?"

The problem is one of AIME 2025, from the Hub. It needs a server that has the model, and the extra
``tml`` (``pip install -e '.[tml]'``).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import chz

from tinker_cookbook.backends import SamplingClient, connect
from tinker_cookbook.eval.benchmarks.mathematics import AIMEBenchmarkBuilder
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, ParseTermination, get_text_content
from tinker_cookbook.renderers.tml_v0 import TmlV0Renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import tinker

# The names that Inkling's documentation gives to efforts.
_NAMES = {0.0: "none", 0.1: "minimal", 0.2: "low", 0.7: "medium", 0.9: "high", 0.99: "xhigh"}


@dataclass(frozen=True)
class SampleResult:
    """A response at one effort; ``answer`` is its text without the thinking."""

    effort: float
    answer: str
    num_generated_tokens: int
    max_tokens: int
    termination: ParseTermination


@chz.chz
class Config:
    """What to sample."""

    problem_number: int = chz.field(default=26, doc="Problem of AIME 2025, from 1 to 30")
    data_path: str | None = chz.field(default=None, doc="Local copy of AIME; default: the Hub")
    prompt: str | None = chz.field(default=None, doc="A question of your own instead")
    efforts: list[float] = chz.field(
        default_factory=lambda: list(_NAMES), doc="Thinking efforts, from 0 to below 1"
    )
    model_name: str = chz.field(default="thinkingmachines/Inkling", doc="Model of the family")
    base_url: str | None = chz.field(default=None, doc="URL of a server; default: the hosted API")
    max_tokens: int | None = chz.field(
        default=None, doc="Tokens of a response; default: 4096 to 16384, more for more effort"
    )
    temperature: float = chz.field(default=1.0, doc="Sampling temperature")


def _problem(number: int, data_path: str | None) -> tuple[str, str]:
    rows = AIMEBenchmarkBuilder("2025", "aime_2025").source.load(data_path)
    found: list[Any] = [row for row in rows if row["problem_idx"] == number]
    if len(found) != 1:
        raise ConfigurationError(
            f"problem_number: got {number}, expected a number from 1 to {len(rows)}"
        )
    request = "Reason step by step. Write the final answer, an integer, in \\boxed{}."
    return f"{found[0]['problem']}\n\n{request}", str(found[0]["answer"])


async def _sample(
    client: SamplingClient, renderer: TmlV0Renderer, prompt: str, effort: float, cfg: Config
) -> SampleResult:
    # Thinking is longer with more effort, and a response that is cut off has no answer.
    budget = 4096 if effort < 0.2 else 8192 if effort < 0.9 else 16384
    max_tokens = cfg.max_tokens or budget
    messages = [Message(role="user", content=prompt)]
    response = await client.sample(
        prompt=renderer.build_generation_prompt(messages, effort=effort),
        num_samples=1,
        sampling_params=tinker.SamplingParams(
            max_tokens=max_tokens,
            temperature=cfg.temperature,
            stop=renderer.get_stop_sequences(),
        ),
    )
    tokens = response.sequences[0].tokens
    message, termination = renderer.parse_response(tokens)
    return SampleResult(effort, get_text_content(message), len(tokens), max_tokens, termination)


async def async_main(cfg: Config) -> None:
    """Samples all efforts at once and prints the responses."""
    if not cfg.efforts:
        raise ConfigurationError("efforts: got none, expected at least one, such as efforts=0.9")
    prompt, expected = (
        (cfg.prompt, None) if cfg.prompt else _problem(cfg.problem_number, cfg.data_path)
    )
    renderer = TmlV0Renderer(get_tokenizer(cfg.model_name))
    with connect("tinker", base_url=cfg.base_url) as connection:
        client = await connection.service.create_sampling_client(base_model=cfg.model_name)
        results = await asyncio.gather(
            *(_sample(client, renderer, prompt, effort, cfg) for effort in cfg.efforts)
        )
    print(f"prompt: {prompt}")
    if expected is not None:
        print(f"expected: {expected}")
    for result in results:
        cut = ", cut off: give more max_tokens"
        print(
            f"\neffort {result.effort:g} ({_NAMES.get(result.effort, 'custom')}): "
            f"{result.num_generated_tokens} of {result.max_tokens} tokens, "
            f"{result.termination.value}"
            f"{cut if result.num_generated_tokens >= result.max_tokens else ''}\n{result.answer}"
        )


def cli_main(cfg: Config) -> None:
    """Runs ``async_main``."""
    asyncio.run(async_main(cfg))


if __name__ == "__main__":
    run_entrypoint(cli_main)
