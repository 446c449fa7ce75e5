"""Writes data for ``recipes.rubric``.

    python -m recipes.rubric.generate_data                  # sums, as in the official cookbook
    python -m recipes.rubric.generate_data task=stories model_name=FOLDER   # the example data

``stories`` samples the answers of a story model to prompts such as "Tell a story about a garden."
A list of words labels them, in equal parts for each combination of labels.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import chz

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.recipes.rubric.data import Rubric, RubricBasedDatapoint
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.command_line.programs import program_command
from tinker_cookbook.utils.imports import tinker

WRITE_DIR = "/tmp/tinker-examples/rubric_data"
TOPICS = (
    "Lily", "Tom", "Ben and Mia", "Sue", "Max", "Anna", "Timmy", "a park", "a garden", "a toy",
    "a ball", "a boat", "the sea", "the rain", "a tree", "a house", "a party", "a long walk",
    "a big box", "the moon", "a new friend", "mom and dad", "a red hat", "a cake",
)  # fmt: skip
NUM_TRAIN_TOPICS = 16
ANIMALS = (
    "dog dogs cat cats bird birds bear bears frog frogs rabbit bunny fish duck ducks mouse cow "
    "horse pig lion fox owl bee squirrel butterfly monkey puppy kitten elephant"
)
HAPPY = "happy smiled smile laughed fun loved joy proud excited glad hugged"
CRITERIA: Mapping[str, str] = {
    "There is an animal in the story.": ANIMALS,
    "Somebody in the story is happy.": HAPPY,
}
"""Criteria of the stories, and the words by which a program decides them."""


@chz.chz
class CLIConfig(SamplingModelSettings):
    """Settings of the program."""

    task: Literal["addition", "stories"] = chz.field(default="addition", doc="addition or stories")
    write_dir: str = chz.field(default=WRITE_DIR, doc="Folder of the files")
    num_train: int = chz.field(default=10000, doc="addition: sums to train on")
    num_test: int = chz.field(default=1000, doc="addition: sums to evaluate on")
    num_labelled: int = chz.field(default=120, doc="stories: answers of each kind to label")
    max_tokens: int = chz.field(default=48, doc="stories: maximum tokens of an answer")
    seed: int = chz.field(default=42, doc="Seed of the data")


def meets(answer: str, criterion: str) -> bool:
    """Returns whether a story meets one of ``CRITERIA``, by its words."""
    return not set(re.findall("[a-z]+", answer.lower())).isdisjoint(CRITERIA[criterion].split())


def generate_one(rng: random.Random) -> RubricBasedDatapoint:
    """Returns a sum with the criterion that the answer is right."""
    x, y = rng.randint(0, 1000), rng.randint(0, 1000)
    return RubricBasedDatapoint(
        convo=[
            Message(role="user", content="What is 4 + 5?"),
            Message(role="assistant", content="9"),
            Message(role="user", content=f"What is {x} + {y}?"),
        ],
        rubric_items=[Rubric(rubric_str=f"Does the chatbot correctly get the answer {x + y}?")],
    )


def generate_dataset(
    num_train: int, num_test: int, seed: int, write_dir: str = WRITE_DIR
) -> tuple[str, str]:
    """Writes sums to train and to evaluate on; returns the paths of both files."""
    rng = random.Random(seed)
    parts = {"train": num_train, "test": num_test}
    paths = []
    for part, count in parts.items():
        lines = [generate_one(rng).to_json() for _ in range(count)]
        paths.append(_write(write_dir, f"example_rubric_{part}.jsonl", lines))
    return paths[0], paths[1]


async def generate_stories(config: CLIConfig) -> list[str]:
    """Writes prompts with rubrics, and labelled answers; returns the paths."""
    items = [Rubric(rubric_str=text) for text in CRITERIA]
    prompts = [[Message(role="user", content=f"Tell a story about {t}.")] for t in TOPICS]
    points = [RubricBasedDatapoint(prompt, items) for prompt in prompts]
    # A criterion's other fields have defaults, so short lines leave them out.
    short = [{"rubric_str": item.rubric_str} for item in items]
    lines = [_line({"convo": point.convo, "rubric_items": short}) for point in points]
    paths = [
        _write(config.write_dir, "rubric_train.jsonl", lines[:NUM_TRAIN_TOPICS]),
        _write(config.write_dir, "rubric_test.jsonl", lines[NUM_TRAIN_TOPICS:]),
    ]
    answers = await _sample_answers(config, prompts)
    kinds: dict[tuple[bool, ...], list[dict[str, Any]]] = {}
    for prompt, text in answers:
        labels = tuple(meets(text, criterion) for criterion in CRITERIA)
        convo = [*prompt, Message(role="assistant", content=text)]
        row = {"convo": convo, "rubric_items": short, "labels": [int(x) for x in labels]}
        kinds.setdefault(labels, []).append(row)
    count = config.num_labelled + config.num_labelled // 3
    fewest = min((len(rows) for rows in kinds.values()), default=0)
    if len(kinds) < 2 ** len(CRITERIA) or fewest < count:
        raise DataValidationError(
            f"num_labelled: got {config.num_labelled}, but the rarest kind of answer came "
            f"{fewest} times, expected {count}; take a smaller number"
        )
    rng = random.Random(config.seed)
    chosen = [rng.sample(rows, count) for rows in kinds.values()]
    # The same number of each kind, so that a judge that always says Yes is right in half the cases.
    cut = config.num_labelled
    for name, part in (
        ("rubric_judge_train.jsonl", [row for rows in chosen for row in rows[:cut]]),
        ("rubric_labelled.jsonl", [row for rows in chosen for row in rows[cut:]]),
    ):
        rng.shuffle(part)
        paths.append(_write(config.write_dir, name, [_line(row) for row in part]))
    return paths


async def _sample_answers(
    config: CLIConfig, prompts: Sequence[list[Message]]
) -> list[tuple[list[Message], str]]:
    """Returns enough distinct answers for each kind, in the order of the prompts."""
    with config.connect() as connection:
        model = await open_sampling_model(connection, config)
        params = [
            tinker.SamplingParams(
                max_tokens=config.max_tokens,
                stop=model.renderer.get_stop_sequences(),
                seed=config.seed + i,
            )
            for i in range(len(prompts))
        ]
        # Animals are in about one story of eight, so this many give enough of the rarest kind.
        each = 80 * config.num_labelled // len(prompts)
        requests = [
            model.client.sample(model.renderer.build_generation_prompt(prompt), each, setting)
            for prompt, setting in zip(prompts, params, strict=True)
        ]
        found: dict[str, list[Message]] = {}
        for prompt, request in zip(prompts, requests, strict=True):
            for sequence in (await request).sequences:
                message, _ = model.renderer.parse_response(sequence.tokens)
                found.setdefault(get_text_content(message).strip(), prompt)
    return [(prompt, text) for text, prompt in found.items() if text]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False)


def _write(folder: str, name: str, lines: Sequence[str]) -> str:
    path = Path(folder).expanduser() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
    print(f"{len(lines)} lines in {path}")
    return str(path)


def main(config: CLIConfig) -> None:
    """Writes the files of a task."""
    if config.task == "addition":
        train, test = generate_dataset(
            config.num_train, config.num_test, config.seed, config.write_dir
        )
        files = (f"train_jsonl_path={train}", f"test_jsonl_path={test}")
        print(program_command("recipes.rubric.train", *files))
    else:
        config.check()
        asyncio.run(generate_stories(config))


if __name__ == "__main__":
    run_entrypoint(main)
