"""Renders conversations with the official tinker-cookbook and with this package, and compares.

``python official_renderings.py`` writes what the package on ``PYTHONPATH`` makes of them: the part
``renderings`` of ``official_cookbook.py`` runs it for both. Tokens and trained tokens count.
``official_renderings.json`` has digests of what the original makes of them, for tests without it.
``official_rendering_exceptions.json`` lists what differs, with a reason for each.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from official_page import Figures

HERE = Path(__file__).resolve().parent
EXCEPTIONS = HERE / "official_rendering_exceptions.json"
RECORDED = HERE / "official_renderings.json"
RENDERERS = {
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3_disable_thinking": "Qwen/Qwen3-8B",
    "qwen3_instruct": "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "qwen3_5": "Qwen/Qwen3.5-4B",
    "qwen3_5_disable_thinking": "Qwen/Qwen3.5-4B",
    "qwen3_8_medium_reasoning": "Qwen/Qwen3.8-27B",
    "llama3": "meta-llama/Llama-3.1-8B-Instruct",
    "deepseekv3": "deepseek-ai/DeepSeek-V3.1",
    "deepseekv3_thinking": "deepseek-ai/DeepSeek-V3.1",
    "gpt_oss_no_sysprompt": "openai/gpt-oss-20b",
    "gpt_oss_medium_reasoning": "openai/gpt-oss-20b",
    "nemotron3": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nemotron3_disable_thinking": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "role_colon": "Qwen/Qwen3-8B",
}
SAME = ("equal", "both refuse")

_Message = dict[str, Any]


def _user(text: str) -> _Message:
    return {"role": "user", "content": text}


def _says(text: str, thinking: str | None = None, **more: Any) -> _Message:
    content: Any = text
    if thinking is not None:
        parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": text}]
        content = parts
    return {"role": "assistant", "content": content, **more}


def _calls(*arguments: str) -> dict[str, Any]:
    """Calls of one tool; :func:`render` makes the package's own objects of them."""
    return {"tool_calls": [{"name": "weather", "arguments": spelled} for spelled in arguments]}


def _result(text: str, call_id: str = "call_0") -> _Message:
    return {"role": "tool", "content": text, "tool_call_id": call_id, "name": "weather"}


_SYSTEM = {"role": "system", "content": "Answer briefly."}
_PARIS, _ROME = '{"city": "Paris"}', '{"city": "Rome"}'
_ASKED = _user("How warm is it in Paris?")
CONVERSATIONS: dict[str, list[_Message]] = {
    "one turn": [_user("Hi"), _says("Hello!")],
    "system": [_SYSTEM, _user("Hi"), _says("Hello!")],
    "two turns": [_user("2+2?"), _says("4"), _user("3+3?"), _says("6")],
    "prompt": [_SYSTEM, _user("2+2?"), _says("4"), _user("3+3?")],
    "thinking": [_user("2+2?"), _says("4", "Easy.")],
    "thinking twice": [_user("2+2?"), _says("4", "Easy."), _user("3+3?"), _says("6", "Hm.")],
    "thinking in history": [_user("2+2?"), _says("4", "Easy."), _user("3+3?"), _says("6")],
    "empty thinking in history": [_user("2+2?"), _says("4", ""), _user("3+3?"), _says("6")],
    "call": [_ASKED, _says("", **_calls(_PARIS))],
    "call and text": [_ASKED, _says("Let me look.", **_calls(_PARIS))],
    "call and result": [_ASKED, _says("", **_calls(_PARIS)), _result("21"), _says("21 degrees.")],
    "two calls": [
        _user("Paris and Rome?"),
        _says("", **_calls(_PARIS, _ROME)),
        _result("21"),
        _result("27", "call_1"),
        _says("21 and 27."),
    ],
    "thinking and call": [
        _ASKED,
        _says("", "I need the tool.", **_calls(_PARIS)),
        _result("21"),
        _says("21 degrees.", "Now I know."),
    ],
    "unicode": [_user("Gr\u00fc\u00dfe \u2603 \u65e5\u672c\u8a9e"), _says("\U0001f600 \u00e9")],
    "white space": [_user("  Hi \n"), _says("\n Hello! \n")],
    "empty": [_user(""), _says("")],
    "users in a row": [_user("Hi"), _user("Are you there?"), _says("Yes.")],
    "no question": [_SYSTEM, _says("How can I help?")],
}


def render(hub: Path | None = None) -> dict[str, dict[str, Any]]:
    """Returns tokens and weights, or the error, of each conversation by each renderer; ``hub`` is a
    Hub cache with the tokenizers."""
    from transformers import AutoTokenizer

    from tinker_cookbook.renderers import ToolCall, get_renderer

    def message(plain: _Message) -> Any:
        calls = [
            ToolCall(id=f"call_{i}", function=ToolCall.FunctionBody(**call))
            for i, call in enumerate(plain.get("tool_calls", []))
        ]
        return {**plain, "tool_calls": calls} if calls else dict(plain)

    found: dict[str, dict[str, Any]] = {}
    for name, model in RENDERERS.items():
        tokenizer = AutoTokenizer.from_pretrained(model, cache_dir=hub, local_files_only=True)
        renderer = get_renderer(name, tokenizer)
        found[name] = {}
        for title, plain in CONVERSATIONS.items():
            messages = [message(m) for m in plain]
            try:
                if plain[-1]["role"] == "assistant":
                    made, weighted = renderer.build_supervised_example(messages)
                    tokens, weights = made.to_ints(), weighted.tolist()
                else:
                    tokens = renderer.build_generation_prompt(messages).to_ints()
                    weights = [0.0] * len(tokens)
                tokens = _with_date(tokens, tokenizer, date.today())
                text = str(tokenizer.decode(tokens))
                found[name][title] = {"tokens": tokens, "weights": weights, "text": text}
            except Exception as error:  # each package refuses with errors of its own
                found[name][title] = {"error": f"{type(error).__name__}: {error}"[:300]}
    return found


def _with_date(tokens: list[int], tokenizer: Any, today: date) -> list[int]:
    """Returns the tokens with one date in the place of today's, which the prompt of gpt-oss has."""
    old, new = (
        tokenizer.encode(str(day), add_special_tokens=False) for day in (today, date(2026, 1, 1))
    )
    for i in range(len(tokens)):
        if tokens[i : i + len(old)] == old:
            return [*tokens[:i], *new, *tokens[i + len(old) :]]
    return tokens


def digests(rendered: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Returns short digests of tokens, weights and text in the place of them."""

    def digest(one: Mapping[str, Any]) -> str:
        if "error" in one:
            return "refused"
        # A line end more or less at the end is no other text.
        parts = one["tokens"], [*map(float, one["weights"])], one["text"].rstrip()
        hashes = (hashlib.sha256(json.dumps(part).encode()).hexdigest() for part in parts)
        return " ".join(one[:8] for one in hashes)

    return {
        name: {title: digest(one) for title, one in titles.items()}
        for name, titles in rendered.items()
    }


def kind_of(official: str, ours: str) -> str:
    """Says how the digests of two renderings of one conversation compare."""
    if "refused" in (official, ours):
        if official == ours:
            return "both refuse"
        return "ours refuses" if ours == "refused" else "original refuses"
    tokens, weights, text = (a == b for a, b in zip(official.split(), ours.split(), strict=True))
    if tokens:
        return "equal" if weights else "other weights"
    return "other tokens" if text else "other text"


def report_renderings(
    official: Mapping[str, Any], rendered: Mapping[str, Any]
) -> tuple[bool, Figures]:
    """Prints how what this package has ``rendered`` compares with the digests of the ``official``
    one; whether each difference has its reason and each reason is needed."""
    ours = digests(rendered)
    exceptions: dict[str, dict[str, str]] = json.loads(EXCEPTIONS.read_text("utf-8"))
    counts: Counter[str] = Counter()
    good = True
    for name in RENDERERS:
        for title in CONVERSATIONS:
            kind = kind_of(official[name][title], ours[name][title])
            counts[kind] += 1
            reason = exceptions.get(name, {}).get(title)
            if kind not in SAME:
                print(f"{name}, {title}: {kind} ({reason or 'NO REASON'})")
                if reason is None:
                    one = rendered[name][title]
                    print(f"    ours     {one.get('error') or repr(one['text'])}")
            elif reason is not None:
                print(f"{name}, {title}: {kind}, the exception is no longer needed")
            good &= (kind in SAME) == (reason is None)
    print(f"renderings: {counts.total()}: {dict(counts.most_common())}")
    same = sum(counts[kind] for kind in SAME)
    figures = {
        "conversations": counts.total(),
        "renderers": len(RENDERERS),
        "equal": counts["equal"],
        "refused": counts["both refuse"],
        "differ": counts.total() - same,
    }
    return good, figures


def rendered_by(package: Path, scratch: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns what the package of another folder makes of the conversations."""
    target = scratch / "renderings.json"
    env = {**os.environ, **environment, "PYTHONPATH": str(package)}
    command = [sys.executable, str(Path(__file__).resolve()), str(target)]
    subprocess.run(command, env=env, check=True, cwd=scratch)
    return json.loads(target.read_text("utf-8"))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(render()), "utf-8")
