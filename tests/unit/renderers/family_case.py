"""One chat format beside the template it stands for: what every family's renderer is held to.

A module of ``families/`` lists the cases of a family in ``CASES``; ``test_families.py`` runs every
check on every case and makes the table of ``docs/06-renderers.md`` from what it saw.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis.strategies import SearchStrategy
from rendering_cases import openai

from tinker_cookbook.renderers import Renderer, get_renderer


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
    difference: str = ""
    """What differs from the template on purpose, and why; the conversations leave it out."""

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
        renderer = get_renderer(case.spec, tokenizer, **options)
        return cls(case, renderer, (templates / case.template).read_text(encoding="utf-8"))

    @property
    def tokenizer(self) -> Any:
        """The vocabulary."""
        return self.renderer.tokenizer

    def expected(self, messages: Sequence[Any], *, prompt: bool = False, **more: Any) -> list[int]:
        """Returns the template's tokens of a conversation, or of the prompt that follows it."""
        options = {**self.case.options, **(self.case.prompt_options if prompt else {}), **more}
        return self.tokenizer.apply_chat_template(
            [self.case.as_template(copy.deepcopy(message)) for message in messages],
            chat_template=self.template,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=prompt,
            **options,
        )

    def tokens(self, messages: Sequence[Any]) -> list[int]:
        """Returns the renderer's tokens of a conversation."""
        return self.renderer.build_supervised_example(messages)[0].to_ints()

    def prompt(self, messages: Sequence[Any]) -> list[int]:
        """Returns the renderer's prompt after a conversation."""
        return self.renderer.build_generation_prompt(messages).to_ints()

    def sampled(self, message: dict[str, Any]) -> list[int]:
        """Returns what a model writes to say ``message``, its stop token included."""
        example, weights = self.renderer.build_supervised_example([*self.case.question, message])
        pairs = zip(example.to_ints(), weights.tolist(), strict=True)
        return [token for token, weight in pairs if weight]
