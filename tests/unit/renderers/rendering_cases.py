"""Conversations for the renderer tests, and what chat templates say about them.

Nothing here uses the code under test beyond its message types: the OpenAI form of a message and
the spans of trained tokens are worked out anew.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinker_cookbook.renderers import TextPart, ThinkingPart, ToolCall


def checked(number):
    """Settings of a check that sees the same examples at every run."""
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@functools.cache
def drawn(strategy, number=60):
    """The examples that a check of ``strategy`` sees. Drawing them takes longer than rendering
    them, and the strategies below are the same object for equal arguments."""
    examples = []

    @checked(number)
    @given(strategy)
    def draw(example):
        examples.append(example)

    draw()
    return examples


def hold(check, strategy):
    """Calls ``check`` with all examples; where it fails, it fails with the smallest."""
    try:
        for example in drawn(strategy):
            check(example)
    except Exception:
        checked(60)(given(strategy)(check))()
        raise


def thought(thinking, text="", **more):
    """An answer of thinking and text."""
    parts = [ThinkingPart(type="thinking", thinking=thinking), TextPart(type="text", text=text)]
    return {"role": "assistant", "content": parts, **more}


def calling(name, arguments):
    """An answer that is one call."""
    function = ToolCall.FunctionBody(name=name, arguments=json.dumps(arguments))
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall(function=function)]}


FRAGMENTS = [
    *[" ", "\n", "\n\n", "  ", "\t", "\r\n", " \n", "Hello", " world", "12345", "é", "你好", "🙂"],
    *["def f(x):\n    return x", "<|im_end|>", "<|im_start|>user\n", "<|eot_id|>", "<think>", "<"],
    *["<tool_call>", "</tool_response>", "'s", "...", "{}", "\u0301", "User:", "\u00a0", "_"],
]
text = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join), st.text(max_size=30)
)
# What an answer may begin with: see the module docstring of renderers/base.py.
answer = text.filter(lambda t: not t[:1].isspace())
# Text in which no tag stands, where tags decide how the text is read.
untagged = st.text(
    alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<>"), max_size=20
)
# Formats trim or merge white space around answers, and vocabularies normalise to NFC.
ascii_text = st.text(
    alphabet=st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="<>")
    | st.just("\n"),
    max_size=30,
)
body = ascii_text.map(str.strip)
name = st.sampled_from(["search", "get_weather", "f"])
arguments = st.dictionaries(
    st.sampled_from(["q", "n", "ort"]),
    st.one_of(st.integers(-9, 999), st.booleans(), st.sampled_from(["x", 'a "b"', "ü\n"])),
    max_size=3,
)
tool_call = st.builds(
    lambda n, a: ToolCall(
        function=ToolCall.FunctionBody(name=n, arguments=json.dumps(a, ensure_ascii=False))
    ),
    name,
    arguments,
)


@functools.cache
@st.composite
def dialogues(draw, user=text, reply=answer, system=text, ends_with_answer=None):
    """A system message or none, then questions and answers in turn."""
    messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(system)})
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(user)})
        messages.append({"role": "assistant", "content": draw(reply)})
    keep_answer = draw(st.booleans()) if ends_with_answer is None else ends_with_answer
    return messages if keep_answer else messages[:-1]


@functools.cache
@st.composite
def qwen_answers(draw, thinking=True, calls=True):
    """An answer with or without thinking (as a part or as tags in the text) and tool calls."""
    content = draw(answer)
    if thinking:
        thought = draw(untagged)
        kind = draw(st.sampled_from(["none", "part", "tags"]))
        if kind == "part":
            parts = [ThinkingPart(type="thinking", thinking=thought)]
            content = [*parts, TextPart(type="text", text=content)]
        elif kind == "tags":
            content = f"<think>\n{thought}\n</think>\n\n{content}"
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = draw(st.lists(tool_call, min_size=1, max_size=2))
    return message


@functools.cache
@st.composite
def qwen_conversations(draw, thinking=True):
    """Turns with chains of tool calls and their results."""
    messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(text)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(text)})
        for _ in range(draw(st.integers(0, 2))):
            messages.append(draw(qwen_answers(thinking=thinking)))
            for _ in range(draw(st.integers(1, 2))):
                messages.append({"role": "tool", "content": draw(text)})
        messages.append(draw(qwen_answers(thinking=thinking, calls=False)))
    return messages


@functools.cache
@st.composite
def cut_conversations(draw, conversations):
    """Conversations that end anywhere."""
    messages = draw(conversations)
    return messages[: draw(st.integers(1, len(messages)))]


@functools.cache
def plain_answers():
    """Answers that are text."""
    return st.fixed_dictionaries({"role": st.just("assistant"), "content": body})


@functools.cache
@st.composite
def tagged_answers(draw, thinking=True, calls=True):
    """Answers with text, thinking and calls, of which each may be absent."""
    content = draw(body)
    if thinking and (thought := draw(st.just("") | body)):
        text_parts = [TextPart(type="text", text=content)] if content else []
        content = [ThinkingPart(type="thinking", thinking=thought), *text_parts]
    message = {"role": "assistant", "content": content}
    if calls and (made := draw(st.lists(tool_call, max_size=3))):
        message["tool_calls"] = made
    return message


def openai(message, parsed_arguments=False):
    """The message as ``apply_chat_template`` takes it."""
    content, result = message["content"], {"role": message["role"]}
    if isinstance(content, list):
        result["content"] = "".join(p["text"] for p in content if p["type"] == "text")
        thoughts = [p["thinking"] for p in content if p["type"] == "thinking"]
        if thoughts:
            result["reasoning_content"] = thoughts[0]
    else:
        result["content"] = content
    for call in message.get("tool_calls", []):
        arguments = call.function.arguments
        result.setdefault("tool_calls", []).append(
            {
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": json.loads(arguments) if parsed_arguments else arguments,
                },
            }
        )
    return result


ENDS = ("<|im_end|>", "<end_of_turn>", "</s>")


def ended(tokenizer, ids):
    """Token ids of a template without white space after the token that ends the last message: no
    model writes it, and an example does not have it."""
    kept = len(ids)
    while kept and not tokenizer.decode(ids[kept - 1 : kept]).strip():
        kept -= 1
    # Otherwise the white space is the content of the last message.
    ends = kept and tokenizer.decode(ids[kept - 1 : kept]) in ENDS
    return ids[:kept] if ends else ids


def template_ids(tokenizer, messages, template=None, **options):
    """Token ids by the chat template (of the tokenizer, or the text of another)."""
    parsed = options.pop("parsed_arguments", False)
    ids = tokenizer.apply_chat_template(
        [openai(message, parsed) for message in messages],
        chat_template=template,
        tokenize=True,
        return_dict=False,
        **options,
    )
    return ids if options.get("add_generation_prompt") else ended(tokenizer, ids)


def template_file(folder, name):
    return (Path(folder) / name).read_text(encoding="utf-8")


def scan_answers(ids, opening, closing):
    """1 for each token after ``opening`` up to and with ``closing``, found by scanning ids."""
    weights, position = [0] * len(ids), 0
    while position < len(ids):
        if ids[position : position + len(opening)] == opening:
            start = position + len(opening)
            end = ids.index(closing, start)
            weights[start : end + 1] = [1] * (end + 1 - start)
            position = end
        position += 1
    return weights
