"""Questions with answers: the example data, Search-R1's, the layout of SQuAD, or rows of a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from tinker_cookbook.exceptions import DataFormatError, DataValidationError
from tinker_cookbook.recipes.search_tool.corpus import squad_articles
from tinker_cookbook.recipes.start import example_data
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset
from tinker_cookbook.supervised.json_files import file_rows, local_files

EXAMPLE, SEARCH_R1 = "example", "search_r1"
DATASETS = (EXAMPLE, SEARCH_R1)
SEARCH_R1_HUB = "PeterJinGo/nq_hotpotqa_train"
EXAMPLE_DOCUMENTS = example_data("search_documents.jsonl")
_EXAMPLE_FILES = {
    "train": example_data("search_questions.jsonl"),
    "test": example_data("search_questions_test.jsonl"),
}
_ANSWER_FIELDS = ("answer", "answers", "golden_answers", "ground_truth", "target")
EXPECTED = (
    'objects like {"question": "...", "answer": ["..."]}; the answer is a text or a list of texts, '
    f"under one of {', '.join(_ANSWER_FIELDS)}"
)


class SearchR1Datum(TypedDict):
    """A question, all answers that are right, and where it is from."""

    question: str
    answer: list[str]
    data_source: str


def process_single_row(
    row_series: Any, where: str = "row", data_source: str = "unknown"
) -> SearchR1Datum:
    """Returns the question of a row: a mapping, or a pandas Series as the original has it.

    The answers are ``reward_model.ground_truth``, or else the first of answer, answers,
    golden_answers, ground_truth, target: a text, a list of texts, or an object with one of these
    under ``target`` or ``text``.

    Raises:
        DataFormatError: ``where`` has no question, or no answer.
    """
    row = dict(row_series) if hasattr(row_series, "keys") else {}
    question = row.get("question")
    value = (row.get("reward_model") or {}).get("ground_truth")
    for name in _ANSWER_FIELDS:
        value = row.get(name) if value is None else value
    # Search-R1 has {"target": [...]}, and SQuAD on the Hub {"text": [...], "answer_start": [...]}.
    if isinstance(value, Mapping):
        value = value.get("target", value.get("text"))
    answers = [value] if isinstance(value, str | int | float) else [] if value is None else value
    texts = list(dict.fromkeys(str(answer).strip() for answer in answers))
    if not isinstance(question, str) or not question.strip() or not texts or not all(texts):
        raise DataFormatError(
            f"{where}: got question {question!r} and answer {value!r}, expected {EXPECTED}"
        )
    return SearchR1Datum(
        question=question.strip(),
        answer=texts,
        data_source=str(row.get("data_source") or data_source),
    )


def read_questions(path: str, split: Literal["train", "test"] = "train") -> list[SearchR1Datum]:
    """Returns the questions of ``example``, ``search_r1``, a file, or a split of a folder.

    A file is JSON in the layout of SQuAD (questions without an answer are left out), or rows as
    ``process_single_row`` reads them; it has no splits. A folder has a file for each split.

    Raises:
        DataError: the questions cannot be read, or the Hub cannot be reached.
    """
    if path == SEARCH_R1:
        return download_search_r1_dataset(split)
    local = _EXAMPLE_FILES[split] if path == EXAMPLE else Path(path).expanduser()
    found = [
        process_single_row(row, where, file.stem.split(".")[0])
        for file in (local_files(local, split) if local.is_dir() else [local])
        for where, row in _rows(file)
    ]
    if not found:
        raise DataValidationError(
            f"dataset: got {path}, which has no question; expected {EXPECTED}"
        )
    return found


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    squad = squad_articles(file)
    if squad is None:
        yield from file_rows(file, EXPECTED)
        return
    for i, (_, paragraph) in enumerate(squad):
        for question in paragraph.get("qas", ()):
            # SQuAD 2 has questions that its paragraph does not answer.
            if answers := [answer["text"] for answer in question.get("answers", ())]:
                row = {"question": question.get("question"), "answer": answers}
                yield f"{file}, paragraph {i}", row


def has_splits(dataset: str) -> bool:
    """Returns whether ``read_questions`` tells train and test questions apart."""
    return dataset in DATASETS or Path(dataset).expanduser().is_dir()


def download_search_r1_dataset(split: Literal["train", "test"]) -> list[SearchR1Datum]:
    """Returns a split of Search-R1's questions (Natural Questions, HotpotQA, …) from the Hub.

    Raises:
        DataError: the Hub cannot be reached, and there is no cached copy.
    """
    rows = load_hf_dataset(
        SEARCH_R1_HUB,
        split,
        instead="Give a copy of its files with dataset=FOLDER (train.parquet, test.parquet), or "
        "questions of your own with dataset=FILE.jsonl",
    )
    return [
        process_single_row(rows[i], f"{SEARCH_R1_HUB}, row {i}", SEARCH_R1)
        for i in range(len(rows))
    ]
