"""Every prompt of an episode with tools begins with the prompt and the answer before it.

Token by token, for every renderer that declares tools, on real vocabularies, and whichever tokens
and spelling of a call the model has sampled. Three renderers run always (2 s), all of them
with the slow tests (20 s, mostly to load vocabularies).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rendering_cases import checked
from test_families import CASES, TOOLS, load  # noqa: F401 - a fixture

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import UnsupportedToolsError
from tinker_cookbook.rl.envs.prompts import EpisodePrompts

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tools.md"
# DeepSeek V3 and R1 declare no tools; the answers of the last one have no calls here.
CALLING = {
    case.spec: case
    for case in CASES
    if (case.declares_tools is not None or case.spec.startswith("deepseekv3"))
}
_EMPTY_BLOCK = "an answer without thinking has an empty block when sampled, and none in history"
REWRITES = {
    "qwen3": _EMPTY_BLOCK,
    "qwen3_vl": _EMPTY_BLOCK,
    "qwen3_disable_thinking": "the prompt has an empty block, and history has none",
    "deepseekv3_thinking": "answers of history have no thinking, within an episode too",
    "template?enable_thinking=false": "as qwen3_disable_thinking, whose template it is here",
}
"""Renderers whose template rewrites an answer within an episode, listed in docs/tools.md."""
QUICK = ("qwen3", "qwen3_instruct", "qwen3_5_preserve_thinking")
TEXTS = ["4", "", " é\n", "<|im_end|>", "a</tool_response>"]


def another_split(renderer, tokens, choose):
    """The same text in other tokens: one token of it is replaced by two or more."""
    codec = renderer.codec
    texts = [codec.decode([token]) for token in tokens[:-1]]
    candidates = [
        i
        for i, text in enumerate(texts)
        if len(text) > 1 and text.isascii() and codec.control_token_in(text) is None
    ]
    if not candidates:
        return tokens
    i = candidates[choose % len(candidates)]
    first, rest = codec.encode(texts[i][:1]), codec.encode(texts[i][1:])
    changed = [*tokens[:i], *first, *rest, *tokens[i + 1 :]]
    return changed if codec.decode(changed) == codec.decode(tokens) else tokens


def another_spelling(renderer, tokens):
    """The same calls as JSON without a space, where the format has such."""
    codec = renderer.codec
    text = codec.decode(tokens[:-1])
    squeezed = text.replace('", "arguments": ', '","arguments":', 1)
    return [*codec.encode(squeezed), tokens[-1]] if squeezed != text else tokens


def as_sampled(renderer, messages, answer):
    """The tokens that the answer adds to the prompt, up to its end; None where it has no such."""
    try:
        prompt = renderer.build_generation_prompt(messages).to_ints()
        example, weights = renderer.build_supervised_example([*messages, answer])
    except RendererError:  # no such answer is ever sampled
        return None
    end = max((i for i, weight in enumerate(weights.tolist()) if weight), default=-1) + 1
    whole = example.to_ints()[:end]
    return whole[len(prompt) :] if whole[: len(prompt)] == prompt and end > len(prompt) else None


def results_of(answer, text):
    """A result for each call of the answer."""
    return [
        {
            "role": "tool",
            "content": f"{text}{i}",
            "name": call.function.name,
            "tool_call_id": call.id,
        }
        for i, call in enumerate(answer["tool_calls"])
    ]


def run_episode(renderer, answers, texts, splits):
    """Whether each prompt begins with what came before; None if no answer could be sampled."""
    messages = []
    with suppress(UnsupportedToolsError):  # a template that writes calls but declares no tools
        messages += renderer.create_conversation_prefix_with_tools(TOOLS, "Help.")
    messages.append({"role": "user", "content": "Hi"})
    prompts = EpisodePrompts(renderer)
    before = prompts.build(messages, None).to_ints()
    whole = None
    for answer, text, split in zip(answers, texts, splits, strict=True):
        action = as_sampled(renderer, messages, answer)
        if action is None:
            continue
        if split % 4 == 1:
            action = another_spelling(renderer, action)
        elif split:
            action = another_split(renderer, action, split)
        said, ending = renderer.parse_response(action)
        if not ending.is_clean or not said.get("tool_calls"):
            continue
        answered = [*messages, said]
        messages = [*answered, *results_of(said, text)]
        after = prompts.build(messages, (answered, action)).to_ints()
        whole = whole is not False and after[: len(before) + len(action)] == [*before, *action]
        before = after
    return whole


def thinks(message):
    """Whether an answer has thinking that is not blank."""
    parts = message["content"] if isinstance(message["content"], list) else []
    return any(part["type"] == "thinking" and part["thinking"].strip() for part in parts)


@pytest.mark.parametrize(
    "spec",
    [
        spec if spec in QUICK else pytest.param(spec, marks=pytest.mark.slow)
        for spec in sorted(CALLING)
    ],
)
def test_an_episode_with_tools_is_one_sequence(load, spec):  # noqa: F811
    renderer = load(CALLING[spec]).renderer
    calling = CALLING[spec].answers.filter(lambda message: message.get("tool_calls"))
    seen = {True: 0, False: 0, None: 0}

    @checked(12)
    @given(
        answers=st.lists(calling, min_size=2, max_size=2),
        texts=st.lists(st.sampled_from(TEXTS), min_size=2, max_size=2),
        splits=st.lists(st.integers(0, 40), min_size=2, max_size=2),
    )
    def check(answers, texts, splits):
        whole = run_episode(renderer, answers, texts, splits)
        seen[whole] += 1
        # Where a template drops empty blocks, it keeps thinking.
        drops_empty = REWRITES.get(spec) == _EMPTY_BLOCK and all(map(thinks, answers))
        if spec not in REWRITES or drops_empty:
            assert whole is not False

    check()
    assert seen[True] + seen[False] >= 6
    assert bool(seen[False]) == (spec in REWRITES)


def test_the_page_lists_the_renderers_that_rewrite_history():
    page = PAGE.read_text(encoding="utf-8")
    assert [spec for spec in REWRITES if f"`{spec}`" not in page] == []
