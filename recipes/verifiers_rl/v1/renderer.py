"""Our chat formats as a renderer of the ``renderers`` library, which verifiers 0.4 renders with.

It is a custom renderer in that library's sense: ``{"name": "custom", "import_path": IMPORT_PATH,
"model_name": …, "renderer_name": …}``. So any format of this package works, also for models that
the other library does not know.
"""

# The library is optional; without it, ``renderers`` is this project's package to the type checker.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

from renderers import CustomRendererConfig
from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens
from renderers.configs import BaseRendererConfig

from tinker_cookbook.recipes.start import renderer_of
from tinker_cookbook.recipes.verifiers_rl.messages import openai_fields, prompt_of
from tinker_cookbook.tokenizer_utils import get_tokenizer

IMPORT_PATH = "tinker_cookbook.recipes.verifiers_rl.v1.renderer.CookbookRenderer"


class CookbookRendererConfig(BaseRendererConfig):
    """Model and chat format; ``renderer_name`` None is the model's own."""

    name: Literal["cookbook"] = "cookbook"
    model_name: str
    renderer_name: str | None = None

    _internal_fields: ClassVar[frozenset[str]] = frozenset({"model_name", "renderer_name"})


class CookbookRenderer:
    """A renderer of this package with the methods that the other library calls."""

    config_class = CookbookRendererConfig
    supports_tools = True
    is_prefix_stable = False

    def __init__(self, tokenizer: object, config: CookbookRendererConfig) -> None:
        """``tokenizer`` is not used: the one that this package loads has the same vocabulary."""
        self.config = config
        self._renderer = renderer_of(config.model_name, config.renderer_name)
        eos = getattr(get_tokenizer(config.model_name), "eos_token_id", None)
        stops = self._renderer.get_stop_sequences()
        ids = [stop for stop in stops if isinstance(stop, int)]
        # Requests need one token at least, also of a format that stops at texts.
        self._stop_ids = ids or ([] if eos is None else [int(eos)])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """Returns the tokens of a conversation with its generation prompt."""
        tokens = self.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        # verifiers stores of each message the tokens that it adds. All new ones count as the last
        # message's: the next turn then continues the same path if its prompt begins with them.
        indices = [-1] * len(tokens)
        indices[-1] = len(messages) - 1
        return RenderedTokens(
            token_ids=tokens,
            message_indices=indices,
            message_roles=[str(message.get("role") or "") for message in messages],
        )

    def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Returns only the tokens."""
        if not add_generation_prompt:
            raise NotImplementedError("only prompts for the next message are rendered here")
        return prompt_of(self._renderer, messages, tools).to_ints()

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        """Returns text, thinking and tool calls of a response."""
        fields = openai_fields(self._renderer.parse_response(list(token_ids))[0])
        calls = [
            ParsedToolCall(
                raw=call["function"]["arguments"],
                name=call["function"]["name"],
                arguments=call["function"]["arguments"],
                id=call["id"],
            )
            for call in fields.get("tool_calls", [])
        ]
        return ParsedResponse(fields["content"], fields.get("reasoning_content"), calls)

    def get_stop_token_ids(self) -> list[int]:
        """Returns the tokens that end a response."""
        return self._stop_ids

    def bridge_to_next_turn(self, *arguments: Any, **others: Any) -> None:
        """Returns None: each turn is rendered whole."""
        return


def custom_renderer(model_name: str, renderer_name: str | None) -> CustomRendererConfig:
    """Returns the ``renderer`` of a ``TrainClientConfig`` that renders as this package does."""
    fields: dict[str, Any] = {"model_name": model_name, "renderer_name": renderer_name}
    return CustomRendererConfig(import_path=IMPORT_PATH, **fields)


@lru_cache(maxsize=8)
def tokenizer_folder(model_name: str) -> str:
    """Returns a folder with the tokenizer of a model, for ``renderer_model_name``.

    verifiers loads a tokenizer by name itself, which fails for names that only this package
    resolves. The folder is deleted when the process ends.
    """
    folder = tempfile.TemporaryDirectory(prefix="tinker-verifiers-tokenizer-")
    _folders.append(folder)
    get_tokenizer(model_name).save_pretrained(folder.name)
    return folder.name


_folders: list[tempfile.TemporaryDirectory[str]] = []
