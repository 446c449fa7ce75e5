"""One chat format and the template it stands for: what every family's renderer is held to.

A module of ``families/`` lists the cases of a family in ``CASES``; ``test_families.py`` runs every
check on every case and makes the table of ``docs/renderers.md`` from what it saw.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from rendering_cases import ended, openai

from tinker_cookbook.renderers import (
    Renderer,
    StreamingMessageHeader,
    get_renderer,
    message_to_jsonable,
)


@dataclass(frozen=True)
class Case:
    """A renderer, the template it must equal, and the conversations both are given."""

    model: str
    """Whose template it is, for the table."""
    spec: str
    """The renderer's name, options included."""
    tokenizer: str
    """Folder of the vocabulary."""
    template: str
    """File of the template, relative to the folder of all vocabularies."""
    conversations: SearchStrategy[list[dict[str, Any]]]
    """Every conversation the template takes: roles in any legal order, empty content, unicode,
    names of control tokens in user text, thinking, tool calls and results where there are any.
    Not all of them end with an answer."""
    answers: SearchStrategy[dict[str, Any]]
    """Assistant messages that parse(render(message)) must give back, calls and thinking among
    them where the format has them."""
    added_tokens: Sequence[str] = ()
    """Control tokens that a stand-in vocabulary lacks. Not empty: the model's own vocabulary could
    not be had, and another one stands in for it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the template."""
    prompt_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the template where it makes a prompt."""
    as_template: Callable[[dict[str, Any]], dict[str, Any]] = openai
    """A message as the template takes it."""
    question: tuple[dict[str, Any], ...] = ({"role": "user", "content": "Hi"},)
    """What precedes an answer where it is rendered alone."""
    declares_tools: Mapping[str, Any] | None = None
    """Arguments of the template where it declares tools, None where it cannot."""
    stop_behind: Callable[[dict[str, Any]], str] = lambda message: ""
    """The stop token behind a message at the end of a supervised example, for formats in which it
    is the beginning of the next message: the template cannot know that one."""
    corrections: Mapping[str, str] = field(default_factory=dict)
    """Text of the template and what is read in its place: where the copy at hand is not what the
    model ships, or does not run in the sandbox in which templates are run. The family's module
    says why for each."""
    image_processor: Callable[[], Any] | None = None
    """Makes transformers' processor of images, where messages have images (of Pillow)."""
    image_token: str = "<|image_pad|>"
    """What the template writes once for each image, and processors once for each of its tokens."""
    prompt_end: str = ""
    """What a prompt ends with where it has already begun the answer: tokens begin anew behind it,
    as the model cannot be asked to continue from a token that spans the border."""
    train_on_what: str = "last_assistant_message"
    """What is trained where tokens alone are compared: ``all_tokens`` where a renderer refuses to
    train an answer that its template writes otherwise once the conversation goes on."""
    difference: str = ""
    """What differs from the template on purpose, and why; the conversations leave it out."""

    @property
    def stand_in(self) -> bool:
        """Whether another vocabulary stands in for the model's own, which could not be had."""
        return bool(self.added_tokens) or self.template.startswith("templates_only/")

    @property
    def label(self) -> str:
        """Names the case in the names of tests."""
        path = Path(self.template)
        return f"{self.spec}-{path.parent.name}-{path.stem.removeprefix('chat_template')}"


@dataclass(frozen=True)
class Side:
    """Both sides of a case, loaded: the renderer, and the template on the same vocabulary."""

    case: Case
    renderer: Renderer
    template: str

    @classmethod
    def load(cls, case: Case, tokenizer: Any, templates: Path, **options: Any) -> Side:
        """Returns both sides; ``options`` are the renderer's."""
        if case.image_processor:
            options["image_processor"] = case.image_processor()
        renderer = get_renderer(case.spec, tokenizer, **options)
        template = (templates / case.template).read_text(encoding="utf-8")
        for wrong, right in case.corrections.items():
            assert wrong in template, f"{case.template}: {wrong!r} is no longer in the template"
            template = template.replace(wrong, right)
        return cls(case, renderer, template)

    @property
    def tokenizer(self) -> Any:
        """The vocabulary."""
        return self.renderer.tokenizer

    def expected(self, messages: Sequence[Any], *, prompt: bool = False, **more: Any) -> list[int]:
        """Returns the template's tokens of a conversation, or of the prompt that follows it."""
        options = {**self.case.options, **(self.case.prompt_options if prompt else {}), **more}
        border = self.case.prompt_end
        found = self.tokenizer.apply_chat_template(
            [self.case.as_template(message) for message in messages],
            chat_template=self.template,
            tokenize=not border,
            return_dict=False,
            add_generation_prompt=prompt,
            **options,
        )
        if border:
            # The prompt's own end, and that before a last answer: history is one text.
            ends = [match.end() for match in re.finditer(re.escape(border), found)]
            last = prompt + (bool(messages) and messages[-1]["role"] == "assistant")
            cuts = [0, *ends[len(ends) - last :], len(found)]
            runs = [found[a:b] for a, b in itertools.pairwise(cuts)]
            encoded = (self.tokenizer.encode(run, add_special_tokens=False) for run in runs)
            found = [token for run in encoded for token in run]
        return self._with_images(found if prompt else ended(self.tokenizer, found), messages)

    def _with_images(self, ids: list[int], messages: Sequence[Any]) -> list[int]:
        """Repeats each image's token as often as transformers' processor does."""
        contents = (m["content"] for m in messages if isinstance(m["content"], list))
        images = [part["image"] for parts in contents for part in parts if "image" in part]
        if not images:
            return ids
        pad = self.tokenizer.convert_tokens_to_ids(self.case.image_token)
        assert ids.count(pad) == len(images)
        processor = self.renderer.image_processor
        grids = processor(images=images, return_tensors="np")["image_grid_thw"]
        counts = iter((grids.prod(axis=1) // processor.merge_size**2).tolist())
        return [t for token in ids for t in [token] * (next(counts) if token == pad else 1)]

    def ids(self, model_input: Any) -> list[int]:
        """Returns the tokens of a model input, an image as its token repeated."""
        pad = self.tokenizer.convert_tokens_to_ids(self.case.image_token)
        runs = (getattr(c, "tokens", None) or [pad] * c.length for c in model_input.chunks)
        return [token for run in runs for token in run]

    def tokens(self, messages: Sequence[Any]) -> list[int]:
        """Returns the renderer's tokens of a conversation."""
        what = self.case.train_on_what
        return self.ids(self.renderer.build_supervised_example(messages, what)[0])

    def stop_behind(self, messages: Sequence[Any]) -> list[int]:
        """Returns the tokens that a supervised example has behind those of the template."""
        token = self.case.stop_behind(messages[-1])
        return self.tokenizer.encode(token, add_special_tokens=False)

    def as_plain(self, messages: Sequence[Any]) -> list[Any]:
        """Returns the messages as JSON values, to look for names in all of their text."""
        return [message_to_jsonable(message) for message in messages]

    def prompt(self, messages: Sequence[Any]) -> list[int]:
        """Returns the renderer's prompt after a conversation."""
        return self.ids(self.renderer.build_generation_prompt(messages))

    def sampled(self, message: dict[str, Any]) -> list[int]:
        """Returns what a model writes to say ``message``, its stop token included."""
        example, weights = self.renderer.build_supervised_example([*self.case.question, message])
        pairs = zip(example.to_ints(), weights.tolist(), strict=True)
        return [token for token, weight in pairs if weight]


def assert_any_cut(renderer: Renderer, tokens: Sequence[int], data: Any) -> None:
    """The parser reads the same message of the tokens in any cut, and in pieces that add up."""
    message, how = renderer.parse_response(tokens)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=6)))
    parser = renderer.response_parser()
    deltas = []
    for start, end in itertools.pairwise([0, *cuts, len(tokens)]):
        deltas += parser.feed(tokens[start:end])
    deltas += parser.finish()
    assert (parser.message, parser.termination) == (message, how)
    header, *singles, last = renderer.parse_response_streaming(iter(tokens))
    assert header == StreamingMessageHeader(role="assistant")
    assert last == message
    content = message["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    written = [part.get("text", part.get("thinking")) for part in parts]
    thinks = any(part["type"] == "thinking" for part in parts)
    for stream in (deltas, singles):
        if not thinks and any(hasattr(delta, "thinking") for delta in stream):
            continue  # the response never left the prompt's thinking: read as text at its end
        pieces = defaultdict(str)
        for delta in stream:
            pieces[delta.content_index] += getattr(delta, "text", "") or delta.thinking
        assert [pieces[i] for i in sorted(pieces)] == [text for text in written if text]
