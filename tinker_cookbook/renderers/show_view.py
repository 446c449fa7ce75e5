"""What there is to say of a conversation and its renderer, apart from how it is drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.content import ensure_list, message_to_jsonable, normalize_messages
from tinker_cookbook.renderers.messages import Message
from tinker_cookbook.renderers.parse_outcome import ParseTermination
from tinker_cookbook.renderers.pieces import Piece, flat
from tinker_cookbook.renderers.show_facts import (
    ExampleView,
    Fact,
    TokenRow,
    View,
    as_pieces,
    count,
    side_by_side,
)
from tinker_cookbook.renderers.show_sample import Conversation
from tinker_cookbook.renderers.show_template import TemplateSide
from tinker_cookbook.renderers.show_tokens import ShownToken, TokenReader, first_difference
from tinker_cookbook.renderers.train_on_what import TrainOnWhat, select_trained

_TAIL = 12  # tokens shown of a prompt


@dataclass(frozen=True)
class _Example:
    pieces: Sequence[Piece]
    tokens: list[ShownToken]
    trains: list[int]
    end: int

    @cached_property
    def items(self) -> list[Any]:
        return flat(self.pieces)


@dataclass
class Viewer:
    """Looks at one conversation through one renderer."""

    renderer: Renderer
    conversation: Conversation
    train_on_what: TrainOnWhat
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def view(self) -> View:
        """Renders, compares and parses. Raises RendererError where the renderer refuses."""
        facts = [
            self._stops(),
            self._extension(),
            self._template(),
            self._prompt(),
            *self._counts(),
        ]
        return View(facts, [self._example_view(i) for i in range(len(self._examples))])

    @cached_property
    def _reader(self) -> TokenReader:
        return TokenReader(self.renderer)

    @property
    def _messages(self) -> list[Message]:
        return self.conversation.messages

    @cached_property
    def _normal(self) -> list[Message]:
        return self.renderer._normalize(self._messages)

    @cached_property
    def _trained(self) -> list[bool]:
        return select_trained(self._messages, self.train_on_what)

    @cached_property
    def _ends(self) -> list[int]:
        """The last message of each example, nothing where one example holds them all."""
        if self.train_on_what is TrainOnWhat.ALL_TOKENS:
            return []
        return self.renderer._example_ends(self._normal, self._trained)

    @cached_property
    def _examples(self) -> list[_Example]:
        made = self.renderer.build_supervised_examples(self._messages, self.train_on_what)
        ends = self._ends
        if len(ends) != len(made):
            ends = [len(self._messages) - 1] * len(made)
        found, done = [], -1
        for (model_input, weights), end in zip(made, ends, strict=True):
            trains = [i for i in range(done + 1, end + 1) if self._trained[i]]
            tokens = self._reader.read(model_input.chunks, weights.tolist())
            found.append(_Example(model_input.chunks, tokens, trains, end))
            done = end
        return found

    def _prompt_items(self, before: int) -> list[Any]:
        return flat(self.renderer.build_generation_prompt(self._messages[:before]).chunks)

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
        for_template = self.conversation.for_template or normalize_messages(self._messages)
        prompt_end = self._last_answer - len(self._messages) + len(for_template)
        side = TemplateSide(self.renderer, self.conversation.tools, self.template_options)
        whole, _ = self._rendered(self._normal)
        prompt = self._prompt_items(self._last_answer)
        found = side.compare(for_template, whole, for_template[:prompt_end], prompt)
        if found.ours is None or found.theirs is None:
            return Fact("template", found.text, found.equal)
        rows = side_by_side(self._reader, ("renderer", found.ours), ("template", found.theirs))
        return Fact("template", found.text, found.equal, rows)

    def _same_tokens(self, parsed: Message, sampled: list[int], answer: int) -> bool:
        """Whether what was read, put in place of the answer, is sampled again."""
        try:
            return self._sampled([*self._normal[:answer], parsed]) == sampled
        except RendererError:
            return False

    def _sampled(self, messages: Sequence[Message]) -> list[Any]:
        """What the model says where the last message is its answer: what is trained of it."""
        items, tokens = self._rendered(messages, len(messages) - 1)
        return [item for item, token in zip(items, tokens, strict=True) if token.trained]

    def _rendered(
        self, messages: Sequence[Message], trained: int | None = None
    ) -> tuple[list[Any], list[ShownToken]]:
        chosen = [i == trained for i in range(len(messages))]
        what = TrainOnWhat.LAST_ASSISTANT_MESSAGE
        model_input, weights = self.renderer._example(messages, chosen, what)
        return flat(model_input.chunks), self._reader.read(model_input.chunks, weights.tolist())

    @cached_property
    def _last_answer(self) -> int:
        """Index of the last answer, or of the one to come."""
        roles = [message["role"] for message in self._messages]
        found = [i for i, role in enumerate(roles) if role == "assistant"]
        return found[-1] if found else len(roles)

    def _prompt(self) -> Fact:
        prompt = self._prompt_items(self._last_answer)
        tokens = self._reader.read(as_pieces(prompt))
        tail = TokenRow("", tokens[-_TAIL:], cut_before=len(tokens) > _TAIL)
        size = count(len(tokens), "token")
        if self._last_answer == len(self._messages):
            text = f"{size}, for the answer to come: this conversation has none"
            return Fact("prompt", text, None, [tail])
        number, example = self._example_of(self._last_answer)
        where = f"example {number}" if len(self._examples) > 1 else "the example"
        fact = self._prefix(prompt, self._last_answer, example, where)
        text = f"{size}, for message {self._last_answer} (the last answer); {fact.text}"
        return Fact("prompt", text, fact.good, [tail, *fact.rows])

    def _example_of(self, message: int) -> tuple[int, _Example]:
        numbered = list(enumerate(self._examples, start=1))
        return next((pair for pair in numbered if message in pair[1].trains), numbered[-1])

    def _prefix(self, prompt: list[Any], answer: int, example: _Example, where: str) -> Fact:
        """Whether the example continues the prompt with what is trained."""
        if answer not in example.trains:
            return Fact("", "this answer is not trained on")
        at = first_difference(prompt, example.items[: len(prompt)])
        if at is not None:
            rows = side_by_side(self._reader, ("prompt", prompt), ("example", example.items))
            return Fact("", f"it is not how {where} begins: they differ at token {at}", False, rows)
        behind = example.tokens[len(prompt) : len(prompt) + 1]
        before = example.tokens[len(prompt) - 1 : len(prompt)]
        if not all(token.trained for token in behind):
            return Fact("", f"{where} begins with it, but the token behind it has weight 0", False)
        prompts_too = self.train_on_what is TrainOnWhat.ALL_TOKENS
        if any(token.trained for token in before) and not prompts_too:
            return Fact("", f"{where} begins with it, but its last token is trained on", False)
        return Fact("", f"{where} begins with it, and training begins right behind it", True)

    def _counts(self) -> list[Fact]:
        tokens = sum(len(example.tokens) for example in self._examples)
        trained = sum(t.trained for example in self._examples for t in example.tokens)
        number = count(len(self._examples), "example")
        sizes = f"{count(tokens, 'token')}, {trained:,} of them trained"
        return [Fact("tokens", f"{sizes}, in {number}"), self._why()]

    def _why(self) -> Fact:
        if not any(self._trained):
            roles = ", ".join(message["role"] for message in self._messages)
            text = f"train_on_what={self.train_on_what.value} selects none of the messages: {roles}"
            return Fact("examples", f"{text}; training refuses such a row", False)
        if len(self._examples) > 1:
            return self._why_split()
        answers = sum(self._trained[i] for i in self._answers)
        if self.train_on_what is TrainOnWhat.ALL_TOKENS:
            reason = "all_tokens trains prompts too and is never split"
        elif answers < 2:
            reason = f"{'one answer' if answers else 'no answer'} is trained on"
        elif self.renderer.has_extension_property:
            reason = "the extension property holds"
        else:
            reason = "here each prompt begins with all tokens up to the answer before it"
        return Fact("examples", f"1, because {reason}")

    @property
    def _answers(self) -> list[int]:
        return [i for i, m in enumerate(self._messages) if m["role"] == "assistant"]

    def _why_split(self) -> Fact:
        first = self._examples[0].end
        later = next(i for i in self._examples[1].trains if i > first)
        sampled, _ = self._rendered(self._normal[: first + 1])
        prompt = self._prompt_items(later)
        at = first_difference(sampled, prompt[: len(sampled)])
        text = f"{len(self._examples)}, because the prompt of message {later} does not begin with "
        text += f"the tokens up to message {first} as they were sampled"
        if at is None:
            return Fact("examples", text)
        rows = side_by_side(self._reader, ("sampled", sampled), ("prompt", prompt))
        return Fact("examples", f"{text}; they differ at token {at}", None, rows)

    def _example_view(self, number: int) -> ExampleView:
        example = self._examples[number]
        facts = [fact for i in example.trains for fact in self._answer_facts(i, example)]
        trained = sum(token.trained for token in example.tokens)
        title = (
            f"example {number + 1} of {len(self._examples)}: {count(len(example.tokens), 'token')}"
            f", {trained:,} trained"
        )
        if example.trains:
            plural = "s" if len(example.trains) > 1 else ""
            title += f" (message{plural} {', '.join(map(str, example.trains))})"
        return ExampleView(title, example.tokens, facts)

    def _answer_facts(self, answer: int, example: _Example) -> list[Fact]:
        message = self._messages[answer]
        if message["role"] != "assistant":
            return []
        prompt = self._prompt_items(answer)
        found = self._prefix(prompt, answer, example, "this example")
        size = count(len(prompt), "token")
        facts = [Fact(f"message {answer}", f"prompt of {size}: {found.text}", found.good)]
        if not found.good:
            return [Fact(facts[0].label, facts[0].text, False, found.rows)]
        sampled = self._sampled(self._normal[: answer + 1])
        at = first_difference(sampled, example.items[len(prompt) :][: len(sampled)])
        if at is not None:
            text = f"{facts[0].text}; but then the answer is not as it is sampled"
            sides = ("sampled", [*prompt, *sampled]), ("example", example.items)
            return [Fact(facts[0].label, text, False, side_by_side(self._reader, *sides))]
        if all(isinstance(item, int) for item in sampled):
            facts.append(self._parsed(sampled, answer))
        return facts

    def _parsed(self, sampled: list[int], answer: int) -> Fact:
        parsed, how = self.renderer.parse_response(sampled)
        same = True
        if _essence(parsed) == _essence(self._messages[answer]):
            verdict = "reads the message back"
        elif same := self._same_tokens(parsed, sampled, answer):
            verdict = "reads another spelling of the message, whose tokens are the same"
        else:
            verdict = "reads something else than the message"
        text = (
            f"of {count(len(sampled), 'token')} {verdict} ({how.value}): "
            f"{json.dumps(message_to_jsonable(parsed), ensure_ascii=False)}"
        )
        good = same and how is ParseTermination.STOP_SEQUENCE
        return Fact("parsed", text, good)


def _essence(message: Message) -> Any:
    """What a message says: parts that are not empty, calls without their ids."""
    parts = [dict(part) for part in ensure_list(message["content"]) if part.get("text") != ""]
    calls = [call.function for call in message.get("tool_calls", [])]
    return parts, calls, message.get("unparsed_tool_calls", [])
