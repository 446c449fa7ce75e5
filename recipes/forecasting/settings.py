"""Settings that select the markets, for both forecasting recipes."""

from __future__ import annotations

from typing import Literal

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.forecasting.data import (
    DEFAULT_CACHE_DIR,
    DEFAULT_DATASET_REVISION,
    DEFAULT_MAX_TRAIN_QUESTIONS,
    DEFAULT_MAX_VALIDATION_QUESTIONS,
    DEFAULT_SPLIT_DATE,
)
from tinker_cookbook.recipes.forecasting.synthetic import synthetic_markets
from tinker_cookbook.training.config import number


@chz.chz
class MarketSettings:
    """Which markets, and how they are split by time."""

    data: Literal["synthetic", "prophet_arena"] = chz.field(
        default="synthetic", doc="synthetic or prophet_arena (a download)"
    )
    data_path: str | None = chz.field(default=None, doc="CSV file of markets, instead of data")
    data_cache_dir: str = chz.field(default=DEFAULT_CACHE_DIR, doc="Folder of the download")
    dataset_revision: str = chz.field(
        default=DEFAULT_DATASET_REVISION, doc="git revision of the download"
    )
    split_date: str = chz.field(default=DEFAULT_SPLIT_DATE, doc="First day of validation")
    max_train_questions: int | None = number(
        DEFAULT_MAX_TRAIN_QUESTIONS, "Maximum number of markets to train on; None: all", low=1
    )
    max_validation_questions: int | None = number(
        DEFAULT_MAX_VALIDATION_QUESTIONS,
        "Maximum number of markets to evaluate on; None: all",
        low=1,
    )

    @chz.validate
    def _check_data(self) -> None:
        if self.data not in ("synthetic", "prophet_arena"):
            raise ConfigurationError(
                f"data: got {self.data!r}, expected synthetic or prophet_arena"
            )

    def csv_file(self) -> str | None:
        """Returns the file of the markets, and writes the synthetic ones; None: the download."""
        if self.data_path is None and self.data == "synthetic":
            return str(synthetic_markets(seed=0))
        return self.data_path
