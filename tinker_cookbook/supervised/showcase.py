"""The model's answers to a few held-out prompts, shown before and after training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDatasetBuilder
from tinker_cookbook.utils.console import get_console
from tinker_cookbook.utils.lazy_imports import lazy_module

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.backends import SamplingClient
    from tinker_cookbook.renderers import Message, Renderer
else:
    tinker = lazy_module("tinker")


@dataclass
class Showcase:
    """Prompts, and how to put them to the model. Answers are greedy, so that a difference between
    two showings is the training's."""

    prompts: list[list[Message]] = field(default_factory=list)
    renderer: Renderer | None = None
    max_tokens: int = 96

    @classmethod
    def of(cls, builder: SupervisedDatasetBuilder, count: int, max_tokens: int) -> Showcase:
        """``count`` prompts of the builder's held-out part; none where it has none."""
        if count == 0 or not isinstance(builder, ChatDatasetBuilder):
            return cls()
        prompts = builder.held_out_prompts(count)
        return cls(prompts, builder.renderer if prompts else None, max_tokens)

    async def answers(self, client: SamplingClient) -> list[str]:
        """The model's answer to each prompt."""
        if self.renderer is None:
            return []
        params = tinker.SamplingParams(
            max_tokens=self.max_tokens, temperature=0.0, stop=self.renderer.get_stop_sequences()
        )
        futures = [
            client.sample(self.renderer.build_generation_prompt(prompt), 1, params)
            for prompt in self.prompts
        ]
        out = []
        for future in futures:
            response = await future
            message, _ = self.renderer.parse_response(response.sequences[0].tokens)
            content = message["content"]
            out.append(content if isinstance(content, str) else str(content))
        return out

    async def show(self, client: SamplingClient, when: str) -> None:
        """Prints each prompt's last message and the model's answer to it."""
        from rich.panel import Panel
        from rich.text import Text

        for prompt, answer in zip(self.prompts, await self.answers(client), strict=True):
            question = prompt[-1]["content"]
            body = Text.assemble((f"{question}\n", "bold"), answer.strip() or "(nothing)")
            get_console().print(Panel(body, title=f"held-out prompt, {when}", title_align="left"))
