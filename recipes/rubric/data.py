"""Rubrics, the conversations that they grade, and their JSONL files.

One line is a conversation to answer and the criteria for its answer::

    {"convo": [{"role": "user", "content": "What is 122 + 12?"}],
     "rubric_items": [{"rubric_str": "Does the chatbot correctly get the answer 134?"}]}

A *labelled* line, for measuring a judge, has the answer as the last message and ``labels``: for
each criterion the right score from 0 to 1.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import chz

from tinker_cookbook.exceptions import DataFormatError, EvalGradingError, nearest
from tinker_cookbook.judges.judge import read_number
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset
from tinker_cookbook.supervised.json_files import json_lines, load_local_rows

Conversation: TypeAlias = list[Message]

_EXPECTED = (
    "a conversation and its criteria on each line (docs/environments.md); python -m "
    "recipes.rubric.generate_data writes an example"
)
DEFAULT_REGEX = r"<score>(.*?)</score>"
DEFAULT_INSTRUCTION = "Please output your score between 0 and 1 wrapped in <score> ... </score>"
DEFAULT_RANGE = (0.0, 1.0)
LABEL_INSTRUCTION = "Does the answer meet the criterion? Reply with Yes or No only."


@dataclass
class Rubric:
    """A criterion, and how the judge writes its score.

    Attributes:
        rubric_str: What a good answer is: a question, or a statement.
        extraction_regex: Pattern whose first group is the score in the judge's text.
        grader_output_format_instruction: Tells the judge to write what the pattern finds.
        score_range: Lowest and highest score that the judge is told to write. It puts scores on the
            scale of labels, from 0 to 1; rewards are the scores themselves.
    """

    rubric_str: str
    extraction_regex: str = DEFAULT_REGEX
    grader_output_format_instruction: str = DEFAULT_INSTRUCTION
    score_range: tuple[float, float] = DEFAULT_RANGE

    def __post_init__(self) -> None:
        try:
            low, high = map(float, self.score_range)
        except (TypeError, ValueError):
            low = high = math.nan
        if not -math.inf < low < high < math.inf:
            raise DataFormatError(
                f"score_range: got {self.score_range!r}, expected two numbers, the lower one first"
            )
        self.score_range = low, high
        try:
            groups = re.compile(self.extraction_regex).groups
        except re.error as error:
            raise DataFormatError(
                f"extraction_regex: got {self.extraction_regex!r}, expected a regular expression "
                f"({error})"
            ) from None
        if groups < 1:
            raise DataFormatError(
                f"extraction_regex: got {self.extraction_regex!r}, expected a group around the "
                "score, as in <score>(.*?)</score>"
            )

    def get_grader_prompt(self, convo: Conversation) -> Conversation:
        """Returns what the judge reads to write a text; the last message is the answer to grade."""
        return self._prompt(convo, self.grader_output_format_instruction)

    def get_label_prompt(self, convo: Conversation) -> Conversation:
        """Returns what the judge reads to answer with Yes or No."""
        return self._prompt(convo, LABEL_INSTRUCTION)

    def _prompt(self, convo: Conversation, instruction: str) -> Conversation:
        context = "\n\n".join(
            f"{'Chatbot' if m['role'] == 'assistant' else 'Human'}: {get_text_content(m)}"
            for m in convo[:-1]
        )
        # The criterion comes last: the prompts of all criteria on an answer then begin alike, and
        # the engine reads their common part once.
        text = (
            "Grade the last answer of a conversation by a criterion.\n\n"
            f"Conversation:\n{context or '(none)'}\n\n"
            f"Answer to grade:\n{get_text_content(convo[-1])}\n\n"
            f"Criterion: {self.rubric_str}\n\n{instruction}"
        )
        return [Message(role="user", content=text)]

    def extract_score(self, response: str) -> float:
        """Returns the score in a judge's text.

        Raises:
            EvalGradingError: There is none. The official cookbook returns 0 here, which trains on
                failures of the judge as if they were bad answers.
        """
        return read_number(self.extraction_regex, -math.inf, math.inf, last=False)(response)

    def share_of_range(self, score: float) -> float:
        """Returns a score of ``extract_score`` on the scale of labels, from 0 to 1.

        Raises:
            EvalGradingError: It is outside ``score_range``.
        """
        low, high = self.score_range
        if not low <= score <= high:
            raise EvalGradingError(
                f"judge: got the score {score:g}, expected {low:g} to {high:g}, the score_range of "
                "the rubric"
            )
        return (score - low) / (high - low)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields; ``score_range`` only if it is not the default."""
        known = {
            "rubric_str": self.rubric_str,
            "extraction_regex": self.extraction_regex,
            "grader_output_format_instruction": self.grader_output_format_instruction,
        }
        own = {} if self.score_range == DEFAULT_RANGE else {"score_range": list(self.score_range)}
        return {**known, **own}

    def to_json(self) -> str:
        """Returns the fields as a JSON object."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    @staticmethod
    def from_dict(d: Mapping[str, Any]) -> Rubric:
        """Returns the rubric with these fields; all but ``rubric_str`` have defaults."""
        known = [field.name for field in fields(Rubric)]
        for name in d:
            if name not in known:
                raise DataFormatError(
                    f"rubric: got the field {name!r}, expected {', '.join(known)}"
                    f"{nearest(name, known)}"
                )
        if not str(d.get("rubric_str") or "").strip():
            raise DataFormatError("rubric_str: got none, expected the criterion as a text")
        return Rubric(**d)

    @staticmethod
    def from_json(json_str: str) -> Rubric:
        """Returns the rubric of a JSON object."""
        return Rubric.from_dict(json.loads(json_str))


@dataclass(frozen=True)
class RubricBasedDatapoint:
    """A conversation that the policy answers, and the criteria for the answer."""

    convo: Conversation
    rubric_items: Sequence[Rubric]

    def to_json(self) -> str:
        """Returns the datapoint as one line of JSON."""
        items = [rubric.to_dict() for rubric in self.rubric_items]
        return json.dumps({"convo": self.convo, "rubric_items": items}, ensure_ascii=False)

    @staticmethod
    def from_json(json_str: str) -> RubricBasedDatapoint:
        """Returns the datapoint of a line; raises ``DataFormatError`` for another format."""
        return _datapoint(json.loads(json_str))


@dataclass(frozen=True)
class LabelledAnswer:
    """An answer, the last message of ``convo``, with its right score for each criterion."""

    convo: Conversation
    rubric_items: Sequence[Rubric]
    labels: Sequence[float]


@chz.chz
class RubricDatapointListBuilder:
    """Source of datapoints."""

    def __call__(self) -> Sequence[RubricBasedDatapoint]:
        """Loads them."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")


@chz.chz
class RubricDatapointListBuilderFromJsonl(RubricDatapointListBuilder):
    """The datapoints of a JSONL file."""

    jsonl_path: str = chz.field(doc="The file")

    def __call__(self) -> Sequence[RubricBasedDatapoint]:
        """Loads them; errors name file and line."""
        return [_checked(_datapoint, row, where) for where, row in _rows(self.jsonl_path)]


@chz.chz
class PrometheusDatapointListBuilder(RubricDatapointListBuilder):
    """Feedback-Collection (Kim et al. 2023, arXiv 2310.08491): a five-level rubric for each
    question.

    ``data_path`` is the Hub dataset, or a JSON, JSONL or Parquet file with its columns.
    """

    data_path: str = chz.field(
        default="prometheus-eval/Feedback-Collection", doc="Hub name, or a file"
    )

    def __call__(self) -> Sequence[RubricBasedDatapoint]:
        """Loads them."""
        path = Path(self.data_path).expanduser()
        rows: Any = (
            load_local_rows(path, "train")
            if path.exists()
            else load_hf_dataset(self.data_path, "train", None, "Give data_path=FILE")
        )
        return [self.build_rubric_datapoint(row) for row in rows]

    def build_rubric_datapoint(self, item: dict[str, Any]) -> RubricBasedDatapoint:
        """Returns the datapoint of a row of the dataset."""
        steps = "\n".join(f"{i}: {item[f'orig_score{i}_description']}" for i in range(1, 6))
        rubric = Rubric(
            rubric_str=f"{item['orig_criteria']}\nThe scores mean:\n{steps}\n"
            f"A reference answer with score 5: {item['orig_reference_answer']}",
            grader_output_format_instruction="Please output your score between 1 and 5 wrapped in "
            "<score> ... </score>",
            score_range=(1.0, 5.0),
        )
        return RubricBasedDatapoint(
            convo=[Message(role="user", content=item["orig_instruction"])], rubric_items=[rubric]
        )


def load_labelled(path: str | Path) -> list[LabelledAnswer]:
    """Loads answers with labels from a JSONL file; errors name file and line."""
    return [_checked(_labelled, row, where) for where, row in _rows(path)]


def _rows(path: str | Path) -> list[tuple[str, dict[str, Any]]]:
    rows = list(json_lines(Path(path).expanduser(), _EXPECTED))
    if not rows:
        raise DataFormatError(f"{path}: the file is empty, expected {_EXPECTED}")
    return rows


def _checked(build: Any, row: Any, where: str) -> Any:
    try:
        return build(row)
    except DataFormatError as error:
        raise DataFormatError(f"{where}: {error}") from None


def _datapoint(row: Any) -> RubricBasedDatapoint:
    if not isinstance(row, dict) or not {"convo", "rubric_items"} <= row.keys():
        got = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataFormatError(f"got {got}, expected an object with convo and rubric_items")
    convo, items = row["convo"], row["rubric_items"]
    messages = isinstance(convo, list) and all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in convo
    )
    if not messages or not convo:
        raise DataFormatError("convo: expected a list of messages with role and content")
    if not isinstance(items, list) or not items:
        raise DataFormatError("rubric_items: got none, expected one criterion at least")
    return RubricBasedDatapoint(convo, [Rubric.from_dict(item) for item in items])


def _labelled(row: Any) -> LabelledAnswer:
    point = _datapoint(row)
    labels = row.get("labels")
    if not isinstance(labels, list) or len(labels) != len(point.rubric_items):
        raise DataFormatError(
            f"labels: got {labels!r}, expected {len(point.rubric_items)} numbers from 0 to 1, one "
            "for each of rubric_items"
        )
    if not all(isinstance(value, (int, float)) and 0 <= value <= 1 for value in labels):
        raise DataFormatError(f"labels: got {labels!r}, expected numbers from 0 to 1")
    if point.convo[-1]["role"] != "assistant":
        raise DataFormatError(
            f"convo: the last message is of the {point.convo[-1]['role']}, expected the answer of "
            "the assistant that the labels are about"
        )
    return LabelledAnswer(point.convo, point.rubric_items, [float(value) for value in labels])


__all__ = [
    "Conversation",
    "EvalGradingError",
    "LabelledAnswer",
    "PrometheusDatapointListBuilder",
    "Rubric",
    "RubricBasedDatapoint",
    "RubricDatapointListBuilder",
    "RubricDatapointListBuilderFromJsonl",
    "load_labelled",
]
