"""Structured output: masks that let a sampler choose only tokens that follow a grammar.

A mask goes to ``LocalSamplingClient.sample`` in ``LogitOptions(token_mask=…)``. The grammars are
those of llguidance (extra ``structured``), which works with any fast tokenizer of the Hub. JSON is
written on one line, with a space after ``:`` and ``,``, as chat templates write it: white space
without end would otherwise be valid JSON.

    mask = json_schema_mask(tokenizer, {"type": "object", "properties": {"a": {"type": "integer"}}})
    client.sample(prompt, 4, params, sampling_options=LogitOptions(token_mask=mask))
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers.core.answer_form import AnswerForm, CallForm
from tinker_cookbook.renderers.core.renderer import Renderer
from tinker_cookbook.tokenizer_utils import Tokenizer, special_id

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Schema: TypeAlias = Mapping[str, Any] | bool
ToolUse: TypeAlias = Literal["auto", "required", "none"]

ANY_OBJECT: Schema = {"type": "object"}
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_TOKENIZERS = 8
_ANY = r"/(.|\n)*/"
_BRACE_FIRST = r"/[ \t\r\n]*[{](.|\n)*/"


class GrammarError(ConfigurationError):
    """A grammar, or a JSON schema, that the library cannot apply."""


class GrammarMask:
    """Mask of a grammar in llguidance's form of Lark; one object serves any number of samples.

    ``stop_tokens`` may follow where the grammar is complete, by default the tokenizer's EOS token.
    Raises GrammarError for an invalid grammar, and ConfigurationError without llguidance.
    """

    def __init__(
        self, tokenizer: Tokenizer, grammar: str, stop_tokens: Collection[int] | None = None
    ) -> None:
        tokens = _tokens_of(tokenizer, stop_tokens)
        from llguidance import LLMatcher  # only now: the error of a missing library comes first

        self._stops = frozenset(tokens.eos_tokens)
        # Errors are not raised, and would be printed at another log level.
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
        bits = self._matcher.compute_bitmask()  # without Python's global lock
        if self._matcher.is_error():
            raise GrammarError(f"token_mask: {_reason(self._matcher)}")
        return np.frombuffer(bits, dtype=np.uint8)

    def add(self, token: int) -> None:
        """Moves on behind a token; raises GrammarError for one that is not allowed."""
        self.finished = token in self._stops
        if not self.finished and not self._matcher.consume_token(token):
            raise GrammarError(f"token_mask: {_reason(self._matcher)}")


def json_rule(schema: Schema) -> str:
    """Returns the rule of JSON that is valid for ``schema``."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": _JSON}
    return f"%json {json.dumps(schema)}"


def regex_rule(pattern: str) -> str:
    """Returns the rule of texts that match a regular expression."""
    escaped = pattern.replace("/", r"\/").replace("\n", r"\n")
    return f"/{escaped}/"


def choice_rule(choices: Sequence[str]) -> str:
    """Returns the rule of one of several texts."""
    return " | ".join(map(json.dumps, choices))


def json_schema_mask(
    tokenizer: Tokenizer, schema: Schema, stop_tokens: Collection[int] | None = None
) -> GrammarMask:
    """Returns the mask of JSON that is valid for ``schema``, with properties in its order."""
    return GrammarMask(tokenizer, f"start: {json_rule(schema)}", stop_tokens)


def regex_mask(
    tokenizer: Tokenizer, regex: str, stop_tokens: Collection[int] | None = None
) -> GrammarMask:
    """Returns the mask of texts that match ``regex`` (Rust's syntax, without look-around)."""
    return GrammarMask(tokenizer, f"start: {regex_rule(regex)}", stop_tokens)


def choice_mask(
    tokenizer: Tokenizer, choices: Sequence[str], stop_tokens: Collection[int] | None = None
) -> GrammarMask:
    """Returns the mask of one of several texts."""
    return GrammarMask(tokenizer, f"start: {choice_rule(choices)}", stop_tokens)


@dataclass(frozen=True)
class AnswerRule:
    """What an answer may be: text, JSON of a schema, or tool calls.

    ``text`` constrains the text: the right side of a rule, such as :func:`json_rule` returns it. A
    tool is its name and the schema of its arguments. ``tool_use``: ``required`` demands a call,
    ``none`` forbids it. ``parallel`` allows several calls, where the chat format has a form for
    them.
    """

    text: str | None = None
    tools: Sequence[tuple[str, Schema]] = ()
    tool_use: ToolUse = "auto"
    parallel: bool = True


def answer_mask(
    renderer: Renderer, rule: AnswerRule, stop_tokens: Collection[int] = ()
) -> GrammarMask:
    """Returns the mask of answers in the chat format of ``renderer``; thinking is not constrained.

    Raises GrammarError for a schema that the library lacks, and ConfigurationError for tools in a
    chat format without a known form of calls.
    """
    stops = {stop for stop in renderer.get_stop_sequences() if isinstance(stop, int)}
    tokens = _tokens_of(renderer.tokenizer, stops | set(stop_tokens))
    grammar = _AnswerGrammar(renderer, tokens).of(rule)
    return GrammarMask(renderer.tokenizer, grammar, stops | set(stop_tokens))


class _AnswerGrammar:
    def __init__(self, renderer: Renderer, tokens: LLTokenizer) -> None:
        self._form: AnswerForm = renderer.answer_form()
        self._name = renderer.spec or type(renderer).__name__
        # Control tokens are no text for the library: a grammar has them by their ids.
        vocabulary: dict[str, int] = cast(Any, renderer.tokenizer).get_added_vocab()
        self._special = {
            name: token for name, token in vocabulary.items() if tokens.is_special_token(token)
        }
        self._rules: list[str] = []

    def of(self, rule: AnswerRule) -> str:
        """Returns the whole grammar."""
        calls = self._form.calls
        if rule.tools and calls is None:
            raise ConfigurationError(
                f"tools: the chat format {self._name} writes calls in a form that has no grammar "
                "here, so they cannot be constrained; leave out strict, tool_choice and "
                "parallel_tool_calls, or name a renderer whose calls are JSON (qwen3, llama3)"
            )
        bodies = []
        if rule.tool_use != "required":
            bodies.append(self._text(rule, calls if rule.tools else None))
        if rule.tools and rule.tool_use != "none":
            assert calls is not None
            self._add_calls(rule, calls)
            bodies.append("calls")
        thinking = self._thinking()
        self._rules.insert(0, f"start: {thinking} body\nbody: {' | '.join(bodies)}")
        return "\n".join(self._rules)

    def _thinking(self) -> str:
        form = self._form
        if form.thinking is None:
            return ""
        opening, closing = form.thinking
        end = self._until("THOUGHT", closing)
        white = f"/[{_escaped(form.after_thinking)}]{{0,2}}/" if form.after_thinking else ""
        self._rules.append(
            f"thinking: {'' if form.opened else self._text_of(opening)} {end} {white}"
        )
        return "thinking" if form.opened else "thinking?"

    def _text(self, rule: AnswerRule, calls: CallForm | None) -> str:
        """Adds the rule of an answer with text and returns its name."""
        prefix = self._text_of(self._form.text)
        if rule.text is not None:
            self._rules.append(f"text: {prefix} content\ncontent: {rule.text}")
            return "text"
        if calls is None:
            self._rules.append(f"text: {prefix} TEXT\nTEXT: {_ANY}")
        elif not calls.marker:
            # Text that begins with a brace would be a call.
            brace = "" if self._form.text else f" & ~{_BRACE_FIRST}"
            self._rules.append(f"text: {prefix} TEXT\nTEXT: {_ANY}{brace}")
        elif rule.tool_use == "none":
            self._rules.append(f"text: {prefix} {self._without('TEXT', calls.marker)}")
        else:
            begins = self._until("BEFORE_CALL", calls.marker)
            self._rules.append(
                f"text: {prefix} ({self._without('TEXT', calls.marker)} | {begins} rest_of_calls)"
            )
        return "text"

    def _add_calls(self, rule: AnswerRule, form: CallForm) -> None:
        names = []
        for i, (name, schema) in enumerate(rule.tools):
            if not re.fullmatch(r"[\w.-]+", name):
                raise GrammarError(
                    f"tools: got the name {name!r}, expected letters, digits, _ and -"
                )
            names.append(f"call_{i}")
            self._rules.append(
                f"call_{i}: {self._text_of(name + form.between)} arguments_{i} "
                f"{self._text_of(form.after)}\narguments_{i}: {json_rule(schema)}"
            )
        before, between = self._text_of(form.before), ""
        if rule.parallel and form.separator is not None:
            between = f"({self._text_of(form.separator + form.before)} call)*"
        begin = form.begin + form.before
        end = self._text_of(form.end)
        self._rules.append(f"call: {' | '.join(names)}")
        if form.marker:
            # The same after text, which ends with the marker.
            rest = self._text_of(begin.removeprefix(form.marker))
            self._rules.append(f"rest_of_calls: {rest} call {between} {end}")
            self._rules.append(f"calls: {self._text_of(form.marker)} rest_of_calls")
        else:
            self._rules.append(f"calls: {self._text_of(form.begin)} {before} call {between} {end}")

    def _until(self, name: str, mark: str) -> str:
        """Returns a rule of any text and then ``mark``, which the text does not contain."""
        special = next((n for n in self._special if mark.startswith(n)), None)
        if special:
            return f"{self._without(name, special)} {self._text_of(mark)}"
        self._rules.append(f"{name.lower()}[lazy]: {_ANY} {json.dumps(mark)}")
        return name.lower()

    def _without(self, name: str, mark: str) -> str:
        """Returns a terminal of text without ``mark``, also where it is spelled by other tokens."""
        if not any(rule.startswith(f"{name}:") for rule in self._rules):
            containing = regex_rule(rf"(.|\n)*{re.escape(mark)}(.|\n)*")
            self._rules.append(f"{name}: {_ANY} & ~{containing}")
        return name

    def _text_of(self, text: str) -> str:
        """Returns a constant text, with control tokens by their ids."""
        if not text:
            return ""
        names = sorted(self._special, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece)
            for piece in pieces
            if piece
        )


def _escaped(characters: str) -> str:
    return re.escape(characters).replace("\n", "n")


def _reason(matcher: LLMatcher) -> str:
    """Returns the first line of the library's message, without the position in the grammar."""
    text = matcher.get_error().split("\n")[0]
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", text)


_tokenizers: OrderedDict[tuple[int, frozenset[int]], tuple[Tokenizer, LLTokenizer]] = OrderedDict()
_lock = threading.Lock()


def _tokens_of(tokenizer: Tokenizer, stop_tokens: Collection[int] | None) -> LLTokenizer:
    """Returns the library's form of a tokenizer, cached: making it takes seconds."""
    try:
        from llguidance import LLTokenizer, hf
    except ImportError as error:
        raise ConfigurationError(
            "structured output needs llguidance, which is not installed: "
            "pip install 'tinker_cookbook[structured]'"
        ) from error
    eos = special_id(tokenizer, "eos")
    stops = frozenset(stop_tokens or ([] if eos is None else [eos]))
    if not stops:
        raise ConfigurationError(
            "stop_tokens: got none, and the tokenizer has no EOS token, expected one at least"
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
            # The tokenizer is kept, so that no other one gets its id.
            _tokenizers[key] = tokenizer, made
        _tokenizers.move_to_end(key)
        while len(_tokenizers) > _MAX_TOKENIZERS:
            _tokenizers.popitem(last=False)
        return _tokenizers[key][1]
