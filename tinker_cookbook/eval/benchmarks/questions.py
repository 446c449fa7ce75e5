"""A benchmark of a user's own questions: a file of rows, and a rule that compares the answers.

    python -m tinker_cookbook.eval model_name=NAME tasks=questions.jsonl match=exact

docs/evaluations.md describes the rules: ``exact``, ``regex``, ``letter``, ``math``, ``judge:TEXT``.
Rows have any layout of supervised data (``question`` and ``answer``, or ``messages``, whose last
message is the expected answer), or ``input`` and ``target``, with images as in supervised data.
``answer`` may be a list of accepted answers. A judge needs no expected answer. With ``letter``,
``options`` (or ``choices``) are written below the question; the answer is a letter, the number of
an option from 0, or its text. Rows of MMMU (``image_1`` …, with marks ``<image 1>``) are read too.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import regex  # a dependency of transformers

from tinker_cookbook.eval.benchmarks.data import make_example_id, with_unique_ids
from tinker_cookbook.eval.run.examples import Example, ExampleBenchmark, Grade
from tinker_cookbook.eval.run.sources import messages_text
from tinker_cookbook.eval.run.types import BenchmarkConfig
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    EvalGradingError,
    RendererError,
)
from tinker_cookbook.grading.letters import extract_mcq_answer
from tinker_cookbook.grading.mathematics import grade_response, require_math_verify
from tinker_cookbook.grading.texts import comparable_text
from tinker_cookbook.image_processing_utils import open_image
from tinker_cookbook.judges.judge import LabelJudge
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.supervised.conversation_row import checked_messages, data_error
from tinker_cookbook.supervised.json_files import SUFFIXES, file_rows
from tinker_cookbook.supervised.layouts import (
    check_columns,
    find_layout,
    read_question,
    with_media,
)
from tinker_cookbook.supervised.row_images import MARK, resolve_paths

MATCHES = ("exact", "regex", "math", "letter", "judge:TEXT")
_QUESTIONS = ("question", "prompt", "problem", "query", "instruction", "input")
_TURNS = ("messages", "conversations")
_ANSWERS = ("answer", "target", "ideal", "expected")
_PATTERN_SECONDS = 5.0
_OPTION_COLUMNS = ("options", "choices")
_IMAGE_MARK = re.compile(r"<image (\d+)>")
_LETTER_INSTRUCTION = "Answer with the letter of the right option."
_LETTERS = string.ascii_uppercase[:10]
_EXPECTED = 'rows such as {"question": "…", "answer": "…"}'


class OwnQuestions(ExampleBenchmark):
    """Questions of a file."""

    def __init__(self, path: str | Path, match: str = "exact") -> None:
        """
        Args:
            path: JSON lines (also gzipped), JSON, CSV, TSV or parquet.
            match: ``exact``, ``regex``, ``math``, ``letter`` or ``judge:TEXT``.

        Raises:
            ConfigurationError: ``match`` is none of these.
        """
        self.path = Path(path).expanduser()
        self.name = self.path.name.split(".")[0]
        self.match, _, self.criterion = match.partition(":")
        self.requires_judge = self.match == "judge"
        known = self.match in ("exact", "regex", "math", "letter") and not self.criterion
        if not known and not (self.requires_judge and self.criterion.strip()):
            raise ConfigurationError(
                f"match: got {match!r}, expected one of {', '.join(MATCHES)}, where TEXT is a "
                "question about the answer, such as 'judge:Is the answer polite?'"
            )
        if self.match == "math":
            require_math_verify()
        # A stored answer is graded again if the rule changes.
        self.grader_version = hashlib.sha256(match.encode()).hexdigest()[:12]

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the questions of the file.

        Raises:
            DataFormatError: a row cannot be read; the message begins with the file and the line.
        """
        if config.data_path is not None:
            raise ConfigurationError(
                f"data_path: got {config.data_path!r} for {self.path}, which is the data; expected "
                "no data_path, or names of benchmarks in tasks"
            )
        return with_unique_ids(
            self._example(where, row) for where, row in file_rows(self.path, _EXPECTED)
        )

    def _example(self, where: str, row: Any) -> Example:
        if not isinstance(row, Mapping):
            raise DataFormatError(f"{where}: got a JSON {type(row).__name__}, expected {_EXPECTED}")
        letters = ""
        with data_error(where):
            if self.match == "letter":
                row, letters = _choice_row(row, self.path.parent)
            messages, answers = _split(row, needs_answer=not self.requires_judge)
            for pattern in answers if self.match == "regex" else ():
                try:
                    regex.compile(pattern)
                except regex.error as error:
                    raise RendererError(
                        f"answer: got {pattern!r}, expected a regular expression ({error})"
                    ) from error
        _check_images(messages, where)
        question = get_text_content(messages[-1])
        return Example(
            example_id=str(row.get("id") or make_example_id(self.name, question)),
            messages=messages,
            expected=answers,
            # An answer that a pattern or a judge accepts is not known.
            gold=answers[0] if answers and self.match in ("exact", "math", "letter") else None,
            logs={"input": messages_text(messages[-1:])[0][1], "expected": " | ".join(answers)}
            | ({"letters": letters} if letters else {}),
        )

    def grade(self, response: str, example: Example) -> Grade:
        """Grades a response by ``exact``, ``regex``, ``math`` or ``letter``."""
        if self.match == "letter":
            chosen = extract_mcq_answer(response, example.logs["letters"])
            return Grade(float(chosen in example.expected), logs={"extracted": chosen})
        if self.match == "math":
            found = [grade_response(response, answer) for answer in example.expected]
            right = any(is_right for is_right, _ in found)
            return Grade(float(right), logs={"extracted": found[0][1]})
        if self.match == "regex":
            return Grade(float(any(_matches(pattern, response) for pattern in example.expected)))
        said = _comparable(response)
        return Grade(float(any(said == _comparable(answer) for answer in example.expected)))

    async def grade_async(self, response: str, example: Example, config: BenchmarkConfig) -> Grade:
        """Grades a response; with a judge, the reward is 1 if Yes is more probable than No."""
        if not self.requires_judge:
            return await super().grade_async(response, example, config)
        client: Any = config.judge_sampling_client
        renderer: Any = config.judge_renderer
        judge = await asyncio.to_thread(LabelJudge, client, renderer)
        prompt = Message(role="user", content=self._judge_prompt(response, example))
        verdict = await judge([prompt], lambda text: 0.0)
        return Grade(float(verdict.score > 0.5), {"judge/yes": verdict.score})

    def _judge_prompt(self, response: str, example: Example) -> str:
        asked = [f"[{m['role']}]\n{get_text_content(m)}" for m in example.messages]
        expected = [f"[Reference answer]\n{answer}" for answer in example.expected]
        return "\n\n".join(
            [
                "Read the conversation and the answer below, then answer a question about the "
                "answer with Yes or No.",
                *asked,
                *expected,
                f"[Answer]\n{response}",
                f"[Question]\n{self.criterion.strip()}\nReply with one word: Yes or No.",
            ]
        )


def _check_images(messages: Sequence[Message], where: str) -> None:
    """Raises DataFormatError for an image that cannot be read."""
    for i, message in enumerate(messages):
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "image":
                try:
                    open_image(part["image"])
                except DataFormatError as error:
                    raise DataFormatError(f"{where}: messages[{i}]: {error}") from error


def is_question_file(task: str) -> bool:
    """Returns whether a task is a file of questions rather than the name of a benchmark."""
    return task.endswith(SUFFIXES)


def _split(row: Mapping[str, Any], needs_answer: bool) -> tuple[list[Message], list[str]]:
    """Returns the messages of the prompt, and the accepted answers; raises RendererError."""
    column = next((name for name in _ANSWERS if row.get(name) is not None), None)
    rest = {name: value for name, value in row.items() if name != column}
    turns = next((name for name in _TURNS if rest.get(name) is not None), None)
    asked = next((name for name in _QUESTIONS if rest.get(name) is not None), None)
    if turns is not None or (column is None and needs_answer) or asked is None:
        raw = find_layout(rest, turns).messages(rest)
    else:
        check_columns(rest, (*rest, asked))
        raw = with_media(rest, read_question(rest, asked, inputs=asked != "input"))
    messages = checked_messages(raw)
    # Without a column for the answer, the last message is the answer.
    if column is None and messages[-1]["role"] == "assistant":
        answers: list[str] = [get_text_content(messages.pop())]
    else:
        answers = _accepted(row, column)
    if not messages or messages[-1]["role"] != "user":
        got = messages[-1]["role"] if messages else "no message"
        raise RendererError(f"got {got} before the answer, expected a question of the user")
    # An empty answer would accept an empty response, and an empty pattern every response.
    if not all(answer.strip() for answer in answers) or (needs_answer and not answers):
        raise RendererError(f"got an empty answer, expected {_EXPECTED}")
    return messages, answers


def _accepted(row: Mapping[str, Any], column: str | None) -> list[str]:
    value = None if column is None else row[column]
    values: Sequence[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for one in values:
        if not isinstance(one, str | int | float) or isinstance(one, bool):
            raise RendererError(
                f"{column}: got {one!r:.80}, expected a text, a number, or a list of these"
            )
    return [str(one) for one in values]


def _comparable(text: str) -> str:
    # Letters with accents have two spellings. A sign alone, such as ".", stays.
    text = unicodedata.normalize("NFC", text)
    return comparable_text(text) or text.strip()


def _matches(pattern: str, response: str) -> bool:
    try:
        # Unlike ``re``, it has a time limit, and other threads run meanwhile.
        return bool(regex.search(pattern, response, timeout=_PATTERN_SECONDS, concurrent=True))
    except TimeoutError as error:
        raise EvalGradingError(
            f"match=regex: {pattern!r} took longer than {_PATTERN_SECONDS:g} s on an answer; "
            "expected a pattern without nested repetitions"
        ) from error


def _choice_row(row: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """Returns a row with its options in the question and a letter as answer, and the letters.

    Options are a list, or its text. Images in ``image_1`` … take the places of their marks. Raises
    RendererError for options or an answer that cannot be read.
    """
    column = next((name for name in _OPTION_COLUMNS if row.get(name)), None)
    plain = {name: value for name, value in row.items() if name not in _OPTION_COLUMNS}
    given: Any = [] if column is None else row[column]
    options: Any = given
    if isinstance(given, str):
        with suppress(ValueError, SyntaxError):
            options = ast.literal_eval(given)
    question = plain.get("question")
    is_list = isinstance(options, list) and len(options) <= len(_LETTERS)
    if not is_list or (options and not isinstance(question, str)):
        raise RendererError(
            f"{column}: got {given!r:.80}, expected a list of up to {len(_LETTERS)} options, "
            "next to a text in question"
        )
    letters = _LETTERS[: len(options)] or _LETTERS
    if options:
        lines = [f"{letter}. {option}" for letter, option in zip(letters, options, strict=True)]
        plain["question"] = "\n".join([str(question), *lines, _LETTER_INSTRUCTION])
    answer = plain.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(options):
        answer = letters[answer]
    elif answer in options:
        answer = letters[options.index(answer)]
    elif isinstance(answer, str) and len(answer.strip(" ().")) == 1:
        answer = answer.strip(" ().").upper()
    if not isinstance(answer, str) or answer not in letters or not answer:
        raise RendererError(
            f"answer: got {plain.get('answer')!r:.80}, expected one of the letters {letters}, the "
            "number of an option from 0, or its text"
        )
    return _with_marked_images({**plain, "answer": answer}, folder), letters


def _with_marked_images(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Moves the images of ``image_1`` … to one column, in the order of their marks."""
    found = {name: row.pop(name) for name in list(row) if re.fullmatch(r"image_\d+", name)}
    found = {name: image for name, image in found.items() if image is not None}
    if not found:
        return row
    numbers = _IMAGE_MARK.findall(str(row.get("question")))
    missing = [number for number in numbers if f"image_{number}" not in found]
    if missing:
        raise RendererError(f"question: got the mark <image {missing[0]}> without its image")
    row["question"] = _IMAGE_MARK.sub(MARK, row["question"])
    images = [found[f"image_{number}"] for number in numbers] or list(found.values())
    row["images"] = images
    resolve_paths(row, folder)
    return row
