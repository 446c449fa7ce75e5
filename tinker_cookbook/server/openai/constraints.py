"""Constraints of a request on its answer (JSON, a schema, tool calls), and the mask for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tinker_cookbook.renderers import Renderer
from tinker_cookbook.server.bodies import Json
from tinker_cookbook.server.openai.models import LoadedModel
from tinker_cookbook.server.openai.protocol import (
    ApiError,
    CallPolicy,
    ChatBody,
    SamplingBody,
    Tool,
)
from tinker_cookbook.structured_output import (
    ANY_OBJECT,
    AnswerRule,
    GrammarError,
    GrammarMask,
    Schema,
    ToolUse,
    answer_mask,
    choice_rule,
    json_rule,
    regex_rule,
)


def chat_mask(
    body: ChatBody, calls: CallPolicy, renderer: Renderer, eos_ids: Collection[int]
) -> GrammarMask | None:
    """Returns the mask that a chat request needs, None if it needs none."""
    text = _text_rule(body)
    if text is None and not calls.constrains:
        return None
    # If calls are forbidden but the format has no call grammar, calls are returned as text.
    if calls.use == "none" and renderer.answer_form().calls is None:
        calls = CallPolicy()
        if text is None:
            return None
    tools = [(tool.function.name, _arguments(tool, calls.use)) for tool in calls.tools]
    rule = AnswerRule(text and text[1], tools, calls.use, calls.parallel)
    try:
        return answer_mask(renderer, rule, eos_ids)
    except GrammarError as error:
        param, reason = text[0] if text else "tools", error
        # Try each tool separately to find the one with the invalid schema.
        for tool, pair in zip(calls.tools, tools, strict=True):
            try:
                answer_mask(renderer, AnswerRule(None, [pair]), eos_ids)
            except GrammarError as its_error:
                index = (body.tools or []).index(tool)
                param, reason = f"tools[{index}].function.parameters", its_error
        raise ApiError(f"{param}: {reason}", param=param) from error


def _arguments(tool: Tool, use: ToolUse) -> Schema:
    """Returns the schema of a tool's arguments; it is enforced only for a strict tool or if a
    call is required."""
    parameters = tool.function.parameters
    binding = tool.function.strict or use == "required"
    return parameters if parameters and binding else ANY_OBJECT


def completion_mask(body: SamplingBody, model: LoadedModel) -> GrammarMask | None:
    """Returns the mask of a completion, None if it is not constrained."""
    text = _text_rule(body)
    if text is None:
        return None
    try:
        return GrammarMask(model.codec.tokenizer, f"start: {text[1]}", model.sampler.base.eos_ids)
    except GrammarError as error:
        raise ApiError(f"{text[0]}: {error}", param=text[0]) from error


def _text_rule(body: SamplingBody) -> tuple[str, str] | None:
    """Returns the parameter that constrains the text, and its grammar rule."""
    format_param, param, outputs = "response_format", "structured_outputs", body.structured_outputs
    given: list[tuple[str, Callable[[Any], str], Any]] = [
        (format_param, json_rule, _schema_of(body.response_format))
    ]
    if outputs is not None:
        given += [
            (param, _json_rule, outputs.json_),
            (param, _regex_rule, outputs.regex),
            (param, _choice_rule, outputs.choice),
            (param, json_rule, ANY_OBJECT if outputs.json_object else None),
        ]
    found = []
    for name, rule_of, value in given:
        try:
            found += [] if value is None else [(name, rule_of(value))]
        except GrammarError as error:
            raise ApiError(f"{name}: {error}", param=name) from error
    if len(found) > 1 or (outputs is not None and not found):
        expected = "one of json, regex, choice and json_object, and no response_format"
        got = "no constraint" if not found else "several constraints"
        raise ApiError(f"{param}: got {got}, expected {expected}", param=param)
    return found[0] if found else None


def _regex_rule(regex: str) -> str:
    # A filtered or unset value of the client, which must not give unconstrained text.
    if not regex:
        raise GrammarError("got an empty regular expression")
    return regex_rule(regex)


def _choice_rule(choices: Sequence[str]) -> str:
    if not choices:
        raise GrammarError("got no choice, expected at least one")
    return choice_rule(choices)


def _schema_of(value: Json | None) -> Schema | None:
    """Returns the schema of a ``response_format``; None if it does not constrain the text."""
    kind = "text" if value is None else value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    wrapper = value.get("json_schema") if value else None
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise ApiError(
            f"response_format: got {json.dumps(value)[:80]}, expected one of "
            '{"type": "text"}, {"type": "json_object"} and '
            '{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}',
            param="response_format",
        )
    return schema


def _json_rule(schema: Json | str) -> str:
    if not isinstance(schema, str):
        return json_rule(schema)
    try:
        return json_rule(json.loads(schema))
    except ValueError as error:
        raise GrammarError(f"got no JSON ({error})") from error
