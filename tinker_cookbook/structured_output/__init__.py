"""Structured output: masks that let a sampler choose only tokens that follow a grammar.

A mask goes to ``LocalSamplingClient.sample`` in ``LogitOptions(token_mask=…)``. The grammars have
the format of llguidance (extra ``structured``), which supports any fast tokenizer of the Hub. JSON
is written on one line, with a space after ``:`` and ``,``, as chat templates do: otherwise
unlimited white space would be valid JSON.

    mask = json_schema_mask(tokenizer, {"type": "object", "properties": {"a": {"type": "integer"}}})
    client.sample(prompt, 4, params, sampling_options=LogitOptions(token_mask=mask))
"""

from __future__ import annotations

from tinker_cookbook.structured_output.answers import AnswerRule, ToolUse, answer_mask
from tinker_cookbook.structured_output.masks import (
    ANY_OBJECT,
    GrammarError,
    GrammarMask,
    GrammarState,
    Schema,
    choice_mask,
    choice_rule,
    json_rule,
    json_schema_mask,
    regex_mask,
    regex_rule,
)

__all__ = [
    "ANY_OBJECT",
    "AnswerRule",
    "GrammarError",
    "GrammarMask",
    "GrammarState",
    "Schema",
    "ToolUse",
    "answer_mask",
    "choice_mask",
    "choice_rule",
    "json_rule",
    "json_schema_mask",
    "regex_mask",
    "regex_rule",
]
