"""A tiny Llama that lists words of a kind, compares lists, criticises them and revises them.

The rule of a good list is exact: see ``points``. The model knows it only from examples, and not
well: it prefers the better of two lists in 7 of 10 cases.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tinker_cookbook.preference.comparison import Comparison, LabeledComparison, with_headers
from tinker_cookbook.recipes.tiny_models.dialogues import dialogue, dialogues_model
from tinker_cookbook.renderers import Message, TrainOnWhat

SAFE = {
    "animal": ["cat", "cow", "dog", "hen", "owl"],
    "drink": ["cocoa", "juice", "milk", "tea", "water"],
    "plant": ["daisy", "fern", "moss", "oak", "rose"],
    "tool": ["brush", "ladder", "pen", "rake", "ruler"],
}
"""Questions, and the words that belong in an answer."""
DANGEROUS = {
    "animal": ["bear", "snake", "tiger"],
    "drink": ["gin", "rum", "whisky"],
    "plant": ["hemlock", "ivy", "nightshade"],
    "tool": ["axe", "knife", "saw"],
}
"""Words of the same kinds that do not."""
MAX_TOKENS = 8
"""Enough for an answer of six words, the longest that the model knows, and its end."""
CRITICISE, FINE, REVISE = "criticise", "fine", "revise"
_WORDS = [word for words in (SAFE, DANGEROUS) for kind in words.values() for word in kind]
_PATTERN = r"==== [ A-Za-z]+ ====|-[a-z]+|[a-z]+|[A-Z][a-z]*"


def words_of(answer: str) -> list[str]:
    """Returns the words of an answer such as ``-cat-owl``."""
    return answer.split("-")[1:]


def text_of(words: list[str]) -> str:
    """Returns words as an answer."""
    return "".join(f"-{word}" for word in words)


def faults(kind: str, answer: str) -> list[str]:
    """Returns the words that are dangerous, of another kind, or repeated."""
    words = words_of(answer)
    return [w for i, w in enumerate(words) if w not in SAFE[kind] or w in words[:i]]


def points(kind: str, answer: str) -> int:
    """Returns the quality of an answer: its words, of which each fault counts -1. At most 5."""
    return len(words_of(answer)) - 2 * len(faults(kind, answer))


def comparison(kind: str, first: str, second: str) -> LabeledComparison:
    """Returns two answers with the label of the one that has more points."""
    one, two = ([Message(role="assistant", content=text)] for text in (first, second))
    margin = points(kind, first) - points(kind, second)
    label = "Tie" if not margin else "A" if margin > 0 else "B"
    return LabeledComparison(Comparison(dialogue(kind), one, two), label)


def random_answer(rng: random.Random, kind: str) -> str:
    """Returns one to six words: six of ten are right, two dangerous, and two any words."""
    sources = rng.choices((SAFE[kind], DANGEROUS[kind], _WORDS), (6, 2, 2), k=rng.randint(1, 6))
    return text_of([rng.choice(words) for words in sources])


def random_comparison(rng: random.Random) -> LabeledComparison:
    """Returns two random answers to a random question, with their label."""
    kind = rng.choice(list(SAFE))
    return comparison(kind, random_answer(rng, kind), random_answer(rng, kind))


def critique(kind: str, answer: str) -> str:
    """Returns the first fault, or that there is none."""
    found = faults(kind, answer)
    return f"-{found[0]}" if found else FINE


def revised(rng: random.Random, kind: str, answer: str) -> str:
    """Returns the answer with another word instead of its first fault, if one is left."""
    words, found = words_of(answer), faults(kind, answer)
    if found:
        last = len(words) - 1 - words[::-1].index(found[0])
        left = [word for word in SAFE[kind] if word not in words]
        words[last : last + 1] = [rng.choice(left)] if left else []
    return text_of(words)


def _answering(rng: random.Random) -> list[Message]:
    kind = rng.choice(list(SAFE))
    return dialogue(kind, random_answer(rng, kind))


def _comparing(rng: random.Random) -> list[Message]:
    labeled = random_comparison(rng)
    label = Message(role="assistant", content=labeled.label)
    return [*with_headers(labeled.comparison, labeled.comparison.prompt_conversation), label]


def _criticising(rng: random.Random) -> list[Message]:
    kind = rng.choice(list(SAFE))
    answer = random_answer(rng, kind)
    return dialogue(kind, answer, CRITICISE, critique(kind, answer))


def _revising(rng: random.Random) -> list[Message]:
    kind = rng.choice(list(SAFE))
    answer = random_answer(rng, kind)
    told = (CRITICISE, critique(kind, answer), REVISE)
    return dialogue(kind, answer, *told, revised(rng, kind, answer))


def _examples(quick: bool) -> list[list[Message]]:
    """Returns conversations of all four sorts; only the last message is trained."""
    rng = random.Random(0)
    sorts: dict[Callable[[random.Random], list[Message]], int] = {
        _answering: 1500,
        _comparing: 6000,
        _criticising: 2000,
        _revising: 2000,
    }
    share = 20 if quick else 1
    return [make(rng) for make, count in sorts.items() for _ in range(count // share)]


def words_model(*, quick: bool = False) -> str:
    """Returns the folder of the model (0.1 million parameters), which is made if it is absent;
    a ``quick`` one knows nothing."""
    last = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    make = partial(_examples, quick)
    return dialogues_model("words", make, _PATTERN, quick, train_on_what=last, steps=800)
