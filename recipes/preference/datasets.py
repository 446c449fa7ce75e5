"""Preference datasets by name: the example data, datasets on the Hub, and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
import numpy as np

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError, nearest
from tinker_cookbook.preference.comparison_file import comparison_of_row
from tinker_cookbook.preference.preference_datasets import (
    ComparisonBuilderFromJsonl,
    ComparisonDatasetBuilder,
)
from tinker_cookbook.preference.types import Comparison, Label, LabeledComparison
from tinker_cookbook.recipes.start import example_data
from tinker_cookbook.renderers import Message, normalize_messages
from tinker_cookbook.supervised.data import Rows
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset
from tinker_cookbook.supervised.json_files import SUFFIXES
from tinker_cookbook.training.config import number


@dataclass(frozen=True)
class _Chosen:
    """Some rows of a dataset."""

    rows: Rows
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int, /) -> Any:
        return self.rows[self.numbers[index]]


@chz.chz
class HubComparisonBuilder(ComparisonDatasetBuilder):
    """Comparisons of a Hub dataset, or of a local copy of it.

    ``test_size`` rows are held out: sampled by seed 0 from the dataset's held-out split, or else
    from the training split, and then not trained on.
    """

    path: str = chz.field(doc="Hub name, or folder of a copy")
    test_size: int = number(1024, "Maximum rows to hold out")
    hub_config: str | None = chz.field(default=None, doc="Named configuration of the dataset")
    test_split: str | None = chz.field(default=None, doc="Held-out split, if there is one")

    def get_train_and_test_datasets(self) -> tuple[Rows, Rows | None]:
        """Loads the splits; raises DataError, with an alternative, if they are unavailable."""
        train = self._load("train")
        source = train if self.test_split is None else self._load(self.test_split)
        # A fixed seed, so that runs with different seeds are evaluated on the same rows.
        order = np.random.default_rng(0).permutation(len(source)).tolist()
        test = _Chosen(source, order[: self.test_size]) if self.test_size else None
        # The dataset has a held-out split, so all training rows are kept.
        if self.test_split is not None:
            return train, test
        return _Chosen(train, order[self.test_size :]), test

    def _load(self, split: str) -> Rows:
        # A local copy has no named configurations.
        local = Path(self.path).expanduser().exists()
        advice = (
            f"Put a copy of it into the folder {self.path} of the current folder, give pairs of "
            "your own with dataset=FILE.jsonl, use dataset=example"
        )
        return load_hf_dataset(self.path, split, None if local else self.hub_config, advice)


@chz.chz
class HHHComparisonBuilder(HubComparisonBuilder):
    """Anthropic/hh-rlhf: which of two answers of an assistant people found more helpful, or less
    harmful (Bai et al. 2022, arXiv 2204.05862)."""

    path: str = chz.field(default="Anthropic/hh-rlhf", doc="Hub name, or folder of a copy")
    test_split: str | None = chz.field(default="test", doc="Held-out split")

    def example_to_labeled_comparison(self, example: Any) -> LabeledComparison | None:
        """Chosen is A."""
        return comparison_of_row(example)


@chz.chz
class HelpSteer3ComparisonBuilder(HubComparisonBuilder):
    """nvidia/HelpSteer3: two answers and a judgement from -3 to 3 (arXiv 2505.11475)."""

    path: str = chz.field(default="nvidia/HelpSteer3", doc="Hub name, or folder of a copy")
    hub_config: str | None = chz.field(default="preference", doc="Named configuration")
    test_split: str | None = chz.field(default="validation", doc="Held-out split")

    def example_to_labeled_comparison(self, example: Any) -> LabeledComparison | None:
        """Below 0 the first answer is better, above it the second; 0 is a tie."""
        preference = int(_field(example, "overall_preference"))
        label: Label = "Tie" if preference == 0 else "A" if preference < 0 else "B"
        comparison = Comparison(
            normalize_messages(_field(example, "context")),
            _answer(_field(example, "response1")),
            _answer(_field(example, "response2")),
        )
        return LabeledComparison(comparison, label)


@chz.chz
class UltraFeedbackComparisonBuilder(HubComparisonBuilder):
    """argilla/ultrafeedback-binarized-preferences: answers of many models, rated by GPT-4 (Cui et
    al. 2023, arXiv 2310.01377)."""

    path: str = chz.field(
        default="argilla/ultrafeedback-binarized-preferences", doc="Hub name, or folder of a copy"
    )

    def example_to_labeled_comparison(self, example: Any) -> LabeledComparison | None:
        """Chosen is A."""
        prompt: Message = {"role": "user", "content": _field(example, "instruction")}
        comparison = Comparison(
            [prompt],
            _answer(_field(example, "chosen_response")),
            _answer(_field(example, "rejected_response")),
        )
        return LabeledComparison(comparison, "A")


def _field(example: Any, name: str) -> Any:
    if example.get(name) is None:
        raise DataFormatError(f"got the fields {', '.join(example)}, expected {name!r}")
    return example[name]


def _answer(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


_BY_NAME: dict[str, Callable[..., HubComparisonBuilder]] = {
    "hhh": HHHComparisonBuilder,
    "helpsteer3": HelpSteer3ComparisonBuilder,
    "ultrafeedback": UltraFeedbackComparisonBuilder,
}


def get_comparison_builder(
    dataset: str, test_path: str | None = None, test_size: int | None = None, seed: int = 0
) -> ComparisonDatasetBuilder:
    """Returns the comparisons that a recipe's ``dataset=`` names; loads nothing.

    ``dataset`` is ``example``, ``hhh``, ``helpsteer3``, ``ultrafeedback``, or a file in one of the
    formats of ``preference.comparison_file``. Without ``test_size`` and ``test_path`` 1024
    comparisons of a Hub dataset and 100 of a file, sampled by ``seed``, are held out.
    """
    for name, given in (("test_path", test_path), ("test_size", test_size)):
        if given is not None and (dataset == "example" or (dataset in _BY_NAME and test_path)):
            raise ConfigurationError(
                f"{name}: got {given} with dataset={dataset}, which has a held-out part; leave it "
                "out, or name a file as the dataset"
            )
    if dataset in _BY_NAME:
        builder = _BY_NAME[dataset]
        return builder() if test_size is None else builder(test_size=test_size)
    if dataset == "example":
        return ComparisonBuilderFromJsonl(
            train_path=str(example_data("comparisons.jsonl")),
            test_path=str(example_data("comparisons_test.jsonl")),
        )
    if not dataset.endswith(SUFFIXES) and not Path(dataset).expanduser().is_file():
        known = ["example", *_BY_NAME]
        raise ConfigurationError(
            f"dataset: got {dataset!r}, expected one of {', '.join(known)}, or a file that ends in "
            f"{', '.join(SUFFIXES)}{nearest(dataset, known)}"
        )
    # A file has no held-out split, so some rows are held out unless test_path names others.
    if test_size is None:
        test_size = 0 if test_path is not None else 100
    return ComparisonBuilderFromJsonl(
        train_path=dataset, test_path=test_path, test_size=test_size, shuffle_seed=seed
    )
