"""Columns of the record of a run; ``docs/record.md`` describes each.

A file has the rows of one step and split: ``record/step_000012.train.parquet``. Its metadata have
the version of the schema, which grows when a column changes its meaning; new columns do not change
it.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "record"
FILE_NAME = re.compile(r"step_(\d+)\.(.+)\.parquet")
"""Step and split of a file."""

RecordLevel = Literal["full", "summary", "off"]
"""``summary`` leaves out the lists of tokens and numbers."""

SCHEMA_VERSION = 1
VERSION_KEY = b"tinker_cookbook.record"

IMAGE = -1
"""Stands for each token of an image in a list of tokens."""


@functools.cache
def turn_schema() -> pa.Schema:
    """Returns the columns of sampled episodes: a row for each turn."""
    import pyarrow as pa  # 0.2 s of CPU

    tokens, numbers = pa.list_(pa.int32()), pa.list_(pa.float32())
    # Of these no update is computed, so three digits are enough.
    halves, text = pa.list_(pa.float16()), pa.string()
    return pa.schema(
        [
            # Where the turn is.
            ("group", pa.int32()),
            ("member", pa.int32()),
            ("turn", pa.int32()),
            # Where the group is in the training data; null in an evaluation.
            ("batch", pa.int32()),
            ("batch_group", pa.int32()),
            # What it was sampled with.
            ("weights_step", pa.int32()),
            ("seed", pa.int64()),
            ("sample", pa.int32()),
            # Tokens; ``prompt`` has those that follow the first ``prompt_kept`` of the turn before.
            ("prompt_kept", pa.int32()),
            ("prompt", tokens),
            ("images", _images()),
            ("answer", tokens),
            ("logprobs", numbers),
            ("entropies", halves),
            ("stop_reason", text),
            # How it was trained; null in an evaluation.
            ("datum", pa.int32()),
            ("update_pass", pa.int32()),
            ("optimizer_step", pa.int32()),
            ("trainer_logprobs", numbers),
            ("reference_logprobs", halves),
            ("advantages", numbers),
            ("masked", pa.bool_()),
            # Rewards, metrics and logs of the turn; the last two are JSON objects.
            ("reward", pa.float64()),
            ("metrics", text),
            ("logs", text),
            # The episode; equal in all of its turns.
            ("episode_reward", pa.float64()),
            ("episode_group_reward", pa.float64()),
            ("episode_advantage", pa.float64()),
            ("episode_stop_reason", text),
            ("episode_metrics", text),
            ("episode_logs", text),
            ("episode_messages", text),
            ("episode_tool_calls", text),
            ("tags", text),
            ("problem", text),
        ]
    )


def _images() -> pa.DataType:
    import pyarrow as pa

    return pa.list_(
        pa.struct(
            [
                ("offset", pa.int32()),
                ("length", pa.int32()),
                ("sha256", pa.string()),
                ("format", pa.string()),
            ]
        )
    )


@functools.cache
def example_schema() -> pa.Schema:
    """Returns the columns of examples with given targets: a row for each datum."""
    import pyarrow as pa

    tokens, numbers = pa.list_(pa.int32()), pa.list_(pa.float32())
    return pa.schema(
        [
            ("datum", pa.int32()),
            ("tokens", tokens),
            ("images", _images()),
            ("targets", tokens),
            ("targets_per_token", pa.int32()),
            ("weights", numbers),
            ("logprobs", numbers),
            # Of preferences.
            ("pair", pa.int32()),
            ("chosen", pa.bool_()),
            ("reference_logprobs", numbers),
            ("reward", pa.float64()),
            ("margin", pa.float64()),
        ]
    )
