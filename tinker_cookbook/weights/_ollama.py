"""Writes an Ollama ``Modelfile`` with the model's chat format as a template.

The template is derived from the renderer's prompts for conversations with marked messages,
and is used only if it reproduces the renderer's prompt of another conversation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import decode_exactly, get_tokenizer, special_id

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_cookbook.renderers import Message, Renderer
    from tinker_cookbook.tokenizer_utils import Tokenizer


@dataclass(frozen=True)
class ChatFormat:
    """Texts around the messages of a conversation."""

    default: str
    """Text before the first message if there is no system message."""
    around: dict[str, tuple[str, str]]
    """Role -> text before and text after its messages."""
    opening: str
    """Text after the last message, before the answer."""
    stops: list[str]

    def render(self, messages: list[Message]) -> str:
        """Returns the prompt that the template produces for these messages."""
        text = "" if any(m["role"] == "system" for m in messages) else self.default
        for message in messages:
            before, after = self.around[message["role"]]
            text += f"{before}{message['content']}{after}"
        return text + self.opening

    def template(self) -> str:
        """Returns the template in the Go template language of Ollama."""
        branches = ""
        for role, (before, after) in self.around.items():
            word = "else if" if branches else "if"
            branches += f'{{{{ {word} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
        default = f"{{{{ if not .System }}}}{self.default}{{{{ end }}}}" if self.default else ""
        messages = f"{{{{ range .Messages }}}}{branches}{{{{ end }}}}{{{{ end }}}}"
        return f"{default}{messages}{self.opening}"


def chat_format(renderer: Renderer, tokenizer: Tokenizer) -> ChatFormat | None:
    """Returns the format of a renderer, or None if such a template cannot express it."""
    try:
        head, turn, back, tail = _between(renderer, tokenizer, ["user", "assistant", "user"])
        system_head, system_end, *_ = _between(renderer, tokenizer, ["system", "user"])
    except (TinkerCookbookError, ValueError):  # such as a format without system messages
        return None
    # A user message follows the head or an answer: the common text belongs to the user message.
    user_before = _common_end(head, back)
    user_after = _common_start(turn, tail)
    if not system_end.endswith(user_before):
        return None
    around = {
        "system": (system_head, system_end[: len(system_end) - len(user_before)]),
        "user": (user_before, user_after),
        "assistant": (turn[len(user_after) :], back[: len(back) - len(user_before)]),
    }
    default = head[: len(head) - len(user_before)]
    stops = [
        stop if isinstance(stop, str) else decode_exactly(tokenizer, [stop])
        for stop in renderer.get_stop_sequences()
    ]
    found = _end_at_stops(ChatFormat(default, around, tail[len(user_after) :], stops))
    return found if _confirmed(found, renderer, tokenizer) else None


def modelfile(
    base_folder: Path, renderer_name: str, model: str, adapter: str | None, context: int
) -> str:
    """Returns a ``Modelfile``.

    Args:
        base_folder: Base model; its tokenizer is used.
        renderer_name: Chat format that the model was trained with.
        model: File of the model, relative to the ``Modelfile``.
        adapter: File of a LoRA adapter.
        context: Maximum context length in tokens.
    """
    tokenizer = get_tokenizer(str(base_folder))
    found = chat_format(get_renderer(renderer_name, tokenizer), tokenizer)
    lines = [f"FROM ./{model}"]
    if adapter:
        lines.append(f"ADAPTER ./{adapter}")
    if found is None or "{{" in found.default + found.opening + str(found.around):
        lines.append(
            f"# The chat format {renderer_name} has no Ollama template: Ollama uses the "
            "chat template in the GGUF file."
        )
        return "\n".join([*lines, ""])
    lines.append(f'TEMPLATE """{found.template()}"""')
    lines += [f'PARAMETER stop "{_quoted(stop)}"' for stop in found.stops]
    # Ollama's default is at most 4096, and it silently truncates the beginning of longer texts.
    lines.append(f"PARAMETER num_ctx {min(context, 8192)}")
    return "\n".join([*lines, ""])


def _end_at_stops(found: ChatFormat) -> ChatFormat:
    """Moves each end-of-turn text to the message before it: the text after a user message is the
    same in all conversations, and so is the text before it."""
    ending = re.compile("|".join(rf".*?{re.escape(stop)}\s*" for stop in found.stops), re.DOTALL)
    around, default, opening = dict(found.around), found.default, found.opening
    before, after = around["user"]
    if match := ending.match(before):
        end, before = match[0], before[match.end() :]
        default += end if default else ""
        for role in ("system", "assistant"):
            around[role] = (around[role][0], around[role][1] + end)
    if match := ending.match(after):
        begin, after = after[match.end() :], match[0]
        around["assistant"] = (begin + around["assistant"][0], around["assistant"][1])
        opening = begin + opening
    around["user"] = (before, after)
    return ChatFormat(default, around, opening, found.stops)


def _between(renderer: Renderer, tokenizer: Tokenizer, roles: list[str]) -> list[str]:
    """Returns the texts before, between and after messages of these roles."""
    messages = [_message(role, f"mark{index}mark") for index, role in enumerate(roles)]
    rest, parts = _rendered(renderer, tokenizer, messages), []
    for message in messages:
        # Raises ValueError if the renderer drops or changes a message.
        before, rest = rest.split(str(message["content"]))
        parts.append(before)
    return [*parts, rest]


def _rendered(renderer: Renderer, tokenizer: Tokenizer, messages: list[Message]) -> str:
    tokens = renderer.build_generation_prompt(messages).to_ints()
    # llama.cpp adds BOS itself if the tokenizer does.
    if tokens[:1] == [special_id(tokenizer, "bos")] == tokenizer.encode("")[:1]:
        tokens = tokens[1:]
    return decode_exactly(tokenizer, tokens)


def _confirmed(found: ChatFormat, renderer: Renderer, tokenizer: Tokenizer) -> bool:
    user, answer = _message("user", "What is 2 + 2?"), _message("assistant", "4.\nYes, 4.")
    system = _message("system", "Be brief.")
    conversations = [[user], [system, user], [user, answer, user], [system, user, answer, user]]
    try:
        return all(
            found.render(messages) == _rendered(renderer, tokenizer, messages)
            for messages in conversations
        )
    except TinkerCookbookError:
        return False


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}  # pyright: ignore[reportReturnType]


def _common_start(one: str, other: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in same)


def _common_end(one: str, other: str) -> str:
    return _common_start(one[::-1], other[::-1])[::-1]


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
