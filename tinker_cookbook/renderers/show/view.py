"""Analyses one conversation: its tokens and weights, its prompts, and what is parsed from them."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tinker_cookbook.display import special_ids
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.codec import TextCodec
from tinker_cookbook.renderers.core.messages import (
    Message,
    ensure_list,
    message_to_jsonable,
)
from tinker_cookbook.renderers.core.parsing import ParseTermination
from tinker_cookbook.renderers.core.rendered import (
    Piece,
    TrainOnWhat,
    first_difference,
    flat,
    length,
    select_trained,
)
from tinker_cookbook.renderers.show.template import Conversation, TemplateSide

LINE_BREAK = "⏎"
UNFINISHED = "⋯"
"""Sign of a token that is part of a character, but not its last."""
_SIGNS = {" ": "·", "\n": LINE_BREAK, "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
_UNREADABLE = frozenset(("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"))
_COMBINING = frozenset(("Mn", "Me"))
_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no whole character
_MOST = 8  # tokens that may be parts of one character


@dataclass(frozen=True)
class ShownToken:
    """Token of a conversation, or an image (``id`` is None)."""

    id: int | None
    text: str
    """Part of the decoded text; empty if a later token completes the character."""
    weight: float = 0.0
    control: bool = False
    """Whether it is a control token or an image."""

    @property
    def trained(self) -> bool:
        """Whether the token has a training weight other than 0."""
        return self.weight != 0


class TokenReader:
    """Converts rendered pieces to tokens that can be displayed."""

    def __init__(self, renderer: Renderer) -> None:
        self._codec = renderer.codec
        self._control = special_ids(renderer.tokenizer)

    def read(
        self, pieces: Sequence[Piece], weights: Sequence[float] | None = None
    ) -> list[ShownToken]:
        """Returns the tokens and images of ``pieces``; ``weights`` is one value per position."""
        items = flat(pieces)
        texts = iter(split_text(self._codec, [item for item in items if isinstance(item, int)]))
        shown: list[ShownToken] = []
        place = 0
        for item in items:
            weight = float(weights[place]) if weights is not None else 0.0
            if isinstance(item, int):
                shown.append(ShownToken(item, next(texts), weight, item in self._control))
                place += 1
            else:
                size = length(item)
                shown.append(ShownToken(None, f"[{_kind(item)}: {size} tokens]", weight, True))
                place += size
        return shown


def split_text(codec: TextCodec, tokens: Sequence[int]) -> list[str]:
    """Returns the text of each token; a character of several tokens belongs to the last."""
    texts = [""] * len(tokens)
    real = codec.encode(_REPLACEMENT)
    start, waiting = 0, ""
    for i in range(len(tokens)):
        run = list(tokens[start : i + 1])
        text = codec.decode(run)
        if text.endswith(_REPLACEMENT) and run != real and len(run) < _MOST:
            waiting = text
            continue
        if waiting and text.startswith(waiting):  # never completed: bytes that are no text
            texts[i - 1], texts[i] = waiting, text[len(waiting) :]
        elif len(run) > 1:
            certain = codec.decode(run[:1]).rstrip(_REPLACEMENT)
            certain = certain if text.startswith(certain) else ""
            texts[start], texts[i] = certain, text[len(certain) :]
        else:
            texts[i] = text
        start, waiting = i + 1, ""
    if waiting:
        texts[-1] = waiting
    return texts


def signs(text: str) -> Iterator[tuple[str, str]]:
    """Yields each character with the sign shown for it, ``""`` for a visible one."""
    for i, character in enumerate(text):
        category = unicodedata.category(character)
        if character in _SIGNS:
            yield character, _SIGNS[character]
        elif category in _UNREADABLE:
            yield character, f"‹U+{ord(character):04X}›"
        elif i == 0 and category in _COMBINING:
            yield character, f"◌{character}"  # else it would combine with the border of the token
        else:
            yield character, ""


def readable(text: str) -> str:
    """Returns ``text`` without characters that control a terminal or a page."""
    return "".join(sign if sign[:1] == "‹" else character for character, sign in signs(text))


def _kind(medium: Any) -> str:
    return "audio" if "audio" in str(getattr(medium, "type", "image")) else "image"


_BEFORE, _AFTER = 4, 8  # tokens shown around a difference


@dataclass(frozen=True)
class TokenRow:
    """A few tokens below a finding; ``…`` marks further ones."""

    label: str
    tokens: Sequence[ShownToken]
    cut_before: bool = False
    cut_after: bool = False


@dataclass(frozen=True)
class Fact:
    """Finding; ``good`` is None where it is neither right nor wrong."""

    label: str
    text: str
    good: bool | None = None
    rows: Sequence[TokenRow] = ()


@dataclass(frozen=True)
class ExampleView:
    """Training example and the findings about its answers."""

    title: str
    tokens: Sequence[ShownToken]
    facts: Sequence[Fact]


@dataclass(frozen=True)
class View:
    """All findings and all training examples of a conversation."""

    facts: Sequence[Fact]
    examples: Sequence[ExampleView]


def side_by_side(reader: TokenReader, *sides: tuple[str, list[Any]]) -> list[TokenRow]:
    """Returns the tokens around the first difference of two lists, one row for each list."""
    at = first_difference(sides[0][1], sides[1][1]) or 0
    start, stop = max(0, at - _BEFORE), at + _AFTER
    rows: list[TokenRow] = []
    for label, items in sides:
        # Read more tokens than are shown, because they may complete a character.
        tokens = reader.read(as_pieces(items[: stop + _BEFORE]))
        rows.append(TokenRow(label, tokens[start:stop], start > 0, len(items) > stop))
    return rows


def as_pieces(items: Sequence[Any]) -> list[Piece]:
    """Returns a flat list of tokens and images as pieces."""
    return [[item] if isinstance(item, int) else item for item in items]


def count(number: int, word: str) -> str:
    """Returns ``1 token``, ``2 tokens``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


_LAST = TrainOnWhat.LAST_ASSISTANT_MESSAGE


class Answers:
    """Prompts and sampled tokens of the answers, as inference produces them."""

    def __init__(
        self, renderer: Renderer, messages: Sequence[Message], reader: TokenReader
    ) -> None:
        self._renderer = renderer
        self._reader = reader
        self._messages = [_without_flag(message) for message in messages]
        self._prompts: dict[int, list[Any]] = {}
        self._samples: dict[int, list[Any]] = {}

    @cached_property
    def indices(self) -> list[int]:
        """Indices of the assistant messages."""
        return [i for i, m in enumerate(self._messages) if m["role"] == "assistant"]

    @cached_property
    def last(self) -> int:
        """Index of the last answer, or of the next message where there is no answer."""
        return self.indices[-1] if self.indices else len(self._messages)

    def prompt(self, end: int) -> list[Any]:
        """Returns the prompt from which inference samples the answer at index ``end``."""
        if end not in self._prompts:
            chunks = self._renderer.build_generation_prompt(self._messages[:end]).chunks
            self._prompts[end] = flat(chunks)
        return self._prompts[end]

    def sampled(self, answer: int) -> list[Any]:
        """Returns the tokens the model samples for this answer, including the stop token."""
        if answer not in self._samples:
            self._samples[answer] = self._sampled(self._messages[: answer + 1])
        return self._samples[answer]

    def conversation(self) -> list[Any]:
        """Returns the tokens of all messages as history, with no trained message."""
        messages = self._renderer._normalize(self._messages)
        return flat(self._renderer._example(messages, [False] * len(messages), _LAST)[0].chunks)

    def parsed(self, answer: int) -> Fact:
        """Compares an answer with the message that ``parse_response`` returns for its tokens."""
        sampled = self.sampled(answer)
        if not all(isinstance(item, int) for item in sampled):
            return Fact("parsed", "nothing: a medium is no token that could be sampled")
        message, how = self._renderer.parse_response(sampled)
        same = True
        if _comparable(message) == _comparable(self._messages[answer]):
            verdict = "reads the message back"
        elif same := self._renders_the_same(message, answer, sampled):
            verdict = "reads another spelling of the message, whose tokens are the same"
        else:
            verdict = "reads something else than the message"
        text = (
            f"of {count(len(sampled), 'token')} {verdict} ({how.value}): "
            f"{json.dumps(message_to_jsonable(message), ensure_ascii=False)}"
        )
        return Fact("parsed", text, same and how is ParseTermination.STOP_SEQUENCE)

    def _renders_the_same(self, message: Message, answer: int, sampled: list[Any]) -> bool:
        try:
            return self._sampled([*self._messages[:answer], message]) == sampled
        except RendererError:
            return False

    def _sampled(self, messages: Sequence[Message]) -> list[Any]:
        # In the last example only the last message is trained.
        model_input, weights = self._renderer.build_merged_examples(messages, _LAST)[-1]
        shown = self._reader.read(model_input.chunks, weights.tolist())
        pairs = zip(flat(model_input.chunks), shown, strict=True)
        return [item for item, token in pairs if token.trained]


def _without_flag(message: Message) -> Message:
    """Returns the message without ``trainable``, which does not affect what is sampled."""
    return Message(**{key: value for key, value in message.items() if key != "trainable"})  # pyright: ignore[reportArgumentType]


def _comparable(message: Message) -> Any:
    """Returns what to compare: nonempty parts, and calls without ids."""
    parts = [dict(part) for part in ensure_list(message["content"]) if part.get("text") != ""]
    calls = [call.function for call in message.get("tool_calls", [])]
    return parts, calls, message.get("unparsed_tool_calls", [])


_TAIL = 12  # tokens shown of a prompt


@dataclass(frozen=True)
class _Example:
    items: list[Any]
    tokens: list[ShownToken]

    def continues(self, prompt: Sequence[Any]) -> int:
        """Counts the prompt tokens that begin the example, plus 1 if the next is trained."""
        at = first_difference(prompt, self.items[: len(prompt)])
        behind = self.tokens[len(prompt) : len(prompt) + 1]
        return len(prompt) + any(token.trained for token in behind) if at is None else at


@dataclass
class Viewer:
    """Builds the view of one conversation with one renderer."""

    renderer: Renderer
    conversation: Conversation
    train_on_what: TrainOnWhat
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def view(self) -> View:
        """Renders, compares and parses; raises RendererError if the format cannot express it."""
        facts = [self._stops(), self._extension(), self._template(), self._prompt()]
        examples = [self._example_view(i) for i in range(len(self._examples))]
        return View([*facts, self._counts(), self._why()], examples)

    @cached_property
    def _reader(self) -> TokenReader:
        return TokenReader(self.renderer)

    @cached_property
    def _answers(self) -> Answers:
        return Answers(self.renderer, self.conversation.messages, self._reader)

    @cached_property
    def _trained(self) -> list[bool]:
        return select_trained(self.conversation.messages, self.train_on_what)

    @cached_property
    def _trained_answers(self) -> list[int]:
        return [i for i in self._answers.indices if self._trained[i]]

    @cached_property
    def _examples(self) -> list[_Example]:
        made = self.renderer.build_merged_examples(self.conversation.messages, self.train_on_what)
        return [
            _Example(flat(model_input.chunks), self._reader.read(model_input.chunks, w.tolist()))
            for model_input, w in made
        ]

    @cached_property
    def _example_of(self) -> dict[int, int]:
        """Example of each trained answer: the one whose tokens continue its prompt the furthest."""
        found: dict[int, int] = {}
        for answer in self._trained_answers:
            # Compare tokens, so that a renderer's own split is supported.
            reach = [example.continues(self._answers.prompt(answer)) for example in self._examples]
            found[answer] = reach.index(max(reach))
        return found

    def _stops(self) -> Fact:
        words: list[str] = []
        for stop in self.renderer.get_stop_sequences():
            if isinstance(stop, int):
                words.append(f"{self.renderer.codec.decode([stop])} (id {stop})")
            else:
                ids = ", ".join(map(str, self.renderer.codec.encode(stop)))
                words.append(f"the text {json.dumps(stop, ensure_ascii=False)} (as ids {ids})")
        return Fact("stops at", ", ".join(words) or "nothing")

    def _extension(self) -> Fact:
        if self.renderer.has_extension_property:
            return Fact("extension", "holds: each prompt begins with all tokens before it")
        return Fact(
            "extension",
            "does not hold: history is written otherwise than it was sampled, so that answers may "
            "need examples of their own",
        )

    def _template(self) -> Fact:
        messages = self.conversation.messages
        for_template = self.conversation.for_template or messages
        prompt_end = self._answers.last - len(messages) + len(for_template)
        side = TemplateSide(self.renderer, self.conversation.tools, self.template_options)
        whole, prompt = self._answers.conversation(), self._answers.prompt(self._answers.last)
        found = side.compare(for_template, whole, for_template[:prompt_end], prompt)
        if found.ours is None or found.theirs is None:
            return Fact("template", found.text, found.equal)
        rows = side_by_side(self._reader, ("renderer", found.ours), ("template", found.theirs))
        return Fact("template", found.text, found.equal, rows)

    def _prompt(self) -> Fact:
        last = self._answers.last
        tokens = self._reader.read(as_pieces(self._answers.prompt(last)))
        tail = TokenRow("", tokens[-_TAIL:], cut_before=len(tokens) > _TAIL)
        size = count(len(tokens), "token")
        if last == len(self.conversation.messages):
            text = f"{size}, for the answer to come: this conversation has none"
            return Fact("prompt", text, None, [tail])
        text = f"{size}, for message {last} (the last answer); "
        if last not in self._example_of:
            return Fact("prompt", f"{text}this answer is not trained on", None, [tail])
        number = self._example_of[last]
        where = f"example {number + 1}" if len(self._examples) > 1 else "the example"
        fact = self._prefix(last, where)
        return Fact("prompt", text + fact.text, fact.good, [tail, *fact.rows])

    def _prefix(self, answer: int, where: str) -> Fact:
        """Checks that the example of an answer is its prompt followed by its sampled tokens."""
        example, prompt = self._examples[self._example_of[answer]], self._answers.prompt(answer)
        at = first_difference(prompt, example.items[: len(prompt)])
        if at is not None:
            rows = side_by_side(self._reader, ("prompt", prompt), ("example", example.items))
            return Fact("", f"it is not how {where} begins: they differ at token {at}", False, rows)
        sampled = self._answers.sampled(answer)
        at = first_difference(sampled, example.items[len(prompt) :][: len(sampled)])
        if at is not None:
            sides = ("sampled", [*prompt, *sampled]), ("example", example.items)
            text = f"{where} begins with it, but does not go on with the answer as it is sampled"
            return Fact("", text, False, side_by_side(self._reader, *sides))
        # All sampled tokens of the answer should be trained.
        behind = example.tokens[len(prompt) : len(prompt) + len(sampled)]
        if not all(token.trained for token in behind):
            return Fact("", f"{where} begins with it, but not all of the answer is trained", False)
        prompts_too = self.train_on_what is TrainOnWhat.ALL_TOKENS
        if example.tokens[len(prompt) - 1].trained and not prompts_too:
            return Fact("", f"{where} begins with it, but its last token is trained on", False)
        return Fact("", f"{where} begins with it, and training begins right behind it", True)

    def _counts(self) -> Fact:
        tokens = sum(len(example.tokens) for example in self._examples)
        trained = sum(t.trained for example in self._examples for t in example.tokens)
        number = count(len(self._examples), "example")
        return Fact("tokens", f"{count(tokens, 'token')}, {trained:,} of them trained, in {number}")

    def _why(self) -> Fact:
        if not any(self._trained):
            roles = ", ".join(message["role"] for message in self.conversation.messages)
            text = f"train_on_what={self.train_on_what.value} selects none of the messages: {roles}"
            return Fact("examples", f"{text}; training refuses such a row", False)
        if len(self._examples) > 1:
            return self._why_split()
        answers = len(self._trained_answers)
        if self.train_on_what is TrainOnWhat.ALL_TOKENS:
            reason = "all_tokens trains prompts too and is never split"
        elif answers < 2:
            reason = f"{'one answer' if answers else 'no answer'} is trained on"
        elif self.renderer.has_extension_property:
            reason = "the extension property holds"
        else:
            reason = "here each prompt begins with all tokens up to the answer before it"
        return Fact("examples", f"1, because {reason}")

    def _why_split(self) -> Fact:
        """Explains the split by the first two adjacent answers in different examples."""
        number = len(self._examples)
        pairs = zip(self._trained_answers, self._trained_answers[1:], strict=False)
        apart = [pair for pair in pairs if self._example_of[pair[0]] != self._example_of[pair[1]]]
        if not apart:
            return Fact("examples", f"{number}, as the renderer makes them")
        before, after = apart[0]
        sampled = [*self._answers.prompt(before), *self._answers.sampled(before)]
        prompt = self._answers.prompt(after)
        at = first_difference(sampled, prompt[: len(sampled)])
        if at is None:
            return Fact("examples", f"{number}, as the renderer makes them")
        text = (
            f"{number}, because the prompt of message {after} does not begin with message {before} "
            f"as it was sampled; they differ at token {at}"
        )
        rows = side_by_side(self._reader, ("sampled", sampled), ("prompt", prompt))
        return Fact("examples", text, None, rows)

    def _example_view(self, number: int) -> ExampleView:
        example = self._examples[number]
        answers = [i for i in self._trained_answers if self._example_of[i] == number]
        trained = sum(token.trained for token in example.tokens)
        size = count(len(example.tokens), "token")
        title = f"example {number + 1} of {len(self._examples)}: {size}, {trained:,} trained"
        if answers:
            plural = "s" if len(answers) > 1 else ""
            title += f" (message{plural} {', '.join(map(str, answers))})"
        facts = [fact for answer in answers for fact in self._answer_facts(answer)]
        return ExampleView(title, example.tokens, facts)

    def _answer_facts(self, answer: int) -> list[Fact]:
        found = self._prefix(answer, "this example")
        size = count(len(self._answers.prompt(answer)), "token")
        text = f"prompt of {size}: {found.text}"
        fact = Fact(f"message {answer}", text, found.good, found.rows)
        return [fact, self._answers.parsed(answer)]
