"""Derives the chat template of a renderer, for transformers (Jinja) and Ollama (Go).

It is derived from the renderer's prompts for conversations with marked messages, and is used only
if it reproduces the renderer's prompts of other conversations.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.tokenizer_utils import Tokenizer, decode_exactly, special_id

if TYPE_CHECKING:
    from tinker_cookbook.renderers import Message, Renderer


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
    bos: str = ""
    """Text of the BOS token, if prompts begin with it."""
    adds_bos: bool = False
    """Whether the tokenizer itself writes BOS before every text."""

    @property
    def has_system(self) -> bool:
        """Whether the format has system messages of its own."""
        return "system" in self.around

    def render(self, messages: list[Message]) -> str:
        """Returns the prompt that the template produces for these messages."""
        text = "" if any(m["role"] == "system" for m in messages) else self.default
        for message in messages:
            before, after = self.around[message["role"]]
            text += f"{before}{message['content']}{after}"
        return text + self.opening

    def jinja(self) -> str:
        """Returns the template in Jinja, for ``apply_chat_template``, which writes BOS itself."""

        def text(literal: str) -> str:
            # As an expression: a template's own white space depends on the options of its reader.
            return f"{{{{ {json.dumps(literal, ensure_ascii=False)} }}}}" if literal else ""

        branches = ""
        for role, (before, after) in self.around.items():
            word = "elif" if branches else "if"
            branches += f"{{% {word} message['role'] == '{role}' %}}"
            branches += f"{text(before)}{{{{ message['content'] }}}}{text(after)}"
        branches += "{% else %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
        parts = [text(self.bos)]
        if self.default:
            without = "{% if not messages or messages[0]['role'] != 'system' %}"
            parts.append(f"{without}{text(self.default)}{{% endif %}}")
        parts.append(f"{{% for message in messages %}}{branches}{{% endfor %}}")
        parts.append(f"{{% if add_generation_prompt %}}{text(self.opening)}{{% endif %}}")
        return "".join(parts)

    def template(self) -> str:
        """Returns the template in the Go template language of Ollama."""
        branches = ""
        for role, (before, after) in self.around.items():
            word = "else if" if branches else "if"
            branches += f'{{{{ {word} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
        default = f"{{{{ if not .System }}}}{self.default}{{{{ end }}}}" if self.default else ""
        default = default if self.adds_bos else self.bos + default
        messages = f"{{{{ range .Messages }}}}{branches}{{{{ end }}}}{{{{ end }}}}"
        return f"{default}{messages}{self.opening}"


def chat_format(renderer: Renderer, tokenizer: Tokenizer) -> ChatFormat | None:
    """Returns the format of a renderer, or None if such a template cannot express it."""
    try:
        head, turn, back, tail = _between(renderer, tokenizer, ["user", "assistant", "user"])
    except (TinkerCookbookError, ValueError):
        return None
    # A user message follows the head or an answer: the common text belongs to the user message.
    user_before = _common_end(head, back)
    user_after = _common_start(turn, tail)
    around = {
        "user": (user_before, user_after),
        "assistant": (turn[len(user_after) :], back[: len(back) - len(user_before)]),
    }
    try:
        system_head, system_end, *_ = _between(renderer, tokenizer, ["system", "user"])
        if system_end.endswith(user_before):
            after = system_end[: len(system_end) - len(user_before)]
            around = {"system": (system_head, after), **around}
    except (TinkerCookbookError, ValueError):  # the format has no system messages
        pass
    default, opening = head[: len(head) - len(user_before)], tail[len(user_after) :]
    stops = stop_texts(renderer, tokenizer)
    first = renderer.build_generation_prompt([_message("user", "")]).to_ints()[:1]
    begins = first == [special_id(tokenizer, "bos")]
    found = ChatFormat(
        default,
        around,
        opening,
        stops,
        decode_exactly(tokenizer, first) if begins else "",
        begins and first == tokenizer.encode("")[:1],
    )
    found = _end_at_stops(found)
    return found if _confirmed(found, renderer, tokenizer) else None


def stop_texts(renderer: Renderer, tokenizer: Tokenizer) -> list[str]:
    """Returns the texts that end an answer, also those that are one token."""
    return [
        stop if isinstance(stop, str) else decode_exactly(tokenizer, [stop])
        for stop in renderer.get_stop_sequences()
    ]


def _end_at_stops(found: ChatFormat) -> ChatFormat:
    """Moves each end-of-turn text to the message before it: the text after a user message is the
    same in all conversations, and so is the text before it."""
    ending = re.compile("|".join(rf".*?{re.escape(stop)}\s*" for stop in found.stops), re.DOTALL)
    around, default, opening = dict(found.around), found.default, found.opening
    before, after = around["user"]
    if match := ending.match(before):
        end, before = match[0], before[match.end() :]
        default += end if default else ""
        for role in {"system", "assistant"} & around.keys():
            around[role] = (around[role][0], around[role][1] + end)
    if match := ending.match(after):
        begin, after = after[match.end() :], match[0]
        around["assistant"] = (begin + around["assistant"][0], around["assistant"][1])
        opening = begin + opening
    around["user"] = (before, after)
    return replace(found, default=default, around=around, opening=opening)


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
    """Returns the text of a prompt without BOS, whose name may resemble other tokens' names."""
    tokens = renderer.build_generation_prompt(messages).to_ints()
    return decode_exactly(tokenizer, tokens[tokens[:1] == [special_id(tokenizer, "bos")] :])


def conversations() -> list[list[Message]]:
    """Returns conversations on which a template is compared with a renderer; some renderers refuse
    the system message."""
    user, answer = _message("user", "What is 2 + 2?"), _message("assistant", "4.\nYes, 4.")
    system = _message("system", "Be brief.")
    return [[user], [user, answer, user], [system, user], [system, user, answer, user]]


def _confirmed(found: ChatFormat, renderer: Renderer, tokenizer: Tokenizer) -> bool:
    try:
        return all(
            found.render(messages) == _rendered(renderer, tokenizer, messages)
            for messages in conversations()
            if found.has_system or messages[0]["role"] != "system"
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
