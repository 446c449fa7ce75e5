"""What a mask allows is valid by ``jsonschema`` and ``re``, or the schema is refused in words."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from functools import cache

import numpy as np
import pytest
from test_tool_call_grammars import XML, read_all, sampled_tokens, tokenizer

from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.structured_output import (
    AnswerRule,
    GrammarError,
    answer_mask,
    json_schema_mask,
    regex_mask,
)

pytest.importorskip("llguidance", reason="structured output is an extra: pip install llguidance")
jsonschema = pytest.importorskip("jsonschema")

NULL = {"type": "null"}
A, B = {"a": NULL}, {"b": NULL}
INT64 = 2**63 - 1


def closed(properties=None, **more):
    of = {} if properties is None else {"properties": properties}
    return {"type": "object", **of, "additionalProperties": False, **more}


def text(pattern, **more):
    return {"type": "string", "pattern": pattern, **more}


VALID = [
    # Strings. A pattern is found anywhere; lengths count characters.
    *map(text, [r"^\d{3}$", r"^\w{2}$", r"^a\sb$", r"^\S{2}$", r"^\D{2}$", r"^\W{2}$", r"^a.b$"]),
    *map(text, [r"^[\d_]{3}$", r"^[^\d]{2}$", r"^[^\w\s]{2}$", r"^[a&&b]$", r"^[a[b]$", r"^\/$"]),
    *map(text, [r"^(a|b)$", "a+", r"(^a)|(b$)", r"^\u00e9\x41$", "^😀[😀-😂]$"]),
    text("^a*$", minLength=2, maxLength=3), text("a", maxLength=3), text("", maxLength=2),
    {"type": "string", "minLength": 2, "maxLength": 3},
    *({"type": "string", "format": f} for f in ("date", "time", "date-time", "ipv4", "uuid")),
    # Numbers.
    {"type": "number"}, {"type": "integer"}, {"type": ["integer", "null"], "maximum": 3},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "integer", "minimum": -5.5, "exclusiveMaximum": 1e2},
    {"type": "integer", "minimum": INT64 - 5000, "maximum": INT64},
    {"type": "integer", "multipleOf": 7, "minimum": -50, "maximum": -3},
    {"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 9},
    # Constants.
    {"const": 'é\n"\\😀'}, {"const": {"a": [1, None, {"b": "c"}]}}, {"const": 1.0},
    {"const": 1e22}, {"const": -0.0}, {"const": None}, {"enum": ["a", "a", 1, 1.0]},
    {"type": "string", "enum": ["a", 1]}, {"enum": [1, 5, 9], "minimum": 4},
    text(r"\d", enum=["a1", "b"]), {"enum": [1, 2], "const": 2},
    # Arrays and objects.
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": False, "maxItems": 3},
    {"type": "array", "prefixItems": [NULL, {"type": "boolean"}], "items": False},
    closed(A | B, minProperties=1), closed(A | {"b": False}), closed({"é\n": NULL}),
    closed(A | B, required=["a", "b"], minProperties=2),
    # Several schemas.
    {"anyOf": [closed(A, required=["a"]), NULL]},
    {"oneOf": [{"type": "string", "maxLength": 2}, NULL]},
    {"oneOf": [closed({"k": {"const": k}}, required=["k"]) for k in "ab"]},
    {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]},
    {"allOf": [{"$ref": "#/$defs/n"}], "maximum": 3, "$defs": {"n": {"type": "integer"}}},
    {"$ref": "#/components/schemas/x", "components": {"schemas": {"x": text(r"^\d$")}}},
    closed({"v": {"enum": [1]}, "n": {"anyOf": [{"$ref": "#"}, NULL]}}, required=["n"]),
    {"title": "pattern", "default": {"pattern": "(?=a)"}, "x-a": {"pattern": "(?=a)"}, **NULL},
]  # fmt: skip
OPEN = [
    True, {}, {"type": "object"}, {"properties": A}, {"type": "object", "minProperties": 1},
    {"type": "object", "properties": A, "required": ["a"]},
    {"type": "object", "properties": {"é": NULL}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "required": ["z"], "minProperties": 2, "additionalProperties": NULL},
    {"type": "object", "maxProperties": 1, "additionalProperties": NULL},
    closed(patternProperties={"^[ab]$": NULL}), closed(patternProperties={r"^\d$": NULL}),
    {"type": "object", "patternProperties": {"^a": NULL}, "additionalProperties": {"const": 1}},
    closed({"ab": {"enum": [None, True]}}, patternProperties={"^a": {"type": "boolean"}}),
]  # fmt: skip
"""Objects whose names may repeat; the last value counts."""


@cache
def json_vocabulary():
    """Likely tokens, which end strings and objects soon."""
    return [tokenizer().convert_tokens_to_ids(one) for one in '"}],ab'] + [tokenizer().eos_token_id]


def sampled(mask, seed, most=300):
    """The text of random tokens that the mask allows; None without an end."""
    rng, state, tokens = np.random.default_rng(seed), mask.start(), []
    while not state.finished and len(tokens) < most:
        allowed = np.flatnonzero(np.unpackbits(state.allowed(), bitorder="little"))
        allowed = allowed[allowed < len(tokenizer())]
        likely = np.intersect1d(allowed, json_vocabulary())
        tokens.append(int(rng.choice(likely if len(likely) and rng.random() < 0.5 else allowed)))
        state.add(tokens[-1])
    return tokenizer().decode(tokens[:-1]) if state.finished else None


def without_repetition(pairs):
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def ascii_pattern(validator, pattern, instance, schema):
    if isinstance(instance, str) and not re.search(pattern, instance, re.ASCII):
        yield jsonschema.ValidationError(f"{instance!r}: {pattern}")


def decimal_multiple(validator, of, instance, schema):
    if Decimal(str(instance)) % Decimal(str(of)):  # jsonschema divides doubles: 7.1 by 0.1
        yield jsonschema.ValidationError(f"{instance} of {of}")


EXACT = {"multipleOf": decimal_multiple}
UNICODE = jsonschema.validators.extend(jsonschema.Draft202012Validator, EXACT)
ECMA = jsonschema.validators.extend(UNICODE, {"pattern": ascii_pattern})


@pytest.mark.parametrize("schema", VALID + OPEN, ids=lambda schema: json.dumps(schema)[:60])
def test_random_json_is_valid(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    mask, ended = json_schema_mask(tokenizer(), schema), 0
    for seed in range(12):
        if (found := sampled(mask, seed)) is None:
            continue
        ended += 1
        hook = None if schema in OPEN else without_repetition
        value = json.loads(found, object_pairs_hook=hook)
        for validator in (ECMA, UNICODE):
            validator(schema, format_checker=validator.FORMAT_CHECKER).validate(value)
    assert ended >= 4


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (text("(?!a)b"), "pattern: .* has look-around"),
        (text(r"(a)\1"), "pattern: .* a reference to a group"),
        (text(r"\bab\b"), "pattern: .* a border of words"),
        (text("a^b"), "pattern: .* an anchor"),
        (text("(^a)*"), "pattern: .* an anchor"),
        (text("[a"), r"pattern: .* a '\[' without a '\]'"),
        (text("(a"), r"pattern: .* a '\(' without"),
        (text("a)"), r"pattern: .* a '\)' without"),
        (text("*a"), r"pattern: .* nothing to repeat"),
        (text("^a{,3}$"), "pattern: .*write {0,n}"),
        (text("^[^]a]$"), "pattern: .* a class without members"),
        (text(r"a\z"), "pattern: .* which ECMA 262 does not know"),
        (text("(?x)a"), r"pattern: .* the group"),
        (text(r"^\x01$"), "pattern: .* control character"),
        (text("a{3,2}"), "invalid repetition"),
        (text(r"\p{None}"), "property not found"),
        (closed(patternProperties={"(?=a)": NULL}), "pattern: .* has look-around"),
        (closed(patternProperties={"^a": NULL, "b$": NULL}), "not disjoint"),
        (closed(patternProperties={"^[ab]$": NULL}, minProperties=2), "minProperties: got 2"),
        ({"type": "object", "properties": A, "minProperties": 2}, "minProperties: got 2 with 0"),
        (closed(A | B, minProperties=2), "min/maxProperties only supported"),
        ({"const": "a\x01"}, "const: .* control character"),
        (closed({"\x7f": NULL}), "properties: .* control character"),
        ({"const": 2**53 + 1}, "const: got 9007199254740993"),
        ({"enum": [[float("inf")]]}, "enum: got inf"),
        ({"enum": []}, "Unsatisfiable"),
        ({"const": 1, "type": "string"}, "Unsatisfiable"),
        (False, "schema is false"),
        (closed(required=["a"]), "'a' is unsatisfiable"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf .* Use anyOf"),
        ({"type": "string", "format": "regex"}, "Unknown format: regex"),
        ({"type": "number", "maximum": 1e300}, "float range"),
        *(
            ({"type": "array", keyword: value}, f"without support: .*{keyword}")
            for keyword, value in (
                ("uniqueItems", True), ("not", {}), ("if", {}), ("contains", {}),
                ("propertyNames", {}), ("dependentRequired", {}), ("unevaluatedProperties", False),
            )
        ),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_kept_is_refused(schema, words):
    with pytest.raises(GrammarError, match=words):
        json_schema_mask(tokenizer(), schema)


def allows(mask, string):
    state = mask.start()
    try:
        read_all(state, tokenizer().encode(string, add_special_tokens=False))
    except GrammarError:
        return False
    return bool(np.unpackbits(state.allowed(), bitorder="little")[tokenizer().eos_token_id])


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        # Another spelling of a name that the schema has.
        ({"type": "object", "properties": A}, r'{"\u0061": 3}'),
        ({"type": "object", "properties": {"é": NULL}}, r'{"\u00e9": 3}'),
        ({"type": "object", "properties": {"\n": NULL}}, r'{"\u000a": 3}'),
        ({"type": "object", "patternProperties": {"^a": NULL}}, r'{"\u0061": 3}'),
        ({"type": "object", "properties": A}, '{"a": null, "a": 3}'),
        # Numbers beyond 2**53.
        ({"type": "integer", "minimum": 2**53 + 1}, str(2**53)),
        ({"type": "integer", "maximum": INT64}, str(INT64 + 1)),
    ],
)
def test_what_random_answers_hardly_try(schema, refused):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(refused), schema)
    assert not allows(json_schema_mask(tokenizer(), schema), refused)


PATTERNS = [
    r"^\d{2}$", r"^\D\D$", r"^\w+$", r"^\W$", r"^[\w-]+$", r"^[^\d_]+$", r"^\s$", r"^\S$", r"^.$",
    "^a|b$", "a|b", "(^a)|(b$)", "^(a|^b)c?$", "(^|,)a(,|$)", "^$", "", "a$|^b", r"\$", "a/b",
    r"a\/b", r"^[a&&b]$", r"^[a~~b]$", r"^[\[\]]$", "^[[]$", "^x{2}$", "^x{1,}?$", "x{",
    "(?:a)(b)?c", "(?P<n>a)b", "^é+$", "^[😀-😂]$", r"^\t$", r"^(?i:A)$",
]  # fmt: skip
TEXTS = [
    "", "a", "b", "ab", "ax", "xa", "xb", "bx", "ac", "abc", "12", "1", "a1", "_", "-", "a-b", "x",
    "xx", "x{", "&", "~", "[", "]", "$", ",", "b,a", "a,b", "a/b", " ", "\t", "\n", "\r", "\v",
    "\x1c", "\x85", "\u1680", "\u2028", "\ufeff", "٣3", "２3", "信赖", "é", "éé", "😀", "😁", "A",
    "²", "!",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_means_the_same_in_json_in_tags_and_as_a_whole(pattern):
    """Valid for ECMA 262 and for Python; each ASCII text that both match is allowed."""
    schema = closed({"x": text(pattern)}, required=["x"])
    renderer = get_renderer(XML, tokenizer())
    tags = answer_mask(renderer, AnswerRule(tools=[("f", schema)], tool_use="required"))
    as_json, whole = json_schema_mask(tokenizer(), schema), regex_mask(tokenizer(), pattern)
    for one in TEXTS:
        arguments = json.dumps({"x": one}, ensure_ascii=False)
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            in_tags = read_all(tags.start(), sampled_tokens(renderer, answer))
        except GrammarError:
            in_tags = False
        for name, found, match in (
            ("json", allows(as_json, arguments), re.search),
            ("tags", in_tags, re.search),
            ("whole", allows(whole, one), re.fullmatch),
        ):
            # Python's ``$`` also matches before a line break at the end, ECMA's does not.
            strict = pattern if name == "whole" else re.sub(r"(?<!\\)\$", r"\\Z", pattern)
            valid = match(strict, one, re.ASCII) and match(strict, one)
            if found or (one.isascii() and one.isprintable()):
                assert found == bool(valid), (name, one)
