"""Shows a conversation as a model sees it: tokens, weights, prompts, and what is parsed from them.

    python -m tinker_cookbook.renderers.show model_name=… [renderer_name=…] [file.jsonl] [index=3]

Without a file it shows a built-in conversation. The output is readable without colour: the bar
before a trained token is heavy.
"""

from __future__ import annotations

import itertools
import json
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import chz
from rich.console import Console
from rich.text import Text

from tinker_cookbook.demo.model import DEMO_MODEL
from tinker_cookbook.display import CONTEXT_STYLE, TRAINED_STYLE
from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.model_info import resolve_renderer_name
from tinker_cookbook.renderers import check_renderer_name, get_renderer
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.messages import (
    ToolSpec,
    normalize_messages,
    system_message,
)
from tinker_cookbook.renderers.core.rendered import (
    TrainOnWhat,
)
from tinker_cookbook.renderers.show_view import (
    Conversation,
    Fact,
    ShownToken,
    View,
    show,
)
from tinker_cookbook.supervised.conversation_file import read_conversation, with_tools
from tinker_cookbook.supervised.conversation_row import data_error
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console

BAR, TRAINED_BAR = "│", "┃"
LINE_BREAK = "⏎"
UNFINISHED = "⋯"
"""Sign of a token that holds part of a character, but not its end."""
_SIGNS = {" ": "·", "\n": LINE_BREAK, "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
_UNREADABLE = frozenset(("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"))
_LABEL_WIDTH = 12
_MARKS = {True: ("✓ ", "green"), False: ("✗ ", "bold red"), None: ("", "")}
_LEGEND = (
    (f"{BAR}context", CONTEXT_STYLE),
    (f"{TRAINED_BAR}trained", TRAINED_STYLE),
    (f"{BAR}<|control token|>", f"{CONTEXT_STYLE} bold underline"),
    (f"·space  {LINE_BREAK} line break  {UNFINISHED} part of a character", "dim"),
)


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
    max_tokens: int = number(600, "Tokens of an example that are shown", low=2)


def main(config: ShowConfig) -> None:
    """Prints one conversation."""
    # Settings and file are checked before the tokenizer is loaded or downloaded.
    try:
        options = json.loads(config.template_options or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigurationError(
            f"template_options: got {config.template_options!r}, expected a JSON object such as "
            "'{\"enable_thinking\": false}'"
        )
    row = None if config.file is None else read_conversation(config.file, config.index)
    renderer_name, why = resolve_renderer_name(config.model_name, config.renderer_name)
    check_renderer_name(renderer_name)
    tokenizer = get_tokenizer(config.model_name)
    renderer = get_renderer(renderer_name, tokenizer, model_name=config.model_name)
    if row is None:
        conversation = sample_conversation(renderer, config.train_on_what)
    else:
        messages, tools, where = row
        # Only the renderer knows how its format declares tools.
        with data_error(f"{where}: tools"):
            declared = with_tools(messages, tools, renderer)
        conversation = Conversation(declared, where, messages, tuple(tools))
    view = show(renderer, conversation, config.train_on_what, options, why)
    print_view(view, get_console(), config.max_tokens)


_TOOL = ToolSpec(
    name="get_weather",
    description="The weather of a city, today.",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
)


def sample_conversation(renderer: Renderer, train_on_what: TrainOnWhat) -> Conversation:
    """Returns a conversation with thinking, tools and a system message, or with as many of them as
    the renderer takes; raises RendererError where it refuses a plain question and answer too."""
    parts = ("thinking", "tools", "a system message")
    for left_out in (left for n in range(4) for left in itertools.combinations(parts, n)):
        without = f", without {' and '.join(left_out)}" if left_out else ""
        try:
            found = _sample(renderer, {*parts} - {*left_out}, f"the built-in example{without}")
        except RendererError:
            if len(left_out) == len(parts):
                raise
            continue
        # Without a flag train_on_what=customized selects nothing.
        if train_on_what is TrainOnWhat.CUSTOMIZED:
            found.messages[-1]["trainable"] = True
        return found
    raise AssertionError


def _sample(renderer: Renderer, parts: set[str], source: str) -> Conversation:
    """Returns a conversation with ``parts``; raises RendererError if it cannot be rendered."""
    tools = (_TOOL,) if "tools" in parts else ()
    system = "You are brief." if "a system message" in parts else ""
    begin = system_message(system)
    declared = renderer.create_conversation_prefix_with_tools(tools, system) if tools else begin

    def answer(text: str, thought: str, **more: Any) -> dict[str, Any]:
        thinking = {"reasoning_content": thought} if "thinking" in parts else {}
        return {"role": "assistant", "content": text, **thinking, **more}

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
    return Conversation(messages, source, [*begin, *dialogue], tools)


def signs(text: str) -> Iterator[tuple[str, str]]:
    """Yields each character with the sign shown for it, ``""`` for a visible one."""
    for i, character in enumerate(text):
        category = unicodedata.category(character)
        if character in _SIGNS:
            yield character, _SIGNS[character]
        elif category in _UNREADABLE:
            yield character, f"‹U+{ord(character):04X}›"
        elif i == 0 and category in ("Mn", "Me"):
            yield character, f"◌{character}"  # or it would combine with the token's border
        else:
            yield character, ""


def _readable(text: str) -> str:
    """Returns ``text`` without characters that control a terminal."""
    return "".join(sign if sign[:1] == "‹" else character for character, sign in signs(text))


def print_view(view: View, console: Console, max_tokens: int) -> None:
    """Prints the findings and each example, with its middle cut out beyond ``max_tokens``."""
    width = max(console.width, 40)
    _print_facts(view.facts, console, width)
    for example in view.examples:
        console.print()
        console.print(Text(example.title, style="bold"), soft_wrap=True)
        tokens, cut = example.tokens, len(example.tokens) - max_tokens
        lines = _token_lines(tokens[: max_tokens // 2] if cut > 0 else tokens, width - 2)
        if cut > 0:
            note = f"… {cut:,} tokens more (max_tokens={max_tokens}) …"
            rest = tokens[max_tokens // 2 + cut :]
            lines += [Text(note, style="dim"), *_token_lines(rest, width - 2)]
        for line in lines:
            console.print(Text("  ").append_text(line), soft_wrap=True)
        _print_facts(example.facts, console, width)
    legend = Text("  ").join(Text(words, style=style) for words, style in _LEGEND)
    console.print()
    console.print(legend, soft_wrap=True)


def _token_lines(tokens: Sequence[ShownToken], width: int, breaks: bool = True) -> list[Text]:
    """Returns tokens as lines of at most ``width`` cells, broken between tokens.

    Without ``breaks``, a line break of the text is shown only as its sign.
    """
    lines = [Text()]
    for token in tokens:
        colour = TRAINED_STYLE if token.weight else CONTEXT_STYLE
        style = f"{colour} bold underline" if token.control else colour
        # A token is split after each line break of its text.
        pieces = [Text(TRAINED_BAR if token.weight else BAR, style=colour)]
        for character, sign in signs(token.text) if token.text else [("", UNFINISHED)]:
            pieces[-1].append(sign or character, style=f"{colour} dim" if sign else style)
            if character == "\n":
                pieces.append(Text(style=colour))
        for piece in filter(None, pieces):
            # Lines break between tokens only, so that each token keeps its bar.
            if lines[-1] and lines[-1].cell_len + piece.cell_len > width:
                lines.append(Text())
            lines[-1].append_text(piece)
            if breaks and piece.plain.endswith(LINE_BREAK):
                lines.append(Text())
    return lines if lines[-1] or len(lines) == 1 else lines[:-1]


def _print_facts(facts: Sequence[Fact], console: Console, width: int) -> None:
    width -= _LABEL_WIDTH
    for fact in facts:
        body = Text.assemble(_MARKS[fact.good], _readable(fact.text))
        lines = list(body.wrap(console, width, overflow="fold"))
        for label, tokens in fact.rows:
            label = f"{label:<9}" if label else ""
            # 4 cells are for the signs of a cut before and after.
            shown = _token_lines(tokens, width - len(label) - 4, breaks=False)
            lines.append(Text.assemble((label, "italic"), ("… ", "dim"), shown[0]))
            lines += [Text(" " * (len(label) + 2)).append_text(line) for line in shown[1:]]
            lines[-1].append(" …" if label else "", style="dim")
        for i, line in enumerate(lines):
            label = Text(fact.label if i == 0 else "", style="bold")
            label.pad_right(_LABEL_WIDTH - len(label))
            line.rstrip()
            console.print(label.append_text(line), soft_wrap=True)


if __name__ == "__main__":
    # The first argument without a key is the file.
    for i, argument in enumerate(sys.argv[1:], 1):
        if "=" not in argument and not argument.startswith("-"):
            sys.argv[i] = f"file={argument}"
            break
    run_entrypoint(main)
