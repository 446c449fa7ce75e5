"""Renderers against those of the package tml-renderers, on the models' own vocabularies.

tml-renderers joins neighbouring messages of one role, and writes tags of thinking in text as text:
these conversations have neither.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from rendering_cases import thought

from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers import ParseTermination, ToolCall, get_renderer
from tinker_cookbook.renderers.base import system_message
from tinker_cookbook.renderers.core.tool_calls import results_in_call_order
from tinker_cookbook.tml_tokenizers import TmlHubTokenizer
from tinker_cookbook.tokenizer_utils import get_tokenizer

TOOL = {
    "name": "weather",
    "description": 'Says how "the weather" is, é',
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["city"],
    },
}


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def calling(*calls, message=None):
    made = [
        ToolCall(
            id=f"functions.{name}:{i}",
            function=ToolCall.FunctionBody(name=name, arguments=json.dumps(a, ensure_ascii=False)),
        )
        for i, (name, a) in enumerate(calls)
    ]
    return {**(message or answer("")), "tool_calls": made}


def result(text, name="weather", i=0):
    return {
        "role": "tool",
        "content": text,
        "name": name,
        "tool_call_id": f"functions.{name}:{i}",
    }


PARIS = ("weather", {"city": "Paris", "n": 2})
ROME = ("weather", {"city": "Rom"})
ASKED = [user("W?"), calling(PARIS), result("12")]
THOUGHT = [user("W?"), calling(PARIS, message=thought("I look.")), result("12")]
TWO = [user("W?"), calling(PARIS, ROME)]
ADDED = [user("2+2?"), thought("easy", "4")]
DONE = [*THOUGHT, thought("cold", "It is 12.")]
CONVERSATIONS: dict[str, list[Any]] = {
    "plain": [user("Hi"), answer("Hello")],
    "system": [*system_message("Be brief."), user("Hi"), answer("Hello")],
    "turns": [*system_message("Be brief."), user("Hi"), answer("Ho"), user("And?"), answer("Hm.")],
    "call": ASKED[:2],
    "text and call": [user("W?"), calling(PARIS, message=answer("Let me look."))],
    "result": [*ASKED, answer("It is 12.")],
    "two results": [*TWO, result("12"), result("20", i=1), answer("12 and 20.")],
    "results in another order": [*TWO, result("20", i=1), result("12"), answer("12 and 20.")],
    "result and question": [*ASKED, user("In F?"), answer("54.")],
    "no arguments": [user("?"), calling(("now", {})), result("12:00", "now"), answer("Noon.")],
    "many kinds": [
        user("?"),
        calling(("f", {"a": [1.5, None, True], "o": {"x": 1}, "s": 'é\n"q"'})),
    ],
    "thinking": ADDED,
    "thinking in history": [*ADDED, user("3+3?"), thought("also easy", "6")],
    "thinking and call": DONE,
    "thinking and call in history": [*DONE, user("Thanks"), thought("polite", "Welcome")],
    "thinking, text and call": [
        user("W?"),
        calling(PARIS, message=thought("I look.", "Wait.")),
        result("12"),
        answer("It is 12."),
    ],
    "empty": [user("Hi"), answer("")],
    "empty in history": [user("Hi"), answer(""), user("?"), answer("Sorry")],
    "white space": [user(" Hi \n"), answer(" Hello \n"), user("x"), answer("y")],
    "white space in thinking": [user("Hi"), thought("\nhm\n\n", "\n\nHello")],
    "no question": [*system_message("Be brief."), answer("Hello")],
    "unicode": [*system_message("Réponds"), user("你好 🙂"), answer("naïve café")],
}
THOUGHTS = tuple(name for name in CONVERSATIONS if "thinking" in name)


@dataclass(frozen=True)
class Pair:
    """A renderer, the one of tml-renderers, and the conversations in which they differ."""

    spec: str
    reference: Callable[[Any], Any]
    differs: dict[str, Sequence[str]] = field(default_factory=dict)
    """Reason -> names of conversations."""
    system: str = ""
    """System message of conversations without one, where the default prompts differ."""
    tools: bool = True
    """Whether tools are declared in the same way."""
    last: int = 0
    """Tokens at the end of an example that differ."""


NO_THINKING = (
    "the prompt closes thinking: an answer with it is refused in training, and has its tags in "
    "prompts; tml-renderers drops it"
)
SORTED = {
    "the template sorts results by their calls, tml-renderers 0.2.1 does not": [
        "results in another order"
    ]
}
# GLM ends an answer with the token that begins the next message; tml-renderers writes
# <|endoftext|> after the last answer, which is a stop token too.
GLM = {"differs": SORTED, "last": 1}
# As in the official cookbook: a default system message, and tools in TypeScript.
K25 = {"system": "Be brief.", "tools": False}
NEMOTRON = {
    "the template writes an empty block before an answer without thinking": [
        name for name in CONVERSATIONS if "thinking" not in name
    ],
    "the template writes a line break before calls": [
        "thinking and call",
        "thinking and call in history",
        "thinking, text and call",
    ],
    "the template keeps white space around thinking": ["white space in thinking"],
}
QWEN = {
    "the template has a blank line between text and a call": [
        "text and call",
        "thinking, text and call",
    ],
    "the template writes JSON with white space": ["many kinds"],
}
PAIRS = [
    Pair("deepseekv4_1", lambda r: r.DeepSeekV41()),
    Pair("deepseekv4_1_low_reasoning", lambda r: r.DeepSeekV41("low")),
    Pair("deepseekv4_1_max_reasoning", lambda r: r.DeepSeekV41("max")),
    Pair(
        "deepseekv4_1_disable_thinking",
        lambda r: r.DeepSeekV41.chat(),
        {NO_THINKING: set(THOUGHTS) - {"thinking, text and call"}},
    ),
    Pair("glm5_3_max_reasoning", lambda r: r.Glm53("max", False), **GLM),
    Pair("glm5_3_high_reasoning", lambda r: r.Glm53("high", False), **GLM),
    Pair(
        "glm5_3_low_reasoning?strip_thinking_from_history=true",
        lambda r: r.Glm53("low", True),
        **GLM,
    ),
    Pair("kimi_k2", lambda r: r.KimiK2()),
    Pair("kimi_k2?strip_thinking_from_history=false", lambda r: r.KimiK2(False)),
    Pair("kimi_k25", lambda r: r.KimiK25(), **K25),
    Pair("kimi_k26_preserve_thinking", lambda r: r.KimiK25.preserve_thinking_history(), **K25),
    Pair(
        "kimi_k25_disable_thinking",
        lambda r: r.KimiK25.disable_thinking(),
        {NO_THINKING: THOUGHTS},
        **K25,
    ),
    Pair("nemotron3", lambda r: r.Nemotron3(), NEMOTRON),
    Pair("nemotron3_low_thinking", lambda r: r.Nemotron3.low(), NEMOTRON),
    Pair("nemotron3_ultra", lambda r: r.Nemotron3.ultra(), NEMOTRON),
    Pair(
        "nemotron3_disable_thinking",
        lambda r: r.Nemotron3.disable_thinking(),
        {
            "the template writes a line break before calls": [
                "call",
                "text and call",
                "result and question",
                "many kinds",
                "thinking and call",
                "thinking and call in history",
                "thinking, text and call",
            ],
            "the template keeps white space": ["white space"],
        },
    ),
    Pair("qwen3_5", lambda r: r.Qwen35(), QWEN),
    Pair(
        "qwen3_5_disable_thinking",
        lambda r: r.Qwen35.disable_thinking(),
        {
            **QWEN,
            NO_THINKING: ["thinking and call", "thinking and call in history"],
        },
    ),
    Pair("qwen3_8_xhigh_reasoning", lambda r: r.Qwen38(), QWEN),
    Pair(
        "gpt_oss_medium_reasoning?current_date=2026-01-31&tool_format=template",
        lambda r: r.GptOss.medium("2026-01-31"),
        {
            "the template writes one call a message": [
                "two results",
                "results in another order",
            ]
        },
    ),
]
QUICK = [pair for pair in PAIRS if pair.spec.startswith(("deepseekv4_1", "glm5_3"))]


@cache
def tokenizer_of(kind):
    from tml_renderers import tokenizers

    return TmlHubTokenizer(kind, getattr(tokenizers, kind)())


def both(pair):
    renderers = pytest.importorskip("tml_renderers").renderers
    reference = pair.reference(renderers)
    return get_renderer(pair.spec, tokenizer_of(type(reference.tokenizer).__name__)), reference


def tokens_of(spans):
    return [token for span in spans for token in span.span.tokens]


def native(messages, declared):
    from tinker_cookbook.third_party.tml_renderers_compat import tinker_messages_to_message_list

    if declared:
        tools = json.dumps([{"type": "function", "function": TOOL}])
        behind = messages[0]["role"] == "system"
        messages = [
            *messages[:behind],
            {"role": "tool_declare", "content": tools},
            *messages[behind:],
        ]
    return tinker_messages_to_message_list(messages)


def ours(renderer, messages, declared):
    if not declared:
        return messages
    behind = messages[0]["role"] == "system"
    system = messages[0]["content"] if behind else ""
    prefix = renderer.create_conversation_prefix_with_tools([TOOL], system)
    return [*prefix, *messages[behind:]]


def last_run(tokens, weights):
    """Tokens, and where the trained tokens at the end begin."""
    end = max(i for i, weight in enumerate(weights) if weight)
    start = end
    while start and weights[start - 1]:
        start -= 1
    return tokens[: end + 1], start


def expected_example(reference, messages, declared):
    *_, example = reference.render_for_sft(native(messages, declared))
    return last_run(tokens_of(example.input_token_spans), example.per_token_loss_weight_unshifted)


def our_example(renderer, messages, declared):
    *_, (tokens, weights) = renderer.build_supervised_examples(
        ours(renderer, messages, declared), "last_assistant_message"
    )
    return last_run(tokens.to_ints(), weights.tolist())


def outcome(make, *arguments):
    try:
        return make(*arguments)
    except (RendererError, ValueError):
        return "refused"


def differences(pair):
    """Names of the conversations with an example, or the prompt of an answer, that differs."""
    renderer, reference = both(pair)
    found = set()
    for name, messages in CONVERSATIONS.items():
        if pair.system and messages[0]["role"] != "system":
            messages = [*system_message(pair.system), *messages]
        answers = (i for i, message in enumerate(messages) if message["role"] == "assistant")
        for declared in (False, True)[: 1 + pair.tools]:
            expected = outcome(expected_example, reference, messages, declared)
            got = outcome(our_example, renderer, messages, declared)
            cut = slice(None, -pair.last or None)
            if (got[0][cut], got[1:]) != (expected[0][cut], expected[1:]):
                found.add(name)
            for i in answers:
                spans, _ = reference.render_for_completion(native(messages[:i], declared))
                before = ours(renderer, messages[:i], declared)
                prompt = outcome(renderer.build_generation_prompt, before)
                if prompt == "refused" or prompt.to_ints() != tokens_of(spans):
                    found.add(name)
    return found


@pytest.mark.parametrize(
    "pair",
    [pytest.param(p, marks=[pytest.mark.slow] * (p not in QUICK), id=p.spec) for p in PAIRS],
)
def test_tokens_are_those_of_tml_renderers(pair):
    assert differences(pair) == {name for names in pair.differs.values() for name in names}


@pytest.mark.parametrize("pair", QUICK, ids=lambda pair: pair.spec)
def test_sampled_answers_render_to_the_same_tokens(pair):
    """An answer that the parser reads, in one piece or as a stream, is written as it was sampled,
    and the prompt after it extends it where the renderer says so."""
    renderer, _ = both(pair)
    for name, messages in CONVERSATIONS.items():
        *before, last = messages
        example = outcome(our_example, renderer, messages, False)
        if example == "refused":
            continue
        tokens, start = example
        sampled = tokens[start:]
        message, how = renderer.parse_response(sampled)
        assert how is ParseTermination.STOP_SEQUENCE
        assert len(message.get("tool_calls", [])) == len(last.get("tool_calls", []))
        assert our_example(renderer, [*before, message], False) == (tokens, start), name
        *_, streamed = renderer.parse_response_streaming(iter(sampled))
        assert streamed == message
        if renderer.has_extension_property:
            more = result("1") if last.get("tool_calls") else user("x")
            prompt = renderer.build_generation_prompt([*messages, more]).to_ints()
            assert prompt[: len(tokens)] == tokens, name


@pytest.mark.parametrize(
    ("given", "known", "any_order"),
    [
        ("ba", "ab", "ab"),
        ("b?", "b?", "?b"),
        ("bb", "bb", "bb"),
        ("bz", "bz", "zb"),
        ("bUa", "bUa", "aUb"),
    ],
)
def test_results_are_sorted_as_the_templates_sort_them(given, known, any_order):
    """Ids of results behind an answer that calls a and b; ``?`` has none, and U is a question."""
    function = ToolCall.FunctionBody(name="f", arguments="{}")
    calls = {**answer(""), "tool_calls": [ToolCall(id=i, function=function) for i in "ab"]}
    results = [
        user(i)
        if i == "U"
        else {"role": "tool", "content": i, **({"tool_call_id": i} if i != "?" else {})}
        for i in given
    ]
    for turn, known_only, expected in (
        (("tool",), True, known),
        (("user", "tool"), False, any_order),
    ):
        _, *ordered = results_in_call_order([calls, *results], turn, known_only=known_only)
        assert "".join(message["content"] for message in ordered) == expected


def test_declared_tools_keep_the_thinking_of_deepseek_v4_1():
    renderer, reference = both(PAIRS[0])
    messages = CONVERSATIONS["thinking and call in history"]
    kept = ours(renderer, messages, True)
    (example,) = reference.render_for_sft(native(messages, True))
    ((tokens, weights),) = renderer.build_merged_examples(kept, "all_assistant_messages")
    assert tokens.to_ints() == tokens_of(example.input_token_spans)
    assert weights.tolist() == example.per_token_loss_weight_unshifted
    for wrong, error in (
        (kept[::-1], "expected it first"),
        ([{**kept[0], "content": "x"}], "JSON"),
    ):
        with pytest.raises(RendererError, match=rf"messages\[\d\]\..*{error}"):
            renderer.build_generation_prompt(wrong)


@pytest.mark.slow
def test_inkling_renders_reads_and_is_restored():
    pytest.importorskip("tml_renderers")
    tokenizer = get_tokenizer("thinkingmachines/Inkling")
    renderer = get_renderer("tml_v0", tokenizer)
    *before, last = CONVERSATIONS["thinking and call in history"]
    prompt = renderer.build_generation_prompt(before).to_ints()
    tokens, weights = renderer.build_supervised_example([*before, last], "last_assistant_message")
    assert tokens.to_ints()[: len(prompt)] == prompt
    assert [i for i, w in enumerate(weights.tolist()) if w] == [*range(len(prompt), len(weights))]
    sampled = tokens.to_ints()[len(prompt) :]
    message, how = renderer.parse_response(sampled)
    assert (message["content"], how) == (last["content"], ParseTermination.STOP_SEQUENCE)
    _, *deltas, streamed = renderer.parse_response_streaming(sampled)
    assert [getattr(d, "text", "") or d.thinking for d in deltas] == ["polite", "Welcome"]
    assert streamed == message
    assert renderer.parse_response(sampled[:3])[1] is ParseTermination.MALFORMED
    restored = pickle.loads(pickle.dumps(renderer))
    assert restored.build_generation_prompt(before).to_ints() == prompt
    assert "effort level: 0.2" in tokenizer.decode(
        renderer.build_generation_prompt(before, effort=0.2).to_ints()
    )
    for wrong, error in (({"effort": 1.0}, r"in \[0, 1\)"), ({"prefill": ""}, "partial")):
        with pytest.raises((ConfigurationError, NotImplementedError), match=error):
            renderer.build_generation_prompt(before, **wrong)
    with pytest.raises(RendererError, match="Unsupported role"):
        renderer.build_generation_prompt([{"role": "developer", "content": "x"}])
    with pytest.raises(ConfigurationError, match="needs one of tml-renderers"):
        get_renderer("tml_v0", FakeTokenizer())


class FakeTokenizer:
    name_or_path = "fake"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "folder"),
    [
        ("Qwen3Tokenizer", "qwen3"),
        ("HarmonyTokenizer", "gptoss"),
        ("DeepSeekV31Tokenizer", "deepseek_v3_1"),
    ],
)
def test_copies_of_tokenizers_equal_those_of_the_hub(kind, folder, tokenizer_folder):
    pytest.importorskip("tml_renderers")
    hub, copy = get_tokenizer(tokenizer_folder(folder)), tokenizer_of(kind)
    names = [*copy._special_ids]
    texts = [
        "Hello  world, it's 12345.67!\n\n\tif x:\r\n naïve 你好 🙂",
        names[1] + "a" + names[-1],
    ]
    for text in texts:
        ids = hub.encode(text, add_special_tokens=False)
        assert copy.encode(text) == ids
        assert copy.decode(ids) == hub.decode(ids)
    assert copy.convert_ids_to_tokens(1000) == hub.convert_ids_to_tokens(1000)
    assert set(copy.get_vocab().items()) <= set(hub.get_vocab().items())
