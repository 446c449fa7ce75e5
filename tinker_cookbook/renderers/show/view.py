"""Analyses one conversation: its tokens and weights, its prompts, and what is parsed from them."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from tinker_cookbook.display import special_ids
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.image_processing_utils import thumbnail_uri
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.codec import TextCodec
from tinker_cookbook.renderers.core.messages import (
    Message,
    ToolSpec,
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
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool, with_parsed_arguments

LINE_BREAK = "⏎"
UNFINISHED = "⋯"
"""Sign of a token that holds part of a character, but not its end."""
_SIGNS = {" ": "·", "\n": LINE_BREAK, "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
_UNREADABLE = frozenset(("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"))
_REPLACEMENT = "\ufffd"  # decoders write it for incomplete characters
_MAX_RUN = 8  # tokens that may be parts of one character
_BEFORE, _AFTER = 4, 8  # tokens shown around a difference
_TAIL = 12  # tokens shown of a prompt


@dataclass(frozen=True)
class Conversation:
    """Messages to show, and the same conversation for the model's chat template."""

    messages: list[Message]
    source: str
    """Source of the conversation, as text for the output."""
    for_template: list[Message] | None = None
    """Messages without the declaration of tools, which the template writes itself."""
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True)
class ShownToken:
    """Token of a conversation, or an image (``id`` is None)."""

    id: int | None
    text: str
    """Part of the decoded text; empty if a later token completes the character."""
    weight: float = 0.0
    control: bool = False
    """Whether it is a control token or an image."""
    image: str = ""
    """Data URI of a small copy of an image."""
    size: int = 1
    """Positions in the model's input."""

    @property
    def trained(self) -> bool:
        """Whether the token has a training weight other than 0."""
        return self.weight != 0


@dataclass(frozen=True)
class TokenRow:
    """Tokens shown below a finding; ``…`` marks omitted ones."""

    label: str
    tokens: Sequence[ShownToken]
    cut_before: bool = False
    cut_after: bool = False


@dataclass(frozen=True)
class Fact:
    """Finding; ``good`` is None if it is neither a success nor a failure."""

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


def read_tokens(
    renderer: Renderer, pieces: Sequence[Piece], weights: Sequence[float] | None = None
) -> list[ShownToken]:
    """Returns the tokens and images of ``pieces``; ``weights`` has one value per position."""
    control = special_ids(renderer.tokenizer)
    items = flat(pieces)
    # All tokens at once, because a character may consist of several.
    texts = iter(split_text(renderer.codec, [item for item in items if isinstance(item, int)]))
    shown, position = list[ShownToken](), 0
    for item in items:
        weight = 0.0 if weights is None else float(weights[position])
        if isinstance(item, int):
            shown.append(ShownToken(item, next(texts), weight, item in control))
            position += 1
        else:
            kind = "audio" if "audio" in str(getattr(item, "type", "image")) else "image"
            size = length(item)
            small = thumbnail_uri(item) if kind == "image" else ""
            shown.append(ShownToken(None, f"[{kind}: {size} tokens]", weight, True, small, size))
            # An image has one weight for each of its positions.
            position += size
    return shown


def split_text(codec: TextCodec, tokens: Sequence[int]) -> list[str]:
    """Returns the text of each token; a character of several tokens belongs to the last."""
    texts = [""] * len(tokens)
    replacement = codec.encode(_REPLACEMENT)
    start, waiting = 0, ""
    for i in range(len(tokens)):
        run = list(tokens[start : i + 1])
        text = codec.decode(run)
        # The run ends inside a character, so wait for the token that completes it.
        if text.endswith(_REPLACEMENT) and run != replacement and len(run) < _MAX_RUN:
            waiting = text
            continue
        if waiting and text.startswith(waiting):  # never completed: invalid bytes
            texts[i - 1], texts[i] = waiting, text[len(waiting) :]
        # The first token may begin with whole characters, which belong to it.
        elif len(run) > 1:
            certain = codec.decode(run[:1]).rstrip(_REPLACEMENT)
            certain = certain if text.startswith(certain) else ""
            texts[start], texts[i] = certain, text[len(certain) :]
        else:
            texts[i] = text
        start, waiting = i + 1, ""
    # The tokens end inside a character.
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
        elif i == 0 and category in ("Mn", "Me"):
            yield character, f"◌{character}"  # or it would combine with the token's border
        else:
            yield character, ""


def readable(text: str) -> str:
    """Returns ``text`` without characters that control a terminal or a page."""
    return "".join(sign if sign[:1] == "‹" else character for character, sign in signs(text))


def count(number: int, word: str) -> str:
    """Returns ``1 token``, ``2 tokens``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def size_of(tokens: Sequence[ShownToken]) -> str:
    """Returns the number of positions of tokens and images."""
    return count(sum(token.size for token in tokens), "token")


@dataclass(frozen=True)
class _Example:
    items: list[Any]
    tokens: list[ShownToken]

    def continues(self, prompt: Sequence[Any]) -> int:
        """Counts the prompt tokens that begin the example, plus 1 if the next is trained."""
        at = first_difference(prompt, self.items[: len(prompt)])
        following = self.tokens[len(prompt) : len(prompt) + 1]
        return len(prompt) + any(token.trained for token in following) if at is None else at


class Viewer:
    """Builds the view of one conversation with one renderer.

    Raises RendererError if the chat format cannot express a message.
    """

    def __init__(
        self,
        renderer: Renderer,
        conversation: Conversation,
        train_on_what: TrainOnWhat,
        template_options: Mapping[str, Any],
    ) -> None:
        self._renderer, self._conversation = renderer, conversation
        self._train_on_what, self._template_options = train_on_what, template_options
        # Inference does not know the flag ``trainable``.
        self._messages = [
            cast("Message", {key: value for key, value in message.items() if key != "trainable"})
            for message in conversation.messages
        ]
        answers = [i for i, m in enumerate(self._messages) if m["role"] == "assistant"]
        # Without an answer the prompt shown is the one after the last message.
        self._last = answers[-1] if answers else len(self._messages)
        selected = select_trained(conversation.messages, train_on_what)
        self._any_trained = any(selected)
        self._trained_answers = [i for i in answers if selected[i]]
        # Prompts and sampled tokens of the answers, as inference produces them.
        self._prompts = {
            end: flat(renderer.build_generation_prompt(self._messages[:end]).chunks)
            for end in {*self._trained_answers, self._last}
        }
        self._samples = {i: self._sampled(self._messages[: i + 1]) for i in self._trained_answers}
        made = renderer.build_merged_examples(conversation.messages, train_on_what)
        self._examples = [
            _Example(flat(tokens.chunks), read_tokens(renderer, tokens.chunks, weights.tolist()))
            for tokens, weights in made
        ]
        # The example of an answer is the one with the longest common prefix with its prompt.
        # Tokens are compared, so that a renderer's own split is supported.
        self._example_of: dict[int, int] = {}
        for answer in self._trained_answers:
            reach = [example.continues(self._prompts[answer]) for example in self._examples]
            self._example_of[answer] = reach.index(max(reach))

    def view(self) -> View:
        """Returns the findings about the conversation and about each example."""
        codec, stops = self._renderer.codec, list[str]()
        for stop in self._renderer.get_stop_sequences():
            if isinstance(stop, int):
                stops.append(f"{codec.decode([stop])} (id {stop})")
            else:
                ids = ", ".join(map(str, codec.encode(stop)))
                stops.append(f"the text {json.dumps(stop, ensure_ascii=False)} (as ids {ids})")
        extension = (
            "does not hold: earlier messages are rendered differently than sampled, so answers may "
            "need separate examples"
        )
        if self._renderer.has_extension_property:
            extension = "holds: each prompt begins with all tokens before it"
        tokens = [token for example in self._examples for token in example.tokens]
        trained = sum(token.trained for token in tokens)
        number = count(len(self._examples), "example")
        facts = [
            Fact("stops at", ", ".join(stops) or "nothing"),
            Fact("extension", extension),
            self._template(),
            self._prompt(),
            Fact("tokens", f"{size_of(tokens)}, {trained:,} of them trained, in {number}"),
            self._why(),
        ]
        return View(facts, [self._example_view(i) for i in range(len(self._examples))])

    def _sampled(self, messages: Sequence[Message]) -> list[Any]:
        """Returns the tokens that the model samples for the last message, with the stop token."""
        what = TrainOnWhat.LAST_ASSISTANT_MESSAGE
        # In the last example only the last message is trained.
        tokens, weights = self._renderer.build_merged_examples(messages, what)[-1]
        shown = read_tokens(self._renderer, tokens.chunks, weights.tolist())
        pairs = zip(flat(tokens.chunks), shown, strict=True)
        return [item for item, token in pairs if token.trained]

    def _side_by_side(self, *sides: tuple[str, list[Any]]) -> list[TokenRow]:
        """Returns the tokens around the first difference of two lists, one row for each list."""
        at = first_difference(sides[0][1], sides[1][1]) or 0
        start, stop = max(0, at - _BEFORE), at + _AFTER
        rows: list[TokenRow] = []
        for label, items in sides:
            # Read more tokens than are shown, because they may complete a character.
            tokens = read_tokens(self._renderer, as_pieces(items[: stop + _BEFORE]))
            rows.append(TokenRow(label, tokens[start:stop], start > 0, len(items) > stop))
        return rows

    def _template(self) -> Fact:
        """Compares the conversation and the last prompt with the model's own chat template."""
        if not getattr(self._renderer.tokenizer, "chat_template", None):
            return Fact("template", "none: the tokenizer has no chat template to compare with")
        # Templates expect call arguments as text or as objects; keep the form that matches better.
        tried = [self._compare_with_template(parsed) for parsed in (False, True)]
        return max(tried, key=lambda found: found[0])[1]

    def _compare_with_template(self, parsed: bool) -> tuple[float, Fact]:
        """Returns the number of equal tokens at the beginning, and the finding.

        The number is infinite if all tokens are equal and -1 if the template raises an error.
        ``parsed`` passes call arguments to the template as objects.
        """
        renderer, messages = self._renderer, self._messages
        # A template writes the declaration of tools itself.
        for_template = self._conversation.for_template or self._conversation.messages
        # The two lists differ only at their beginning, so positions count from the end.
        prompt_end = self._last - len(messages) + len(for_template)
        normal = renderer._normalize(messages)
        # Only the tokens are compared, so no message needs a weight.
        history, _ = renderer._example(
            normal, [False] * len(normal), TrainOnWhat.LAST_ASSISTANT_MESSAGE
        )
        # Templates ignore unknown arguments. These two disable thinking in several families.
        off = {"enable_thinking": False, "thinking": False} if renderer.disables_thinking else {}
        given = {**off, **self._template_options}
        notes, brackets = [f"with {json.dumps(given)}"] if given else [], ""
        for name, part, ours in (
            ("conversation", for_template, flat(history.chunks)),
            ("prompt for the last answer", for_template[:prompt_end], self._prompts[self._last]),
        ):
            written = [renderer.to_openai_message(message) for message in part]
            as_objects = "call arguments passed as objects"
            if parsed and any(message.get("tool_calls") for message in written):
                written = [with_parsed_arguments(message) for message in written]
                notes += [] if as_objects in notes else [as_objects]
            try:
                theirs: Any = renderer.tokenizer.apply_chat_template(
                    written,
                    tools=[as_openai_tool(tool) for tool in self._conversation.tools] or None,
                    tokenize=True,
                    return_dict=False,
                    add_generation_prompt=name != "conversation",
                    # By default Llama 3.1 declares tools in the question, unlike any renderer.
                    **{"tools_in_user_message": False, **given},
                )
            except Exception as error:  # a template may raise anything
                return -1, Fact("template", f"no: the template refuses the {name}: {error}", False)
            brackets = f" ({', '.join(notes)})" if notes else ""
            theirs = list(theirs)
            # The template's line break after the last message is never sampled.
            stops = set(renderer.get_stop_sequences())
            if name == "conversation" and stops.issuperset(ours[-1:] + theirs[-2:-1]):
                theirs = theirs[:-1] if renderer.codec.decode(theirs[-1:]).isspace() else theirs
            # A template writes one token for each image, which processors repeat.
            single = [
                item if isinstance(item, int) or i >= len(theirs) else theirs[i]
                for i, item in enumerate(ours)
            ]
            at = first_difference(single, theirs)
            if at is None:
                continue
            text = f"no: the {name} differs at token {at} of {len(ours):,} and {len(theirs):,}"
            # Equal text with different tokens is due to the tokenizer, not to the format.
            only_text, decode = all(isinstance(item, int) for item in ours), renderer.codec.decode
            if only_text and decode(ours) == decode(theirs):
                text += "; it is the same text, split into different tokens"
            rows = self._side_by_side(("renderer", ours), ("template", theirs))
            return at, Fact("template", text + brackets, False, rows)
        text = "yes: conversation and prompt are, token by token, those of the model's own chat "
        return math.inf, Fact("template", f"{text}template{brackets}", True)

    def _prompt(self) -> Fact:
        last, prompt = self._last, self._prompts[self._last]
        tokens = read_tokens(self._renderer, as_pieces(prompt))
        # The end of a prompt shows how the answer is opened.
        tail = TokenRow("", tokens[-_TAIL:], cut_before=len(tokens) > _TAIL)
        size = size_of(tokens)
        if last == len(self._messages):
            text = f"{size}, for the next answer: this conversation has none"
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
        example, prompt = self._examples[self._example_of[answer]], self._prompts[answer]
        # Prompt, answer, weights: an earlier difference is the cause of the later ones.
        at = first_difference(prompt, example.items[: len(prompt)])
        if at is not None:
            rows = self._side_by_side(("prompt", prompt), ("example", example.items))
            return Fact("", f"it is not how {where} begins: they differ at token {at}", False, rows)
        sampled = self._samples[answer]
        at = first_difference(sampled, example.items[len(prompt) :][: len(sampled)])
        if at is not None:
            rows = self._side_by_side(("sampled", [*prompt, *sampled]), ("example", example.items))
            text = f"{where} begins with it, but does not continue with the sampled answer"
            return Fact("", text, False, rows)
        if not all(token.trained for token in example.tokens[len(prompt) :][: len(sampled)]):
            return Fact("", f"{where} begins with it, but not all of the answer is trained", False)
        prompts_too = self._train_on_what is TrainOnWhat.ALL_TOKENS
        # The prompt is given at inference, so it is trained only by all_tokens.
        if example.tokens[len(prompt) - 1].trained and not prompts_too:
            return Fact("", f"{where} begins with it, but its last token is trained on", False)
        return Fact("", f"{where} begins with it, and training begins right after it", True)

    def _why(self) -> Fact:
        """Explains the number of examples."""
        # Checked first, because training refuses such a conversation.
        if not self._any_trained:
            roles = ", ".join(message["role"] for message in self._messages)
            text = f"train_on_what={self._train_on_what.value} selects none of the messages: "
            return Fact("examples", f"{text}{roles}; training refuses such a row", False)
        answers, number = self._trained_answers, len(self._examples)
        if number > 1:
            # The first two adjacent answers in different examples show the reason.
            for before, after in pairwise(answers):
                if self._example_of[before] == self._example_of[after]:
                    continue
                sampled = [*self._prompts[before], *self._samples[before]]
                prompt = self._prompts[after]
                at = first_difference(sampled, prompt[: len(sampled)])
                if at is None:
                    break
                text = (
                    f"{number}, because the prompt of message {after} does not begin with message "
                    f"{before} as it was sampled; they differ at token {at}"
                )
                rows = self._side_by_side(("sampled", sampled), ("prompt", prompt))
                return Fact("examples", text, None, rows)
            return Fact("examples", f"{number}, as the renderer builds them")
        if self._train_on_what is TrainOnWhat.ALL_TOKENS:
            reason = "all_tokens trains prompts too and is never split"
        elif len(answers) < 2:
            reason = f"{'one answer' if answers else 'no answer'} is trained on"
        elif self._renderer.has_extension_property:
            reason = "the extension property holds"
        else:
            reason = "here each prompt begins with all tokens up to the previous answer"
        return Fact("examples", f"1, because {reason}")

    def _example_view(self, number: int) -> ExampleView:
        example = self._examples[number]
        answers = [i for i in self._trained_answers if self._example_of[i] == number]
        trained = sum(token.trained for token in example.tokens)
        size = size_of(example.tokens)
        title = f"example {number + 1} of {len(self._examples)}: {size}, {trained:,} trained"
        if answers:
            title += f" (message{'s' * (len(answers) > 1)} {', '.join(map(str, answers))})"
        facts: list[Fact] = []
        for answer in answers:
            # The same check as for the last prompt, for each answer of the example.
            found = self._prefix(answer, "this example")
            size = sum(map(length, as_pieces(self._prompts[answer])))
            text = f"prompt of {count(size, 'token')}: {found.text}"
            facts += [Fact(f"message {answer}", text, found.good, found.rows), self._parsed(answer)]
        return ExampleView(title, example.tokens, facts)

    def _parsed(self, answer: int) -> Fact:
        """Compares an answer with the message that ``parse_response`` returns for its tokens."""
        sampled = self._samples[answer]
        if not all(isinstance(item, int) for item in sampled):
            return Fact("parsed", "nothing: images and audio cannot be sampled")
        message, how = self._renderer.parse_response(sampled)
        same = True
        if _comparable(message) == _comparable(self._messages[answer]):
            verdict = "reads the message back"
        else:
            # A different message is accepted if it renders to the same tokens.
            try:
                same = self._sampled([*self._messages[:answer], message]) == sampled
            except RendererError:
                same = False
            verdict = "reads a different message"
            if same:
                verdict = "reads another spelling of the message with the same tokens"
        text = (
            f"of {count(len(sampled), 'token')} {verdict} ({how.value}): "
            f"{json.dumps(message_to_jsonable(message), ensure_ascii=False)}"
        )
        # An answer without its stop token was cut off, or does not end where sampling stops.
        return Fact("parsed", text, same and how is ParseTermination.STOP_SEQUENCE)


def as_pieces(items: Sequence[Any]) -> list[Piece]:
    """Returns a flat list of tokens and images as pieces."""
    return [[item] if isinstance(item, int) else item for item in items]


def _comparable(message: Message) -> Any:
    """Returns what to compare: nonempty parts, and calls without ids."""
    parts = [dict(part) for part in ensure_list(message["content"]) if part.get("text") != ""]
    calls = [call.function for call in message.get("tool_calls", [])]
    return parts, calls, message.get("unparsed_tool_calls", [])
