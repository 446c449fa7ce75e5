"""Everyday questions, and a judge without a model: the shorter of two answers is the better one.

It needs no download and no judgement, so it shows quickly whether learning from comparisons works.
It also shows the effect of a preference that ignores the content: answers get shorter, not better.
"""

from __future__ import annotations

from functools import cached_property

import chz

from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder, ComparisonSet
from tinker_cookbook.preference.types import (
    Comparison,
    LabeledComparison,
    PreferenceModel,
    PreferenceModelBuilder,
)
from tinker_cookbook.renderers import Message, get_text_content

INSTRUCTION = "Answer in one sentence."

QUESTIONS = (
    "Who are you?",
    "Why is the sky blue?",
    "What does a librarian do?",
    "How do bees make honey?",
    "What is a friend?",
    "Why do leaves fall in autumn?",
    "How does a bicycle stay upright?",
    "What is bread made of?",
    "Why do people sleep?",
    "What is a good breakfast?",
    "How does soap clean hands?",
    "What does the heart do?",
    "Why does ice float?",
    "What is a map for?",
    "How do birds find their way?",
    "Why do we shake hands?",
    "What makes a good teacher?",
    "How does a kite fly?",
    "Why is the sea salty?",
    "What is a holiday?",
    "How do plants drink?",
    "What does a judge do?",
    "Why do cats purr?",
    "What is money?",
)

HELD_OUT = (
    ("What is the moon?", "The moon is a ball of rock that goes around the earth."),
    ("Why do dogs bark?", "Dogs bark to warn, to greet and to get attention."),
    ("What does a baker do?", "A baker makes bread and cakes and sells them."),
    ("How do fish breathe?", "Fish take oxygen out of the water with their gills."),
    ("Why do we laugh?", "We laugh when we are amused and to be close to others."),
    ("What is a bridge for?", "A bridge lets people cross a river or a road."),
    ("How does rain form?", "Rain forms when water in clouds gathers into drops that fall."),
    ("What is a book?", "A book is a set of pages with words bound together."),
)
"""Questions to evaluate on, each with an answer of about ten words to be shorter than."""


class PreferenceModelShorter(PreferenceModel):
    """Prefers the answer with fewer characters, without blanks around it; equal lengths tie.

    An empty answer loses to any other, otherwise it would be the best.
    """

    async def __call__(self, comparison: Comparison) -> float:
        """Returns -1 if the first is better, 1 if the second is."""
        first, second = map(_length, (comparison.completion_A, comparison.completion_B))
        # Without this rule the shortest answer, and so the best, would be an empty one.
        if not (first and second):
            return float(bool(second)) - float(bool(first))
        return float(second < first) - float(first < second)


def _length(completion: list[Message]) -> int:
    return sum(len(get_text_content(message).strip()) for message in completion)


@chz.chz
class ShorterPreferenceModelBuilder(PreferenceModelBuilder):
    """Builder of the judge."""

    def __call__(self) -> PreferenceModel:
        """Returns the judge, which has no settings."""
        return PreferenceModelShorter()


@chz.chz
class ShorterComparisonBuilder(ComparisonDatasetBuilder):
    """The questions. Only held-out ones have an answer; the other of each pair is a longer one."""

    @cached_property
    def comparison_sets(self) -> tuple[ComparisonSet, ComparisonSet]:
        """Training and held-out questions."""
        return (
            ComparisonSet([_question(question, "") for question in QUESTIONS]),
            ComparisonSet([_question(question, answer) for question, answer in HELD_OUT]),
        )


def _question(question: str, answer: str) -> LabeledComparison:
    prompt: list[Message] = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": question},
    ]
    # The same text twice is longer, so A is the better answer.
    short, long = (
        [Message(role="assistant", content=text)] for text in (answer, f"{answer} {answer}")
    )
    return LabeledComparison(Comparison(prompt, short, long), "A")
