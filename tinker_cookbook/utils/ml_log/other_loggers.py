"""Logs to Neptune and to Trackio, for loops that make their loggers themselves."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.ml_log.base import Logger, Metrics
from tinker_cookbook.utils.run_folder.config_io import dump_config


class NeptuneLogger(Logger):
    """A run of Neptune; rows without a step are not sent.

    Args:
        project: ``WORKSPACE/PROJECT``.
        config: The run's configuration.
        log_dir: Folder of Neptune's files.
        neptune_name: Name of the experiment.

    Raises:
        ConfigurationError: neptune-scale is not installed, or ``NEPTUNE_API_TOKEN`` is not set.
    """

    def __init__(
        self,
        project: str | None = None,
        config: Any = None,
        log_dir: str | os.PathLike[str] | None = None,
        neptune_name: str | None = None,
    ) -> None:
        neptune = _installed("neptune_scale", "neptune-scale")
        if not os.environ.get("NEPTUNE_API_TOKEN"):
            raise ConfigurationError("NEPTUNE_API_TOKEN is not set, which Neptune needs; set it")
        self.run = neptune.Run(
            project=project,
            log_directory=None if log_dir is None else os.fspath(log_dir),
            experiment_name=neptune_name,
        )
        if config is not None:
            self.log_hparams(config)

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Sends the metrics in the background."""
        if step is not None:
            self.run.log_metrics(dict(metrics), step=step)

    def log_summary(self, metrics: Metrics) -> None:
        """Sets totals as attributes of the run."""
        self.run.log_configs(dict(metrics))

    def log_hparams(self, config: Any) -> None:
        """Sets the run's configuration."""
        self.run.log_configs(dump_config(config), flatten=True, cast_unsupported=True)

    def close(self) -> None:
        """Waits for the upload and ends the run."""
        self.run.close()

    def get_logger_url(self) -> str | None:
        """Returns the run's web page."""
        return self.run.get_run_url()


class TrackioLogger(Logger):
    """A run of Trackio.

    Args:
        project: Its project.
        config: The run's configuration; Trackio takes it only here.
        log_dir: Not used: Trackio has its own folder.
        trackio_name: Name of the run.

    Raises:
        ConfigurationError: trackio is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        config: Any = None,
        log_dir: str | os.PathLike[str] | None = None,
        trackio_name: str | None = None,
    ) -> None:
        trackio = _installed("trackio", "trackio")
        self.run = trackio.init(
            project=project or "default",
            name=trackio_name,
            config=None if config is None else dump_config(config),
        )

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Sends the metrics in the background."""
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Waits until everything is stored and ends the run."""
        self.run.finish()


def _installed(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{error}; run: pip install {package}") from error
