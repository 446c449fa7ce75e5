"""Command that shows the tokens, weights, prompt and parsed answers of a conversation.

    python -m tinker_cookbook.renderers.show model_name=… [renderer_name=…] [file.jsonl] [index=3]

Without a file it shows a built-in conversation. ``html=page.html`` writes the same as a page.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.demo.model import DEMO_MODEL
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError, RendererError
from tinker_cookbook.model_info import resolve_renderer_name
from tinker_cookbook.renderers import check_renderer_name, get_renderer
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.messages import (
    Message,
    ToolSpec,
    normalize_messages,
    system_message,
)
from tinker_cookbook.renderers.core.rendered import TrainOnWhat
from tinker_cookbook.renderers.show.output import page, print_view
from tinker_cookbook.renderers.show.view import Conversation, Fact, View, Viewer
from tinker_cookbook.run.paths import local_path, write_atomically
from tinker_cookbook.supervised.conversation_file import read_conversation, with_tools
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.terminal import get_console


@chz.chz
class ShowConfig:
    """Settings of the command."""

    model_name: str = chz.field(default=DEMO_MODEL, doc="Hub name or local folder of the model")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    file: str | None = chz.field(
        default=None, doc="JSONL file of conversations, also without 'file='; default: an example"
    )
    index: int = number(0, "Number of the conversation in the file, from 0")
    train_on_what: TrainOnWhat = chz.field(
        default=TrainOnWhat.ALL_ASSISTANT_MESSAGES, doc="Which messages are trained on"
    )
    template_options: str = chz.field(
        default="", doc="Arguments of the model's chat template to compare with, a JSON object"
    )
    max_tokens: int = number(600, "Tokens of an example shown in the terminal", low=2)
    html: str | None = chz.field(default=None, doc="HTML page to write as well")


def main(config: ShowConfig) -> None:
    """Prints one conversation, and writes an HTML page if ``html`` is set."""
    # Settings and file are checked before the tokenizer is loaded or downloaded.
    options = _check(config)
    row = None if config.file is None else _read_row(config.file, config.index)
    renderer_name, why = resolve_renderer_name(config.model_name, config.renderer_name)
    check_renderer_name(renderer_name)
    tokenizer = get_tokenizer(config.model_name)
    renderer = get_renderer(renderer_name, tokenizer, model_name=config.model_name)
    if row is None:
        conversation = sample_conversation(renderer, config.train_on_what)
    else:
        try:
            # Only the renderer knows how its format declares tools.
            declared = with_tools(row.messages, row.tools, renderer)
        except RendererError as error:
            raise DataFormatError(f"{row.source}: tools: {error}") from error
        conversation = dataclasses.replace(row, messages=declared)
    view = show(renderer, conversation, config.train_on_what, options, why)
    print_view(view, get_console(), config.max_tokens)
    if config.html is not None:
        target = local_path(config.html, "html")
        title = f"{renderer_name} on {Path(config.model_name).name}"
        try:
            write_atomically(target, page(view, title).encode("utf-8"))
        except OSError as error:
            raise ConfigurationError(
                f"html: {target} cannot be written: {error.strerror or error}; give another path"
            ) from error
        print(target)


def show(
    renderer: Renderer,
    conversation: Conversation,
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    template_options: dict[str, Any] | None = None,
    why: str = "asked for",
) -> View:
    """Returns the view of a conversation; ``why`` states how the renderer was chosen.

    Raises RendererError for messages that the chat format cannot express.
    """
    view = Viewer(renderer, conversation, train_on_what, template_options or {}).view()
    facts = [
        Fact("model", renderer.model_name or getattr(renderer.tokenizer, "name_or_path", "")),
        Fact("renderer", f"{renderer.spec}, {why}"),
        Fact("messages", f"{len(conversation.messages)}, {conversation.source}"),
        Fact("trained", f"train_on_what={train_on_what.value}"),
    ]
    return View([*facts, *view.facts], view.examples)


def with_file_key(arguments: Sequence[str]) -> list[str]:
    """Returns command line arguments with ``file=`` before the first one that has no key."""
    named = list(arguments)
    for i, argument in enumerate(named):
        if "=" not in argument and not argument.startswith("-"):
            named[i] = f"file={argument}"
            break
    return named


def _check(config: ShowConfig) -> dict[str, Any]:
    """Raises ConfigurationError for a setting that cannot work; returns the template's options."""
    if config.index and config.file is None:
        raise ConfigurationError(
            f"index: got {config.index} without a file; expected it only together with a JSONL "
            "file, since there is one built-in conversation"
        )
    if config.html is not None and not local_path(config.html, "html").parent.is_dir():
        raise ConfigurationError(
            f"html: got {config.html!r}, whose folder does not exist; make it, or give another path"
        )
    try:
        options = json.loads(config.template_options or "{}")
    except ValueError as error:
        # Reported below as JSON that is not an object.
        options = error
    if not isinstance(options, dict):
        raise ConfigurationError(
            f"template_options: got {config.template_options!r}, expected a JSON object such as "
            "'{\"enable_thinking\": false}'"
        )
    return options


def _read_row(file: str, index: int) -> Conversation:
    messages, tools, where = read_conversation(file, index)
    return Conversation(messages, where, messages, tuple(tools))


_TOOL = ToolSpec(
    name="get_weather",
    description="The weather of a city, today.",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
)
# The built-in conversation has every part that the chat format accepts.
_PARTS = ("thinking", "tools", "a system message")


def sample_conversation(renderer: Renderer, train_on_what: TrainOnWhat) -> Conversation:
    """Returns a conversation with thinking, tools and a system message, or with fewer of them.

    A part is left out where the renderer refuses it, and ``source`` gives the reason. Raises
    RendererError where it refuses a plain question and answer too.
    """
    # Try all parts first, then leave out as few as possible.
    tries = (left for n in range(len(_PARTS)) for left in itertools.combinations(_PARTS, n))
    for left_out in tries:
        parts = {part for part in _PARTS if part not in left_out}
        if _refusal(renderer, parts) is None:
            break
    else:
        left_out, parts = _PARTS, set[str]()
    messages, for_template, tools = _sample(renderer, parts)
    source = "the built-in example"
    for part in left_out:
        # Add the part again, to get the reason why the renderer refuses it.
        reason = _refusal(renderer, parts | {part})
        reason = (
            reason
            or "the renderer accepts it, but not together with the other parts that were left out"
        )
        source += f"\nwithout {part}: {reason}"
    # Without a flag train_on_what=customized selects nothing.
    if train_on_what is TrainOnWhat.CUSTOMIZED:
        messages[-1]["trainable"] = True
    return Conversation(messages, source, for_template, tools)


def _refusal(renderer: Renderer, parts: set[str]) -> str | None:
    """Returns why the renderer refuses the sample with ``parts``, None where it accepts it."""
    try:
        _sample(renderer, parts)
    except RendererError as error:
        return str(error)
    return None


def _sample(
    renderer: Renderer, parts: set[str]
) -> tuple[list[Message], list[Message], tuple[ToolSpec, ...]]:
    """Returns a conversation with ``parts``, with and without the declaration of its tools.

    Raises RendererError if it cannot be rendered.
    """
    tools = (_TOOL,) if "tools" in parts else ()
    system = "You are brief." if "a system message" in parts else ""
    begin = system_message(system)
    declared = renderer.create_conversation_prefix_with_tools(tools, system) if tools else begin

    def answer(text: str, thought: str, **more: Any) -> dict[str, Any]:
        content: Any = text
        if "thinking" in parts:
            content = [{"type": "thinking", "thinking": thought}]
            content += [{"type": "text", "text": text}] if text else []
        return {"role": "assistant", "content": content, **more}

    call = {"function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}
    looked_up = [
        answer("", "I have to look it up.", tool_calls=[call]),
        {"role": "tool", "content": "4 °C, snow 🌨️"},
    ]
    dialogue = normalize_messages(
        [
            {"role": "user", "content": "Do I need a coat in Zürich?"},
            *(looked_up if tools else []),
            answer("Yes: it is 4 °C there.", "Snow means cold."),
            {"role": "user", "content": "And gloves?\nOr a hat?"},
            answer("Both.", "At 4 °C both help."),
        ]
    )
    messages = [*declared, *dialogue]
    for end in range(1, len(messages) + 1):
        # Some formats reject in the last answer what they drop from history.
        renderer.build_merged_examples(messages[:end], TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    return messages, [*begin, *dialogue], tools
