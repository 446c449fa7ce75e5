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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import chz

from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.judges.judge import read_number
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.renderers.core.messages import normalize_messages
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset
from tinker_cookbook.supervised.json_files import json_lines, load_local_rows

Conversation: TypeAlias = list[Message]
P = TypeVar("P")

_EXPECTED = (
    "a conversation and its criteria on each line (docs/environments.md); python -m "
    "recipes.rubric.generate_data writes an example"
)
DEFAULT_REGEX = r"<score>(.*?)</score>"
DEFAULT_INSTRUCTION = "Please output your score between 0 and 1 wrapped in <score> ... </score>"
LABEL_INSTRUCTION = "Does the answer meet the criterion? Reply with Yes or No only."


@dataclass
class Rubric:
    """A criterion, and how the judge writes its score.

    Attributes:
        rubric_str: What a good answer is: a question, or a statement.
        extraction_regex: Pattern whose first group is the score in the judge's text.
        grader_output_format_instruction: Tells the judge to write what the pattern finds.
    """

    rubric_str: str
    extraction_regex: str = DEFAULT_REGEX
    grader_output_format_instruction: str = DEFAULT_INSTRUCTION

    def __post_init__(self) -> None:
        if re.compile(self.extraction_regex).groups < 1:
            raise ValueError(
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

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)

    def to_json(self) -> str:
        """Returns the fields as a JSON object."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    @staticmethod
    def from_dict(d: Mapping[str, Any]) -> Rubric:
        """Returns the rubric with these fields; all but ``rubric_str`` have defaults."""
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
        """Returns the datapoint of a line."""
        return _datapoint(json.loads(json_str))


@dataclass(frozen=True)
class LabelledAnswer(RubricBasedDatapoint):
    """An answer, the last message of ``convo``, with its right score for each criterion."""

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
        return _read(self.jsonl_path, _datapoint)


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
        )
        return RubricBasedDatapoint(
            convo=[Message(role="user", content=item["orig_instruction"])], rubric_items=[rubric]
        )


def load_labelled(path: str | Path) -> list[LabelledAnswer]:
    """Loads answers with labels from a JSONL file; errors name file and line."""
    return _read(path, _labelled)


def _read(path: str | Path, build: Callable[[dict[str, Any]], P]) -> list[P]:
    found: list[P] = []
    for where, row in json_lines(Path(path).expanduser(), _EXPECTED):
        try:
            found.append(build(row))
        except (LookupError, TypeError, ValueError, re.error) as error:
            raise DataFormatError(f"{where}: {error!r}; expected {_EXPECTED}") from error
    if not found:
        raise DataFormatError(f"{path}: the file is empty, expected {_EXPECTED}")
    return found


def _datapoint(row: Mapping[str, Any]) -> RubricBasedDatapoint:
    convo = normalize_messages(row["convo"])
    rubrics = [Rubric.from_dict(item) for item in row["rubric_items"]]
    if not convo or not rubrics:
        raise ValueError("expected a message in convo and a criterion in rubric_items at least")
    return RubricBasedDatapoint(convo, rubrics)


def _labelled(row: Mapping[str, Any]) -> LabelledAnswer:
    point = _datapoint(row)
    labels = [float(label) for label in row["labels"]]
    if len(labels) != len(point.rubric_items) or not all(0 <= label <= 1 for label in labels):
        raise ValueError(f"labels: got {labels}, expected a number from 0 to 1 for each criterion")
    if point.convo[-1]["role"] != "assistant":
        raise ValueError("convo: expected the answer that the labels are about as the last message")
    return LabelledAnswer(point.convo, point.rubric_items, labels)
