"""Data sets of self-distillation: SciKnowEval, ToolAlpaca, and the two tasks of the SDFT paper.

Each is loaded from the Hub or from a local copy: a JSONL or parquet file, a folder of them, or a
folder that ``Dataset.save_to_disk`` wrote.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import chz

from tinker_cookbook.distillation.datasets import PromptOnlyEnv
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.recipes.sdft.eval import SCIENCE_SYSTEM_PROMPT_THINKING
from tinker_cookbook.renderers import Message, Renderer, get_renderer
from tinker_cookbook.rl.envs.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDatasetBuilder
from tinker_cookbook.supervised.conversation_file import ChatDataset
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset
from tinker_cookbook.tokenizer_utils import get_tokenizer

Split = tuple[list[str], list[str], list[str], list[str]]
"""Questions and golden answers to train on, then held-out ones."""

SCIKNOWEVAL, TOOLALPACA = "hicai-zju/SciKnowEval", "tangqiaoyu/ToolAlpaca"
# What the questions of each task end with: the form of the answer that the evaluation reads.
_LETTER = (
    "Please reason step by step, then give your answer as <answer>X</answer> where X is the letter "
    "of the correct option."
)
SCIENCE_SYSTEM_PROMPT = (
    "Given a question and four options, please select the right answer. Respond in the following "
    "format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n\nFor the answer, only "
    "output the letter corresponding to the correct option (A, B, C, or D), and nothing else."
)


class SDFTDataset:
    """Batches of environments, questions and golden answers (``sdft.SDFTBatchProvider``)."""

    def __init__(
        self,
        questions: list[str],
        golden_answers: list[str],
        batch_size: int,
        group_size: int,
        renderer: Renderer,
        dataset_name: str = "sdft",
    ) -> None:
        self.questions, self.golden_answers = questions, golden_answers
        self.batch_size, self.group_size = batch_size, group_size
        self.renderer, self.dataset_name = renderer, dataset_name

    def get_batch(self, index: int) -> tuple[Sequence[EnvGroupBuilder], list[str], list[str]]:
        """Returns one environment group, question and golden answer for each problem."""
        if not 0 <= index < len(self):
            raise IndexError(f"index: got {index}, expected less than {len(self)}")
        part = slice(index * self.batch_size, (index + 1) * self.batch_size)
        groups = [
            ProblemGroupBuilder(
                partial(PromptOnlyEnv, question, self.renderer), self.group_size, self.dataset_name
            )
            for question in self.questions[part]
        ]
        return groups, self.questions[part], self.golden_answers[part]

    def __len__(self) -> int:
        return math.ceil(len(self.questions) / self.batch_size)


def _rows(source: str, split: str, advice: str = "") -> Sequence[Any]:
    """Returns the rows of a local copy or of the Hub; ``advice`` ends the error of the latter."""
    path = Path(source).expanduser()
    if (path / "state.json").is_file():
        from datasets import load_from_disk

        rows: Any = load_from_disk(str(path))
    else:
        rows = load_hf_dataset(source, "train" if path.is_file() else split, None, advice)
    return [rows[i] for i in range(len(rows))]


def _split(pairs: list[tuple[str, str]], fraction: float, seed: int) -> Split:
    """Divides after a shuffle of the standard library, as in the official cookbook."""
    random.Random(seed).shuffle(pairs)
    at = int(len(pairs) * fraction)
    train, test = pairs[:at], pairs[at:]
    return [q for q, _ in train], [a for _, a in train], [q for q, _ in test], [a for _, a in test]


def load_sciknoweval(
    domain: str = "Chemistry",
    train_fraction: float = 0.9,
    seed: int = 42,
    data_path: str | None = None,
) -> Split:
    """Returns the multiple-choice questions of level L3 of a domain, with the right letters."""
    advice = "Give a local copy: dataset_path=FILE.jsonl or dataset_path=FOLDER"
    rows = _rows(data_path or SCIKNOWEVAL, "test", advice)
    found: list[tuple[str, str]] = []
    for row in rows:
        level = (row["details"] or {}).get("level")
        if row["domain"] == domain and level == "L3" and "mcq" in row["type"]:
            choices = zip(row["choices"]["label"], row["choices"]["text"], strict=True)
            listed = "\n".join(f"{label}: {text}" for label, text in choices)
            found.append((f"{row['question']}\n\n{listed}\n{_LETTER}", row["answerKey"]))
    if not found:
        domains = ", ".join(sorted({row["domain"] for row in rows}))
        raise DataValidationError(
            f"sciknoweval_domain: got {domain!r}, of which none of the {len(rows)} rows is a "
            f"multiple-choice question of level L3; the domains are {domains}"
        )
    return _split(found, train_fraction, seed)


def load_toolalpaca(
    data_path: str | None = None, seed: int = 42, train_fraction: float = 0.9
) -> Split:
    """Returns instructions with a right use of tools.

    Rows of the Hub have ``instruction`` and ``output``, those of the paper's copy ``prompt`` and
    ``golden_response``, a text or lines.
    """
    advice = "Give a local copy: dataset_path=FILE.jsonl or dataset_path=FOLDER"
    rows = _rows(data_path or TOOLALPACA, "train", advice)
    return _split(list(map(_tool_use, rows)), train_fraction, seed)


def _tool_use(row: Mapping[str, Any]) -> tuple[str, str]:
    if "prompt" not in row:
        return row["instruction"], row["output"]
    golden = row["golden_response"]
    return row["prompt"], "\n".join(golden) if isinstance(golden, list) else golden


@chz.chz
class _SDFTBuilder(RLDatasetBuilder):
    groups_per_batch: int = chz.field(doc="Questions per step")
    group_size: int = chz.field(default=1, doc="Answers per question")
    model_name_for_tokenizer: str = chz.field(default="Qwen/Qwen3-8B", doc="Model of the tokenizer")
    renderer_name: str = chz.field(default="qwen3", doc="Chat format")
    data_path: str | None = chz.field(default=None, doc="A local copy; default: the Hub")

    name: ClassVar[str]

    def load(self) -> Split:
        """Returns the questions and golden answers."""
        raise NotImplementedError

    async def __call__(self) -> tuple[SDFTDataset, SDFTDataset | None]:  # type: ignore[override]
        """Builds the training set and, if rows are held out, the test set."""
        train_q, train_a, test_q, test_a = self.load()
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))
        size, name = self.groups_per_batch, self.name
        train = SDFTDataset(train_q, train_a, size, self.group_size, renderer, name)
        test = SDFTDataset(test_q, test_a, size, 1, renderer, f"{name}_test")
        return train, test if test_q else None


@chz.chz
class SciKnowEvalSDFTBuilder(_SDFTBuilder):
    """Questions of SciKnowEval."""

    domain: str = chz.field(default="Chemistry", doc="Biology, Chemistry, Material or Physics")
    train_fraction: float = chz.field(default=0.9, doc="Share of the questions to train on")

    name = "sciknoweval"

    def load(self) -> Split:
        """Loads the domain."""
        return load_sciknoweval(self.domain, self.train_fraction, data_path=self.data_path)


@chz.chz
class ToolAlpacaSDFTBuilder(_SDFTBuilder):
    """Instructions of ToolAlpaca."""

    name = "toolalpaca"

    def load(self) -> Split:
        """Loads the data set."""
        return load_toolalpaca(self.data_path)


# --- the paper's own copies: a folder with train_data and eval_data ------------------------------


def _convert_golden_answer_to_thinking_format(output_text: str, for_sft: bool = False) -> str:
    """Returns reasoning and answer without the paper's tags; for SFT the reasoning as thinking."""
    reasoning = re.search(r"<reasoning>\s*(.*?)\s*</reasoning>", output_text, re.DOTALL)
    letter = re.search(r"<answer>\s*([A-D])\s*</answer>", output_text)
    thought = reasoning[1].strip() if reasoning else output_text
    answer = f"The answer is {letter[1]}." if letter else ""
    if for_sft:
        return f"<think>\n{thought}\n</think>\n\n{answer}"
    return f"{thought}\n\n{answer}" if answer else thought


def load_science_from_arrow(
    data_dir: str, thinking_format: bool = False, for_sft: bool = False
) -> tuple[list[str], list[str], list[list[Message]], list[str]]:
    """Returns questions, golden answers, and messages and letters to evaluate on.

    Training rows have ``messages`` (system, user) and ``output_text`` (reasoning and answer in
    tags), rows to evaluate on ``prompt`` (messages) and ``answer``. ``thinking_format``: without
    the tags, for models that think.
    """
    questions, golden = [], []
    for row in _rows(f"{data_dir}/train_data", "train"):
        questions.append(row["messages"][1]["content"])
        text = row["output_text"]
        golden.append(
            _convert_golden_answer_to_thinking_format(text, for_sft) if thinking_format else text
        )
    prompts, letters = [], []
    for row in _rows(f"{data_dir}/eval_data", "train"):
        prompt = [Message(**message) for message in row["prompt"]]
        if thinking_format and prompt[0]["role"] == "system":
            prompt[0]["content"] = SCIENCE_SYSTEM_PROMPT_THINKING
        prompts.append(prompt)
        letters.append(row["answer"])
    return questions, golden, prompts, letters


def load_tooluse_from_arrow(
    data_dir: str,
) -> tuple[list[str], list[str], list[str], list[list[dict[str, str]]]]:
    """Returns questions, golden responses, and prompts and right actions to evaluate on."""
    pairs = list(map(_tool_use, _rows(f"{data_dir}/train_data", "train")))
    rows = _rows(f"{data_dir}/eval_data", "train")
    prompts, golden = [row["prompt"] for row in rows], [row["golden_answer"] for row in rows]
    return [q for q, _ in pairs], [a for _, a in pairs], prompts, golden


class _ArrowSFTBuilder(ChatDatasetBuilder):
    def conversations(self) -> list[list[Message]]:
        """Returns the demonstrations as conversations."""
        raise NotImplementedError

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Builds the training set; the evaluation is another program."""
        rows = [{"messages": talk} for talk in self.conversations()]
        return ChatDataset(self, rows, self.common_config.batch_size, "messages"), None


@chz.chz
class ScienceArrowSFTBuilder(_ArrowSFTBuilder):
    """The paper's science questions with their reasoning, for supervised training."""

    data_dir: str = chz.field(
        default="~/Repos/Self-Distillation/data/science_data", doc="Folder of the paper's copy"
    )
    thinking_format: bool = chz.field(default=False, doc="Write the reasoning as thinking")

    def conversations(self) -> list[list[Message]]:
        """Loads questions and answers."""
        questions, golden, *_ = load_science_from_arrow(
            self.data_dir, self.thinking_format, for_sft=True
        )
        system = SCIENCE_SYSTEM_PROMPT_THINKING if self.thinking_format else SCIENCE_SYSTEM_PROMPT
        return [
            [{"role": "system", "content": system}, *_turn(q, a)]
            for q, a in zip(questions, golden, strict=True)
        ]


@chz.chz
class TooluseArrowSFTBuilder(_ArrowSFTBuilder):
    """The paper's use of tools, for supervised training."""

    data_dir: str = chz.field(
        default="~/Repos/Self-Distillation/data/tooluse_data", doc="Folder of the paper's copy"
    )

    def conversations(self) -> list[list[Message]]:
        """Loads questions and answers."""
        questions, golden, *_ = load_tooluse_from_arrow(self.data_dir)
        return [_turn(q, a) for q, a in zip(questions, golden, strict=True)]


def _turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
