"""TMLv0, the format of Inkling, with a thinking effort, as the package tml-renderers writes it."""

from __future__ import annotations

import math
from importlib import import_module
from typing import TYPE_CHECKING

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers.core.messages import Role
from tinker_cookbook.renderers.core.rendered import TrainOnWhat
from tinker_cookbook.renderers.core.renderer import Example, Messages
from tinker_cookbook.renderers.tml_renderers_adapter import (
    TmlRenderersRenderer,
    TmlRenderInput,
    _cookbook_messages_to_sft_input,
    _messages_to_render_input,
    _model_input,
    _native_messages,
)
from tinker_cookbook.tokenizer_utils import TmlTokenizer
from tinker_cookbook.utils.imports import tinker

if TYPE_CHECKING:
    from tml_renderers import v0

DEFAULT_EFFORT: float = 0.9
"""Thinking effort of prompts and examples, from 0 up to, but not including, 1."""


class TmlV0Renderer(TmlRenderersRenderer):
    """Inkling: text, thinking, tool calls, images and audio.

    The effort is a system message behind those of the conversation. Datasets train at
    ``DEFAULT_EFFORT``; for another one call the methods with ``effort``.
    """

    renderer_name = "tml_v0"
    _tml_renderer: v0.Renderer

    def _build_tml_renderer(self, tml_tokenizer: TmlTokenizer) -> v0.Renderer:
        return import_module("tml_renderers.v0").Renderer(tml_tokenizer)

    def _parse_error_types(self) -> tuple[type[Exception], ...]:
        return (import_module("tml_renderers.v0").ParseError,)

    @property
    def has_extension_property(self) -> bool:
        """True: no message is written differently once others follow."""
        return True

    def build_generation_prompt(
        self,
        messages: Messages | TmlRenderInput,
        role: Role = "assistant",
        prefill: str | None = None,
        effort: float = DEFAULT_EFFORT,
    ) -> tinker.ModelInput:
        """Returns the prompt for the next answer, with the thinking effort in [0, 1)."""
        self._check_prompt(role, prefill)
        _check_effort(effort)
        source = _messages_to_render_input(messages)
        return _model_input(self._tml_renderer.render_for_completion_with_effort(source, effort)[0])

    def build_supervised_examples(
        self,
        messages: Messages | TmlRenderInput,
        train_on_what: TrainOnWhat | str = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
        effort: float = DEFAULT_EFFORT,
    ) -> list[Example]:
        """Returns the examples, which begin with the tokens of a prompt of the same effort."""
        _check_effort(effort)
        source = _cookbook_messages_to_sft_input(messages, train_on_what, self.renderer_name)
        native = _native_messages(source)
        chat = import_module("tml_renderers.chat")
        system = chat.AuthorKind.System
        # As in prompts: behind the first system messages. The unit is a thousandth.
        thinks = chat.ThinkingEffort(round(effort * 1000))
        others = (i for i, message in enumerate(native) if message.author.kind != system)
        native.insert(next(others, len(native)), chat.Message(thinks, chat.Author(system)))
        return self._examples(native)

    def build_supervised_example(
        self,
        messages: Messages | TmlRenderInput,
        train_on_what: TrainOnWhat | str = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
        effort: float = DEFAULT_EFFORT,
    ) -> Example:
        """Returns the example; see :meth:`build_supervised_examples`."""
        return self._single_example(self.build_supervised_examples(messages, train_on_what, effort))


def _check_effort(effort: float) -> None:
    if not math.isfinite(effort) or not 0.0 <= effort < 1.0:
        raise ConfigurationError(
            f"effort: got {effort}; the thinking effort must be a number in [0, 1)"
        )
