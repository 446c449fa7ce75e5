"""A small invented world: documents about its towns, people and ships, and questions.

All facts are invented, so no model knows an answer without a search. Another seed gives another
world with the same names and other facts; the example data are the world of ``EXAMPLE_SEED``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.recipes.search_tool.corpus import Document

EXAMPLE_SEED = 20


def _words(text: str, separator: str = " ") -> list[str]:
    return text.replace("\n", " ").split(separator)


TOWNS = _words(
    """Aldmere Arnvik Ashlow Balloch Bexmoor Brackwell Calder Carnholt Dunmarsh Eastfold Elmscar
Fennbury Galtby Garrow Hallin Hexby Holmwick Ivelstone Jarroway Kelldale Kirkfen Lamwich Lindhorn
Marfleet Merrowby Nettlecombe Norsey Oakenport Orrest Penwith Quarnford Ravelsea Redmire Saltash
Selby Skarness Tamwood Thornaby Ulverton Vennick Wexcombe Yarmoor"""
)
FIRST_NAMES = _words(
    """Ada Agnes Alva Bela Bram Cora Daan Edda Elias Emil Fenna Gideon Greta Hanno Ida
Ilse Jonas Jorun Karin Lars Lena Lotte Mads Mara Milo Nora Olaf Oskar Petra Ravi Rosa Runa Silas
Sonja Tilda Tomas Ulla Vera Wanda Yusuf"""
)
LAST_NAMES = _words(
    """Abel Bakke Brenn Cole Dahl Ekman Falk Finch Gray Hale Holm Iversen Juhl Kemp Lund
Marsh Moe Nash Nilsen Oake Paget Quist Rask Roth Sand Sorley Stahl Thorn Tveit Ulven Vance Vogel
Ward Weir Winter Yates Zander Ames Birk Croft"""
)
SHIPS = _words(
    """Amber Gull, Black Heron, Bold Sparrow, Copper Star, Dawn Runner, Evening Tide,
Fair Ellen, Golden Carp, Grey Otter, High Water, Iron Thistle, Jolly Miller, Kind Ada,
Long Summer, Maiden Rose, Night Lark, Old Faithful, Proud Mary, Quiet Hour, Red Falcon,
Silver Eel, Swift Annie, Tall Pine, Third Wish, True North, Velvet Moon,
Wandering Jack, White Badger, Wind Flower, Young Harald""",
    ", ",
)
ISLANDS = ("Tarn", "Osk", "Sandrey", "Hollin", "Veyra", "Brona")
PRODUCTS = _words(
    """glass cheese rope paper honey cider pottery lace bells knives salt boots candles
lanterns apples wool ink clocks baskets drums soap kites tea violins"""
)
JOBS = _words(
    """painter botanist baker teacher engineer poet geologist carpenter surgeon weaver printer
astronomer gardener composer beekeeper judge"""
)
NUM_PEOPLE = 60


@dataclass(frozen=True)
class Question:
    """A question, its answer, and the searches that lead to it."""

    text: str
    answer: str
    kind: str
    """``one_hop``: one document has the answer; ``two_hop``: the first names the second."""
    queries: tuple[str, ...]
    documents: tuple[str, ...]
    """Ids of the documents that the searches should find."""
    about: str
    """The town, person or ship that the question names."""


@dataclass(frozen=True)
class World:
    """Documents, and all questions about them."""

    documents: list[Document]
    questions: list[Question]


@dataclass(frozen=True)
class _Facts:
    towns: dict[str, tuple[str, str, str, str]]
    """Island, year, product, mayor."""
    people: dict[str, tuple[str, str, str]]
    """Home town, job, year of birth."""
    ships: dict[str, tuple[str, str, str]]
    """Town, year, captain."""


def make_world(seed: int) -> World:
    """Returns a world of 42 towns, 60 people and 30 ships; its facts depend on ``seed``."""
    rng = random.Random(seed)
    facts = _facts(rng)
    return World(_documents(facts, rng), _questions(facts))


def _facts(rng: random.Random) -> _Facts:
    first, last = rng.sample(FIRST_NAMES, len(FIRST_NAMES)), rng.sample(LAST_NAMES, len(LAST_NAMES))
    # Each first name and each last name occurs twice at most, never twice with each other.
    names = [f"{a} {b}" for a, b in zip(first, last, strict=True)]
    names += [f"{a} {b}" for a, b in zip(first, last[7:] + last[:7], strict=True)]
    names = names[:NUM_PEOPLE]
    return _Facts(
        towns={
            town: (rng.choice(ISLANDS), str(rng.randint(1120, 1790)), rng.choice(PRODUCTS), mayor)
            for town, mayor in zip(TOWNS, names, strict=False)
        },
        people={
            name: (rng.choice(TOWNS), rng.choice(JOBS), str(rng.randint(1931, 1998)))
            for name in names
        },
        ships={
            ship: (rng.choice(TOWNS), str(rng.randint(1962, 2019)), captain)
            for ship, captain in zip(SHIPS, names[-len(SHIPS) :], strict=True)
        },
    )


def _id_of(kind: str, name: str) -> str:
    return f"{kind}-{name.lower().replace(' ', '-')}"


def _documents(facts: _Facts, rng: random.Random) -> list[Document]:
    """Returns a text for each town, person and ship, in one of three wordings."""
    documents: list[Document] = []

    def add(kind: str, name: str, *wordings: str) -> None:
        identifier = _id_of(kind, name)
        documents.append(Document(identifier, name, rng.choice(wordings), identifier))

    for name, (island, year, product, mayor) in facts.towns.items():
        add(
            "town",
            name,
            f"{name} is a town on the island of {island}. It was founded in {year} and is known "
            f"for its {product}. The mayor is {mayor}.",
            f"The town of {name} lies on {island}. Its mayor is {mayor}. It is known for its "
            f"{product} and was founded in {year}.",
            f"Founded in {year}, {name} is a town on {island}. {mayor} is the mayor. The town is "
            f"known for its {product}.",
        )
    for name, (home, job, year) in facts.people.items():
        article = "an" if job[0] in "aeiou" else "a"
        add(
            "person",
            name,
            f"{name} from {home} works as {article} {job}. The year of birth is {year}.",
            f"{name} was born in {home} in {year} and works as {article} {job}.",
            f"Born in {home} in {year}, {name} is {article} {job}.",
        )
    for name, (built, year, captain) in facts.ships.items():
        add(
            "ship",
            name,
            f"The {name} is a ship that was built in {built} in {year}. The captain is {captain}.",
            f"Captain {captain} commands the {name}, a ship. It was built in {built} in {year}.",
            f"Built in {built} in {year}, the {name} is a ship. {captain} is the captain.",
        )
    return documents


def _questions(facts: _Facts) -> list[Question]:
    """Returns every question that one document answers, or two documents of which the first names
    the second."""
    questions: list[Question] = []

    def ask(text: str, answer: str, *path: tuple[str, str]) -> None:
        kind = "one_hop" if len(path) == 1 else "two_hop"
        queries = tuple(name for _, name in path)
        found = tuple(_id_of(*place) for place in path)
        questions.append(Question(text, answer, kind, queries, found, queries[0]))

    for name, (island, year, product, mayor) in facts.towns.items():
        here = ("town", name)
        ask(f"In which year was {name} founded?", year, here)
        ask(f"What is {name} known for?", product, here)
        ask(f"Who is the mayor of {name}?", mayor, here)
        ask(f"On which island is {name}?", island, here)
    for name, (home, job, year) in facts.people.items():
        here, there = ("person", name), ("town", home)
        ask(f"What does {name} work as?", job, here)
        ask(f"When was {name} born?", year, here)
        ask(f"Which town is {name} from?", home, here)
        ask(f"When was the home town of {name} founded?", facts.towns[home][1], here, there)
        ask(f"On which island is the home town of {name}?", facts.towns[home][0], here, there)
    for name, (built, _, captain) in facts.ships.items():
        here, town, person = ("ship", name), ("town", built), ("person", captain)
        ask(f"Who is the captain of the {name}?", captain, here)
        ask(f"Where was the {name} built?", built, here)
        ask(f"What does the captain of the {name} work as?", facts.people[captain][1], here, person)
        ask(f"On which island was the {name} built?", facts.towns[built][0], here, town)
    return questions


def example_rows() -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of the files of the example data, by name of the file.

    Every fifth town, person and ship is held out: no question to train on is about it.
    """
    world = make_world(EXAMPLE_SEED)
    names = sorted({question.about for question in world.questions})
    held_out = set(names[::5])
    rows: dict[str, list[dict[str, Any]]] = {
        "search_documents.jsonl": [
            {"id": d.id, "title": d.title, "text": d.text} for d in world.documents
        ],
        "search_questions.jsonl": [],
        "search_questions_test.jsonl": [],
    }
    for question in random.Random(EXAMPLE_SEED).sample(world.questions, len(world.questions)):
        part = "search_questions_test" if question.about in held_out else "search_questions"
        rows[f"{part}.jsonl"].append(
            {
                "question": question.text,
                "answer": [question.answer],
                "data_source": question.kind,
                "queries": list(question.queries),
                "documents": list(question.documents),
            }
        )
    return rows
