"""Masks of grammars in llguidance's dialect of Lark, and the rules of JSON and texts."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tinker_cookbook.exceptions import ConfigurationError, install_command
from tinker_cookbook.structured_output.patterns import GrammarError, full_pattern
from tinker_cookbook.structured_output.schemas import Schema, readable_schema
from tinker_cookbook.tokenizer_utils import Tokenizer, special_id

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ANY_OBJECT: Schema = {"type": "object"}
# No escapes by number, as which the name of a property could be written once more.
_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}
_MAX_TOKENIZERS = 8


class GrammarMask:
    """Mask of a grammar in llguidance's dialect of Lark, usable for any number of samples.

    ``stop_tokens`` are allowed where the grammar is complete; default: the tokenizer's EOS token.
    Raises GrammarError for an invalid grammar, and ConfigurationError without llguidance.
    """

    def __init__(
        self, tokenizer: Tokenizer, grammar: str, stop_tokens: Collection[int] | None = None
    ) -> None:
        tokens = library_tokenizer(tokenizer, stop_tokens)
        from llguidance import LLMatcher  # after the check for a missing library

        self._stops = frozenset(tokens.eos_tokens)
        # The library reports errors in the matcher; log level 0 keeps it from printing them too.
        self._matcher: LLMatcher = LLMatcher(tokens, grammar, log_level=0)
        if self._matcher.is_error():
            raise GrammarError(_reason(self._matcher))

    def start(self) -> GrammarState:
        """Returns the state at the beginning of a sequence."""
        return GrammarState(self._matcher.deep_copy(), self._stops)


class GrammarState:
    """Position of one sequence in a grammar."""

    def __init__(self, matcher: LLMatcher, stops: frozenset[int]) -> None:
        self._matcher, self._stops = matcher, stops
        self.finished = False

    def allowed(self) -> np.ndarray:
        """Returns the tokens that may come next, as bits, uint8 [ceil(V / 8)]."""
        bits = self._matcher.compute_bitmask()  # releases the GIL
        if self._matcher.is_error():
            raise GrammarError(f"token_mask: {_reason(self._matcher)}")
        return np.frombuffer(bits, dtype=np.uint8)

    def add(self, token: int) -> None:
        """Advances by one token; raises GrammarError if the token is not allowed."""
        self.finished = token in self._stops
        if not self.finished and not self._matcher.consume_token(token):
            raise GrammarError(f"token_mask: {_reason(self._matcher)}")


def json_rule(schema: Schema) -> str:
    """Returns the rule for JSON that is valid under ``schema``.

    Raises GrammarError for a keyword or a pattern that cannot be expressed.
    """
    if not isinstance(schema, (bool, Mapping)):
        raise GrammarError(f"schema: got {json.dumps(schema)[:80]}, expected an object")
    readable = readable_schema(schema)
    # Options have no place in the schemas true and false.
    whole = {"allOf": [readable]} if isinstance(readable, bool) else readable
    return f"%json {json.dumps({**whole, 'x-guidance': _JSON})}"


def regex_rule(pattern: str) -> str:
    """Returns the rule for texts that match a regular expression (ECMA 262) as a whole.

    Raises GrammarError for a pattern that cannot be expressed.
    """
    return f"/{full_pattern(pattern)}/"


def choice_rule(choices: Sequence[str]) -> str:
    """Returns the rule for one of several texts."""
    return " | ".join(map(json.dumps, choices))


def json_schema_mask(
    tokenizer: Tokenizer, schema: Schema, stop_tokens: Collection[int] | None = None
) -> GrammarMask:
    """Returns the mask for JSON that is valid under ``schema``, with properties in its order."""
    return GrammarMask(tokenizer, f"start: {json_rule(schema)}", stop_tokens)


def regex_mask(
    tokenizer: Tokenizer, regex: str, stop_tokens: Collection[int] | None = None
) -> GrammarMask:
    """Returns the mask for texts that match ``regex`` (ECMA 262, without look-around)."""
    return GrammarMask(tokenizer, f"start: {regex_rule(regex)}", stop_tokens)


def choice_mask(
    tokenizer: Tokenizer, choices: Sequence[str], stop_tokens: Collection[int] | None = None
) -> GrammarMask:
    """Returns the mask for one of several texts."""
    return GrammarMask(tokenizer, f"start: {choice_rule(choices)}", stop_tokens)


def _reason(matcher: LLMatcher) -> str:
    """Returns the first line of the library's message, without the position in the grammar.

    The reason of an invalid regular expression is in a later line.
    """
    first, *rest = matcher.get_error().split("\n")
    reasons = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
    text = " ".join([first, *reasons[:1]])
    text = text.replace(
        "Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf"
    )
    text = text.replace("Unimplemented keys", "keywords without support")
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", text)


_tokenizers: OrderedDict[tuple[int, frozenset[int]], tuple[Tokenizer, LLTokenizer]] = OrderedDict()
_lock = threading.Lock()


def library_tokenizer(tokenizer: Tokenizer, stop_tokens: Collection[int] | None) -> LLTokenizer:
    """Returns llguidance's tokenizer object, cached because building it takes seconds."""
    try:
        from llguidance import LLTokenizer, hf
    except ImportError as error:
        raise ConfigurationError(
            "structured output needs llguidance, which is not installed: "
            f"{install_command('structured')}"
        ) from error
    eos = special_id(tokenizer, "eos")
    stops = frozenset(stop_tokens or ([] if eos is None else [eos]))
    if not stops:
        raise ConfigurationError(
            "stop_tokens: got none, and the tokenizer has no EOS token, expected at least one"
        )
    key = id(tokenizer), stops
    with _lock:
        if key not in _tokenizers:
            try:
                slices = LLTokenizer.json_slices()
                made = hf.from_tokenizer(
                    cast(Any, tokenizer), eos_token=sorted(stops), slices=slices
                )
            except ValueError as error:
                raise ConfigurationError(
                    f"structured output needs a fast tokenizer: {error}"
                ) from error
            # Keep the tokenizer, so that its id stays unique.
            _tokenizers[key] = tokenizer, made
        _tokenizers.move_to_end(key)
        while len(_tokenizers) > _MAX_TOKENIZERS:
            _tokenizers.popitem(last=False)
        return _tokenizers[key][1]
