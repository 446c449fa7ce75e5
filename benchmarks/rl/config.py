"""Settings of the comparison and their checks."""

from __future__ import annotations

import chz

from benchmarks.engine.beside_trl import SidesConfig
from benchmarks.engine.checks import check_least
from tinker_cookbook.exceptions import ConfigurationError


@chz.chz
class Config(SidesConfig):
    """Settings of the comparison with TRL's GRPOTrainer."""

    groups_per_batch: int = chz.field(default=8, doc="Problems a step")
    group_size: int = chz.field(default=8, doc="Samples of each problem")
    max_tokens: int = chz.field(default=10, doc="Most tokens of an answer")
    trl_batch_size: int | None = chz.field(
        default=None, doc="Samples of a training pass of TRL's; default: all of a step"
    )

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.groups_per_batch * self.group_size

    def check(self) -> None:
        """Raises ``ConfigurationError`` for what can be told without loading anything."""
        super().check()
        check_least(self, {"groups_per_batch": 1, "max_tokens": 1, "group_size": 2})
        size = self.trl_batch_size
        if size is not None and (size < 1 or self.samples % size):
            raise ConfigurationError(
                f"trl_batch_size: got {size}, expected a divisor of groups_per_batch x group_size "
                f"= {self.samples}"
            )
