"""Command line of the chat.

    python -m tinker_cookbook.chat model_path=LOG_PATH
    python -m tinker_cookbook.chat model_path=LOG_PATH@120,base temperature=0
    echo 'Why is the sky blue?' | python -m tinker_cookbook.chat model_name=Qwen/Qwen3-0.6B

Several models answer side by side. ``/help`` in the chat lists the commands. From a pipe, each line
is a message of one conversation.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import chz
from rich.console import Console
from rich.text import Text

from tinker_cookbook.backends.connect import Connection
from tinker_cookbook.backends.sampler_options import SamplerOptions
from tinker_cookbook.chat.answers import ChatModel, SamplingChoices, chat_models
from tinker_cookbook.chat.loop import ChatLoop, is_interactive
from tinker_cookbook.chat.session import ChatSession
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.weights_paths import FORMS
from tinker_cookbook.sampling_model import (
    SamplingModel,
    SamplingModelSettings,
    open_sampling_model,
)
from tinker_cookbook.training.config import BackendSettings, at_least, number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console

_BASE = "base"


@chz.chz
class Config(BackendSettings, SamplerOptions):
    """Settings of the chat."""

    model_path: str | None = chz.field(
        default=None,
        doc=f"Checkpoint: {FORMS}; several, comma-separated, answer side by side; "
        f"'{_BASE}' is the base model of the first one",
    )
    model_name: str | None = chz.field(
        default=None, doc="Base model, Hub name or local folder; default: from model_path"
    )
    renderer_name: str | None = chz.field(
        default=None, doc="Chat format; default: the run's, else the model's"
    )
    system_prompt: str = chz.field(default="", doc="System message of the conversation")
    max_tokens: int = number(512, "Maximum tokens of an answer", low=1)
    temperature: float = number(0.7, "Sampling temperature; 0 is greedy")
    top_p: float = chz.field(
        default=0.9,
        validator=at_least(0, 1 + 1e-9),
        doc="Nucleus sampling: total probability of the candidate tokens; 1 is off",
    )
    seed: int | None = chz.field(default=None, doc="Seed of the answers; default: random")
    # Another default than elsewhere: starting vLLM would delay the first answer by minutes.
    sampler: str = chz.field(
        default="builtin",
        doc="auto, builtin, vllm, or the URL of a vLLM server (local engine); vllm needs "
        "minutes to start",
    )

    def models(self) -> list[SamplingModelSettings]:
        """Returns the settings of each model; ``base`` without model_name has no path and no name
        yet."""
        paths: list[str | None] = [part.strip() for part in (self.model_path or "").split(",")]
        names: list[str | None] = [self.model_name]
        if self.model_path is None:
            # Without checkpoints, model_name may list several base models.
            names = [part.strip() for part in (self.model_name or "").split(",")]
            pairs = [(None, name) for name in names if name]
        else:
            pairs = [(None if path == _BASE else path, self.model_name) for path in paths if path]
        return [
            SamplingModelSettings.of(
                self, model_path=path, model_name=name, renderer_name=self.renderer_name
            )
            for path, name in pairs
        ]

    def check(self) -> None:
        """Raises ConfigurationError for an invalid setting; opens no connection."""
        models = self.models()
        if not models:
            raise ConfigurationError(
                f"model_path: got none, expected a checkpoint ({FORMS}), or model_name= for a base "
                "model"
            )
        for one in models:
            if one.model_path is not None or one.model_name is not None:
                one.check()
        # ``base`` is the base model of a checkpoint, whose name is known after connecting.
        if all(one.model_path is None and one.model_name is None for one in models):
            raise ConfigurationError(
                f"model_path: got {self.model_path}, expected a checkpoint too, or model_name="
            )


async def _open(
    connection: Connection, config: Config, inform: Callable[[str], None]
) -> ChatSession:
    settings = config.models()
    opened: dict[int, SamplingModel] = {}
    # Open checkpoints first: they name the base model.
    order = sorted(range(len(settings)), key=lambda i: settings[i].model_path is None)
    for i in order:
        one = settings[i]
        if one.model_path is None and one.model_name is None:
            one = chz.replace(one, model_name=opened[order[0]].model_name)
        opened[i] = await open_sampling_model(connection, one)
    models = await chat_models(connection, [opened[i] for i in range(len(settings))])
    for model in models:
        inform(_describe(model))
    choices = SamplingChoices(config.max_tokens, config.temperature, config.top_p, config.seed)
    return ChatSession(models, choices, inform, config.system_prompt)


def _describe(model: ChatModel) -> str:
    opened = model.model
    base = f" (on {opened.model_name})" if opened.model_path else ""
    context = f"{model.context_length:,} tokens" if model.context_length else "unknown"
    return (
        f"{model.label}: {opened.name}{base}\n"
        f"    chat format {opened.renderer_name}, {opened.renderer_reason}; context {context}"
    )


def main(config: Config) -> None:
    """Chats until ``/quit``, Ctrl-D, or the end of the input."""
    config.check()
    interactive = is_interactive()
    console = get_console() if interactive else Console(force_terminal=False, no_color=True)

    def inform(text: str) -> None:
        # If a program reads standard output, it gets only the answers.
        if interactive:
            console.print(Text(text, style="dim"))
        else:
            print(text, file=sys.stderr, flush=True)

    with config.models()[0].connect() as connection, asyncio.Runner() as runner:
        inform(connection.describe())
        session = runner.run(_open(connection, config, inform))
        loop = ChatLoop(session, runner, console, inform)
        if interactive:
            inform("/help lists the commands")
            loop.run_terminal()
        else:
            loop.run_pipe(sys.stdin)


if __name__ == "__main__":
    run_entrypoint(main)
