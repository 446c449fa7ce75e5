"""Trains on the recorded episodes of another run instead of sampling (``fork … from=batch``)."""

from __future__ import annotations

import json
import time
from itertools import groupby

from tinker_cookbook.exceptions import DataError
from tinker_cookbook.record.read import open_record
from tinker_cookbook.replay.trajectories import group_of
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.loop.sources import (
    Consume,
    GroupSource,
    PolicySnapshot,
    RolloutBatch,
    RolloutGroup,
)


class RecordedSource(GroupSource):
    """Source of the recorded groups of each step, with their rewards and log-probabilities."""

    def __init__(self, config: Config) -> None:
        assert config.episodes_from is not None
        self._record = open_record(config.episodes_from)
        self._num_substeps = config.num_substeps
        self._groups: list[RolloutGroup] = []

    async def collect(self, step: int, snapshot: PolicySnapshot, consume: Consume) -> RolloutBatch:
        """Reads the groups of update ``step``; see :meth:`GroupSource.collect`.

        Raises:
            DataError: The record has no such step, or no tokens.
        """
        began = time.monotonic()
        table = self._record.table(step + 1)
        if table is None or "answer" not in table.column_names:
            raise DataError(
                f"episodes_from: {self._record.log_path} has no recorded episodes of step "
                f"{step + 1}; expected a run with record=full that is as long. Set "
                f"max_steps={step} to end before it"
            )
        self._groups = []
        for _, found in groupby(table.to_pylist(), lambda row: row["group"]):
            rows = list(found)
            result, tags = group_of(self._record, rows), json.loads(rows[0]["tags"])
            position = rows[0]["batch"], rows[0]["batch_group"]
            self._groups.append(RolloutGroup(*position, result=result, tags=tags))
        for place, group in enumerate(self._groups):
            group.substep = place * self._num_substeps // len(self._groups)
        seconds = time.monotonic() - began
        await consume(self._groups)
        return RolloutBatch(self._groups, 0, 0, seconds, {})

    def finished(self) -> list[RolloutGroup]:
        """Returns the groups of this iteration."""
        return self._groups

    async def close(self) -> None:
        """Has nothing to stop."""
