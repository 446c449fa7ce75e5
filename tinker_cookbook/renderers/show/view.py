"""What there is to say of a conversation and its renderer, apart from how it is drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.content import normalize_messages
from tinker_cookbook.renderers.core.pieces import flat
from tinker_cookbook.renderers.core.train_on_what import TrainOnWhat, select_trained
from tinker_cookbook.renderers.show.answers import Answers
from tinker_cookbook.renderers.show.facts import (
    ExampleView,
    Fact,
    TokenRow,
    View,
    as_pieces,
    count,
    side_by_side,
)
from tinker_cookbook.renderers.show.sample import Conversation
from tinker_cookbook.renderers.show.template import TemplateSide
from tinker_cookbook.renderers.show.tokens import ShownToken, TokenReader, first_difference

_TAIL = 12  # tokens shown of a prompt


@dataclass(frozen=True)
class _Example:
    items: list[Any]
    tokens: list[ShownToken]

    def continues(self, prompt: Sequence[Any]) -> int:
        """How many tokens of the prompt begin the example, one more where it trains an answer to
        it."""
        at = first_difference(prompt, self.items[: len(prompt)])
        behind = self.tokens[len(prompt) : len(prompt) + 1]
        return len(prompt) + any(token.trained for token in behind) if at is None else at


@dataclass
class Viewer:
    """Looks at one conversation through one renderer."""

    renderer: Renderer
    conversation: Conversation
    train_on_what: TrainOnWhat
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def view(self) -> View:
        """Renders, compares and parses. Raises RendererError where the renderer refuses."""
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
        """The example of each trained answer: the one that continues its prompt, or comes nearest.

        Found by tokens, so that it holds for renderers that split in ways of their own.
        """
        found: dict[int, int] = {}
        for answer in self._trained_answers:
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
        for_template = self.conversation.for_template or normalize_messages(messages)
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
        """Whether the example of an answer continues its prompt with what is sampled."""
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
        """By the first two answers in a row that do not share an example."""
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
