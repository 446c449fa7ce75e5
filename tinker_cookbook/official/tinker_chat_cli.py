"""Chat in the terminal with the options of the official cookbook's command.

    python -m tinker_cookbook.chat_app.tinker_chat_cli base_model=Qwen/Qwen3-0.6B
    python -m tinker_cookbook.chat_app.tinker_chat_cli model_path=LOG_PATH

It runs ``python -m tinker_cookbook.chat``, which has more options.
"""

from __future__ import annotations

import chz

from tinker_cookbook.chat import __main__ as chat
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.renderers.core.messages import get_text_content
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.training.config import at_least, number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import tinker

_DEFAULT_MODEL = "Qwen/Qwen3.5-9B-Base"


@chz.chz
class Config:
    """Settings of the chat."""

    base_model: str = chz.field(
        default=_DEFAULT_MODEL, doc="Base model; with model_path, the checkpoint's is used"
    )
    model_path: str | None = weights_field("sampler_weights", "Checkpoint")
    max_tokens: int = number(512, "Maximum tokens of an answer", low=1)
    temperature: float = number(0.7, "Sampling temperature; 0 is greedy")
    top_p: float = chz.field(
        default=0.9,
        validator=at_least(0, 1 + 1e-9),
        doc="Nucleus sampling: total probability of the candidate tokens; 1 is off",
    )
    base_url: str | None = chz.field(default=None, doc="URL of a Tinker server")


class ChatSession:
    """Conversation with a sampling client, for programs."""

    def __init__(
        self,
        sampling_client: tinker.SamplingClient,
        renderer: Renderer,
        max_tokens: int = 512,
        temperature: float = 0.7,
        top_p: float = 0.9,
    ) -> None:
        self.sampling_client, self.renderer = sampling_client, renderer
        self.messages: list[Message] = []
        self._policy = TinkerTokenCompleter(
            sampling_client, max_tokens, temperature=temperature, top_p=top_p
        )

    def add_user_message(self, content: str) -> None:
        """Adds a user message."""
        self.messages.append(Message(role="user", content=content))

    def add_assistant_message(self, content: str) -> None:
        """Adds an assistant message, for example one written by the program."""
        self.messages.append(Message(role="assistant", content=content))

    def clear_history(self) -> None:
        """Starts a new conversation."""
        self.messages.clear()

    async def generate_response(self) -> str:
        """Samples the answer to the messages so far, adds it, and returns its text."""
        prompt = self.renderer.build_generation_prompt(self.messages)
        sampled = await self._policy(prompt, self.renderer.get_stop_sequences())
        message, _ = self.renderer.parse_response(sampled.tokens)
        self.messages.append(message)
        return get_text_content(message)


def main(config: Config) -> None:
    """Chats until ``/quit``, Ctrl-D, or the end of the input."""
    # A checkpoint records its base model; the default is for a chat without a checkpoint.
    named = config.model_path is None or config.base_model != _DEFAULT_MODEL
    chat.main(
        chat.Config(
            model_name=config.base_model if named else None,
            model_path=config.model_path,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            base_url=config.base_url,
        )
    )


if __name__ == "__main__":
    run_entrypoint(main)
