"""The renderer that derives every format from the template, on every vocabulary that there is.

Each case gives the tokenizer the template it is compared with; nothing else says what the format
is. Calls in any form but JSON between ``<tool_call>`` tags are not read back, so they are among the
conversations, not among the answers.
"""

from __future__ import annotations

from family_case import Case
from hypothesis import strategies as st
from rendering_cases import (
    ascii_text,
    cut_conversations,
    dialogues,
    openai,
    plain_answers,
    qwen_conversations,
    tagged_answers,
    text,
    tool_call,
)

from tinker_cookbook.renderers import TextPart, ThinkingPart

DATES = {"date_string": "26 Jul 2024"}
ON_A_DAY = {'strftime_now("%Y-%m-%d")': '"2025-08-05"'}
REWRITES = {"train_on_what": "all_tokens"}


def parsed(message):
    """Templates that write arguments with ``tojson`` take them as an object."""
    return openai(message, parsed_arguments=True)


@st.composite
def one_call_a_message(draw, said, thinking=False):
    """Questions, calls without text, their results, and answers."""
    messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(text)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(text)})
        for _ in range(draw(st.integers(0, 2))):
            messages.append(draw(thoughtful(st.just(""), thinking)))
            messages[-1]["tool_calls"] = [draw(tool_call)]
            messages.append({"role": "tool", "content": draw(text)})
        messages.append(draw(thoughtful(said, thinking)))
    return messages


@st.composite
def thoughtful(draw, said, thinking=True):
    """An answer with or without thinking."""
    content = draw(said)
    if thinking and draw(st.booleans()):
        kept = [TextPart(type="text", text=content)] if content else []
        content = [ThinkingPart(type="thinking", thinking=draw(ascii_text)), *kept]
    return {"role": "assistant", "content": content}


def case(model, folder, file="chat_template.jinja", arguments="", **more):
    return Case(
        model=model,
        spec=f"template{arguments}",
        tokenizer=folder,
        template=f"{folder}/{file}",
        **more,
    )


def qwen(model, folder, file="chat_template.jinja", thinking=True, **more):
    """Dialogue, thinking, chains of calls."""
    return case(
        model,
        folder,
        file,
        conversations=cut_conversations(qwen_conversations(thinking=thinking)),
        answers=tagged_answers(thinking=thinking),
        declares_tools={},
        **more,
    )


def plain_dialogue(model, folder, file="chat_template.jinja", reply=text, **more):
    return case(
        model, folder, file, conversations=dialogues(reply=reply), answers=plain_answers(), **more
    )


CASES = [
    case("SmolLM2", "smollm2", conversations=dialogues(), answers=plain_answers()),
    qwen("Qwen2.5", "qwen2_5", thinking=False, as_template=parsed),
    qwen("Qwen3", "qwen3", **REWRITES),
    qwen("Qwen3, later revision", "qwen3", "chat_template.qwen3_trl.jinja", **REWRITES),
    qwen(
        "Qwen3, enable_thinking=false",
        "qwen3",
        thinking=False,
        arguments="?enable_thinking=false",
        options={"enable_thinking": False},
        **REWRITES,
    ),
    qwen("Qwen3-2507", "qwen3", "chat_template.qwen3_instruct_2507.jinja", thinking=False),
    qwen("Qwen3-VL, text", "qwen3", "chat_template.qwen3_vl.jinja", thinking=False),
    plain_dialogue("Llama 3", "llama3", "chat_template.llama3.jinja"),
    *[
        case(
            model,
            "llama3",
            file,
            "?date_string=26%20Jul%202024",
            conversations=cut_conversations(one_call_a_message(text)),
            answers=plain_answers(),
            as_template=parsed,
            options=DATES,
        )
        for model, file in [
            ("Llama 3.1", "chat_template.jinja"),
            ("Llama 3.2", "chat_template.llama3_2.jinja"),
        ]
    ],
    plain_dialogue("DeepSeek V3", "deepseek_v3"),
    case(
        "DeepSeek V3.1",
        "deepseek_v3_1",
        conversations=cut_conversations(one_call_a_message(text)),
        answers=plain_answers(),
        as_template=parsed,
    ),
    case(
        "gpt-oss",
        "gptoss",
        arguments="?today=2025-08-05",
        conversations=cut_conversations(one_call_a_message(text, thinking=True)),
        answers=tagged_answers(calls=False),
        as_template=parsed,
        corrections=ON_A_DAY,
        **REWRITES,
    ),
    plain_dialogue("Gemma 3", "gemma3"),
]
