"""Answers of a run's model to held-out prompts, before and after training."""

from __future__ import annotations

from collections.abc import Sequence

from rich.panel import Panel
from rich.text import Text

from tinker_cookbook.renderers import Message, format_content_as_string
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDatasetBuilder
from tinker_cookbook.training.session import TrainingSession
from tinker_cookbook.utils.activity import activity
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.terminal import get_console


async def show_answers(
    session: TrainingSession,
    builder: SupervisedDatasetBuilder | None,
    max_tokens: int,
    prompts: Sequence[list[Message]],
    when: str,
) -> None:
    """Prints the last message of each prompt and the greedy answer of the current weights."""
    if not prompts or not isinstance(builder, ChatDatasetBuilder):
        return
    renderer = builder.renderer
    client = await session.sampling_client()
    # Greedy, so that answers differ only through training.
    params = tinker.SamplingParams(
        max_tokens=max_tokens, temperature=0.0, stop=renderer.get_stop_sequences()
    )
    futures = [
        # All are submitted before the first is awaited, so that the backend batches them.
        client.sample(renderer.build_generation_prompt(prompt), 1, params)
        for prompt in prompts
    ]
    for prompt, future in zip(prompts, futures, strict=True):
        with activity().phase("answering held-out prompts"):
            sampled = (await future).sequences[0]
        answer, _ = renderer.parse_response(sampled.tokens)
        text = str(answer["content"]).strip() or "(nothing)"
        if sampled.stop_reason == "length":
            text += f" … (cut off at {max_tokens} tokens)"
        asked = format_content_as_string(prompt[-1]["content"])
        body = Text.assemble((f"{asked}\n", "bold"), text)
        get_console().print(Panel(body, title=f"held-out prompt, {when}", title_align="left"))
