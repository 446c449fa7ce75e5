"""Writes addition problems with rubrics for ``recipes.rubric``, as in the official cookbook.

python -m recipes.rubric.generate_data
"""

from __future__ import annotations

import random
from pathlib import Path

import chz

from tinker_cookbook.cli_utils import default_log_path
from tinker_cookbook.recipes.rubric.data import Rubric, RubricBasedDatapoint
from tinker_cookbook.renderers import Message
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.command_line.programs import program_command

WRITE_DIR = default_log_path("rubric_data")


@chz.chz
class CLIConfig:
    """Settings of the program."""

    write_dir: str = chz.field(default=WRITE_DIR, doc="Folder of the files")
    num_train: int = chz.field(default=10000, doc="Sums to train on")
    num_test: int = chz.field(default=1000, doc="Sums to evaluate on")
    seed: int = chz.field(default=42, doc="Seed of the data")


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
    folder = Path(write_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for part, count in (("train", num_train), ("test", num_test)):
        path = folder / f"example_rubric_{part}.jsonl"
        lines = [generate_one(rng).to_json() for _ in range(count)]
        write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
        print(f"{count} lines in {path}")
        paths.append(str(path))
    return paths[0], paths[1]


def main(config: CLIConfig) -> None:
    """Writes both files."""
    train, test = generate_dataset(config.num_train, config.num_test, config.seed, config.write_dir)
    files = (f"train_jsonl_path={train}", f"test_jsonl_path={test}")
    print(program_command("recipes.rubric.train", *files))


if __name__ == "__main__":
    run_entrypoint(main)
