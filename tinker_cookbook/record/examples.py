"""Examples with given targets as rows of the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_cookbook.record.episodes import table_of, tokens_of
from tinker_cookbook.record.images import ImageFiles
from tinker_cookbook.record.schema import example_schema
from tinker_cookbook.run.current import current_step
from tinker_cookbook.utils.imports import tinker

if TYPE_CHECKING:
    import pyarrow as pa

    from tinker_cookbook.record.write import RecordWriter

HELD_OUT = 64
"""Examples of a test set that are recorded: enough to see what changes, and as few as a batch."""


def example_table(
    data: Sequence[tinker.Datum],
    logprobs: Sequence[tinker.TensorData | None],
    columns: Mapping[str, Sequence[Any]],
    images: ImageFiles,
) -> pa.Table:
    """Returns a row for each datum of a batch, with the log-probabilities of its targets [T] or
    [T, K] and more columns."""
    rows = []
    for number, datum in enumerate(data):
        tokens, in_prompt = tokens_of(datum.model_input, images)
        row: dict[str, Any] = {"datum": number, "tokens": tokens, "images": in_prompt}
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
        if number < len(logprobs) and (found := logprobs[number]) is not None:
            row["logprobs"] = found.to_numpy().reshape(-1).astype(np.float32)
        rows.append(row)
    return table_of(rows, example_schema())


def write_held_out(
    record: RecordWriter,
    name: str,
    data: Sequence[tinker.Datum],
    logprobs: Sequence[tinker.TensorData],
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Writes the first ``HELD_OUT`` examples of the evaluation ``name`` of the current step."""
    if record.level != "full":
        return
    shown = list(data[:HELD_OUT])
    table = partial(example_table, shown, logprobs[:HELD_OUT], columns or {}, record.images)
    record.write(current_step(), f"eval_{name}", table)
