"""Analyses one conversation: its tokens and weights, its prompts, and what is parsed from them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from tinker_cookbook.display import special_ids
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.codec import TextCodec
from tinker_cookbook.renderers.core.messages import Message, ToolSpec, message_to_jsonable
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


@dataclass(frozen=True)
class Fact:
    """Finding, with rows of tokens below it; ``good`` is None if it is neither a success nor a
    failure."""

    label: str
    text: str
    good: bool | None = None
    rows: Sequence[tuple[str, Sequence[ShownToken]]] = ()


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


def show(
    renderer: Renderer,
    conversation: Conversation,
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    template_options: Mapping[str, Any] | None = None,
    why: str = "asked for",
) -> View:
    """Returns the view of a conversation; ``why`` states how the renderer was chosen.

    Raises RendererError for messages that the chat format cannot express.
    """
    return Viewer(renderer, conversation, train_on_what, template_options or {}).view(why)


def read_tokens(
    renderer: Renderer, pieces: Sequence[Piece], weights: Sequence[float] | None = None
) -> list[ShownToken]:
    """Returns the tokens and images of ``pieces``; ``weights`` has one value per position."""
    control, items = special_ids(renderer.tokenizer), flat(pieces)
    # All tokens at once, because a character may consist of several.
    texts = iter(split_text(renderer.codec, [item for item in items if isinstance(item, int)]))
    shown, position = list[ShownToken](), 0
    for item in items:
        weight = 0.0 if weights is None else float(weights[position])
        if isinstance(item, int):
            shown.append(ShownToken(item, next(texts), weight, item in control))
            position += 1
        else:  # an image, which has one weight for each of its positions
            shown.append(ShownToken(None, f"[{item.type}: {length(item)} tokens]", weight, True))
            position += length(item)
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


@dataclass(frozen=True)
class _Example:
    items: list[Any]
    tokens: list[ShownToken]
    size: int

    def continues(self, prompt: Sequence[Any]) -> int:
        """Counts the prompt tokens that begin the example, plus 1 if the next is trained."""
        at = first_difference(prompt, self.items[: len(prompt)])
        following = self.tokens[len(prompt) : len(prompt) + 1]
        return len(prompt) + any(token.weight for token in following) if at is None else at


class Viewer:
    """Builds the view of one conversation with one renderer."""

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
        self._selected = select_trained(conversation.messages, train_on_what)
        self._trained_answers = [i for i in answers if self._selected[i]]
        # Prompts and sampled tokens of the answers, as inference produces them.
        self._prompts = {
            end: flat(renderer.build_generation_prompt(self._messages[:end]).chunks)
            for end in {*self._trained_answers, self._last}
        }
        self._samples = {i: self._sampled(self._messages[: i + 1]) for i in self._trained_answers}
        made = renderer.build_merged_examples(conversation.messages, train_on_what)
        self._examples = [
            _Example(
                flat(tokens.chunks),
                read_tokens(renderer, tokens.chunks, weights.tolist()),
                tokens.length,
            )
            for tokens, weights in made
        ]
        # The example of an answer is the one with the longest common prefix with its prompt.
        # Tokens are compared, so that a renderer's own split is supported.
        self._example_of: dict[int, int] = {}
        for answer in self._trained_answers:
            reach = [example.continues(self._prompts[answer]) for example in self._examples]
            self._example_of[answer] = reach.index(max(reach))

    def view(self, why: str) -> View:
        """Returns the findings about the conversation and about each example."""
        renderer, messages = self._renderer, self._conversation.messages
        stops = [
            f"{renderer.codec.decode([stop])} (id {stop})"
            if isinstance(stop, int)
            else f"the text {json.dumps(stop, ensure_ascii=False)}"
            for stop in renderer.get_stop_sequences()
        ]
        extension = (
            "holds: each prompt begins with all tokens before it"
            if renderer.has_extension_property
            else "does not hold: earlier messages are rendered differently than sampled, so "
            "answers may need separate examples"
        )
        size = sum(example.size for example in self._examples)
        trained = sum(bool(token.weight) for e in self._examples for token in e.tokens)
        facts = [
            Fact("model", renderer.model_name or getattr(renderer.tokenizer, "name_or_path", "")),
            Fact("renderer", f"{renderer.spec}, {why}"),
            Fact("messages", f"{len(messages)}, {self._conversation.source}"),
            Fact("trained", f"train_on_what={self._train_on_what.value}"),
            Fact("stops at", ", ".join(stops)),
            Fact("extension", extension),
            self._template(),
            self._prompt(),
            Fact("tokens", f"{size:,} tokens, {trained:,} of them trained"),
            self._number(),
        ]
        return View(facts, [self._example_view(i) for i in range(len(self._examples))])

    def _sampled(self, messages: Sequence[Message]) -> list[Any]:
        """Returns the tokens that the model samples for the last message, with the stop token."""
        what = TrainOnWhat.LAST_ASSISTANT_MESSAGE
        # In the last example only the last message is trained.
        tokens, weights = self._renderer.build_merged_examples(messages, what)[-1]
        shown = read_tokens(self._renderer, tokens.chunks, weights.tolist())
        pairs = zip(flat(tokens.chunks), shown, strict=True)
        return [item for item, token in pairs if token.weight]

    def _side_by_side(self, *sides: tuple[str, list[Any]]) -> list[tuple[str, list[ShownToken]]]:
        """Returns the tokens around the first difference of two lists, one row for each list."""
        at = first_difference(sides[0][1], sides[1][1]) or 0
        start, stop = max(0, at - _BEFORE), at + _AFTER
        # Read more tokens than are shown, because they may complete a character.
        return [
            (label, read_tokens(self._renderer, as_pieces(items[: stop + _BEFORE]))[start:stop])
            for label, items in sides
        ]

    def _template(self) -> Fact:
        """Compares the conversation and the last prompt with the model's own chat template."""
        if not getattr(self._renderer.tokenizer, "chat_template", None):
            return Fact("template", "none: the tokenizer has no chat template to compare with")
        # Templates expect call arguments as text or as objects; keep the form that matches better.
        tried = [self._compare_with_template(parsed) for parsed in (False, True)]
        return max(tried, key=lambda found: found[0])[1]

    def _compare_with_template(self, parsed: bool) -> tuple[float, Fact]:
        """Returns the number of equal tokens at the beginning (infinite if all are equal, -1 if the
        template raises an error), and the finding; ``parsed`` passes call arguments as objects."""
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
        note = f" (with {json.dumps(given)})" if given else ""
        for name, part, ours in (
            ("conversation", for_template, flat(history.chunks)),
            ("prompt for the last answer", for_template[:prompt_end], self._prompts[self._last]),
        ):
            written = [renderer.to_openai_message(message) for message in part]
            try:
                theirs: Any = renderer.tokenizer.apply_chat_template(
                    [with_parsed_arguments(m) for m in written] if parsed else written,
                    tools=[as_openai_tool(tool) for tool in self._conversation.tools] or None,
                    tokenize=True,
                    return_dict=False,
                    add_generation_prompt=name != "conversation",
                    # By default Llama 3.1 declares tools in the question, unlike any renderer.
                    **{"tools_in_user_message": False, **given},
                )
            except Exception as error:  # a template may raise anything
                return -1, Fact("template", f"no: the template refuses the {name}: {error}", False)
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
            if at is not None:
                text = f"no: the {name} differs at token {at} of {len(ours):,} and {len(theirs):,}"
                rows = self._side_by_side(("renderer", ours), ("template", theirs))
                return at, Fact("template", text + note, False, rows)
        text = "yes: conversation and prompt are, token by token, those of the model's own chat "
        return math.inf, Fact("template", f"{text}template{note}", True)

    def _prompt(self) -> Fact:
        last, prompt = self._last, self._prompts[self._last]
        # The end of a prompt shows how the answer is opened.
        tail = ("", read_tokens(self._renderer, as_pieces(prompt))[-_TAIL:])
        size = f"{sum(map(length, as_pieces(prompt))):,} tokens"
        if last not in self._example_of:
            why = "this conversation has none" if last == len(self._messages) else "not trained on"
            return Fact("prompt", f"{size}, for the next answer: {why}", None, [tail])
        where = f"example {self._example_of[last] + 1}"
        fact = self._continues(last, where if len(self._examples) > 1 else "the example")
        text = f"{size}, for message {last} (the last answer); {fact.text}"
        return Fact("prompt", text, fact.good, [tail, *fact.rows])

    def _continues(self, answer: int, where: str) -> Fact:
        """Checks that the example of an answer is its prompt followed by its sampled tokens."""
        example, prompt = self._examples[self._example_of[answer]], self._prompts[answer]
        sampled = [*prompt, *self._samples[answer]]
        at = first_difference(sampled, example.items[: len(sampled)])
        if at is not None:
            rows = self._side_by_side(("sampled", sampled), ("example", example.items))
            return Fact("", f"it is not how {where} begins: they differ at token {at}", False, rows)
        weights = [token.weight for token in example.tokens[: len(sampled)]]
        # The prompt is given at inference, so it is trained only by all_tokens.
        prompt_too = weights[len(prompt) - 1] and self._train_on_what is not TrainOnWhat.ALL_TOKENS
        if prompt_too or not all(weights[len(prompt) :]):
            return Fact("", f"{where} begins with it, but training does not begin after it", False)
        return Fact("", f"{where} begins with it, and training begins right after it", True)

    def _number(self) -> Fact:
        """Explains the number of examples."""
        if not any(self._selected):  # training refuses such a conversation
            roles = ", ".join(message["role"] for message in self._messages)
            text = f"train_on_what={self._train_on_what.value} selects none of the messages: "
            return Fact("examples", f"{text}{roles}; training refuses such a row", False)
        # The first two adjacent answers in different examples show the reason.
        for before, after in pairwise(self._trained_answers):
            if self._example_of[before] != self._example_of[after]:
                sampled = [*self._prompts[before], *self._samples[before]]
                prompt = self._prompts[after]
                at = first_difference(sampled, prompt[: len(sampled)])
                text = (
                    f"{len(self._examples)}, because the prompt of message {after} does not begin "
                    f"with message {before} as it was sampled; they differ at token {at}"
                )
                rows = self._side_by_side(("sampled", sampled), ("prompt", prompt))
                return Fact("examples", text, None, rows)
        return Fact("examples", f"{len(self._examples)}")

    def _example_view(self, number: int) -> ExampleView:
        example = self._examples[number]
        answers = [i for i in self._trained_answers if self._example_of[i] == number]
        trained = sum(bool(token.weight) for token in example.tokens)
        title = (
            f"example {number + 1} of {len(self._examples)}: {example.size:,} tokens, "
            f"{trained:,} trained"
        )
        if answers:
            title += f" (message{'s' * (len(answers) > 1)} {', '.join(map(str, answers))})"
        facts: list[Fact] = []
        for answer in answers:
            found = self._continues(answer, "this example")
            size = sum(map(length, as_pieces(self._prompts[answer])))
            text = f"prompt of {size:,} tokens: {found.text}"
            facts += [Fact(f"message {answer}", text, found.good, found.rows), self._parsed(answer)]
        return ExampleView(title, example.tokens, facts)

    def _parsed(self, answer: int) -> Fact:
        """Checks that ``parse_response`` returns a message that renders to the sampled tokens."""
        sampled = self._samples[answer]
        message, how = self._renderer.parse_response(sampled)
        try:
            same = self._sampled([*self._messages[:answer], message]) == sampled
        except RendererError:
            same = False
        written = json.dumps(message_to_jsonable(message), ensure_ascii=False)
        verdict = "reads the message back" if same else "reads a message with other tokens"
        # An answer without its stop token was cut off, or does not end where sampling stops.
        good = same and how is ParseTermination.STOP_SEQUENCE
        text = f"of {len(sampled):,} tokens {verdict} ({how.value}): {written}"
        return Fact("parsed", text, good)


def as_pieces(items: Sequence[Any]) -> list[Piece]:
    """Returns a flat list of tokens and images as pieces."""
    return [[item] if isinstance(item, int) else item for item in items]
