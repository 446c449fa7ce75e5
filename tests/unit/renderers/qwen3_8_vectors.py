"""Conversations for Qwen3.8, and digests of what its chat template gives for them.

No copy of the template comes with the tests. ``python qwen3_8_vectors.py TEMPLATE.jinja`` writes
``qwen3_8_vectors.json`` from one (the file in the repository: from the copy in TRL, 8952
characters): for each setting the SHA-256 of the text of every conversation followed by a prompt.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

CONVERSATIONS = 200
VECTORS = Path(__file__).with_name("qwen3_8_vectors.json")
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_8_xhigh_reasoning": {},
    "qwen3_8_medium_reasoning": {"reasoning_effort": "medium"},
    "qwen3_8_low_reasoning": {"reasoning_effort": "low"},
    "qwen3_8_low_reasoning?strip_thinking_from_history=true": {
        "reasoning_effort": "low",
        "preserve_thinking": False,
    },
    "qwen3_8_disable_thinking": {"enable_thinking": False},
}
WORDS = [
    "Hello",
    " world",
    "é",
    "你好",
    "🙂",
    "12",
    "{}",
    " ",
    "\n",
    "\n\n",
    "<think>",
    "'s",
    "</",
    "",
]
VALUES = [1, 2.5, "x", "a\nb", "12", True, None, [1, "a"], {"k": "é"}]


def text(draw: random.Random) -> str:
    """A few words, perhaps none."""
    return "".join(draw.choices(WORDS, k=draw.randint(0, 5)))


def conversation(seed: int, thinking: bool) -> list[dict[str, Any]]:
    """The conversation of a seed, as chat templates take it."""
    draw = random.Random(seed)
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": text(draw)})
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": text(draw)})
        for _ in range(draw.randint(0, 2)):
            messages.append(answer(draw, thinking, calls=draw.randint(1, 2)))
            results = draw.randint(1, 2)
            messages += [{"role": "tool", "content": text(draw)} for _ in range(results)]
        messages.append(answer(draw, thinking, calls=0))
    return messages[: draw.randint(1 + (messages[0]["role"] == "system"), len(messages))]


def answer(draw: random.Random, thinking: bool, calls: int) -> dict[str, Any]:
    """An answer with thinking or none, and so many calls."""
    message: dict[str, Any] = {"role": "assistant", "content": text(draw)}
    if thinking and draw.random() < 0.6:
        message["reasoning_content"] = text(draw)
    if calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "function": {
                    "name": draw.choice(["f", "get_weather"]),
                    "arguments": {
                        name: draw.choice(VALUES)
                        for name in draw.sample(["q", "n", "a b"], draw.randint(0, 2))
                    },
                },
            }
            for _ in range(calls)
        ]
    return message


def digest(written: str) -> str:
    """Identifies a text."""
    return hashlib.sha256(written.encode()).hexdigest()[:16]


def main(template: str) -> None:
    """Writes the digests."""
    from transformers.utils.chat_template_utils import render_jinja_template

    source = Path(template).read_text(encoding="utf-8")
    vectors: dict[str, list[str]] = {}
    for spec, options in SETTINGS.items():
        chats = [conversation(i, "disable" not in spec) for i in range(CONVERSATIONS)]
        rendered, _ = render_jinja_template(
            chats, chat_template=source, add_generation_prompt=True, **options
        )
        vectors[spec] = [digest(written) for written in rendered]
    VECTORS.write_text(json.dumps(vectors, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
