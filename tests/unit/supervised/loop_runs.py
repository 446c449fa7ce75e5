"""Small supervised runs in this process, and what they left."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import chz
import tinker

from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.types import (
    EmptyBatchError,
    SupervisedDataset,
    SupervisedDatasetBuilder,
)


class Batches(SupervisedDataset):
    """Batch i is two copies of a sequence of its own; those in ``empty`` have nothing to train."""

    def __init__(self, count: int, empty: list[int], plain: bool) -> None:
        self._count, self._empty, self._plain = count, empty, plain

    def get_batch(self, index: int) -> list[tinker.Datum]:
        if index in self._empty:
            if self._plain:  # what a dataset of a user's own gives
                return []
            raise EmptyBatchError(f"batch {index}: all too long")
        tokens = [1, *range(10 + 8 * index, 18 + 8 * index)]
        fields: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [1.0] * 8}
        model_input = tinker.ModelInput.from_ints(tokens[:-1])
        return [tinker.Datum(model_input=model_input, loss_fn_inputs=fields)] * 2

    def __len__(self) -> int:
        return self._count


@chz.chz
class BatchesBuilder(SupervisedDatasetBuilder):
    """Builds :class:`Batches`."""

    count: int = 4
    empty: list[int] = chz.field(default_factory=list)
    plain: bool = False
    test: int = 0

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        test_set = Batches(self.test, [], False) if self.test else None
        return Batches(self.count, self.empty, self.plain), test_set


def config_of(model: str, folder: Path, **settings: Any) -> train.Config:
    """A run of four batches an epoch, a checkpoint after each second step."""
    dataset = {
        name: settings.pop(name) for name in ("count", "empty", "plain", "test") if name in settings
    }
    common: dict[str, Any] = {
        "log_path": str(folder / "run"),
        "model_name": model,
        "dataset_builder": BatchesBuilder(**dataset),
        "learning_rate": 0.01,
        "lora_rank": 4,
        "save_every": 2,
        "show_samples": 0,
        "backend": "local",
        "device": "cpu",
        "dtype": "float32",
    }
    return train.Config(**{**common, **settings})


def run(config: train.Config) -> list[dict[str, Any]]:
    """Trains; gives the rows of ``metrics.jsonl`` without times."""
    asyncio.run(train.main(config))
    return rows(config)


def rows(config: train.Config) -> list[dict[str, Any]]:
    lines = (Path(config.log_path) / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith("time/")}
        for line in lines
    ]
