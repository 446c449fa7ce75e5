"""Messages and small readers for the tests of gpt-oss."""

from __future__ import annotations

from tinker_cookbook.renderers import TextPart, ThinkingPart, ToolCall

MEDIUM = "gpt_oss_medium_reasoning?current_date=2025-08-05&tool_format=template"
USER = {"role": "user", "content": "Hi"}
CALL = ToolCall(function=ToolCall.FunctionBody(name="f", arguments='{"x": 1}'))
RESULT = {"role": "tool", "content": "20"}
STOP, CALL_END = "<|return|>", "<|call|>"


def thinking(text):
    return ThinkingPart(type="thinking", thinking=text)


def part(text):
    return TextPart(type="text", text=text)


def calling(*content):
    return {"role": "assistant", "content": list(content), "tool_calls": [CALL]}


def prompt_text(renderer, messages):
    return renderer.tokenizer.decode(renderer.build_generation_prompt(messages).to_ints())


def parse(renderer, text):
    return renderer.parse_response(renderer.tokenizer.encode(text, add_special_tokens=False))
