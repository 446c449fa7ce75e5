"""Examples with given targets as rows of the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_cookbook.record.episodes import table_of, tokens_of
from tinker_cookbook.record.images import ImageFiles
from tinker_cookbook.record.schema import example_schema
from tinker_cookbook.utils.imports import tinker

if TYPE_CHECKING:
    import pyarrow as pa


def example_table(
    data: Sequence[tinker.Datum],
    output: tinker.ForwardBackwardOutput | None,
    columns: Mapping[str, Sequence[Any]],
    images: ImageFiles,
) -> pa.Table:
    """Returns a row for each datum of a batch, with the results of its pass and more columns."""
    outputs: Sequence[Any] = output.loss_fn_outputs if output is not None else ()
    rows = []
    for number, datum in enumerate(data):
        tokens, found = tokens_of(datum.model_input, images)
        row: dict[str, Any] = {"datum": number, "tokens": tokens, "images": found}
        row |= {name: values[number] for name, values in columns.items()}
        targets = datum.loss_fn_inputs.get("target_tokens")
        if targets is not None:
            # [T], or [T, K] if each position has K weighted targets.
            values = targets.to_numpy()
            row["targets"] = values.reshape(-1).astype(np.int32)
            row["targets_per_token"] = values.shape[1] if values.ndim > 1 else 1
        weights = datum.loss_fn_inputs.get("weights")
        if weights is not None:
            row["weights"] = weights.to_numpy().reshape(-1).astype(np.float32)
        if number < len(outputs) and (logprobs := outputs[number].get("logprobs")) is not None:
            row["logprobs"] = logprobs.to_numpy().reshape(-1).astype(np.float32)
        rows.append(row)
    return table_of(rows, example_schema())
