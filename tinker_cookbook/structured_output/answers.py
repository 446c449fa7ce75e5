"""Masks of complete answers in a chat format: text, JSON that fits a schema, or tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers.core.answer_form import AnswerForm, CallForm
from tinker_cookbook.renderers.core.renderer import Renderer
from tinker_cookbook.structured_output.arguments import arguments_rule
from tinker_cookbook.structured_output.masks import (
    GrammarError,
    GrammarMask,
    Schema,
    json_rule,
    library_tokenizer,
)
from tinker_cookbook.structured_output.rules import ANY_TEXT, RuleWriter

ToolUse: TypeAlias = Literal["auto", "required", "none"]

_TAG = re.compile(r"</?[^<>\s=]+>")
_BRACE_FIRST = r"/[ \t\r\n]*[{](.|\n)*/"


@dataclass(frozen=True)
class AnswerRule:
    """Allowed answers: text, JSON that fits a schema, or tool calls.

    ``text`` constrains the text: the right side of a rule, for example from :func:`json_rule`. A
    tool is its name and the schema of its arguments. ``tool_use``: ``required`` demands a call,
    ``none`` forbids it. ``parallel`` allows several calls, if the chat format has a syntax for
    them.
    """

    text: str | None = None
    tools: Sequence[tuple[str, Schema]] = ()
    tool_use: ToolUse = "auto"
    parallel: bool = True


def answer_mask(
    renderer: Renderer, rule: AnswerRule, stop_tokens: Collection[int] = ()
) -> GrammarMask:
    """Returns the mask of answers in the renderer's chat format; thinking is not constrained.

    Raises GrammarError for a schema that the library or the chat format does not support, and
    ConfigurationError for tools in a chat format without a known syntax for calls.
    """
    stops = {stop for stop in renderer.get_stop_sequences() if isinstance(stop, int)}
    stops |= set(stop_tokens)
    rules = RuleWriter(renderer.tokenizer, library_tokenizer(renderer.tokenizer, stops))
    name = renderer.spec or type(renderer).__name__
    grammar = _AnswerGrammar(name, renderer.answer_form(), rules).of(rule)
    return GrammarMask(renderer.tokenizer, grammar, stops)


class _AnswerGrammar:
    def __init__(self, name: str, form: AnswerForm, rules: RuleWriter) -> None:
        self._name, self._form, self._rules = name, form, rules

    def of(self, rule: AnswerRule) -> str:
        """Returns the whole grammar."""
        calls, rules = self._form.calls, self._rules
        if rule.tools and calls is None:
            raise ConfigurationError(
                f"tools: the chat format {self._name} has no known call syntax, so calls cannot "
                "be constrained; leave out strict, tool_choice and parallel_tool_calls, or name a "
                "renderer with tools (qwen3, llama3)"
            )
        if rule.text is not None:
            self._check_constants("text", rule.text)
        bodies = []
        if rule.tool_use != "required":
            bodies.append(self._text(rule, calls if rule.tools else None))
        if rule.tools and rule.tool_use != "none":
            assert calls is not None
            self._add_calls(rule, calls)
            bodies.append("calls")
        leading = rules.white(self._form.leading)
        start = f"start: {self._thinking()} {leading} body"
        return "\n".join([start, f"body: {' | '.join(bodies)}", *rules.rules])

    def _check_constants(self, where: str, rule: str) -> None:
        """Refuses a rule whose constants contain a marker of the chat format.

        An answer with it would be read as another one, up to the marker or as a call.
        """
        form, marks = self._form, set(self._rules.control_tokens)
        marks.update(form.thinking or ())
        if (calls := form.calls) is not None:
            marks.update(_TAG.findall(f"{calls.begin} {calls.before} {calls.after} {calls.end}"))
        if found := sorted(mark for mark in marks if mark and json.dumps(mark)[1:-1] in rule):
            raise GrammarError(
                f"{where}: got {found[0]!r} in a constant or a name, expected none of the markers "
                f"of the chat format {self._name}, which reads an answer at them"
            )

    def _thinking(self) -> str:
        form, rules = self._form, self._rules
        if form.thinking is None:
            return ""
        opening, closing = form.thinking
        end = rules.until("THOUGHT", closing)
        begin = "" if form.opened else rules.constant(opening)
        rules.add("thinking", f"{begin} {end} {rules.white(form.after_thinking)}")
        return "thinking" if form.opened else "thinking?"

    def _text(self, rule: AnswerRule, calls: CallForm | None) -> str:
        """Adds the rule of an answer with text and returns its name."""
        rules = self._rules
        prefix = rules.constant(self._form.text)
        if rule.text is not None:
            rules.add("content", rule.text)
            return rules.add("text", f"{prefix} content")
        if calls is None:
            return rules.add("text", f"{prefix} {rules.without('TEXT', [])}")
        if not calls.marker:
            # A text that begins with a brace would be parsed as a call.
            brace = [ANY_TEXT] if self._form.text else [ANY_TEXT, f"~{_BRACE_FIRST}"]
            return rules.add("text", f"{prefix} {rules.without('TEXT', [], *brace)}")
        text = rules.without("TEXT", [calls.marker])
        if rule.tool_use == "none":
            return rules.add("text", f"{prefix} {text}")
        begins = rules.until("BEFORE_CALL", calls.marker)
        return rules.add("text", f"{prefix} ({text} | {begins} rest_of_calls)")

    def _add_calls(self, rule: AnswerRule, form: CallForm) -> None:
        rules, names = self._rules, []
        for i, (name, schema) in enumerate(rule.tools):
            if not re.fullmatch(r"[\w.-]+", name):
                raise GrammarError(
                    f"tools: got the name {name!r}, expected letters, digits, _ and -"
                )
            whole = json_rule(schema)
            self._check_constants(f"tools: {name}", whole)
            if form.arguments is None:
                arguments = rules.add(f"arguments_{i}", whole)
            else:
                arguments = arguments_rule(rules, form.arguments, f"a{i}", name, schema)
            called = rules.constant(name), form.number, rules.constant(form.between)
            ended = form.call_id, rules.constant(form.after)
            names.append(rules.add(f"call_{i}", " ".join([*called, arguments, *ended])))
        before, between = rules.constant(form.before), ""
        if rule.parallel and form.separator is not None:
            between = f"({rules.constant(form.separator + form.before)} call)*"
        begin, end = form.begin + form.before, rules.constant(form.end)
        rules.add("call", " | ".join(names))
        if form.marker:
            # The same rules for calls after a text, which ends with the marker.
            rest = rules.constant(begin.removeprefix(form.marker))
            rules.add("rest_of_calls", f"{rest} call {between} {end}")
            rules.add("calls", f"{rules.constant(form.marker)} rest_of_calls")
        else:
            rules.add("calls", f"{rules.constant(form.begin)} {before} call {between} {end}")
