"""Several supervised datasets in one batch, each example knowing whose it is.

An example's number (of its dataset, of its row) travels as one more field of the datum. Whoever
asks the teacher takes it off, since no loss knows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import chz
import numpy as np

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.supervised.data import trained_batch
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    EmptyBatchError,
    SupervisedDataset,
    SupervisedDatasetBuilder,
)
from tinker_cookbook.utils.imports import lazy_module

if TYPE_CHECKING:
    import tinker
else:
    tinker = lazy_module("tinker")

__all__ = [
    "ConcatenatedDataset",
    "MixedDataset",
    "number_of",
    "numbered",
    "shares",
    "with_batch_size",
    "without_number",
]

_NUMBER = "number"


def numbered(datum: tinker.Datum, number: int) -> tinker.Datum:
    """The datum with ``number`` attached."""
    field = tinker.TensorData.from_numpy(np.array([number], dtype=np.int64))
    return tinker.Datum(
        model_input=datum.model_input, loss_fn_inputs={**datum.loss_fn_inputs, _NUMBER: field}
    )


def number_of(datum: tinker.Datum) -> int:
    """The number that :func:`numbered` attached."""
    if _NUMBER not in datum.loss_fn_inputs:
        raise DataValidationError(
            "datum: got one without a number, expected it from a dataset whose examples are "
            "numbered, since the number says which teacher or demonstration belongs to it"
        )
    return int(datum.loss_fn_inputs[_NUMBER].to_numpy()[0])


def without_number(datum: tinker.Datum) -> tinker.Datum:
    """The datum as it was before :func:`numbered`."""
    fields = {name: value for name, value in datum.loss_fn_inputs.items() if name != _NUMBER}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=fields)


def shares(weights: Sequence[float], batch_size: int) -> list[int]:
    """How many of ``batch_size`` examples each dataset gives: by weight, and at least one each.

    Each further example comes from the dataset that is furthest below its exact share.
    """
    for i, weight in enumerate(weights):
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigurationError(
                f"dataset_configs[{i}].weight: got {weight}, expected a positive number; leave out "
                "a dataset that is not wanted"
            )
    if batch_size < len(weights):
        raise ConfigurationError(
            f"batch_size: got {batch_size}, expected at least {len(weights)}, one example for each "
            "dataset"
        )
    exact = [batch_size * weight / math.fsum(weights) for weight in weights]
    counts = [1] * len(weights)
    for _ in range(batch_size - len(weights)):
        counts[max(range(len(counts)), key=lambda i: exact[i] - counts[i])] += 1
    return counts


def with_batch_size(
    builder: SupervisedDatasetBuilder, batch_size: int, where: str
) -> SupervisedDatasetBuilder:
    """The builder with another batch size. Raises ConfigurationError where it has none to set."""
    if isinstance(builder, ChatDatasetBuilder):
        common = chz.replace(builder.common_config, batch_size=batch_size)
        return chz.replace(builder, common_config=common)
    if "batch_size" in chz.chz_fields(builder):
        return chz.replace(builder, batch_size=batch_size)
    raise ConfigurationError(
        f"{where}.dataset_builder: got {type(builder).__name__}, expected a ChatDatasetBuilder or "
        "a builder with a batch_size, so that the batch can be shared out by weight"
    )


class MixedDataset(SupervisedDataset):
    """Batch i has batch i of every dataset, one after the other, numbered by dataset.

    An epoch ends with the dataset that ends first, so that none repeats within it.
    """

    def __init__(self, datasets: Sequence[SupervisedDataset]) -> None:
        if not datasets:
            raise ConfigurationError("dataset_configs: got none, expected at least one dataset")
        self._datasets = list(datasets)

    @property
    def num_dropped(self) -> int:
        """Datums of all datasets left out so far because they have no token to train on."""
        return sum(dataset.num_dropped for dataset in self._datasets)

    def report(self) -> list[str]:
        """What each of them left out."""
        return [
            f"dataset_configs[{i}]: {line}"
            for i, dataset in enumerate(self._datasets)
            for line in dataset.report()
        ]

    def set_epoch(self, seed: int = 0) -> None:
        """Orders each dataset by the seed."""
        for dataset in self._datasets:
            dataset.set_epoch(seed)

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """The numbered datums of all datasets; a dataset without any in this batch is passed over.

        Raises EmptyBatchError where none has any.
        """
        data = [
            numbered(datum, number)
            for number, dataset in enumerate(self._datasets)
            for datum in trained_batch(dataset, index)
        ]
        if not data:
            raise EmptyBatchError(
                f"batch {index}: got no token to train on in any of the {len(self._datasets)} "
                "datasets, expected at least one; raise max_length or batch_size"
            )
        return data

    def __len__(self) -> int:
        return min(map(len, self._datasets))


class ConcatenatedDataset(SupervisedDataset):
    """All batches of the datasets, one dataset after the other, numbered by their keys."""

    def __init__(self, datasets: Mapping[int, SupervisedDataset]) -> None:
        self._places = [
            (number, dataset, index)
            for number, dataset in datasets.items()
            for index in range(len(dataset))
        ]

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """One batch of one dataset."""
        number, dataset, place = self._places[index]
        return [numbered(datum, number) for datum in dataset.get_batch(place)]

    def __len__(self) -> int:
        return len(self._places)
