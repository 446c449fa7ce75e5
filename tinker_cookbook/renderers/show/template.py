"""Compares the tokens of a renderer with those of the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.messages import Message, ToolSpec
from tinker_cookbook.renderers.core.rendered import first_difference
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool, with_parsed_arguments

# Templates ignore unknown arguments. Without the first, Llama 3.1 declares tools in the question,
# unlike any renderer; the others disable thinking in several families.
_OPTIONS = {"tools_in_user_message": False}
_NO_THINKING = {"enable_thinking": False, "thinking": False}


@dataclass(frozen=True)
class Conversation:
    """Messages to show, and the same conversation for the model's chat template."""

    messages: list[Message]
    source: str
    """Source of the conversation, as text for the output."""
    for_template: list[Message] | None = None
    """Messages without the declaration of tools, which the template writes itself."""
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison, with the tokens of both sides where they differ."""

    text: str
    equal: bool | None
    """None without a template to compare with."""
    ours: list[Any] | None = None
    theirs: list[Any] | None = None

    @property
    def agreement(self) -> int:
        """Length of the common prefix; -1 where the template raised an error."""
        if self.ours is None or self.theirs is None:
            return -1
        at = first_difference(self.ours, self.theirs)
        return len(self.ours) if at is None else at


@dataclass(frozen=True)
class TemplateSide:
    """Chat template of a renderer's tokenizer."""

    renderer: Renderer
    tools: Sequence[ToolSpec]
    """Tools that the template declares."""
    options: Mapping[str, Any]
    """Further arguments of the template."""

    def compare(
        self,
        messages: Sequence[Message],
        conversation: list[Any],
        prompt_messages: Sequence[Message],
        prompt: list[Any],
    ) -> Comparison:
        """Compares the renderer's tokens of a conversation and of a prompt with the template's."""
        if not getattr(self.renderer.tokenizer, "chat_template", None):
            return Comparison("none: the tokenizer has no chat template to compare with", None)
        pairs = (
            ("conversation", messages, conversation),
            ("prompt for the last answer", prompt_messages, prompt),
        )
        tried = [self._compare(pairs, parsed) for parsed in (False, True)]
        equal = next((found for found in tried if found.equal), None)
        # Of call arguments as text and as objects, the closer form is the one of the template.
        return equal or max(tried, key=lambda found: found.agreement)

    def _compare(
        self, pairs: Sequence[tuple[str, Sequence[Message], list[Any]]], parsed: bool
    ) -> Comparison:
        given = {**(_NO_THINKING if self.renderer.disables_thinking else {}), **self.options}
        words = [f"with {json.dumps(given)}"] if given else []
        for name, messages, ours in pairs:
            written = [self.renderer.to_openai_message(message) for message in messages]
            if parsed and any(message.get("tool_calls") for message in written):
                written = [with_parsed_arguments(message) for message in written]
                words += ["arguments of calls given as objects"] * (len(words) < 2)
            try:
                theirs = self._tokens(written, {**_OPTIONS, **given}, name != "conversation")
            except Exception as error:  # a template may raise anything
                return Comparison(f"no: the template refuses the {name}: {error}", False)
            at = first_difference(ours, theirs)
            if at is not None:
                text = f"no: the {name} differs at token {at} of {len(ours):,} and {len(theirs):,}"
                if self._same_text(ours, theirs):
                    text += "; it is the same text, cut into other tokens"
                text += _brackets(words)
                return Comparison(text, False, ours, theirs)
        return Comparison(
            "yes: conversation and prompt are, token by token, those of the model's own chat "
            f"template{_brackets(words)}",
            True,
        )

    def _same_text(self, ours: list[Any], theirs: list[int]) -> bool:
        decode = self.renderer.codec.decode
        only_text = all(isinstance(item, int) for item in ours)
        return only_text and decode(ours) == decode(theirs)

    def _tokens(
        self, written: list[dict[str, Any]], options: Mapping[str, Any], prompt: bool
    ) -> list[int]:
        tokens = self.renderer.tokenizer.apply_chat_template(
            written,
            tools=[as_openai_tool(tool) for tool in self.tools] or None,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=prompt,
            **options,
        )
        return list(cast("list[int]", tokens))


def _brackets(words: Sequence[str]) -> str:
    return f" ({', '.join(words)})" if words else ""
