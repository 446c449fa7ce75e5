"""Prompt distillation end to end: a teacher answers, a student is trained, kills, resumes."""

from __future__ import annotations

import json
import signal
import string
import subprocess
import sys
from pathlib import Path

import pytest
from homes import new_home
from recipe_runs import RecipeRuns, last_of_each

from recipes.prompt_distillation import create_data, train
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

CREATE, TRAIN = "recipes.prompt_distillation.create_data", "recipes.prompt_distillation.train"
ROW = "tinker_cookbook.run.jsonl:append_row"
OPTIM_STEP = "tinker_cookbook.engine.training.run:TrainingRun.optim_step"
WORDS = ["dog", "sun", "box", "ball", "tree", "hat", "car", "fish", "bird", "cake", "park", "red"]
ADJECTIVES = ["big", "old", "new", "red"]


def half(text: str) -> str:
    """The half of the alphabet in which a text begins."""
    return "x" if text[0].lower() < "n" else "y"


class DistillationRuns(RecipeRuns):
    """A teacher that begins a story. Its first letter counts, b to m as x, n to z as y; vowels do
    not."""

    def __init__(self, folder: Path, model: str) -> None:
        options = """batch_size=4 num_epochs=3 save_every=3 learning_rate=0.01 answer_max_tokens=12
            test_fraction=0.5 show_samples=0"""
        super().__init__(folder, model, TRAIN, options)
        (folder / "prompt.txt").write_text("Tell a story. It is about: {query}")
        rows = [
            {"query": f"A {adjective} {word}", "label": half(word), "group": word[:1]}
            for word in WORDS
            for adjective in ADJECTIVES
        ]
        (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def create(self, name: str, *extra: str) -> list[str]:
        consonants = [letter for letter in string.ascii_lowercase if letter not in "aeiou"]
        labels = ",".join(f"{letter}={half(letter)}" for letter in consonants)
        words = f"""teacher_model={self.model} output_file={self.folder / name}.jsonl
            teacher_prompt_file={self.folder}/prompt.txt input_file={self.folder}/queries.jsonl
            renderer_name=role_colon answer_regex=[A-Za-z] labels={labels} temperature=1
            max_tokens=4 device=cpu dtype=float32"""
        return last_of_each([*words.split(), *extra])

    def train(self, name: str, data: str, *extra: str) -> list[str]:
        return self.words(name, "raise", f"file_path={self.folder / data}.jsonl", *extra)

    def go(
        self, recipe: str, arguments: list[str], kill: list[str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.execute([recipe, *arguments], kill)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, stories_model):
    return DistillationRuns(tmp_path_factory.mktemp("distill"), stories_model)


@pytest.fixture(scope="module")
def made(runs):
    """A file of answers, and what was printed."""
    done = runs.go(CREATE, runs.create("made"))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def trained(runs, made):
    done = runs.go(TRAIN, runs.train("trained", "made"))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def files(runs: RecipeRuns, name: str) -> list[Path]:
    """The file of answers that count, and that of those that do not."""
    return [runs.folder / f"{name}.jsonl", runs.folder / f"{name}.jsonl.run" / "dropped.jsonl"]


def test_rows_are_conversations_without_the_prompt(runs, made):
    kept, dropped = (read_rows(file) for file in files(runs, "made"))
    assert len(kept) + len(dropped) == 4 * len(WORDS)
    assert len({row["id"] for row in kept + dropped}) == 4 * len(WORDS)
    for row in kept:
        user, answer = row["messages"]
        assert "story" not in user["content"]
        word = user["content"].split()[-1]
        assert answer["content"] == half(next(c for c in row["answer"] if c.isalpha()))
        assert row["label"] == half(word)
    assert dropped
    assert all(row["reason"] in ("unknown label", "cut off", "no match") for row in dropped)
    assert f"answers      {len(kept)} kept, {len(dropped)} dropped" in made
    assert "learned: " in made
    assert "right        " in made


@pytest.mark.slow
def test_a_killed_teacher_goes_on_and_ends_with_the_same_file(runs, made):
    killed = runs.go(CREATE, runs.create("cut"), kill=[ROW, "7", "before"])
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    kept, dropped = (read_rows(file) for file in files(runs, "cut"))
    assert len(kept) + len(dropped) == 6
    # A row that was torn by a power cut is as good as not written.
    with files(runs, "cut")[0].open("a") as file:
        file.write('{"messages": [{"role": "us')
    again = runs.go(CREATE, runs.create("cut"))
    assert again.returncode == 0, again.stderr[-2000:]
    assert "continuing after 6 answers" in again.stdout
    for cut, straight in zip(files(runs, "cut"), files(runs, "made"), strict=True):
        assert cut.read_bytes() == straight.read_bytes()


@pytest.mark.slow
def test_the_student_learns_and_is_compared_with_the_teacher(runs, trained):
    rows = runs.rows("trained")
    first, last = rows[0], rows[-1]
    assert last["test/nll"] < first["test/nll"]
    assert rows[-1]["train_mean_nll"] < rows[1]["train_mean_nll"]
    assert {"test/agreement", "test/accuracy", "test/teacher_accuracy"} <= first.keys()
    assert first["test/agreement"] == 0.0
    assert last["test/agreement"] > 0.0
    assert last["test/cut_off"] == 0.0


# --- input that cannot work ------------------------------------------------------------------


@pytest.fixture
def refused(runs, monkeypatch, capsys):
    """Runs a recipe with arguments that cannot work; gives the message."""
    import tinker_cookbook.engine.model.base_model as base_model

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(base_model.BaseModel, "__init__", never)
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(runs.folder / "home"))

    def run(main, arguments: list[str]) -> str:
        monkeypatch.setattr(sys, "argv", ["recipe", *arguments])
        with pytest.raises(SystemExit) as ended:
            run_entrypoint(main)
        printed = capsys.readouterr()
        assert ended.value.code == 1
        assert "Traceback" not in printed.err
        return printed.err

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["teacher_model=smollm"], ["model_name: got 'smollm'", "folder"]),
        (["teacher_prompt_file=gone.txt"], ["teacher_prompt_file: gone.txt cannot be read"]),
        (["input_file=gone.jsonl"], ["gone.jsonl", "no such file"]),
        (["input_file=gone.txt"], ["input_file: gone.txt cannot be read"]),
        (["task=language"], ["task=language", "teacher_prompt_file", "leave one out"]),
        (["labels=a,b"], ["queries.jsonl:1: label: got 'x', expected one of a, b"]),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_settings_of_the_teacher(runs, refused, arguments, words):
    message = refused(create_data.main, runs.create("refused", *arguments))
    for word in words:
        assert word in message
    assert not (runs.folder / "refused.jsonl").exists()


def test_a_file_of_other_settings_is_not_touched(runs, made, refused):
    before = (runs.folder / "made.jsonl").read_bytes()
    message = refused(create_data.main, runs.create("made", "temperature=0.5", "seed=3"))
    assert "temperature was 1.0; seed was 0" in message
    (runs.folder / "foreign.jsonl").write_text("{}\n")
    assert "created with other settings" in refused(create_data.main, runs.create("foreign"))
    assert (runs.folder / "made.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no query"),
        ('{"query": "  "}\n', "queries.jsonl:1: got {'query': '  '}, expected"),
        ('{"query": "a"}\n{"query": "b", "label": 3}\n', "queries.jsonl:2: label: got 3"),
        ('{"query": "a"}\n[1]\n', "queries.jsonl:2: got [1], expected"),
    ],
)
def test_queries_that_cannot_be(runs, refused, tmp_path, text, words):
    file = tmp_path / "queries.jsonl"
    file.write_text(text)
    assert words in refused(create_data.main, runs.create("refused", f"input_file={file}"))


def test_settings_and_files_of_the_student(runs, made, refused, tmp_path):
    for argument, words in (
        ("file_path=gone.jsonl", "there is no file or folder gone.jsonl"),
        ("labels=a,b", "made.jsonl:1: the answer: got"),
        ("batch_size=500", "batch_size: got 500"),
    ):
        message = refused(train.main, runs.train("refused", "made", argument))
        assert words in message
    assert not list((runs.folder).glob("refused/metrics.jsonl"))
